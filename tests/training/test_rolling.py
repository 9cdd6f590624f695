import math
import shutil
from concurrent.futures import wait
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import TINY
from training.checkpoint_folders import cut
from training.members import MEMBER, expert
from training.saved import names, write, writer_of

from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.members.checkpoints import find_resumable, newest_checkpoint
from ddm_lightning.members.skipped import read_skipped
from ddm_lightning.training.callbacks import RollingCheckpoints, StopOnRequest
from ddm_lightning.training.checkpoint import choose, origin_of
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.parallel import OneDevice

TENSORS = {"w": torch.arange(5000.0)}


class FakeTrainer:
    """Counts steps and writes checkpoints as a Trainer does."""

    world_size = 1
    global_rank = 0
    is_global_zero = True
    should_stop = False

    def __init__(self, rolling, max_steps=1000):
        self.max_steps = max_steps
        self.global_step = 0
        self.saved = []
        self.lightning_module = MemberModule(expert())
        self.strategy = OneDevice(torch.device("cpu"))
        self.strategy.checkpoints = writer_of()
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


def write_steps(folder, *steps, **rest):
    for step in steps:
        write(folder / f"step-{step:08d}.ckpt", TENSORS, {"step": step, **rest})


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
    guard = trainer.lightning_module.guard
    ids = torch.tensor([5, 9])
    guard.record(ids, torch.tensor([0.25, 0.5]), torch.tensor([1.0, math.inf]))
    guard.skip_unless_finite(7, 0, SimpleNamespace(), torch.tensor(math.inf))
    trainer.take(10)
    ((skipped,),) = found

    assert (skipped.step, skipped.rank, skipped.sample_ids, skipped.t) == (7, 0, [5, 9], [0.25, 0.5])


def test_milestones_of_any_start_are_kept_and_validations_have_a_checkpoint(tmp_path):
    write_steps(tmp_path, 3, 4, experiment={"island": {"milestone_every_n_steps": 4}})
    trainer = FakeTrainer(rolling(tmp_path, 10, 1, 35, 25))
    trainer.global_step = 4

    trainer.take(56)

    assert trainer.saved == [10, 20, 25, 30, 35, 40, 50, 60]
    assert names(tmp_path) == [f"step-000000{step}.ckpt" for step in ("04", 25, 50, 60)]


def test_checkpoints_by_minutes_count_from_the_newest_and_validations_still_have_one(tmp_path, monkeypatch):
    """Steps of two minutes, and an interval in steps that no longer counts."""
    clock = SimpleNamespace(monotonic=lambda: 5000.0 + 120 * trainer.global_step if trainer else 5000.0)
    monkeypatch.setattr("ddm_lightning.training.callbacks.time", clock)
    trainer = None
    trainer = FakeTrainer(rolling(tmp_path, 2, 1, 9, 12, minutes=10))
    trainer.take(28, StopOnRequest(trainer.rolling))

    assert trainer.saved == [5, 9, 12, 17, 18, 23, 24, 27]


def test_one_step_is_saved_once_and_checkpoints_of_an_earlier_start_count(tmp_path):
    write_steps(tmp_path, 4, 8, 11)
    trainer = FakeTrainer(rolling(tmp_path, 3, 2, 100))
    trainer.global_step = 11

    trainer.take(1)
    trainer.rolling.save(trainer)

    assert trainer.saved == [12]
    assert names(tmp_path) == ["step-00000011.ckpt", "step-00000012.ckpt"]

    trainer.take(1)
    trainer.rolling.save(trainer)

    assert trainer.saved == [12, 13]


def test_a_save_that_failed_ends_training_at_a_later_step(tmp_path):
    trainer = FakeTrainer(rolling(tmp_path / "folder", 5, 2, 100))
    (tmp_path / "folder").write_text("no folder")
    trainer.global_step = 5
    trainer.rolling.save(trainer)
    wait([trainer.strategy.checkpoints._pending])

    with pytest.raises(OSError, match="folder"):  # at the next step, not at the next save
        trainer.take(1)


def test_a_failed_removal_does_not_end_training(tmp_path, monkeypatch):
    def in_use(path, ignore_errors=False):
        if not ignore_errors:
            raise OSError(39, "Directory not empty", str(path))

    trainer = FakeTrainer(rolling(tmp_path, 1, 1, 100))
    monkeypatch.setattr("ddm_lightning.training.callbacks.shutil.rmtree", in_use)
    trainer.take(3)

    assert [name for name in names(tmp_path) if name.startswith("step")] == ["step-00000003.ckpt"]


def test_the_newest_is_found(tmp_path):
    assert find_resumable(tmp_path) == (None, {})
    assert find_resumable(tmp_path / "none") == (None, {})

    write_steps(tmp_path, 90, 100, 1000)
    assert find_resumable(tmp_path) == (tmp_path / "step-00001000.ckpt", {})

    write_steps(tmp_path, 20_000_000, 100_000_000)  # the last of them by number, not by name
    assert find_resumable(tmp_path)[0] == newest_checkpoint(tmp_path) == tmp_path / "step-100000000.ckpt"


@pytest.mark.parametrize("name", ["step-00000155-copy.ckpt", "step-abc.ckpt", "step-9.ckpt"])
def test_other_names_are_ignored(tmp_path, name):
    write_steps(tmp_path, 5, 10)
    shutil.copytree(tmp_path / "step-00000010.ckpt", tmp_path / name)

    assert find_resumable(tmp_path) == (tmp_path / "step-00000010.ckpt", {})
    assert newest_checkpoint(tmp_path) == tmp_path / "step-00000010.ckpt"

    FakeTrainer(rolling(tmp_path, 15, 1, 100)).take(15)
    assert names(tmp_path) == sorted(["step-00000015.ckpt", name])


def test_training_does_not_start_over_if_all_are_damaged(tmp_path):
    write_steps(tmp_path, 10, 30)
    for path in tmp_path.iterdir():
        cut(path)

    before = names(tmp_path)

    with pytest.raises(UserError) as caught:
        find_resumable(tmp_path)

    line = str(caught.value)

    assert line.startswith(f"{tmp_path / 'step-00000030.ckpt'}: damaged checkpoint (")
    assert line.endswith(f"none before it is whole; restore one, or remove {tmp_path} to start afresh")
    assert names(tmp_path) == before


def test_damaged_checkpoints_give_way_to_an_earlier_one_and_leftovers_go(tmp_path, capsys):
    origin = origin_of(MEMBER, load_experiment(TINY))
    for _ in range(2):  # the second replaces the damaged one set aside by the first
        write_steps(tmp_path, 10, 20, 30, **origin)
        (tmp_path / ".tmp-step-00000040.ckpt").mkdir()
        newer = [tmp_path / f"step-000000{step}.ckpt" for step in (30, 20)]
        for path in newer:
            cut(path)
        path, damaged = find_resumable(tmp_path)
        assert (path, [*damaged]) == (tmp_path / "step-00000010.ckpt", newer)
        assert choose(tmp_path, origin) == path
        assert capsys.readouterr().err.count("); falling back to the one before it\n") == 2
        assert names(tmp_path) == ["step-00000010.ckpt", "step-00000020.damaged"]

    assert find_resumable(tmp_path) == (path, {})  # reported once

    choose(tmp_path, origin_of(MEMBER, load_experiment(TINY, ["island.devices=2"])))
    assert "expert-0: from here on with island.devices=2 (was 1)" in capsys.readouterr().err
