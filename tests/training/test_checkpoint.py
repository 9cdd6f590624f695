import errno
import json
import os
import pickle
import shutil
import subprocess
import threading
from collections import deque

import pytest
import torch
from safetensors.torch import load_file
from training.checkpoint_folders import cut, largest_file, stored
from training.saved import names, write, writer_of

from ddm_lightning.core.errors import UserError
from ddm_lightning.members.checkpoints import damage_of
from ddm_lightning.training import checkpoint
from ddm_lightning.training.checkpoint import read_tensors, stored_sizes

TENSORS = {"model/w": torch.arange(5000.0)}


def drawn(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_tensors_come_back_as_they_were(tmp_path):
    tensors = {
        "model/a": drawn(3, 5, seed=0),
        "model/number": torch.tensor(7.0),
        "model/counts": torch.arange(4),
        "model/half": drawn(6, seed=1).bfloat16(),
        "model/not.finite": torch.tensor([float("nan"), float("inf")]),
        "model/turned": torch.arange(6.0).view(2, 3).T,
        "model/rows": torch.ones(1, 3).expand(4, 3),
    }

    path = write(tmp_path / "step-1", tensors, {"step": 3})

    found, rest = stored(path)
    into = {name: torch.zeros_like(value).contiguous() for name, value in tensors.items()}
    read_tensors(path, into)

    assert rest == {"step": 3}
    assert stored_sizes(path) == {name: (value.shape, value.dtype) for name, value in tensors.items()}

    for one in (found, into):
        torch.testing.assert_close(one, tensors, rtol=0, atol=0, equal_nan=True)


def test_large_tensors_are_spread_over_files(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint, "_FILE_BYTES", 1000)
    tensors = {f"model/{n}": torch.full((100,), float(n)) for n in range(5)}
    tensors |= {"model/big": torch.zeros(1000), "model/last": torch.ones(1)}

    path = write(tmp_path / "step-1", tensors)

    found = sorted(sorted(load_file(file)) for file in path.glob("*.safetensors"))

    assert found == [["model/0", "model/1", "model/2"], ["model/3", "model/4"], ["model/big"], ["model/last"]]
    assert damage_of(path) is None

    into = {name: torch.full_like(value, -1.0) for name, value in tensors.items()}
    read_tensors(path, into)
    torch.testing.assert_close(into, tensors, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("rest", "kind", "words"),
    [
        ({"own": {"losses": deque([0.5])}}, UserError, r"^key 'island\.callbacks': the state_dict of a callback holds"),
        (lambda: None, (AttributeError, pickle.PicklingError), "pickle"),
    ],
    ids=["deque", "function"],
)
def test_a_state_that_could_not_be_read_again_is_refused_at_once(tmp_path, rest, kind, words):
    with pytest.raises(kind, match=words):
        write(tmp_path / "step-1", TENSORS, rest)

    assert names(tmp_path) == []


def test_a_checkpoint_appears_whole_while_training_continues(tmp_path, monkeypatch):
    may_end = threading.Event()
    moved = checkpoint.move_folder
    monkeypatch.setattr(checkpoint, "move_folder", lambda *paths: [may_end.wait(20), moved(*paths)])
    ended = []
    writer = writer_of()
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

    writer.close()
    assert stored(tmp_path / "step-3")[0]["w"].sum() == 2000


def test_a_save_takes_the_place_of_an_earlier_one_and_of_leftovers(tmp_path):
    left = tmp_path / ".tmp-step-1"
    left.mkdir()
    (left / "shard-00002-model-00001-of-00001.safetensors").write_bytes(b"of a second rank")
    for value in (0.0, 1.0):
        path = write(tmp_path / "step-1", {"w": torch.full((3,), value)})

    assert names(tmp_path) == ["step-1"]
    assert stored(path)[0]["w"].sum() == 3
    assert damage_of(path) is None
    assert names(path) == names(write(tmp_path / "step-2", {"w": torch.ones(3)}))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


HARM = {
    "unrelated-file": (lambda path: (path / ".DS_Store").write_bytes(b""), None),
    "half-a-file": (cut, "has changed"),
    "flipped-bit": (lambda path: flip(largest_file(path)), "has changed"),
    "flipped-bit-in-the-rest": (lambda path: flip(path / "trainer.pt"), "trainer.pt has changed"),
    "no-tensors": (lambda path: largest_file(path).unlink(), "lists other files"),
    "no-rest": (lambda path: (path / "trainer.pt").unlink(), "trainer.pt"),
    "no-list": (lambda path: (path / "files.json").unlink(), "files.json"),
    "half-a-list": (lambda path: flip(path / "files.json"), ""),
    "another-list": (lambda path: (path / "files.json").write_text("[1]"), "lists other files"),
    "one-more": (lambda path: (path / "more.safetensors").write_bytes(b""), "lists other files"),
    "gone": (shutil.rmtree, "files.json"),
}


@pytest.mark.parametrize(("harm", "words"), HARM.values(), ids=HARM.keys())
def test_damage_is_described(tmp_path, harm, words):
    path = write(tmp_path / "step-1", TENSORS)

    harm(path)

    problem = damage_of(path)
    if words is None:
        assert problem is None
    else:
        assert problem and words in problem and "\n" not in problem


class _Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


@pytest.mark.filterwarnings("ignore:Detected pickle protocol")
@pytest.mark.parametrize("dump", [torch.save, lambda value, path: path.write_bytes(pickle.dumps(value))])
def test_a_pickle_with_code_is_not_loaded(tmp_path, dump):
    path = write(tmp_path / "step-1", TENSORS)
    dump({"state": _Bomb(tmp_path / "ran")}, path / "trainer.pt")
    sums = json.loads((path / "files.json").read_text())
    sums["trainer.pt"] = checkpoint.sha256_file(path / "trainer.pt")
    (path / "files.json").write_text(json.dumps(sums))

    assert damage_of(path) == "trainer.pt holds more than plain values"
    assert not (tmp_path / "ran").exists()


def test_a_full_disk_is_named_and_leaves_earlier_checkpoints(tmp_path):
    options = ["-t", "tmpfs", "-o", "size=2m", "tmpfs", str(tmp_path)]
    if subprocess.run(["mount", *options], capture_output=True, timeout=20, check=False).returncode:
        pytest.skip("needs the right to mount a tmpfs")

    try:
        write(tmp_path / "step-1", TENSORS)
        with pytest.raises(OSError, match="No space left on device") as full:
            write(tmp_path / "step-2", {"w": torch.ones(1_000_000)})

        assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(tmp_path / "step-2"))
        assert names(tmp_path) == ["step-1"]
        assert damage_of(tmp_path / "step-1") is None
    finally:
        # Lazily: the error's frames still hold the file that could not be written.
        subprocess.run(["umount", "-l", str(tmp_path)], check=True, timeout=20)
