"""What commands import, in fresh processes: a command that computes nothing waits for no torch."""

import os
import subprocess
import sys

import pytest
from tiny_runs import settings

CHILD = """
import sys
from ddm_lightning.cli.parser import main
code = main(sys.argv[2:])
print("imported:", *sorted(set(sys.argv[1].split(",")) & set(sys.modules)))
sys.exit(code)
"""
TRAINING = "lightning,torchmetrics,streaming,tensorboard,transformers,torchvision,torch.distributed.tensor"


def imported(of, command):
    words = [sys.executable, "-c", CHILD, of, *command]
    done = subprocess.run(words, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    return done.stdout.splitlines()[-1].split()[1:]


@pytest.mark.parametrize("command", ["config", "status"])
def test_what_computes_nothing_imports_no_torch(run, command):
    assert imported(f"torch,numpy,matplotlib,{TRAINING}", [command, *settings(run)]) == []


def test_the_status_of_a_folder_imports_no_torch(run):
    assert imported("torch", ["status", "-c", str(run)]) == []


def test_sample_imports_neither_what_trains_nor_torchs_compiler(run, tmp_path):
    command = ["sample", "-c", str(run), "--num=1", f"--out={tmp_path / 'a.png'}"]
    assert imported(f"{TRAINING},torch._dynamo,sympy", command) == []


def test_an_ensemble_samples_without_torchs_compiler_and_matplotlib(run):
    code = (
        "import sys; from ddm_lightning import DecentralizedEnsemble\n"
        "DecentralizedEnsemble.from_pretrained(sys.argv[1], 'cpu').sample(num=1, seed=0)\n"
        "print(set(sys.argv[2].split(',')) & set(sys.modules))"
    )
    words = [sys.executable, "-c", code, str(run), f"{TRAINING},torch._dynamo,sympy,matplotlib"]
    assert subprocess.run(words, check=True, capture_output=True, text=True).stdout == "set()\n"
