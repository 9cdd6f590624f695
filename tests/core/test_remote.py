import threading
from concurrent.futures import ThreadPoolExecutor

import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from shards import servers
from shards.mds import WARNINGS

from ddm_lightning.core import filesystems, remote
from ddm_lightning.prepare.sources.urls import Files

pytestmark = WARNINGS
CONTENTS = {"a.txt": b"one", "sub/b [1].txt": b"", "sub/deep/c.bin": np.random.default_rng(0).bytes(100_000)}


class Flaky(MemoryFileSystem):
    protocol = ("flaky",)
    left = 0

    def get_file(self, rpath, lpath, **options):
        if Flaky.left:
            Flaky.left -= 1
            raise ConnectionResetError("cut off at flaky://me:secret@host")
        super().get_file(rpath, lpath, **options)


fsspec.register_implementation("flaky", Flaky, clobber=True)


@pytest.fixture
def sources(tmp_path):
    for name, content in CONTENTS.items():
        (tmp_path / "here" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "here" / name).write_bytes(content)
    return tmp_path / "here"


@pytest.fixture(
    params=[
        "folder",
        "memory",
        "s3",
        "sftp",
    ]
)
def url(request, tmp_path, monkeypatch):
    there = tmp_path / "there"
    there.mkdir()
    if request.param == "folder":
        yield f"file://{there}"
    elif request.param == "memory":
        MemoryFileSystem.store.clear()
        yield "memory://there"
    else:
        with getattr(servers, request.param)(there, tmp_path, monkeypatch) as (address, _):
            yield address
    remote.disconnect()


def test_what_is_put_is_listed_and_comes_back(url, sources, tmp_path):
    assert remote.files(url) == {}
    for name in CONTENTS:
        remote.put(sources / name, f"{url}/{name}")
    assert remote.files(url) == {name: len(content) for name, content in CONTENTS.items()}
    for name in CONTENTS:
        remote.get(f"{url}/{name}", tmp_path / "back" / name)
        assert (tmp_path / "back" / name).read_bytes() == CONTENTS[name]
    with pytest.raises(FileNotFoundError, match=r"^\S+/sub/none: does not exist$"):
        remote.get(f"{url}/sub/none", tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_a_source_reads_the_same_files(url, sources):
    for name in CONTENTS:
        remote.put(sources / name, f"{url}/{name}")
    files = Files(url)
    assert list(files.states) == sorted(CONTENTS)
    assert list(files.contents(sorted(CONTENTS))) == [CONTENTS[name] for name in sorted(CONTENTS)]
    with files.open("sub/deep/c.bin") as file:
        file.seek(70_000)
        assert file.read(1000) == CONTENTS["sub/deep/c.bin"][70_000:71_000]
    assert list(Files(f"{url}/*.txt").states) == ["a.txt"]
    assert list(Files(f"{url}/a.txt").states) == ["a.txt"]


def test_a_transfer_is_tried_again_and_its_error_hides_the_password(sources, tmp_path, monkeypatch):
    monkeypatch.setattr("time.sleep", lambda _: None)
    remote.put(sources / "a.txt", "flaky://me:secret@host/a.txt")
    for Flaky.left in (2, 3):
        if Flaky.left == 2:
            remote.get("flaky://me:secret@host/a.txt", tmp_path / "a")
            assert (tmp_path / "a").read_bytes() == b"one"
            continue
        with pytest.raises(OSError, match=r"^flaky://me:\*\*\*@host/a\.txt: cut off at flaky://me:\*\*\*@host$"):
            remote.get("flaky://me:secret@host/a.txt", tmp_path / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "here"]


def test_an_upload_that_is_cut_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    there, big = tmp_path / "there", tmp_path / "big"
    there.mkdir()
    big.write_bytes(bytes(4 << 20))
    with servers.sftp(there, tmp_path, monkeypatch) as (url, line):
        remote.write(f"{url}/file", b"old")
        remote.disconnect()
        monkeypatch.setattr("time.sleep", lambda _: None)
        line.fail(5000)  # in the server's receipts of the blocks
        with pytest.raises(OSError, match="sftp://"):
            remote.put(big, f"{url}/file")
        remote.disconnect()
    assert (there / "file").read_bytes() == b"old"
    assert any(0 < path.stat().st_size < 4 << 20 for path in there.iterdir() if path.name != "file")


def test_of_several_writers_one_creates_a_file(url):
    with ThreadPoolExecutor(8) as threads:
        contents = [f"writer {number}".encode() for number in range(8)]
        won = list(threads.map(lambda content: remote.create(f"{url}/new/one.json", content), contents))
    assert won.count(True) == 1
    assert remote.read(f"{url}/new/one.json") == contents[won.index(True)]
    assert remote.create(f"{url}/new/one.json", contents[won.index(True)])  # whose answer was lost
    assert remote.files(f"{url}/new").keys() == {"one.json"}


def test_a_folder_is_removed_with_its_files_alone(url):
    for name in ("gone/a", "gone/sub/b", "gone-not/c"):
        remote.write(f"{url}/{name}", b"content")
    remote.remove(f"{url}/gone")
    remote.remove(f"{url}/gone")
    assert remote.files(url).keys() == {"gone-not/c"}


@pytest.mark.parametrize(
    ("url", "login", "shown"),
    [
        ("sftp://me:p@ss@host/x", {"username": "me", "password": "p@ss"}, "sftp://me:***@host/x"),
        ("sftp://m%40e:p%3As@host/x", {"username": "m@e", "password": "p:s"}, "sftp://m%40e:***@host/x"),
        ("sftp://host:2222/a:b@c", {"port": 2222}, "sftp://host:2222/a:b@c"),
    ],
)
def test_a_login_in_a_url_is_used_whole_and_never_shown(monkeypatch, url, login, shown):
    made = []
    monkeypatch.setattr(filesystems, "SFTPFileSystem", lambda *_, **given: made.append(given))
    monkeypatch.setattr(remote, "_used", set())
    remote.filesystem(url)
    assert made == [{"port": 22, "username": None, "password": None} | login]
    assert remote.shown(url) == shown


def test_a_signal_while_a_thread_starts_leaves_none_that_would_hold_up_the_end(monkeypatch):
    start, started = threading.Thread.start, []

    def interrupted(thread):
        start(thread)
        started.append(thread)
        raise KeyboardInterrupt

    remote._threads.cache_clear()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            remote.in_threads(len, ["a", "bc"])
    started[0].join(30)
    assert not started[0].is_alive()
    assert remote.in_threads(len, ["a", "bc"]) == [1, 2]
