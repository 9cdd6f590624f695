import errno
import json
import os
import pickle
import shutil
import signal
import subprocess
import threading
from collections import deque

import pytest
import torch
from safetensors.torch import load_file
from training.checkpoint_folders import cut, largest_file, stored

from ddm_lightning.core.errors import UserError
from ddm_lightning.training import checkpoint
from ddm_lightning.training.checkpoint import CheckpointWriter, damage_of, read_tensors, stored_sizes


def write(path, tensors=None, rest=None, done=lambda: None):
    writer = CheckpointWriter(None, is_rank_zero=True, from_device=False)
    try:
        writer.start(path, {"model/w": torch.arange(5000.0)} if tensors is None else tensors, rest, done)
        writer.wait()
    finally:
        writer.close()
    return path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_tensors_come_back_as_they_were(tmp_path):
    tensors = {
        "model/a": torch.randn(3, 5, generator=torch.Generator().manual_seed(0)),
        "model/number": torch.tensor(7.0),
        "model/counts": torch.arange(4),
        "model/half": torch.randn(6, generator=torch.Generator().manual_seed(1)).bfloat16(),
        "model/not.finite": torch.tensor([float("nan"), float("inf")]),
    }
    path = write(tmp_path / "step-1", tensors, {"step": 3})
    found, rest = stored(path)
    assert rest == {"step": 3}
    into = {name: torch.zeros_like(value) for name, value in tensors.items()}
    read_tensors(path, into)
    assert stored_sizes(path) == {name: (value.shape, value.dtype) for name, value in tensors.items()}
    for name, value in tensors.items():
        for one in (found[name], into[name]):
            torch.testing.assert_close(one, value, rtol=0, atol=0, equal_nan=True)


def test_large_tensors_are_spread_over_files(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 1000)
    tensors = {f"model/{n}": torch.full((100,), float(n)) for n in range(5)} | {"model/big": torch.zeros(1000)}
    tensors["model/last"] = torch.ones(1)
    path = write(tmp_path / "step-1", tensors)
    found = {file.name: sorted(load_file(file)) for file in path.glob("*.safetensors")}
    assert sorted(found.values()) == [
        ["model/0", "model/1", "model/2"],
        ["model/3", "model/4"],
        ["model/big"],
        ["model/last"],
    ]
    assert damage_of(path) is None
    into = {name: torch.full_like(value, -1.0) for name, value in tensors.items()}
    read_tensors(path, into)
    assert all(torch.equal(into[name], value) for name, value in tensors.items())


def test_a_state_that_could_not_be_read_again_is_refused_at_once(tmp_path):
    with pytest.raises(
        UserError, match=r"^key 'island\.callbacks': the state_dict of a callback holds more than plain"
    ):
        write(tmp_path / "step-1", rest={"callbacks": {"own": {"losses": deque([0.5])}}})
    assert names(tmp_path) == []


def test_a_checkpoint_appears_whole_while_training_continues(tmp_path, monkeypatch):
    may_end, ended = threading.Event(), []
    moved = checkpoint.move_folder

    def slowly(temporary, path):
        assert may_end.wait(20)
        moved(temporary, path)

    monkeypatch.setattr(checkpoint, "move_folder", slowly)
    writer = CheckpointWriter(None, is_rank_zero=True, from_device=False)
    value = torch.zeros(1000)
    writer.start(tmp_path / "step-1", {"w": value}, {"list": [1]}, lambda: ended.append(names(tmp_path)))
    value.fill_(1.0)  # training goes on
    assert not (tmp_path / "step-1").exists()
    writer.raise_failure()  # waits for nothing
    assert ended == []
    may_end.set()
    writer.wait()
    assert ended == [["step-1"]]
    assert stored(tmp_path / "step-1")[0]["w"].sum() == 0
    value.fill_(2.0)
    writer.start(tmp_path / "step-2", {"w": value}, None, lambda: None)
    writer.start(tmp_path / "step-3", {"w": value}, None, lambda: None)
    assert damage_of(tmp_path / "step-2") is None  # one at a time
    writer.wait()
    assert stored(tmp_path / "step-3")[0]["w"].sum() == 2000
    writer.close()


def test_an_existing_checkpoint_is_replaced(tmp_path):
    write(tmp_path / "step-1", {"w": torch.zeros(3)})
    write(tmp_path / "step-1", {"w": torch.ones(3)})
    assert names(tmp_path) == ["step-1"]
    assert stored(tmp_path / "step-1")[0]["w"].sum() == 3


def test_leftovers_of_a_killed_save_are_not_included(tmp_path):
    left = tmp_path / ".tmp-step-1"
    left.mkdir()
    (left / "shard-00002-model-00001-of-00001.safetensors").write_bytes(b"of a second rank")
    path = write(tmp_path / "step-1")
    assert names(tmp_path) == ["step-1"]
    assert names(path) == names(write(tmp_path / "step-2"))
    assert damage_of(path) is None


def test_unrelated_files_are_ignored(tmp_path):
    path = write(tmp_path / "step-1")
    (path / ".DS_Store").write_bytes(b"")
    assert damage_of(path) is None


