"""Machines that are lent for a limited time: members leave them in time, and go on elsewhere to the same bits."""

import math
import os
import signal
import threading
import time
from datetime import datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from islands.watching import steps_of, wait_for, weights
from shards.mds import WARNINGS
from tiny_runs import MEMBERS, STEPS, TINY, finish, read_status, settings, start

from ddm_lightning.cli.parser import main
from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.islands import local, slots
from ddm_lightning.islands.lease import read_lease
from ddm_lightning.members.run import Run
from ddm_lightning.members.status import MemberStatus

pytestmark = WARNINGS
NEW_YORK = timezone(timedelta(hours=-5))


@pytest.mark.parametrize(
    ("text", "end"),
    [
        ("1000000000", 1e9),
        ("1000000000.5\n", 1e9 + 0.5),
        ("2001-09-09T01:46:40Z", 1e9),
        ("2001-09-09T03:46:40+02:00\n", 1e9),
        ("2001-09-08 20:46", 1e9 - 40),  # by the machine's own clock
    ],
)
def test_the_lenders_file_holds_the_end_in_several_forms(tmp_path, monkeypatch, text, end):
    monkeypatch.setenv("TZ", "EST5")
    time.tzset()
    file = tmp_path / "lease"
    file.write_text(text)
    left = slots.seconds_left(IslandConfig(lease_file=str(file)))
    assert left == pytest.approx(end - datetime.now(NEW_YORK).timestamp(), abs=5)
    monkeypatch.undo()
    time.tzset()


def test_the_earlier_of_both_ends_counts_and_no_file_is_no_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(slots, "STARTED", time.monotonic() - 30)
    file = tmp_path / "lease"
    assert slots.seconds_left(IslandConfig()) == math.inf
    assert slots.seconds_left(IslandConfig(lease_file=str(file))) == math.inf
    assert slots.seconds_left(IslandConfig(max_minutes=1, lease_file=str(file))) == pytest.approx(30, abs=5)
    file.write_text(str(time.time() + 10))
    assert slots.seconds_left(IslandConfig(max_minutes=1, lease_file=str(file))) == pytest.approx(10, abs=5)


@pytest.fixture
def told():
    """Set at the first SIGTERM."""
    event = threading.Event()
    previous = signal.signal(signal.SIGTERM, lambda *_: event.set())
    yield event
    signal.signal(signal.SIGTERM, previous)


@pytest.mark.parametrize(("seconds", "leaves"), [(2.0, False), (30.0, True)])
def test_a_member_leaves_early_enough_to_publish(tiny_run, tmp_path, told, monkeypatch, seconds, leaves):
    monkeypatch.setattr(slots, "_POLL_SECONDS", 0.05)
    file = tmp_path / "lease"
    file.write_text(str(time.time() + 3600))
    run = Run(load_experiment(TINY, [f"run_dir={tiny_run}", f"island.lease_file={file}"]))
    slot = slots.Slot(run.member("expert-0"), run)
    slot.publisher = SimpleNamespace(publication_seconds=seconds, training_over=threading.Event())
    slot.__enter__()
    file.write_text("")  # while it is being written
    assert not told.wait(0.5)
    file.write_text(str(time.time() + 40))  # shorter than was said
    assert told.wait(1.5) == leaves
    if leaves:
        with pytest.raises(UserError, match="no step was taken"):
            slot.__exit__()
    else:
        slot.__exit__()


