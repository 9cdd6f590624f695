"""Micro batches: gradients accumulated within a step."""

import json
import shutil

import pytest
import torch
from shards.mds import WARNINGS
from tiny_runs import TINY

from ddm_lightning.cli.parser import main
from ddm_lightning.ensemble.load import load_member

pytestmark = WARNINGS

SHORT = (
    "expert.train.max_steps=20",
    "router.train.max_steps=10",
    "island.log_sample_ids=true",
    "island.log_every_n_steps=20",
    "island.validate_every_n_steps=20",
    "island.checkpoint_every_n_steps=10",
)


def fit(run, size, member="expert-0"):
    settings = [f"run_dir={run}", f"member={member}", *SHORT, f"island.micro_batch_size={size}"]
    assert main(["fit", "-c", str(TINY), *settings]) == 0
    return run / "members" / member


@pytest.fixture(scope="module")
def whole(tiny_prepared, tmp_path_factory):
    """Expert and router, trained without micro batches."""
    run = tmp_path_factory.mktemp("whole")
    shutil.copytree(tiny_prepared, run / "prepared")
    for member in ("expert-0", "router"):
        fit(run, "null", member=member)
    return run


def metrics(member):
    return json.loads((member / "status.json").read_text())["metrics"]


@pytest.mark.parametrize("member", ["expert-0", "router"])
def test_micro_batches_give_the_weights_of_the_whole_batch(whole, tiny_run, member):
    """8 or 16 samples, at most 3 at once, so the micro batches are unequal."""
    parts, expected = fit(tiny_run, 3, member=member), whole / "members" / member
    assert (parts / "sample_ids.txt").read_text() == (expected / "sample_ids.txt").read_text()
    reference = load_member(expected / "artifact").network.state_dict()
    for name, value in load_member(parts / "artifact").network.state_dict().items():
        torch.testing.assert_close(value, reference[name], rtol=1e-3, atol=1e-4)  # 20 steps moved it by some 1e-2
    figures = metrics(expected)
    assert metrics(parts).keys() == figures.keys()
    for name, value in metrics(parts).items():
        assert value == pytest.approx(figures[name], rel=1e-3, abs=1e-6), name


def test_a_single_micro_batch_changes_no_bit(whole, tiny_run):
    name = "artifact/model.safetensors"
    assert (fit(tiny_run, 64) / name).read_bytes() == (whole / "members/expert-0" / name).read_bytes()


def test_a_size_of_zero_is_refused(tiny_run, capsys):
    assert main(["fit", "-c", str(TINY), f"run_dir={tiny_run}", "member=expert-0", "island.micro_batch_size=0"]) == 2
    assert "'island.micro_batch_size' = 0: must be at least 1" in capsys.readouterr().err
