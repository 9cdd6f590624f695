"""A request to stop during a validation or while its images are sampled."""

import json
import os
import shutil
import signal
import threading
import time

import pytest
from shards.mds import WARNINGS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import read_status
from training.short_fits import checkpoints, fit, member, trained, weights

from ddm_lightning.members.meta import read_meta
from ddm_lightning.members.status import MemberStatus
from ddm_lightning.training import checkpoint, parallel, previews
from ddm_lightning.training.callbacks import MissedValidation
from ddm_lightning.training.module import MemberModule

EIGHT = ("island.validate_every_n_steps=8", "island.checkpoint_every_n_steps=20")
LAST = (*EIGHT, "expert.train.max_steps=16")

pytestmark = WARNINGS


@pytest.fixture(scope="module")
def undisturbed(tiny_prepared, tmp_path_factory):
    return trained(tiny_prepared, tmp_path_factory.mktemp("undisturbed"), *EIGHT)


def status(run):
    return read_status(run, "expert-0")


def logged(run, kind, tag):
    """Steps at which something was logged."""
    return sorted(event.step for event in events(run, kind, tag))


def events(run, kind, name):
    """What each start has logged, file by file: of two starts in one second a reader of the folder may miss one."""
    found = []
    for path in member(run, "tensorboard").iterdir():
        file = EventAccumulator(str(path))
        file.Reload()
        for tag in file.Tags()[kind.lower()]:
            found += getattr(file, kind)(tag) if tag.partition("/")[2] == name else []

    return found


def values(run, tag):
    """The value at each step; of a step that was logged twice, one for two that are the same."""
    pairs = {(event.step, event.value) for event in events(run, "Scalars", tag)}

    assert len(pairs) == len(dict(pairs))

    return dict(pairs)


def in_held_out_batches(monkeypatch, at_step):
    """SIGTERM in the first held-out batch of ``at_step``."""
    step_of = MemberModule.validation_step
    seen = []

    def validation_step(self, batch, batch_idx):
        seen.append(self.global_step)
        if self.global_step == at_step and seen.count(at_step) == 1:
            os.kill(os.getpid(), signal.SIGTERM)

        step_of(self, batch, batch_idx)

    monkeypatch.setattr(MemberModule, "validation_step", validation_step)
    return seen


def in_sampling(monkeypatch, at_step):
    """SIGTERM while the third velocity of the samples of ``at_step`` is computed."""
    solve = previews.Euler.solve
    seen = []

    def watched(self, field, noise, times):
        seen.append([])

        def velocity(x_t, t):
            seen[-1].append(t)
            if len(seen) * 8 == at_step and len(seen[-1]) == 3:
                os.kill(os.getpid(), signal.SIGTERM)

            return field(x_t, t)

        return solve(self, velocity, noise, times)

    monkeypatch.setattr(previews.Euler, "solve", watched)
    return seen


@pytest.mark.parametrize("place", [in_held_out_batches, in_sampling])
def test_it_ends_at_once_and_resumes_to_the_same_bits(undisturbed, tiny_run, monkeypatch, capsys, place):
    for _ in range(2 if place is in_held_out_batches else 1):  # also a validation that a resume makes up for
        with monkeypatch.context() as patched:
            seen = place(patched, 8)
            assert fit(tiny_run, *EIGHT) == 130

    # Of two held-out batches the first, or the samples' velocities up to the signal.
    assert (seen == [8]) if place is in_held_out_batches else ([len(times) for times in seen] == [3])
    assert "expert-0: stopped at step 8; the same command resumes it" in capsys.readouterr().err
    assert (status(tiny_run)["state"], status(tiny_run)["step"]) == ("stopped", 8)
    assert checkpoints(tiny_run) == ["step-00000008.ckpt"]
    assert logged(tiny_run, "Images", "validation/samples") == []
    assert logged(tiny_run, "Scalars", "held_out/loss") == []
    assert fit(tiny_run, *EIGHT) == 0
    assert weights(tiny_run) == weights(undisturbed)
    # What was cut short is made up for, once, with the figures that it would have had.
    assert logged(tiny_run, "Images", "validation/samples") == [8, 16, 20]

    for tag in ("held_out/loss", "held_out/loss_t0.938"):
        assert values(tiny_run, tag) == values(undisturbed, tag)
        assert sorted(values(undisturbed, tag)) == [8, 16, 20]

    assert status(tiny_run)["validated_step"] == 20


