"""One process at a time holds a member's lease, and one that was taken over finds out."""

import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.islands import lease


@pytest.fixture
def url(tmp_path, monkeypatch):
    monkeypatch.setattr(lease, "STALE_SECONDS", 0.4)
    monkeypatch.setattr(lease, "_POLL_SECONDS", 0.05)
    return str(tmp_path / "store" / "lease")


def claim(url):
    return lease.claim("expert-0", url)


def from_elsewhere(monkeypatch, url):
    """A claim made by a process of another machine."""
    with monkeypatch.context() as patched:
        patched.setattr(lease, "_machine", lambda: "another start of another machine")
        patched.setattr(lease.platform, "node", lambda: "far-away")
        return claim(url)


@contextmanager
def beating(held):
    """Let a lease beat during the block."""
    over = threading.Event()

    def beat():
        while not over.wait(0.1):
            held.beat({})

    thread = threading.Thread(target=beat)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_claim_is_refused_while_its_process_lives_and_free_once_released(url):
    first = claim(url)
    with pytest.raises(UserError, match=r"^expert-0: is in use by process \d+ on \S+, which is alive; wait "):
        claim(url)
    first.beat({"step": 7}, released=True)
    second = claim(url)
    assert (first.generation, second.generation) == (1, 2)
    assert lease.read_lease(url, 1).status["step"] == 7
    second.check()
    with pytest.raises(lease.LostLeaseError, match="has taken it over"):
        first.check()


def test_the_claim_of_a_dead_process_of_this_machine_is_taken_over_at_once(url, monkeypatch):
    script = f"from ddm_lightning.islands import lease; lease.claim('expert-0', {url!r})"
    subprocess.run([sys.executable, "-c", script], check=True)
    monkeypatch.setattr(lease, "STALE_SECONDS", 1000)
    assert claim(url).generation == 2


def test_a_silent_claim_of_another_machine_is_taken_over_after_a_wait(url, monkeypatch, capsys):
    from_elsewhere(monkeypatch, url)
    start = time.monotonic()
    assert claim(url).generation == 2
    assert time.monotonic() - start >= 0.4
    assert capsys.readouterr().err == "expert-0: waits 0.4 s to see whether its process on far-away is alive\n"


@pytest.mark.parametrize("days", [-1, 1])
def test_a_claim_that_beats_is_refused_whatever_its_clock_says(url, monkeypatch, days):
    other, now = from_elsewhere(monkeypatch, url), time.time()
    monkeypatch.setattr(lease.time, "time", lambda: now + days * 86_400)

    with beating(other), pytest.raises(UserError, match="on far-away, which is alive"):
        claim(url)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"host": 1}', b"\xff", b"[" * 200_000])
def test_a_damaged_claim_holds_nobody_up_for_good(url, content):
    remote.write(f"{url}/3.json", content)
    assert claim(url).generation == 4


def test_a_store_that_answers_garbage_makes_no_dead_process_alive(url, monkeypatch):
    from_elsewhere(monkeypatch, url)
    answers = iter([b"<html>Please log in</html>"] * 2)
    read = remote.read
    monkeypatch.setattr(remote, "read", lambda path: next(answers, None) or read(path))
    assert claim(url).generation == 2


def test_a_listing_that_hides_the_newest_claims_lets_nobody_in(url, monkeypatch):
    first = from_elsewhere(monkeypatch, url)
    first.beat({}, released=True)
    second, created = from_elsewhere(monkeypatch, url), []
    files, create = remote.files, remote.create
    monkeypatch.setattr(remote, "files", lambda url: {"1.json": 1} if url.endswith("lease") else files(url))
    monkeypatch.setattr(remote, "create", lambda *given: created.append(given) or create(*given))

    with beating(second), pytest.raises(UserError, match="on far-away, which is alive"):
        claim(url)
    assert len(created) == 1

    third = claim(url)  # it is dead now
    assert third.generation == 3
    with pytest.raises(lease.LostLeaseError, match="has taken it over"):
        second.check()
    third.check()


def test_a_page_instead_of_a_lease_takes_nobody_over(url, monkeypatch):
    own = claim(url)
    read = remote.read
    monkeypatch.setattr(remote, "read", lambda path: b"<html></html>" if path.endswith("2.json") else read(path))
    own.check()
