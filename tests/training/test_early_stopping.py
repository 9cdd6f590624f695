"""The callback ``early-stopping``: the member is finished, as one whose last step was that of the validation."""

import json
import shutil

import pytest
from shards.mds import WARNINGS
from tiny_runs import TINY, finish, start
from training.short_fits import events, fit, member, trained, weights

from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.islands.launch import _state
from ddm_lightning.islands.status import Watch
from ddm_lightning.members.run import Run

pytestmark = WARNINGS
# A rate that rises until held-out losses do.
FAST = (
    *("expert.train.learning_rate=2", "expert.train.warmup_steps=200", "expert.train.ema_decay=0.2"),
    *("island.validate_every_n_steps=4", "expert.train.max_steps=40"),
)
WIDTHS = "expert.train.ema_widths=[0.1, 0.2]"
EARLY = "island.callbacks=[{name: early-stopping, params: {patience: 2}}]"


def meta(run):
    return json.loads(member(run, "artifact", "member.json").read_text())


def resume(run, *more):
    """Train again without the artifact, as after a kill before it was written."""
    shutil.rmtree(member(run, "artifact"))
    assert fit(run, *FAST, WIDTHS, *more) == 0
    return weights(run), {**meta(run), "metrics": meta(run)["metrics"]["held_out/loss"]}


@pytest.fixture(scope="module")
def ended(tiny_prepared, tmp_path_factory):
    """An expert that has ended early."""
    return trained(tiny_prepared, tmp_path_factory.mktemp("early"), *FAST, EARLY, WIDTHS)


def test_it_ends_when_the_loss_has_not_fallen_as_a_training_of_that_many_steps(ended, tiny_prepared, tmp_path):
    step = meta(ended)["step"]
    lowest, waited, ends = float("inf"), 0, []
    for point in events(ended).Scalars("1_watch/held_out/loss"):
        waited = 0 if point.value < lowest else waited + 1
        lowest = min(lowest, point.value)
        ends += [point.step] * (waited == 2)

    assert ends == [step] and step < 40 == meta(ended)["max_steps"]

    shorter = trained(tiny_prepared, tmp_path, *FAST, f"expert.train.max_steps={step}")
    assert weights(ended) == weights(shorter)


def test_it_is_finished(ended, capsys):
    before = weights(ended)
    step = meta(ended)["step"]
    capsys.readouterr()

    assert fit(ended, *FAST, WIDTHS, EARLY) == 0
    assert "expert-0 is finished" in capsys.readouterr().err and weights(ended) == before

    address = ["-c", str(TINY), f"run_dir={ended}", *FAST, WIDTHS]
    assert main(["status", *address]) == 0

    (row,) = [line for line in capsys.readouterr().out.splitlines() if "expert-0" in line]
    assert "done early" in row and f"{step}/40" in row

    run = Run(load_experiment(TINY, address[2:]))
    seen = {one.status.member: one for one in Watch(run).look()}
    assert _state(seen["expert-0"], run) == "finished"

    longer = Run(load_experiment(TINY, [*address[2:], "expert.train.max_steps=44"]))
    assert not longer.is_finished("expert-0")
    assert _state(Watch(longer).look()[0], longer) == ""


def test_a_killed_training_ends_at_the_same_step(ended, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(ended, run)
    whole = weights(run), {**meta(run), "metrics": meta(run)["metrics"]["held_out/loss"]}

    # Killed after the validation that ended it, which no checkpoint counts.
    assert resume(run, EARLY) == whole

    # Killed before.
    *_, newest = sorted(member(run, "checkpoints").iterdir())
    shutil.rmtree(newest)
    assert resume(run, EARLY) == whole

    # With more patience it goes on, and without the callback to its last step.
    assert resume(run, EARLY.replace("2", "3"))[1]["step"] == whole[1]["step"] + 4
    assert resume(run)[1]["step"] == 40


def test_widths_of_its_averages_are_compared_up_to_the_last_snapshot(ended, capsys):
    address = ["-c", str(TINY), f"run_dir={ended}", *FAST, WIDTHS]
    assert main(["ema", *address, "member=expert-0"]) == 0
    assert "width 0.1" in capsys.readouterr().out


def test_the_best_average_is_handed_over(ended, tiny_prepared, tmp_path):
    best = trained(tiny_prepared, tmp_path, *FAST, EARLY, "expert.train.keep=best", "expert.train.max_steps=41")
    losses = {point.step: point.value for point in events(ended).Scalars("1_watch/held_out/loss")}

    assert meta(best)["step"] == meta(ended)["step"]
    assert meta(best)["metrics"]["kept_step"] == min(losses, key=losses.get)


@pytest.mark.parametrize("params", ["{patience: 0}", "{min_delta: -1.0}", "{patient: 2}"])
def test_bad_params_are_one_line(tiny_run, capsys, params):
    assert fit(tiny_run, f"island.callbacks=[{{name: early-stopping, params: {params}}}]") == 2

    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert "island.callbacks" in line and "early-stopping" in line
    assert not member(tiny_run).exists()


@pytest.mark.long
def test_two_ranks_end_together(tiny_run):
    ranks = ("island.devices=2", "island.strategy=ddp", "island.accelerator=cpu", "member=expert-0")
    _, said = finish(start("fit", tiny_run, *FAST, EARLY, *ranks))

    assert said.count("finished early at step") == 1
    assert meta(tiny_run)["step"] < 40
