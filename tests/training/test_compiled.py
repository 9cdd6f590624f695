"""Every network's blocks are one graph each, alone and with their activations computed twice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

NETWORKS = ("dit", "dit with every option", "router", "mmdit")


@pytest.fixture(scope="module")
def found():
    program = Path(__file__).with_name("compiled_blocks.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {(name, is_checkpointed): what for name, is_checkpointed, what in map(json.loads, done.stdout.splitlines())}


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_each_block_is_one_graph_with_the_gradients_of_no_compiler(found, name, is_checkpointed):
    what = found[name, is_checkpointed]
    assert what["is_close"]
    assert what["breaks"] == 0
    assert what["graphs"] >= 1


def test_a_block_in_two_graphs_is_an_error(found):
    assert found["break", False]["refused"]
