import json
import math
import shutil
from concurrent.futures import wait
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import TINY
from training.checkpoint_folders import cut
from training.members import MEMBER, expert

from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.training.callbacks import RollingCheckpoints, StopOnRequest
from ddm_lightning.training.checkpoint import (
    CheckpointWriter,
    check_origin,
    find_resumable,
    newest_checkpoint,
    origin_of,
    tidy,
)
from ddm_lightning.training.guard import read_skipped
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.parallel import OneDevice


class FakeTrainer:
    """Counts steps and writes checkpoints as a Trainer does."""

    world_size, global_rank, is_global_zero = 1, 0, True

    def __init__(self, rolling, max_steps=1000):
        self.max_steps = max_steps
        self.global_step = 0
        self.saved = []
        self.lightning_module = MemberModule(expert())
        self.strategy = OneDevice(torch.device("cpu"))
        self.strategy.checkpoints = CheckpointWriter(None, is_rank_zero=True, from_device=False)
        self.rolling = rolling
        rolling.setup(self, self.lightning_module, "fit")

    def save_checkpoint(self, path, weights_only):
        assert weights_only is False  # in Lightning's words: not the weights alone
        self.saved.append(self.global_step)
        tensors = {"w": torch.tensor(float(self.global_step))}
        self.strategy.checkpoints.start(path, tensors, None, self.strategy.checkpoint_written)

    def take(self, steps, *others):
        for _ in range(steps):
            self.global_step += 1
            for callback in (self.rolling, *others):
                callback.on_train_batch_end(self, self.lightning_module)
        self.rolling.on_train_end(self, self.lightning_module)


def rolling(folder, every, keep, validate_every, milestone_every=None, minutes=None):
    island = IslandConfig(
        checkpoint_every_n_steps=every,
        checkpoint_every_n_minutes=minutes,
        keep_checkpoints=keep,
        validate_every_n_steps=validate_every,
        milestone_every_n_steps=milestone_every,
    )
    return RollingCheckpoints(folder, island, {})


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write(folder, *steps, **rest):
    writer = CheckpointWriter(None, is_rank_zero=True, from_device=False)
    for step in steps:
        path, tensors = folder / f"step-{step:08d}.ckpt", {"w": torch.arange(5000.0)}
        writer.start(path, tensors, {"step": step, **rest}, lambda: None)
    writer.wait()
    writer.close()
    return folder


def test_the_newest_few_are_kept(tmp_path):
    trainer = FakeTrainer(rolling(tmp_path, 10, 2, 100), max_steps=33)
    trainer.take(9)
    assert names(tmp_path) == []
    trainer.take(23)
    assert names(tmp_path) == ["step-00000020.ckpt", "step-00000030.ckpt"]
    trainer.take(1)  # the last step
    assert names(tmp_path) == ["step-00000030.ckpt", "step-00000033.ckpt"]
    assert trainer.saved == [10, 20, 30, 33]


def test_skipped_steps_are_written_before_the_checkpoint(tmp_path):
    """Who resumes there does not take those steps once more, so that nobody else would write them down."""
    trainer = FakeTrainer(rolling(tmp_path / "checkpoints", 10, 2, 100))
    found = []
    save = trainer.save_checkpoint
    trainer.save_checkpoint = lambda *path, **named: (
        found.append(read_skipped(tmp_path / "skipped_steps.jsonl")),
        save(*path, **named),
    )
    guard, ids = trainer.lightning_module.guard, torch.tensor([5, 9])
    guard.record(ids, torch.tensor([0.25, 0.5]), torch.tensor([1.0, math.inf]))
    guard.skip_unless_finite(7, 0, SimpleNamespace(), torch.tensor(math.inf))
    trainer.take(10)
    ((skipped,),) = found
    assert (skipped.step, skipped.rank, skipped.sample_ids, skipped.t) == (7, 0, [5, 9], [0.25, 0.5])


