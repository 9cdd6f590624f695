"""A step whose samples are computed in parts (gradient accumulation within the step)."""

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


def fit(run, size, *more, member="expert-0"):
    arguments = [
        "-c",
        str(TINY),
        f"run_dir={run}",
        f"member={member}",
        *SHORT,
        f"island.micro_batch_size={size}",
        *more,
    ]
    assert main(["fit", *arguments]) == 0
    return run / "members" / member


@pytest.fixture(scope="module")
def whole(tiny_prepared, tmp_path_factory):
    """Experts and router, each step in one part."""
    run = tmp_path_factory.mktemp("whole")
    shutil.copytree(tiny_prepared, run / "prepared")
    for member in ("expert-0", "router"):
        fit(run, "null", member=member)
    return run


def metrics(member):
    return json.loads((member / "status.json").read_text())["metrics"]


@pytest.mark.parametrize("member", ["expert-0", "router"])
def test_parts_give_the_weights_of_the_whole(whole, tiny_run, member):
    """Of 8 samples, or the router's 16, 3 at most at once, so that the parts are unequal."""
    parts, expected = fit(tiny_run, 3, member=member), whole / "members" / member
    assert (parts / "sample_ids.txt").read_text() == (expected / "sample_ids.txt").read_text()
    reference = load_member(expected / "artifact").network.state_dict()
    for name, value in load_member(parts / "artifact").network.state_dict().items():
        torch.testing.assert_close(value, reference[name], rtol=1e-3, atol=1e-4)  # 20 steps moved it by some 1e-2
    figures = metrics(expected)
    assert metrics(parts).keys() == figures.keys()
    for name, value in metrics(parts).items():
        assert value == pytest.approx(figures[name], rel=1e-3, abs=1e-6), name


def test_one_part_is_the_whole_to_the_bit(whole, tiny_run):
    name = "artifact/model.safetensors"
    assert (fit(tiny_run, 64) / name).read_bytes() == (whole / "members/expert-0" / name).read_bytes()


def test_it_may_change_between_two_starts(whole, tiny_run):
    """It belongs to the machine, not to the experiment."""
    shutil.copytree(whole / "members", tiny_run / "members")
    shutil.copy(whole / "experiment.yaml", tiny_run)
    member = tiny_run / "members/expert-0"
    shutil.rmtree(member / "artifact")
    shutil.rmtree(member / "checkpoints/step-00000020.ckpt")
    assert fit(tiny_run, 2) == member
    steps = [int(line.partition(":")[0]) for line in (member / "sample_ids.txt").read_text().splitlines()]
    assert steps == [*range(20), *range(10, 20)]


def test_weights_over_timesteps_count_in_parts_as_in_the_whole(whole, tiny_prepared, tmp_path):
    weighted = []
    for size in ("null", 3):
        run = tmp_path / f"weighted-{size}"
        shutil.copytree(tiny_prepared, run / "prepared")
        weighted.append(load_member(fit(run, size, "expert.min_snr_gamma=5") / "artifact").network.state_dict())
    one, parts = weighted
    other = load_member(whole / "members/expert-0/artifact").network.state_dict()
    for name, value in parts.items():
        torch.testing.assert_close(value, one[name], rtol=1e-3, atol=1e-4)
    assert max(float((value - other[name]).abs().max()) for name, value in one.items()) > 5e-3


def test_mixed_precision_works_in_parts(whole, tiny_run):
    """In bfloat16, to its own precision."""
    figures = metrics(fit(tiny_run, 3, "island.precision=bf16-mixed"))
    assert figures["train/loss"] == pytest.approx(metrics(whole / "members/expert-0")["train/loss"], rel=0.05)


def test_a_size_of_zero_is_refused(tiny_run, capsys):
    assert main(["fit", "-c", str(TINY), f"run_dir={tiny_run}", "member=expert-0", "island.micro_batch_size=0"]) == 2
    assert "'island.micro_batch_size' = 0: must be at least 1" in capsys.readouterr().err