@pytest.mark.parametrize(("setting", "steps"), [("devices=1", 1), ("devices=2", 10), ("nodes=2", 10)])
def test_time_to_leave_is_twice_that_of_a_step_a_checkpoint_and_a_publication(tiny_run, setting, steps):
    """Several ranks agree to stop at every tenth step only."""
    run = Run(load_experiment(TINY, [f"run_dir={tiny_run}", f"island.{setting}", "island.strategy=ddp"]))
    folder = run.folder.member("expert-0")
    for second, name in enumerate("abc"):
        file = folder / "checkpoints" / "step-00000020.ckpt" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
        os.utime(file, (0, 1e9 + 1.5 * second))
    batch_size = run.member("expert-0").batch_size
    MemberStatus("expert-0", 60, samples_per_second=4 * batch_size).write(folder)
    slot = slots.Slot(run.member("expert-0"), run)
    slot.publisher = SimpleNamespace(publication_seconds=7.0)
    assert slot._leaving_seconds() == slots.LEAVING_SECONDS + 2 * (steps * 0.25 + 3.0 + 7.0)


@pytest.mark.parametrize("text", ["tonight", "", "2026-11-31T00:00", "nan", "9" * 400, "0001-01-01T00:00", "\ufffd"])
def test_a_file_without_a_time_is_one_line(tiny_run, tmp_path, capsys, text):
    file = tmp_path / "lease"
    file.write_bytes(b"\xff" if text == "\ufffd" else text.encode())
    island = [f"island.lease_file={file}", "island.accelerator=cpu"]
    assert main(["fit", *settings(tiny_run), "member=expert-0", *island]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(
        f"error: key 'island.lease_file': {file}: holds {text[:40]!r}, which is no time; write the end "
    )
    assert not (tiny_run / "members").exists()


def test_a_slot_that_is_too_short_is_one_line(tiny_run, capsys):
    assert main(["fit", *settings(tiny_run), "member=expert-0", "island.max_minutes=0.01"]) == 2
    line = capsys.readouterr().err.splitlines()[-1]
    assert line.startswith("error: expert-0: the slot was too short: it had to end ")
    assert not (tiny_run / "experiment.yaml").exists()


def test_several_members_share_the_slot_of_their_fit(tiny_run, monkeypatch, capsys):
    for module in (local, slots):
        monkeypatch.setattr(module, "STARTED", time.monotonic() - 30)
    assert main(["fit", *settings(tiny_run), "island.max_minutes=0.51"]) == 130
    assert capsys.readouterr().err.count("not started: the slot is over") == len(MEMBERS)


@pytest.mark.slow
def test_a_member_leaves_when_the_lender_wants_it(finished_run, tmp_path, monkeypatch, quick_prepare):
    store, file = tmp_path / "store", tmp_path / "lease"
    assert main(["prepare", *settings(tmp_path / "home"), f"remote={store}"]) == 0
    with monkeypatch.context() as patched:
        patched.setenv("STEP_SECONDS", "0.5")
        member = start("fit", tmp_path / "one", f"remote={store}", "member=expert-0", f"island.lease_file={file}")
    # Long before it is due, to know how long it takes to leave.
    wait_for(lambda: [*store.glob("members/expert-0/checkpoints/*/files.json")])
    end = time.time() + 12
    file.write_text(str(end))

    finish(member, code=130)

    assert time.time() < end
    assert read_lease(f"{store}/members/expert-0/lease", 1).released
    finish(start("fit", tmp_path / "two", f"remote={store}", "member=expert-0"))
    assert 0 < len(steps_of(tmp_path / "one")) < STEPS["expert-0"]
    assert steps_of(tmp_path / "two") == [*range(STEPS["expert-0"])]
    assert weights(tmp_path / "two") == weights(finished_run)


@pytest.mark.long
def test_a_step_that_outlasts_the_slot_is_given_up(tiny_run, tmp_path, monkeypatch):
    monkeypatch.setenv("STEP_SECONDS", "100")
    file = tmp_path / "lease"
    member = start("fit", tiny_run, "member=expert-0", f"island.lease_file={file}")
    wait_for(lambda: read_status(tiny_run, "expert-0").get("state") == "training")
    end = time.time() + 8
    file.write_text(str(end))
    _, said = finish(member, code=130)
    assert said.splitlines()[-1] == "expert-0: its slot is over: ends at once"
    assert time.time() < end + 3
