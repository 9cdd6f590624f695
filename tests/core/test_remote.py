import getpass
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import boto3
import fsspec
import numpy as np
import pytest
from fsspec.implementations.memory import MemoryFileSystem
from shards import servers
from shards.mds import WARNINGS

from ddm_lightning.core import filesystems, remote
from ddm_lightning.core.errors import UserError, redacted
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


@pytest.mark.parametrize("url", ["folder", "s3", "sftp"], indirect=True)
def test_a_name_is_a_name_and_touches_no_other_file(url):
    kept = {"a": b"precious", "keep": b"precious"}
    odd = {"a#b": b"1", "a?b": b"2", "keep::x": b"3", "keep::memory": b"4", "a [1]*": b"5"}
    for name, content in {**kept, **odd}.items():
        remote.write(f"{url}/{name}/x" if name == "keep::x" else f"{url}/{name}", content)
    for name, content in {**kept, **odd}.items():
        assert remote.read(f"{url}/{name}/x" if name == "keep::x" else f"{url}/{name}") == content
    assert remote.files(url).keys() == {*kept, *odd, "keep::x/x"} - {"keep::x"}


@pytest.mark.parametrize("url", ["s3"], indirect=True)
def test_keys_that_no_folder_can_hold_are_read_by_a_source_and_no_part_of_a_run(url):
    client = boto3.client("s3", endpoint_url=os.environ["S3_ENDPOINT_URL"])
    for key in ("run/sub/x", "run/sub//x", "run//y", "run/sub///z", "run/sub/../w", "/top"):
        client.put_object(Bucket="images", Key=key, Body=key.encode())
    assert remote.files(url).keys() == {"sub/x"} and remote.files(f"{url}/sub").keys() == {"x"}
    files = Files(url)
    assert list(files.states) == ["/y", "sub///z", "sub//x", "sub/x"]
    assert list(files.contents(["sub//x", "/y"])) == [b"run/sub//x", b"run//y"]
    assert remote.files("s3://images/run/sub/").keys() == {"x"}
    assert next(iter(Files("s3://images").states)) == "/top"


def test_a_store_that_takes_a_file_and_does_not_hold_it_is_an_error(tmp_path, monkeypatch, sources):
    monkeypatch.setattr("time.sleep", lambda _: None)
    page = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 13\r\nConnection: close\r\n\r\n<html></html>"
    (tmp_path / "there").mkdir()
    with servers.s3(tmp_path / "there", tmp_path, monkeypatch) as (url, line):
        line.fail(0, answer=page)
        for name in ("a.txt", "sub/deep/c.bin"):
            with pytest.raises(ConnectionError, match="the store does not hold what was sent"):
                remote.put(sources / name, f"{url}/{name}")
        with suppress(OSError):
            assert not remote.create(f"{url}/b.json", b"mine")
        line.fail(0, times=0)
        assert remote.files(url) == {}
    remote.disconnect()


def test_an_alias_of_the_ssh_configuration_names_a_store(tmp_path, monkeypatch):
    (tmp_path / "there").mkdir()
    (tmp_path / ".ssh").mkdir()
    with servers.sftp(tmp_path / "there", tmp_path, monkeypatch) as (_, line):
        (tmp_path / ".ssh/config").write_text(
            f"Host Node-1\n  HostName 127.0.0.1\n  Port {line.port}\n  User {getpass.getuser()}\n"
            "  IdentityFile ~/user\n  IdentityFile ~/none\n"
        )
        monkeypatch.setenv("HOME", str(tmp_path))
        monkeypatch.delenv("COMPOSER_SFTP_KEY_FILE")
        remote.write(f"sftp://Node-1{tmp_path}/there/a.txt", b"one")
        remote.disconnect()
    assert (tmp_path / "there/a.txt").read_bytes() == b"one"


def test_the_cause_of_a_failure_is_named(tmp_path, monkeypatch, sources):
    monkeypatch.setattr("time.sleep", lambda _: None)
    with pytest.raises(UserError, match=r"cannot be read: .*Cannot connect to host"):
        Files("http://127.0.0.1:1/images.tar")
    monkeypatch.setenv("COMPOSER_SFTP_KNOWN_HOSTS_FILE", str(tmp_path / "none"))
    with pytest.raises(OSError, match=r"cannot log in: .*/none"):
        remote.read("sftp://127.0.0.1:1/a.txt")
    sources.chmod(0)
    user = os.geteuid()
    if user == 0:  # may read everything
        os.seteuid(65534)
    try:
        with pytest.raises(OSError, match="Permission denied"):
            remote.get(str(sources / "a.txt"), Path("/tmp/never"))
    finally:
        os.seteuid(user)
        sources.chmod(0o700)


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
    assert made == [{"port": None, "username": None, "password": None} | login]
    assert redacted(url) == shown


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


@pytest.mark.parametrize("url", ["s3"], indirect=True)
def test_threads_share_a_client_and_fetch_by_one_request(url, tmp_path, monkeypatch):
    remote.write(f"{url}/a", b"content")
    made, requests = [], []
    make = boto3.Session.client

    def client(*args, **kwargs):
        made.append(make(*args, **kwargs))
        made[-1].meta.events.register("before-send.s3", lambda request, **_: requests.append(request.method))
        return made[-1]

    monkeypatch.setattr(boto3.Session, "client", client)
    remote.disconnect()
    remote.download(f"{url}/a", tmp_path / "0")
    remote.in_threads(lambda number: remote.download(f"{url}/a", tmp_path / str(number)), range(1, 9))
    assert len(made) == 1 and requests == 9 * ["GET"]
    assert {path.read_bytes() for path in tmp_path.glob("[0-9]")} == {b"content"}

    remote.disconnect()  # after an error: credentials may be new
    remote.download(f"{url}/a", tmp_path / "0")
    assert len(made) == 2
