import json
import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
from artifact_files import put
from tiny_runs import TINY

from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.processes import start_time
from ddm_lightning.members.run import Run
from ddm_lightning.members.status import MemberStatus


def gone():
    """The id of a process that has ended."""
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_status_round_trip(tmp_path):
    status = MemberStatus("router", 40, "training", 7, 1.5, 30.0, {"train/loss": 0.25})
    assert MemberStatus.read(tmp_path, "router", 40) == MemberStatus("router", 40)

    status.write(tmp_path)
    read = MemberStatus.read(tmp_path, "router", 40)

    assert read == status
    assert read.pid == os.getpid()
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"metrics": {"train/loss": "x"}}, "key 'metrics.train/loss': must be a finite number, is 'x'"),
        ({"step": -5}, "key 'step' = -5: must be at least 0"),
        ({"seconds": float("inf")}, "key 'seconds': must be a finite number, is inf"),
        ({"state": "flying"}, "key 'state' = 'flying': must be one of waiting, starting, .*, done"),
    ],
)
def test_wrong_values_are_refused(tmp_path, changes, words):
    MemberStatus("router", 40).write(tmp_path)
    path = tmp_path / "status.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(UserError, match=rf"status\.json: {words}.*; delete it"):
        MemberStatus.read(tmp_path, "router", 40)


@pytest.mark.parametrize("state", ["starting", "training"])
def test_a_dead_process_is_shown_as_killed(tmp_path, state):
    status = MemberStatus("router", 40, state, pid=os.getpid())
    assert status.shown_state() == state

    for pid in (gone(), 0, -1, 99999999999999999999):
        status.pid = pid
        assert status.shown_state() == "killed"

    status.state = "stopped"  # which needs no process
    assert status.shown_state() == "stopped"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system does not say when a process began")
def test_a_reused_process_id_is_not_training(tmp_path):
    status = MemberStatus("router", 40, "training")
    status.write(tmp_path)  # by this process
    # The command's name is in front of the numbers, and may hold what parts them.
    odd = tmp_path / "a) 1 2 (b"
    odd.symlink_to("/bin/sleep")
    with subprocess.Popen([odd, "60"]) as process:
        status.pid = process.pid
        assert status.shown_state() == "killed"
        ticks = int(start_time(process.pid))
        process.kill()

    with Path("/proc/uptime").open(encoding="ascii") as stream:
        now = round(float(stream.read().split()[0]) * os.sysconf("SC_CLK_TCK"))

    assert int(status.began) < ticks <= now < ticks + 60 * os.sysconf("SC_CLK_TCK")


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system does not say what a process does")
def test_a_zombie_does_not_train(tmp_path):
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    status = MemberStatus("router", 40, "training", pid=process.pid, began=start_time(process.pid))
    assert status.shown_state() == "training"
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # dead, and still in the table of processes
    assert status.shown_state() == "killed"
    process.wait()


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="the system does not say when a process began")
def test_another_users_process_with_a_reused_id_is_not_training(monkeypatch):
    def refused(*_):
        raise PermissionError

    monkeypatch.setattr(os, "kill", refused)
    status = MemberStatus("router", 40, "training", pid=os.getpid(), began=start_time(os.getpid()))
    assert status.shown_state() == "training"
    status.began = "1"
    assert status.shown_state() == "killed"


def test_status_of_another_machine_shows_its_age(tmp_path, monkeypatch):
    status = MemberStatus("router", 40, "training")
    status.write(tmp_path)
    assert status.shown_state() == "training"
    monkeypatch.setattr(platform, "node", lambda: "elsewhere")
    status.updated -= 180
    assert status.shown_state() == "seen 3 min ago"
    assert not status.runs()


@pytest.mark.parametrize(("step", "is_done"), [(6, True), (7, True), (8, False)])
def test_an_artifact_counts_unless_training_has_gone_beyond_it(tmp_path, step, is_done):
    """A process may be killed between its artifact and its last status."""
    run = Run(load_experiment(TINY, [f"run_dir={tmp_path}"]))
    put(run.folder.artifact("expert-0"), step=7)
    status = MemberStatus("expert-0", 60, state="training", step=step, metrics={"validation_loss": 2.0})
    status.write(run.folder.member("expert-0"))
    found = run.status("expert-0")
    wanted = ("done", 7, 0.5) if is_done else ("training", 8, 2.0)
    assert (found.state, found.step, found.metrics["validation_loss"]) == wanted
