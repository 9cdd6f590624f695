import errno
import os
import pickle
import subprocess
from types import SimpleNamespace

import pytest
import torch
from training.members import expert

from ddm_lightning.errors import UserError
from ddm_lightning.training.checkpoints import AtomicCheckpointIO, RollingCheckpoints, newest_checkpoint


class FakeTrainer:
    """Counts steps and writes checkpoints as a Trainer does."""

    is_global_zero = True

    def __init__(self):
        self.global_step = 0
        self.saved = []
        self.lightning_module = expert()

    def save_checkpoint(self, path, weights_only):
        assert weights_only is False  # in Lightning's words: not the weights alone
        self.saved.append(self.global_step)
        AtomicCheckpointIO().save_checkpoint({"step": self.global_step}, path)

    def take(self, steps, callback):
        for _ in range(steps):
            self.global_step += 1
            callback.on_train_batch_end(self, self.lightning_module)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def write(folder, *steps):
    for step in steps:
        AtomicCheckpointIO().save_checkpoint(
            {"step": step, "weights": torch.arange(5000.0)}, folder / f"step-{step:08d}.ckpt"
        )
    return folder


def test_the_newest_few_are_kept(tmp_path):
    trainer, rolling = FakeTrainer(), RollingCheckpoints(tmp_path, 10, 2, 100)
    trainer.take(9, rolling)
    assert names(tmp_path) == []
    trainer.take(1, rolling)
    assert names(tmp_path) == ["step-00000010.ckpt"]
    trainer.take(27, rolling)
    assert names(tmp_path) == ["step-00000020.ckpt", "step-00000030.ckpt"]
    assert trainer.saved == [10, 20, 30]


def test_each_validation_has_a_checkpoint_before_it(tmp_path):
    trainer, rolling = FakeTrainer(), RollingCheckpoints(tmp_path, 10, 9, 15)
    trainer.take(30, rolling)
    assert trainer.saved == [10, 15, 20, 30]


def test_those_of_an_earlier_start_are_counted_too(tmp_path):
    write(tmp_path, 4, 8, 11)
    trainer, rolling = FakeTrainer(), RollingCheckpoints(tmp_path, 3, 2, 100)
    trainer.global_step = 11
    trainer.take(1, rolling)
    assert names(tmp_path) == ["step-00000011.ckpt", "step-00000012.ckpt"]


def test_one_step_is_saved_once(tmp_path):
    trainer, rolling = FakeTrainer(), RollingCheckpoints(tmp_path, 5, 2, 100)
    trainer.take(5, rolling)
    rolling.save(trainer)
    assert trainer.saved == [5]
    trainer.take(1, rolling)
    rolling.save(trainer)
    assert trainer.saved == [5, 6]


def test_a_diverged_step_is_not_kept(tmp_path):
    trainer, rolling = FakeTrainer(), RollingCheckpoints(tmp_path, 5, 2, 100)
    trainer.take(5, rolling)
    guard = trainer.lightning_module.guard
    for step in range(guard.max_in_succession + 1):
        guard.saw(step, torch.tensor([0]), torch.tensor([0.5]), torch.tensor([1.0]))
        guard.judge(SimpleNamespace(), torch.tensor(float("nan")))
    with pytest.raises(UserError, match="not finite"):
        trainer.take(5, rolling)
    assert names(tmp_path) == ["step-00000005.ckpt"]


def test_the_newest_is_found(tmp_path):
    assert newest_checkpoint(tmp_path) == (None, [])
    assert newest_checkpoint(tmp_path / "none") == (None, [])
    write(tmp_path, 90, 100, 1000)
    assert newest_checkpoint(tmp_path) == (tmp_path / "step-00001000.ckpt", [])


def cut(share):
    return lambda content: content[: int(len(content) * share)]