def test_tensors_that_are_views_are_saved(tmp_path):
    tensors = {"model/turned": torch.arange(6.0).view(2, 3).T, "model/rows": torch.ones(1, 3).expand(4, 3)}
    found = stored(write(tmp_path / "step-1", tensors))[0]
    assert all(torch.equal(found[name], value) for name, value in tensors.items())


def test_a_signal_interrupts_the_wait_but_not_the_save(tmp_path, monkeypatch):
    may_end = threading.Event()
    moved = checkpoint.move_folder
    monkeypatch.setattr(checkpoint, "move_folder", lambda *paths: [may_end.wait(20), moved(*paths)])
    writer = CheckpointWriter(None, is_rank_zero=True, from_device=False)
    writer.start(tmp_path / "step-1", {"w": torch.zeros(3)}, None, lambda: None)

    def interrupt(_number, _frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        with pytest.raises(KeyboardInterrupt):
            writer.wait()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not (tmp_path / "step-1").exists()
    threading.Timer(0.1, may_end.set).start()
    writer.close()
    assert damage_of(tmp_path / "step-1") is None


def flip(path):
    content = path.read_bytes()
    middle = len(content) // 2
    path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])


HARM = {
    "half-a-file": cut,
    "last-byte": lambda path: largest_file(path).write_bytes(largest_file(path).read_bytes()[:-1]),
    "flipped-bit": lambda path: flip(largest_file(path)),
    "flipped-bit-in-the-rest": lambda path: flip(path / "trainer.pt"),
    "no-tensors": lambda path: largest_file(path).unlink(),
    "no-rest": lambda path: (path / "trainer.pt").unlink(),
    "no-list": lambda path: (path / "files.json").unlink(),
    "half-a-list": lambda path: flip(path / "files.json"),
    "another-list": lambda path: (path / "files.json").write_text("[1]"),
    "no-hash": lambda path: (path / "files.json").write_text('{"trainer.pt": 5}'),
    "one-more": lambda path: (path / "more.safetensors").write_bytes(b""),
    "empty": lambda path: [file.unlink() for file in path.iterdir()],
    "gone": shutil.rmtree,
}


@pytest.mark.parametrize("harm", HARM.values(), ids=HARM.keys())
def test_damage_is_described(tmp_path, harm):
    path = write(tmp_path / "step-1")
    assert damage_of(path) is None
    harm(path)
    problem = damage_of(path)
    assert problem
    assert "\n" not in problem


def test_files_are_hashed_together(tmp_path, monkeypatch):
    """Each waits until another one is hashed, too."""
    pair, hashed = threading.Barrier(2, timeout=60), checkpoint.sha256_file
    monkeypatch.setattr(checkpoint, "sha256_file", lambda path: (pair.wait(), hashed(path))[1])
    path = write(tmp_path / "step-1")
    assert len(names(path)) == 3  # two, and their list
    assert damage_of(path) is None


class _Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("dump", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_a_pickle_with_code_is_not_loaded(tmp_path, dump):
    path = write(tmp_path / "step-1")
    dump({"state": _Bomb(tmp_path / "ran")}, path / "trainer.pt")
    sums = json.loads((path / "files.json").read_text())
    sums["trainer.pt"] = checkpoint.sha256_file(path / "trainer.pt")
    (path / "files.json").write_text(json.dumps(sums))
    assert damage_of(path) == "trainer.pt holds more than plain values"
    assert not (tmp_path / "ran").exists()


def test_values_that_cannot_be_saved_fail_at_once(tmp_path):
    path = write(tmp_path / "step-1")
    with pytest.raises((AttributeError, pickle.PicklingError)):
        write(path, rest=lambda: None)
    assert names(tmp_path) == ["step-1"]
    assert damage_of(path) is None


def test_a_full_disk_is_named_and_leaves_earlier_checkpoints(tmp_path):
    options = ["-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    if subprocess.run(["mount", *options], capture_output=True, timeout=20, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        write(tmp_path / "step-1")
        with pytest.raises(OSError, match="No space left on device") as full:
            write(tmp_path / "step-2", {"w": torch.ones(1_000_000)})
        assert full.value.errno == errno.ENOSPC and full.value.filename == str(tmp_path / "step-2")
        assert names(tmp_path) == ["step-1"]
        assert damage_of(tmp_path / "step-1") is None
    finally:
        # Lazily: the error's frames still hold the file that could not be written.
        subprocess.run(["umount", "-l", str(tmp_path)], check=True, timeout=20)


def test_a_failed_save_is_raised_once(tmp_path, monkeypatch):
    def fails(temporary, path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    monkeypatch.setattr(checkpoint, "move_folder", fails)
    writer = CheckpointWriter(None, is_rank_zero=True, from_device=False)
    writer.start(tmp_path / "step-1", {"w": torch.zeros(3)}, None, lambda: None)
    writer._thread.submit(lambda: None).result()  # behind it
    with pytest.raises(OSError, match="Input/output"):
        writer.raise_failure()
    writer.raise_failure()  # once
    assert names(tmp_path) == []
    writer.close()