def test_milestones_are_kept_for_good_and_validations_have_a_checkpoint(tmp_path):
    trainer = FakeTrainer(rolling(tmp_path, 10, 1, 35, 25))
    trainer.take(60)
    assert trainer.saved == [10, 20, 25, 30, 35, 40, 50, 60]
    assert names(tmp_path) == [f"step-000000{step}.ckpt" for step in (25, 50, 60)]


def test_milestones_by_the_setting_they_were_saved_under_are_kept(tmp_path):
    write(tmp_path, 20, 25, experiment={"island": {"milestone_every_n_steps": 25}})
    trainer = FakeTrainer(rolling(tmp_path, 10, 1, 100))
    trainer.global_step = 29
    trainer.take(11)
    assert names(tmp_path) == ["step-00000025.ckpt", "step-00000040.ckpt"]


@pytest.mark.parametrize(
    ("before", "after", "line"),
    [
        ({}, {"keep_checkpoints": 9}, None),
        ({}, {"devices": 2}, "island.devices=2 (was 1): the same samples, other noise and rounding"),
        ({}, {"compile": True}, "island.compile=true (was false): the same samples, other rounding"),
    ],
)
def test_settings_that_differ_from_the_checkpoints(tmp_path, before, after, line):
    def experiment_of(changes):
        return load_experiment(TINY, [f"island.{key}={json.dumps(value)}" for key, value in changes.items()])

    write(tmp_path, 5, **origin_of(MEMBER, experiment_of(before)))
    path = tmp_path / "step-00000005.ckpt"
    assert check_origin(path, origin_of(MEMBER, experiment_of(after))) == (line and f"from here on with {line}")


def test_checkpoints_by_minutes_count_from_the_newest_and_validations_still_have_one(tmp_path, monkeypatch):
    """Steps of two minutes, and an interval in steps that no longer counts."""
    clock = SimpleNamespace(monotonic=lambda: 5000.0 + 120 * trainer.global_step if trainer else 5000.0)
    monkeypatch.setattr("ddm_lightning.training.callbacks.time", clock)
    trainer = None
    trainer = FakeTrainer(rolling(tmp_path, 2, 1, 9, 12, minutes=10))
    trainer.take(28, StopOnRequest(trainer.rolling))
    assert trainer.saved == [5, 9, 12, 17, 18, 23, 24, 27]


def test_checkpoints_of_an_earlier_start_count(tmp_path):
    write(tmp_path, 4, 8, 11)
    trainer = FakeTrainer(rolling(tmp_path, 3, 2, 100))
    trainer.global_step = 11
    trainer.take(1)
    assert names(tmp_path) == ["step-00000011.ckpt", "step-00000012.ckpt"]


def test_one_step_is_saved_once(tmp_path):
    trainer = FakeTrainer(rolling(tmp_path, 5, 2, 100))
    trainer.take(5)
    trainer.rolling.save(trainer)
    assert trainer.saved == [5]
    trainer.take(1)
    trainer.rolling.save(trainer)
    assert trainer.saved == [5, 6]


def test_a_diverged_step_is_not_kept(tmp_path):
    trainer = FakeTrainer(rolling(tmp_path, 5, 2, 100))
    trainer.take(5)
    guard = trainer.lightning_module.guard
    for step in range(guard.max_consecutive + 1):
        guard.record(torch.tensor([0]), torch.tensor([0.5]), torch.tensor([1.0]))
        guard.skip_unless_finite(step, 0, SimpleNamespace(), torch.tensor(float("nan")))
    with pytest.raises(UserError, match="no finite gradient"):
        trainer.take(5)
    assert names(tmp_path) == ["step-00000005.ckpt"]


def test_a_save_that_failed_ends_training_at_a_later_step(tmp_path):
    trainer = FakeTrainer(rolling(tmp_path / "folder", 5, 2, 100))
    (tmp_path / "folder").write_text("no folder")
    trainer.global_step = 4
    with pytest.raises(OSError, match="folder"):
        trainer.take(1)
    trainer.global_step = 5
    trainer.rolling._newest_step = -1
    trainer.rolling.save(trainer)
    wait([trainer.strategy.checkpoints._pending])
    with pytest.raises(OSError, match="folder"):  # at the next step, not at the next save
        trainer.rolling.on_train_batch_end(at(trainer, 6), trainer.lightning_module)