def flip(content):
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "harm",
    [cut(0), cut(0.01), cut(0.5), lambda content: content[:-1], flip, lambda _: b"no zip" * 100],
    ids=["empty", "head", "half", "last-byte", "flipped-bit", "something-else"],
)
def test_a_damaged_one_gives_way_to_the_one_before(tmp_path, harm):
    write(tmp_path, 10, 20)
    newest = tmp_path / "step-00000020.ckpt"
    newest.write_bytes(harm(newest.read_bytes()))
    path, (line,) = newest_checkpoint(tmp_path)
    assert path == tmp_path / "step-00000010.ckpt"
    assert line.startswith(f"{newest}: damaged checkpoint (")
    assert "falling back to the one before it" in line
    assert "\n" not in line
    assert names(tmp_path) == ["step-00000010.ckpt", "step-00000020.damaged"]
    assert newest_checkpoint(tmp_path) == (path, [])  # said once


def test_when_all_are_damaged_training_starts_afresh_and_says_so(tmp_path):
    write(tmp_path, 10, 20)
    for path in tmp_path.iterdir():
        path.write_bytes(path.read_bytes()[:100])
    path, lines = newest_checkpoint(tmp_path)
    assert path is None
    assert [line.partition(":")[0] for line in lines] == [
        str(tmp_path / f"step-000000{step}.ckpt") for step in (20, 10)
    ]
    assert "starting afresh" in lines[-1]


class _Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("dump", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_a_checkpoint_that_would_run_code_is_not_opened(tmp_path, dump):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    write(folder, 10)
    dump({"state": _Bomb(tmp_path / "ran")}, folder / "step-00000020.ckpt")
    path, (line,) = newest_checkpoint(folder)
    assert path == folder / "step-00000010.ckpt"
    assert "step-00000020.ckpt" in line
    assert not (tmp_path / "ran").exists()


def test_a_save_that_fails_leaves_the_old_file_and_nothing_else(tmp_path):
    path = write(tmp_path, 10) / "step-00000010.ckpt"
    before = path.read_bytes()
    with pytest.raises((AttributeError, pickle.PicklingError)):
        AtomicCheckpointIO().save_checkpoint({"function": lambda: None}, path)
    assert path.read_bytes() == before
    assert names(tmp_path) == ["step-00000010.ckpt"]


def test_what_a_killed_save_left_is_swept(tmp_path):
    write(tmp_path, 10)
    (tmp_path / ".tmp-123-step-00000020.ckpt").write_bytes(b"half")
    assert newest_checkpoint(tmp_path)[0] == tmp_path / "step-00000010.ckpt"
    assert names(tmp_path) == ["step-00000010.ckpt"]


def test_only_the_first_rank_removes(tmp_path):
    write(tmp_path, 1, 2, 3)
    trainer, rolling = FakeTrainer(), RollingCheckpoints(tmp_path, 1, 1, 100)
    trainer.is_global_zero = False
    trainer.save_checkpoint = lambda _path, **_settings: None
    trainer.take(1, rolling)
    assert len(names(tmp_path)) == 3


def test_a_full_disk_is_told_as_such_and_leaves_what_was_there(tmp_path):
    options = ["-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    if subprocess.run(["mount", *options], capture_output=True, timeout=20, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        save = AtomicCheckpointIO().save_checkpoint
        save({"weights": torch.ones(1000)}, tmp_path / "step-1.ckpt")
        with pytest.raises(OSError, match="No space left on device") as full:
            save({"weights": torch.ones(1_000_000)}, tmp_path / "step-2.ckpt")
        assert full.value.errno == errno.ENOSPC and full.value.filename == str(tmp_path / "step-2.ckpt")
        assert names(tmp_path) == ["step-1.ckpt"]
        assert torch.load(tmp_path / "step-1.ckpt")["weights"].sum() == 1000
    finally:
        # Lazily: the error's frames still hold the file that could not be written.
        subprocess.run(["umount", "-l", str(tmp_path)], check=True, timeout=20)
