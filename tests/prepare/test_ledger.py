"""Finished work to real servers on this machine: S3's protocol (moto), SFTP (asyncssh), and a mounted folder."""

from contextlib import contextmanager

import pytest
from prepare.listed import hashes
from shards import servers
from shards.mds import WARNINGS

from ddm_lightning.core import remote as core_remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.prepare import ledger
from ddm_lightning.prepare.ledger import Ledger, Store

pytestmark = [*WARNINGS, pytest.mark.slow]
FILES = {"x_0.npy": b"0" * 70_000, "groups/a.npz": b"a", "shards/cluster-0/train/0-ab/shard.00000.mds": b"s" * 300}


@contextmanager
def mounted(folder, tmp_path, monkeypatch):
    yield f"file://{folder}", None


@pytest.fixture(params=["mounted", "s3", "sftp"])
def place(request, tmp_path, monkeypatch):
    folder = tmp_path / "remote"
    folder.mkdir()
    with (mounted if request.param == "mounted" else getattr(servers, request.param))(
        folder, tmp_path, monkeypatch
    ) as found:
        yield found


@pytest.fixture
def work(tmp_path):
    """Finished work, in a folder and as it is recorded."""
    folder = tmp_path / "here"
    for name, content in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    made = Ledger(folder / "work.json", folder)
    made.add("columns", "the key", [folder / name for name in FILES], num_rows=3)
    return folder, made.entries


@pytest.fixture
def puts(monkeypatch):
    """Addresses that are written to."""
    seen = []

    def watched(path, url, put=core_remote.put):
        seen.append(url)
        put(path, url)

    monkeypatch.setattr(core_remote, "put", watched)
    return seen


def test_work_is_published_once_and_pulled_elsewhere(place, work, puts, tmp_path):
    (url, _), (folder, entries) = place, work
    store = Store(f"{url}/prepared", {"numpy": "2"})
    assert store.names("parts") == set() and store.read("parts/one") == {}
    store.publish("parts/one", folder, entries)
    assert puts[-1] == f"{url}/prepared/parts/one.json" and len(puts) == 4, "the record goes last"
    assert f"{url}/prepared/shards/cluster-0/train/0-ab/shard.00000.mds" in puts, "readers know it by this name"
    assert store.names("parts") == {"parts/one"} and store.read("parts/one") == entries
    puts.clear()
    store.publish("parts/one", folder, entries)
    assert puts == [f"{url}/prepared/parts/one.json"]
    half = f"{url}/prepared/shards/cluster-0/train/0-ab/shard.00000.mds"
    core_remote.write(half, b"s" * 200)  # as a store that is no object store may show it
    puts.clear()
    store.publish("parts/one", folder, entries)
    assert puts == [half, f"{url}/prepared/parts/one.json"] and core_remote.read(half) == b"s" * 300

    elsewhere = tmp_path / "elsewhere"
    store.pull("parts/one", elsewhere, entries, ("npz", ".mds"))
    assert {path.name for path in elsewhere.rglob("*.*")} == {"a.npz", "shard.00000.mds"}
    store.pull("parts/one", elsewhere, entries)
    assert hashes(elsewhere) == hashes(folder)
    stale = elsewhere / "x_0.npy"
    stale.write_bytes(bytes(stale.stat().st_size))  # of another preparation
    store.pull("parts/one", elsewhere, entries)
    assert hashes(elsewhere) == hashes(folder)


def test_a_broken_connection_is_waited_for_or_one_line_and_what_had_arrived_is_not_sent_again(
    place, work, puts, monkeypatch
):
    (url, line), (folder, entries) = place, work
    store = Store(f"{url}/prepared", {})
    if line is None:
        return
    num_bytes = 0 if url.startswith("s3") else 3_000
    with monkeypatch.context() as patch:
        patch.setattr(core_remote, "_ATTEMPTS", 2)
        patch.setattr(ledger, "POLL_SECONDS", 0.01)
        line.fail(num_bytes, times=3)
        store.publish("parts/zero", folder, entries)
        assert store.read("parts/zero") == entries
        patch.setattr(ledger, "PATIENCE_SECONDS", 0)
        line.fail(num_bytes)
        with pytest.raises(UserError, match=f"^key 'remote': {url}") as refusal:
            store.publish("parts/one", folder, entries)
    assert "\n" not in str(refusal.value)
    line.fail(0, times=0)
    store.publish("parts/one", folder, entries)
    assert store.read("parts/one") == entries


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("gopher://host/run", "gopher"),
        ("sftp://nobody@127.0.0.1:9/run", "127.0.0.1"),
        ("file:///proc/nowhere/run", "nowhere"),
    ],
)
def test_an_unwritable_address_is_one_line(work, url, words, monkeypatch):
    monkeypatch.setattr(ledger, "PATIENCE_SECONDS", 0)
    with pytest.raises(UserError, match=f"^key 'remote': {url}") as refusal:
        Store(url, {}).publish("parts/one", *work)
    assert words in str(refusal.value) and "\n" not in str(refusal.value)
