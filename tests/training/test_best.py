"""``train.keep: best`` hands over the averages of the best validation, as a training that ended there would have."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from shards.mds import WARNINGS
from tiny_runs import TINY, finish, start
from torch import nn
from training.short_fits import fit, member, trained, weights

from ddm_lightning.cli.parser import main
from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.members.status import MemberStatus
from ddm_lightning.training.callbacks import BestWeights

pytestmark = WARNINGS
# A rate that rises until held-out losses do.
FAST = (
    *("expert.train.learning_rate=2", "expert.train.warmup_steps=200", "expert.train.ema_decay=0.2"),
    *("island.validate_every_n_steps=4", "expert.train.max_steps=14"),
)
BEST = "expert.train.keep=best"


def meta(run):
    return json.loads(member(run, "artifact", "member.json").read_text())


@pytest.fixture(scope="module")
def best(tiny_prepared, tmp_path_factory):
    """A finished expert that keeps its best weights."""
    return trained(tiny_prepared, tmp_path_factory.mktemp("best"), *FAST, BEST, "expert.train.ema_widths=[0.1, 0.2]")


def test_it_hands_over_what_a_training_that_ended_there_would(best, tiny_prepared, tmp_path):
    metrics = meta(best)["metrics"]
    step = int(metrics["kept_step"])

    assert 0 < step < 14 == meta(best)["step"] and metrics["held_out/step"] == step

    # Steps 4, 8, … and the last one; all later ones are worse.
    shorter = trained(tiny_prepared, tmp_path / "shorter", *FAST, f"expert.train.max_steps={step}")
    ended = meta(shorter)["metrics"]

    assert "kept_step" not in ended

    held_out = [name for name in ended if name.startswith("held_out/")]
    assert {name: ended[name] for name in held_out} == {name: metrics[name] for name in held_out}
    assert weights(best) == weights(shorter)


class Counting(nn.Module):
    """Counts its training steps in a buffer, as batch norm does."""

    prediction = "velocity"

    def __init__(self, x_shape, condition):
        super().__init__()
        self.gain = nn.Parameter(torch.zeros(x_shape))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x_t, t, condition):
        self.seen += self.training
        return 10 * self.gain * x_t  # soon too much, at this rate


def test_buffers_are_those_of_the_best_validation_too(tiny_prepared, tmp_path, monkeypatch):
    monkeypatch.setitem(EXPERTS._registered, "counting", Counting)
    run = trained(tiny_prepared, tmp_path, *FAST, BEST, "expert.network={name: counting}")
    kept = meta(run)["metrics"]["kept_step"]

    assert load_file(member(run, "artifact", "model.safetensors"))["seen"] == kept < 14


def test_a_resumed_training_keeps_the_same(best, tiny_prepared, tmp_path):
    step = int(meta(best)["metrics"]["kept_step"])
    widths = "expert.train.ema_widths=[0.1, 0.2]"
    # Stopped right before the best validation counts in a checkpoint, and after it.
    run = trained(tiny_prepared, tmp_path, *FAST, BEST, widths, f"expert.train.max_steps={step}")
    for steps in (step + 1, 14):
        assert fit(run, *FAST, BEST, widths, f"expert.train.max_steps={steps}") == 0

    assert weights(run) == weights(best)
    assert {**meta(run), "metrics": None} == {**meta(best), "metrics": None}
    assert meta(run)["metrics"]["held_out/loss"] == meta(best)["metrics"]["held_out/loss"]


def test_a_stop_leaves_the_newest_figures(tmp_path):
    status = MemberStatus("expert-0", 9)
    kept = BestWeights(status)
    kept.kept["figures"] = {"kept_step": 4.0}

    kept.on_train_end(SimpleNamespace(global_step=5, max_steps=9), None)

    assert (status.validated_step, status.metrics) == (0, {})


def test_another_average_is_not_the_best_validation_s(best):
    arguments = ["-c", str(TINY), f"run_dir={best}", *FAST, BEST, "expert.train.ema_widths=[0.1, 0.2]"]
    kept = weights(best)
    for width, step in (("0.1", 14), ("original", None)):
        assert main(["ema", *arguments, "member=expert-0", "--use", width]) == 0
        metrics = meta(best)["metrics"]
        assert ("kept_step" in metrics) == (step is None)

    assert weights(best) == kept


def test_a_member_without_held_out_samples_cannot_choose(tmp_path, capsys):
    none = "prepare.held_out_fraction=0"

    assert main(["prepare", "-c", str(TINY), f"run_dir={tmp_path / 'run'}", BEST, none]) == 0

    capsys.readouterr()
    assert fit(tmp_path / "run", BEST, none) == 2

    *_, line = capsys.readouterr().err.splitlines()
    assert line.startswith("error: key 'expert.train.keep' = 'best': expert-0 has no held-out samples")
    assert not member(tmp_path / "run", "checkpoints").exists()


@pytest.mark.long
def test_two_ranks_keep_the_best_of_both(tiny_prepared, tmp_path):
    ranks = ("island.devices=2", "island.strategy=fsdp", "island.accelerator=cpu", "member=expert-0")
    found = []
    for name, own in (("best", (BEST,)), ("shorter", ())):
        run = tmp_path / name
        run.mkdir()
        (run / "prepared").symlink_to(tiny_prepared)
        steps = own or (f"expert.train.max_steps={int(meta(tmp_path / 'best')['metrics']['kept_step'])}",)
        finish(start("fit", run, *FAST, *steps, *ranks))
        found.append(weights(run))

    assert found[0] == found[1]