def test_a_second_signal_does_not_end_the_writing_of_the_checkpoint(undisturbed, tiny_run, monkeypatch, capsys):
    with monkeypatch.context() as patched:
        in_the_last_step(patched, 13)  # a step that saves by request alone
        moved = checkpoint.move_folder
        signals = []

        def slowly(temporary, path):
            if path.name == "step-00000013.ckpt":
                for _ in range(2):
                    time.sleep(0.2)
                    os.kill(os.getpid(), signal.SIGTERM)
                    signals.append(path.exists())
            moved(temporary, path)

        patched.setattr(checkpoint, "move_folder", slowly)
        before = set(threading.enumerate())  # among them threads of earlier tests' trainings that failed
        assert fit(tiny_run, *EIGHT) == 130

    assert signals == [False, False]
    assert "expert-0: stopped at step 13; the same command resumes it" in capsys.readouterr().err
    assert "step-00000013.ckpt" in checkpoints(tiny_run)
    assert not [thread for thread in set(threading.enumerate()) - before if thread.name.startswith("checkpoint")]
    assert fit(tiny_run, *EIGHT) == 0
    assert weights(tiny_run) == weights(undisturbed)


def in_the_last_step(monkeypatch, at_step):
    """SIGTERM while the step before ``at_step`` is taken."""
    step_of = MemberModule.training_step

    def training_step(self, batch, batch_idx):
        if self.global_step == at_step - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return step_of(self, batch, batch_idx)

    monkeypatch.setattr(MemberModule, "training_step", training_step)


def test_the_last_validation_is_not_cut_short(tiny_run, monkeypatch):
    """Training is over, and the artifact takes its figures from there."""
    with monkeypatch.context() as patched:
        in_held_out_batches(patched, 16)
        assert fit(tiny_run, *LAST) == 0

    assert status(tiny_run)["state"] == "done"
    assert logged(tiny_run, "Scalars", "held_out/loss") == [8, 16]


class KilledError(Exception):
    """In place of SIGKILL, which would end the tests."""


def test_the_last_one_is_made_up_for_where_a_kill_ended_it(tiny_run, tmp_path, monkeypatch):
    other = tmp_path / "other"
    shutil.copytree(tiny_run, other)
    step_of = MemberModule.validation_step

    def validation_step(self, batch, batch_idx):
        if self.global_step == 16:
            raise KilledError
        step_of(self, batch, batch_idx)

    with monkeypatch.context() as patched:
        patched.setattr(MemberModule, "validation_step", validation_step)
        with pytest.raises(KilledError):
            fit(tiny_run, *LAST)

    speed = status(tiny_run)["samples_per_second"]
    with monkeypatch.context() as patched:  # a stop while it loads its last checkpoint hands over no weights
        patched.setattr(parallel, "read_trainer_state", lambda _: os.kill(os.getpid(), signal.SIGTERM))
        assert fit(tiny_run, *LAST) == 130

    assert (status(tiny_run)["state"], status(tiny_run)["step"]) == ("stopped", 16)

    for run in (tiny_run, other):
        assert fit(run, *LAST) == 0

    assert weights(tiny_run) == weights(other)
    assert values(tiny_run, "held_out/loss") == values(other, "held_out/loss")
    assert sorted(values(other, "held_out/loss")) == [8, 16]
    assert logged(tiny_run, "Images", "validation/samples") == [8, 16]
    assert status(tiny_run)["samples_per_second"] == speed > 0

    first, second = (read_meta(member(run, "artifact")).metrics for run in (tiny_run, other))
    held_out = [name for name in first if name.startswith("held_out/")]

    assert [first[name] for name in held_out] == [second[name] for name in held_out]
    assert first["held_out/loss"] == pytest.approx(values(other, "held_out/loss")[16])


@pytest.mark.parametrize(
    ("step", "validated", "again"), [(16, 8, 1), (16, 16, 0), (12, 8, 0), (0, 0, 0), (20, 16, 1), (20, 20, 0)]
)
def test_only_what_was_due_and_missed_is_made_up_for(tmp_path, step, validated, again):
    status = MemberStatus("expert-0", 20, validated_step=validated)
    assert MissedValidation(tmp_path, status, 8).is_missed(step, 20) == bool(again)


def test_a_point_behind_the_checkpoint_that_is_resumed_does_not_count(undisturbed, tmp_path, monkeypatch):
    """It is taken out of the curves, and comes again or is made up for."""
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    shutil.rmtree(member(run, "artifact"))
    shutil.rmtree(member(run, "checkpoints", "step-00000020.ckpt"))
    member(run, "status.json").write_text(json.dumps({**status(run), "validated_step": 24}))
    seen = []

    def seen_before(self, *_):
        seen.append(self.status.validated_step)
        return False

    monkeypatch.setattr(MissedValidation, "is_missed", seen_before)

    assert fit(run, *EIGHT) == 0
    assert seen == [16]
