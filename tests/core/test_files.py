import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import subprocess
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
from artifact_files import refused
from deadline import within
from filelock import Timeout

from ddm_lightning.core.files import (
    atomic_files,
    atomic_folder,
    atomic_write,
    atomic_write_json,
    atomic_write_text,
    create_file,
    inside,
    locked,
    read_json,
    sha256_file,
    sha256_json,
)


def names(folder):
    return sorted(child.name for child in folder.iterdir())


def test_a_file_appears_with_its_folders_and_replaces_the_old_one(tmp_path):
    path = tmp_path / "a" / "b" / "f.txt"
    atomic_write_text(path, "älter")
    atomic_write_text(path, "neuer ☂")
    assert path.read_text(encoding="utf-8") == "neuer ☂"
    assert names(path.parent) == ["f.txt"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    path = tmp_path / "f.txt"
    atomic_write_text(path, "old")

    def half(temporary):
        assert temporary.suffix == ".txt", "some writers append another"
        temporary.write_text("ne")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError, match="No space left") as caught:
        atomic_write(path, half)
    assert caught.value.filename == str(path)
    assert path.read_text() == "old"
    assert names(tmp_path) == ["f.txt"]


def test_an_error_of_a_reader_or_a_library_keeps_its_words(tmp_path):
    def read(_):
        (tmp_path / "none").read_bytes()

    def refuse(_):
        raise OSError("cannot write this mode as PNG")

    for write, words in ((read, f"'{tmp_path / 'none'}'"), (refuse, "this mode as PNG")):
        with pytest.raises(OSError, match=words):
            atomic_write(tmp_path / "f.txt", write)


def test_several_files_appear_together_beside_others(tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "own.txt").write_text("mine")
    (tmp_path / "grid.png").write_text("old")
    for fails in (True, False):
        with suppress(ZeroDivisionError), atomic_files(tmp_path) as folder:
            atomic_write_text(folder / "a" / "b.txt", "b")
            atomic_write_text(folder / "grid.png", "new")
            assert (tmp_path / "grid.png").read_text() == "old"
            _ = 1 / (not fails)
        assert (tmp_path / "a" / "b.txt").exists() != fails
    assert names(tmp_path) == ["a", "grid.png"] and names(tmp_path / "a") == ["b.txt", "own.txt"]
    assert (tmp_path / "grid.png").read_text() == "new"
    with suppress(ZeroDivisionError), atomic_files(tmp_path / "new"):
        _ = 1 / 0
    assert names(tmp_path) == ["a", "grid.png"]


def watch(monkeypatch):
    """What is flushed and renamed from here on, by name, temporary names cut."""
    events = []
    fsync, replace = os.fsync, os.replace

    def short(path):
        return ".tmp" if path.name.startswith(".tmp") else path.name

    def watched_fsync(handle):
        events.append(f"flush {short(Path(f'/proc/self/fd/{handle}').readlink())}")
        fsync(handle)

    def watched_replace(old, new):
        events.append(f"rename {short(Path(new))}")
        replace(old, new)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    return events


def test_bytes_reach_the_disk_before_the_name_does(tmp_path, monkeypatch):
    events = watch(monkeypatch)
    atomic_write_text(tmp_path / "f.txt", "x")
    assert events == ["flush .tmp", "rename f.txt", f"flush {tmp_path.name}"]


def test_a_disk_without_hard_links_lets_one_of_several_create_a_file(tmp_path, monkeypatch):
    def refuse(*_):
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "link", refuse)
    create_file(tmp_path / "f.json", b"first")
    with pytest.raises(FileExistsError):
        create_file(tmp_path / "f.json", b"second")
    assert (tmp_path / "f.json").read_bytes() == b"first" and names(tmp_path) == ["f.json"]