def at(trainer, step):
    trainer.global_step = step
    return trainer


def test_a_failed_removal_does_not_end_training(tmp_path, monkeypatch):
    def in_use(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(39, "Directory not empty", str(path))

    trainer = FakeTrainer(rolling(tmp_path, 1, 1, 100))
    monkeypatch.setattr("ddm_lightning.training.callbacks.shutil.rmtree", in_use)
    trainer.take(3)
    assert [name for name in names(tmp_path) if name.startswith("step")] == ["step-00000003.ckpt"]


def test_the_end_waits_for_the_running_save(tmp_path):
    trainer = FakeTrainer(rolling(tmp_path, 5, 2, 100))
    trainer.global_step = 5
    trainer.rolling.save(trainer)
    trainer.strategy.checkpoints.close()
    assert names(tmp_path) == ["step-00000005.ckpt"]


def test_the_newest_is_found(tmp_path):
    assert find_resumable(tmp_path) == (None, {})
    assert find_resumable(tmp_path / "none") == (None, {})
    write(tmp_path, 90, 100, 1000)
    assert find_resumable(tmp_path) == (tmp_path / "step-00001000.ckpt", {})
    write(tmp_path, 20_000_000, 100_000_000)  # the last of them by number, not by name
    assert find_resumable(tmp_path)[0] == newest_checkpoint(tmp_path) == tmp_path / "step-100000000.ckpt"


@pytest.mark.parametrize("name", ["step-00000155-copy.ckpt", "step-abc.ckpt", "step-9.ckpt"])
def test_other_names_are_ignored(tmp_path, name):
    write(tmp_path, 5, 10)
    shutil.copytree(tmp_path / "step-00000010.ckpt", tmp_path / name)
    assert find_resumable(tmp_path) == (tmp_path / "step-00000010.ckpt", {})
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000010.ckpt"
    FakeTrainer(rolling(tmp_path, 15, 1, 100)).take(15)
    assert names(tmp_path) == sorted(["step-00000015.ckpt", name])


@pytest.mark.parametrize(("steps", "others"), [((10, 20, 30), ", nor the 2 before it"), ((30,), "")])
def test_training_does_not_start_over_if_all_are_damaged(tmp_path, steps, others):
    write(tmp_path, *steps)
    for path in tmp_path.iterdir():
        cut(path)
    before = names(tmp_path)
    with pytest.raises(UserError) as caught:
        find_resumable(tmp_path)
    line = str(caught.value)
    assert line.startswith(f"{tmp_path / 'step-00000030.ckpt'}: damaged checkpoint (")
    assert line.endswith(f"){others}; restore one, or remove {tmp_path} to start afresh")
    assert names(tmp_path) == before


def test_damaged_checkpoints_give_way_to_an_earlier_one(tmp_path):
    for _ in range(2):  # the second replaces the damaged one set aside by the first
        write(tmp_path, 10, 20, 30)
        newer = [tmp_path / f"step-000000{step}.ckpt" for step in (30, 20)]
        for path in newer:
            cut(path)
        path, damaged = find_resumable(tmp_path)
        assert (path, [*damaged]) == (tmp_path / "step-00000010.ckpt", newer)
        assert all(problem and "\n" not in problem for problem in damaged.values())
        tidy(tmp_path, damaged)
        assert names(tmp_path) == ["step-00000010.ckpt", "step-00000020.damaged"]
    assert find_resumable(tmp_path) == (path, {})  # reported once


def test_leftovers_of_a_killed_save_are_removed(tmp_path):
    write(tmp_path, 10)
    left = tmp_path / ".tmp-step-00000020.ckpt"
    left.mkdir()
    (left / "half").write_bytes(b"half")
    tidy(tmp_path, [])
    assert names(tmp_path) == ["step-00000010.ckpt"]
