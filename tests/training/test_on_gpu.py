"""Training on a CUDA device as users do: the command line, in bfloat16 with compiled blocks, stopped and resumed."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from ddm_lightning.training.checkpoint import CheckpointWriter, read_tensors
from ddm_lightning.training.guard import FiniteGuard
from ddm_lightning.training.optimizer import clip_in_step

pytestmark = pytest.mark.gpu

EXPERIMENT = Path(__file__).parents[2] / "experiments" / "tiny_2x.yaml"
SETTINGS = ["island.accelerator=gpu", "island.precision=bf16-mixed", "island.compile=true"]
NETWORK = "{name: dit, params: {width: 64, depth: 3, num_heads: 2, patch_size: 2, qk_norm: true, rope: true}}"


def ddm(command, folder, *settings):
    # In processes of their own: what is compiled has no annotations that are checked at each call.
    given = [f"run_dir={folder}", f"expert.network={NETWORK}", *SETTINGS, *settings]
    done = subprocess.run(
        [sys.executable, "-m", "ddm_lightning", command, "-c", str(EXPERIMENT), *given],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr

    return done.stderr


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu") / "run"
    ddm("prepare", folder)
    ddm("fit", folder, "member=expert-0")
    return folder


def status(folder):
    return json.loads((folder / "members" / "expert-0" / "status.json").read_text())


@pytest.mark.slow
def test_a_compiled_expert_trains_in_bfloat16_and_resumes(run):
    assert status(run)["state"] == "done"
    assert status(run)["step"] == 60
    assert 0 < status(run)["metrics"]["held_out/loss"] < 3

    member = run / "members" / "expert-0"
    shutil.rmtree(member / "artifact")
    shutil.rmtree(member / "checkpoints" / "step-00000060.ckpt")

    assert "resumes at step 50" in ddm("fit", run, "member=expert-0")
    assert status(run)["state"] == "done"


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["island.activation_checkpointing=true", "expert.train.optimizer=muon"])
def test_it_trains_otherwise(run, setting):
    folder = run.parent / setting.replace("=", "-")
    (folder / "prepared").parent.mkdir()
    (folder / "prepared").symlink_to(run / "prepared")
    ddm("fit", folder, "member=expert-0", "expert.train.max_steps=12", setting)

    assert status(folder)["step"] == 12


def test_a_step_that_is_not_finite_changes_nothing():
    weight = torch.nn.Parameter(torch.ones(3, device="cuda"))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    guard = FiniteGuard("expert-0", 5)
    for gradient, expected in ((1.0, 0.9), (float("nan"), 0.9)):
        weight.grad = torch.full_like(weight, gradient)
        guard.skip_unless_finite(0, 0, optimizer, clip_in_step(optimizer, [weight], 1.0))
        optimizer.step()
        torch.testing.assert_close(weight.detach().cpu(), torch.full((3,), expected), atol=2e-2, rtol=0)
        assert bool(weight.isfinite().all())

    assert optimizer.state[weight]["step"].item() == 1


def test_a_checkpoint_is_of_its_moment(tmp_path):
    weight = torch.zeros(1 << 24, device="cuda")
    writer = CheckpointWriter(None, is_rank_zero=True, from_device=True)
    for number in range(3):
        writer.start(tmp_path / f"step-{number}", {"model/w": weight}, None, lambda: None)
        weight += 1  # queued at once, as the next step would be

    writer.wait()
    writer.close()
    for number in range(3):
        into = {"model/w": torch.full((1 << 24,), -1.0, device="cuda")}
        read_tensors(tmp_path / f"step-{number}", into)
        assert bool((into["model/w"] == number).all())