def test_a_disk_that_cannot_sync_folders_takes_files(tmp_path, monkeypatch):
    fsync = os.fsync

    def refuse_folders(handle):
        if stat.S_ISDIR(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(handle)

    monkeypatch.setattr(os, "fsync", refuse_folders)
    with atomic_folder(tmp_path / "artifact") as folder:
        atomic_write_text(folder / "model", "x")
    assert names(tmp_path / "artifact") == ["model"]


HOLD = """
import sys
from pathlib import Path
import fcntl, os
def refuse(*_):
    raise OSError(int(sys.argv[2]), os.strerror(int(sys.argv[2])))
if int(sys.argv[2]):
    fcntl.flock = refuse
from ddm_lightning.core.files import locked
with locked(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@pytest.mark.filterwarnings("ignore:flock not supported")
@pytest.mark.parametrize("code", [0, errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP])
def test_a_lock_excludes_others_also_on_a_disk_that_cannot_lock(tmp_path, monkeypatch, code):
    def refuse(*_):
        raise OSError(code, os.strerror(code))

    if code:
        monkeypatch.setattr(fcntl, "flock", refuse)
    lock, pipe = tmp_path / ".lock", subprocess.PIPE
    command = [sys.executable, "-c", HOLD, str(lock), str(code)]
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True) as holder:
        assert holder.stdout.readline() == "held\n"
        with pytest.raises(Timeout):
            locked(lock)
        holder.kill()
    for _ in range(2):  # a dead process of this machine holds nobody up
        with locked(lock):
            pass


def test_json_is_whole_and_finite(tmp_path):
    path = tmp_path / "f.json"
    value = {"b": [1, 2.5, None], "a": "☂"}
    atomic_write_json(path, value)
    assert json.loads(path.read_text(encoding="utf-8")) == value
    assert list(read_json(path, "the thing", "make it")) == ["b", "a"]
    with pytest.raises(ValueError, match="not JSON compliant"):
        atomic_write_json(path, {"loss": float("nan")})
    assert read_json(path, "the thing", "make it") == value
    assert names(tmp_path) == ["f.json"]


def test_a_folder_appears_whole_and_replaces_the_old_one(tmp_path):
    path = tmp_path / "a" / "artifact"
    with atomic_folder(path) as folder:
        (folder / "one").write_text("1")
        assert not path.exists()

    with pytest.raises(RuntimeError, match="stop"), atomic_folder(path) as folder:
        (folder / "half").write_text("2")
        raise RuntimeError("stop")

    with atomic_folder(path) as folder:
        (folder / "two").touch(0o600)
        assert names(path) == ["one"]

    assert names(path) == ["two"]
    assert names(path.parent) == ["artifact"]
    assert path.stat().st_mode & 0o777 == 0o755 and (path / "two").stat().st_mode & 0o777 == 0o644


def test_the_files_of_a_folder_reach_the_disk_before_its_name_does(tmp_path, monkeypatch):
    events = watch(monkeypatch)
    with atomic_folder(tmp_path / "artifact") as folder:
        (folder / "below").mkdir()
        (folder / "below" / "model").write_text("x")
    renamed = events.index("rename artifact")
    assert {"flush model", "flush below", "flush .tmp"} <= set(events[:renamed])
    assert len(events) == renamed + 2


def test_the_old_folder_stands_until_the_new_one_is_complete(tmp_path, monkeypatch):
    path = tmp_path / "artifact"
    with atomic_folder(path) as folder:
        (folder / "one").write_text("1")
    events = watch(monkeypatch)
    monkeypatch.setattr(shutil, "rmtree", lambda folder, **_: events.append(f"remove {folder.name.split('-')[0]}"))
    with atomic_folder(path) as folder:
        (folder / "two").write_text("2")
    assert [event for event in events if "flush" not in event][:2] == ["rename .tmp", "rename artifact"]
    assert names(path) == ["two"]


def test_hashes_are_those_of_hashlib(tmp_path):
    for data in (bytes(range(256)) * 12289, b""):  # longer than one block, and no multiple of it
        (tmp_path / "f").write_bytes(data)
        assert sha256_file(tmp_path / "f") == hashlib.sha256(data).hexdigest()


def test_the_hash_of_json_depends_on_values_and_not_on_order():
    value = {"a": 1, "b": [1.5, None, "ü"]}
    expected = hashlib.sha256(b'{"a":1,"b":[1.5,null,"\\u00fc"]}').hexdigest()
    assert sha256_json(value) == sha256_json(dict(reversed(value.items()))) == expected
    with pytest.raises(ValueError, match="not JSON compliant"):
        sha256_json(float("inf"))


@pytest.mark.parametrize(
    ("relative", "expected"),
    [
        ("members/expert-0", "members/expert-0"),
        ("a/../b", "b"),
        (".", ""),
        *dict.fromkeys(
            ["..", "a/../../other", "/etc/passwd", "{folder}/a", "link/model", "../run-2"], "leaves its"
        ).items(),
        *dict.fromkeys(["circle", "x" * 300, "\0"], "names no file").items(),
    ],
)
def test_a_path_stays_inside_its_folder(tmp_path, relative, expected):
    folder, neighbour = tmp_path / "run", tmp_path / "run-2"
    folder.mkdir()
    neighbour.mkdir()
    (folder / "link").symlink_to(neighbour)
    (folder / "circle").symlink_to(folder / "circle")
    relative = relative.replace("{folder}", str(folder))  # which may move

    if " " in expected:
        line = refused(lambda: inside(folder, relative, folder / "m.json"))
        assert line.startswith(f"{folder / 'm.json'}: path {relative!r} {expected}")
    else:
        assert inside(folder, relative, folder / "m.json") == folder.resolve() / expected


def large(path):
    with path.open("wb") as stream:
        stream.truncate(1 << 40)


@pytest.mark.parametrize(
    "make",
    [
        os.mkfifo,
        Path.mkdir,
        large,
        *(partial(Path.symlink_to, target=target) for target in ("/dev/zero", "../outside.json", "f.json")),
        *(
            partial(Path.write_bytes, data=data)
            for data in (b"{", b"", b"\xff\xfe", b'{"a": 1} trailing', b"[" * 200_000)
        ),
    ],
)
def test_what_is_no_small_regular_json_of_the_folder_is_one_line(tmp_path, make):
    path = tmp_path / "run" / "f.json"
    path.parent.mkdir()
    atomic_write_json(tmp_path / "outside.json", {})
    make(path)

    with within(10):
        line = refused(lambda: read_json(path, "the manifest", "run prepare again"))
    assert line.startswith(f"{path}: the manifest cannot be read (") and line.endswith("); run prepare again")


def test_missing_json_is_refused_with_its_remedy(tmp_path):
    line = refused(lambda: read_json(tmp_path / "f.json", "the manifest", "run prepare first"))
    assert line == f"{tmp_path / 'f.json'}: the manifest is missing; run prepare first"
