"""Every network's blocks are one graph each, alone and with their activations computed twice."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_runs import TINY, bucket_settings, prepared

NETWORKS = ("dit", "dit with every option", "router", "mmdit")


def run(*arguments):
    command = [sys.executable, str(Path(__file__).with_name("compiled_blocks.py")), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr

    return {(name, is_checkpointed): what for name, is_checkpointed, what in map(json.loads, done.stdout.splitlines())}


@pytest.fixture(scope="module")
def found():
    return run()


def is_one_graph_and_close(what):
    return what["is_close"] and what["breaks"] == 0 and what["graphs"] >= 1


@pytest.fixture(scope="module")
def quick(bucket_prepared, tmp_path_factory):
    """Some networks, and a training on 12, 4 and 8 tokens."""
    folder = tmp_path_factory.mktemp("compiled")
    images = "{size: 8, buckets: [[8, 24], [8, 8], [16, 8]]}"
    settings = bucket_settings(bucket_prepared.parent / "images", images)
    prepared(folder, *settings)
    more = ("member=expert-0", "expert.train.max_steps=20", "island.validate_every_n_steps=10", "island.compile=true")
    return run("quick", "-c", str(TINY), f"run_dir={folder}", *settings, *more)


@pytest.mark.slow
def test_a_block_with_every_option_is_one_graph_and_one_in_two_graphs_is_an_error(quick):
    assert is_one_graph_and_close(quick["dit with every option", True])
    assert quick["break", False]["refused"]

    samples = quick["samples", False]
    assert samples["is_close"] and 1 <= samples["graphs"] <= 3  # of one row, of the first number of rows, of any


@pytest.mark.slow
def test_each_number_of_tokens_is_one_graph_that_later_epochs_use(quick):
    """More than torch's own limit of 8, at which it would give up."""
    shapes = quick["shapes", False]

    assert shapes["is_close"] and shapes["breaks"] == 0
    assert shapes["graphs"] == [11, 11, 11]
    assert quick["limit", False]["is_error"]


@pytest.mark.slow
def test_a_training_on_three_shapes_makes_no_graph_after_its_first_validation(quick):
    found = quick["training", False]

    shapes, graphs = zip(*found["steps"], strict=True)
    assert found["code"] == 0
    assert len(shapes) == 20 and {*shapes[:10]} == {*shapes[10:]} == {"8x24", "8x8", "16x8"}
    assert graphs[9] == 3  # before the first validation, which has graphs of its own
    assert {*graphs[10:], found["graphs"]} == {graphs[10]}


@pytest.mark.slow
def test_a_compiled_ensemble_takes_shapes_that_it_has_not_seen(quick):
    samples = quick["samples of shapes", False]

    assert samples["is_close"]
    assert samples["graphs"][-1] == samples["graphs"][2]


@pytest.mark.long
@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("name", NETWORKS)
def test_each_block_is_one_graph_with_the_gradients_of_no_compiler(found, name, is_checkpointed):
    assert is_one_graph_and_close(found[name, is_checkpointed])


@pytest.mark.long
def test_a_block_is_one_graph_under_ddp_too(found):
    assert found["ddp", False]["ddp"] == found["ddp", False]["alone"]


@pytest.mark.long
@pytest.mark.parametrize(("name", "most"), [("dit", 5), ("dit with every option", 5), ("router", 5), ("mmdit", 10)])
def test_no_validation_ends_a_training_by_torch_s_limit_of_graphs(found, name, most):
    # The last block of an MM-DiT is of another kind. torch's own limit is 8.
    assert 4 <= found[name, "kinds"]["graphs"] <= most


@pytest.mark.long
@pytest.mark.parametrize("backend", ["xformers", "flash"])
def test_a_graph_calls_what_was_chosen(found, backend):
    assert found[backend, False]["taken"]
