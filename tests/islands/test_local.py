"""Members as processes of the real command line: killed, interrupted, resumed, started twice."""

import contextlib
import os
import re
import signal
import subprocess
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from deadline import within
from islands.watching import weights
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import LONG, MEMBERS, TINY, ended_on_failure, finish, read_status
from tiny_runs import LONG_STEPS as STEPS
from tiny_runs import start as start_shorter

from ddm_lightning.config.load import load_experiment
from ddm_lightning.core import processes
from ddm_lightning.islands import local
from ddm_lightning.members.run import Run

KILLED = "expert-1"
OTHERS = tuple(member for member in MEMBERS if member != KILLED)


def start(command, run, *more):
    return start_shorter(command, run, *LONG, *more)


def wait_for_step(run, member, step, parent):
    """Wait until the member trains beyond ``step`` steps; returns its process id."""
    with ended_on_failure(parent):
        while True:
            status = read_status(run, member)
            if status.get("state") == "training" and status["step"] >= step:
                return status["pid"]
            with contextlib.suppress(subprocess.TimeoutExpired):
                parent.wait(0.05)
                raise AssertionError("it ended")


def wait_until_pending(pid, number, parent):
    """Return when the stopped process ``pid`` has been sent ``number``."""
    while True:
        status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
        if int(status["ShdPnd"], 16) & 1 << (number - 1):
            return
        with contextlib.suppress(subprocess.TimeoutExpired):
            parent.wait(0.05)
            raise AssertionError(parent.communicate())


def wait_until_gone(pid):
    """Return when the process, which is another's child by now, has ended."""
    with contextlib.suppress(ProcessLookupError):
        while True:
            os.kill(pid, 0)
            time.sleep(0.05)


def losses(run, member):
    events = EventAccumulator(str(run / "members" / member / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    name = "2_router/train/cross_entropy" if member == "router" else "1_watch/train/loss"
    return [(event.step, event.value) for event in events.Scalars(name)]


def sample_ids(run, member):
    lines = (run / "members" / member / "sample_ids.txt").read_text(encoding="utf-8").splitlines()
    return [(int(step), ids) for step, _, ids in (line.partition(": ") for line in lines)]


@pytest.fixture(scope="module")
def disturbed(tmp_path_factory):
    """One run, one disturbance after another, with what was seen at each.

    kill -9 of a member, Ctrl-C, kill -9 of what started the members, peace.
    """
    seen = SimpleNamespace(run=tmp_path_factory.mktemp("disturbed") / "run")
    members = seen.run / "members"
    with within(600):
        # Of the three, this one and another start at once and the third takes the free place.
        parent = start("fit", seen.run, "--jobs", "2")
        os.kill(wait_for_step(seen.run, KILLED, 60, parent), signal.SIGKILL)
        seen.out_killed, seen.err_killed = finish(parent, code=1)
        seen.finished_by_others = [member for member in OTHERS if (members / member / "artifact").exists()]
        seen.log_killed = (members / KILLED / "log.txt").read_text(encoding="utf-8")
        seen.ids_killed = len(sample_ids(seen.run, KILLED))

        parent = start("fit", seen.run)
        pid = wait_for_step(seen.run, KILLED, 120, parent)
        os.kill(pid, signal.SIGSTOP)
        parent.send_signal(signal.SIGINT)
        wait_until_pending(pid, signal.SIGTERM, parent)  # let go before that, it might be done before it is told
        os.kill(pid, signal.SIGCONT)
        seen.out_interrupted, seen.err_interrupted = finish(parent, code=130)
        seen.status_interrupted = read_status(seen.run, KILLED)
        seen.checkpoints_interrupted = [path.name for path in (members / KILLED / "checkpoints").iterdir()]

        parent = start("fit", seen.run)
        pid = wait_for_step(seen.run, KILLED, seen.status_interrupted["step"] + 5, parent)
        os.kill(pid, signal.SIGSTOP)  # else it might be done before it looks for its parent
        parent.kill()
        parent.communicate()
        time.sleep(processes.PARENT_SECONDS)
        os.kill(pid, signal.SIGCONT)
        wait_until_gone(pid)
        seen.status_left = read_status(seen.run, KILLED)

        seen.out_resumed, seen.err_resumed = finish(start("fit", seen.run))
    seen.log = (members / KILLED / "log.txt").read_text(encoding="utf-8")
    return seen


@pytest.mark.long
def test_the_parent_names_the_killed_member_and_the_signal(disturbed):
    lines = disturbed.err_killed.splitlines()
    assert lines[-1].startswith(f"{KILLED}: ended by SIGKILL; the same command resumes it; logs: ")
    assert not [line for line in lines if line.startswith(OTHERS)]
    assert re.search(rf"^ ?{KILLED} +killed ", disturbed.out_killed, re.MULTILINE), disturbed.out_killed


@pytest.mark.long
def test_other_members_are_bit_identical(disturbed, long_run):
    assert disturbed.finished_by_others == list(OTHERS)
    for member in OTHERS:
        undisturbed = losses(long_run, member)
        assert [step for step, _ in undisturbed] == list(range(5, STEPS[member] + 1, 5))
        assert losses(disturbed.run, member) == undisturbed
        assert weights(disturbed.run, member) == weights(long_run, member)
        log = (disturbed.run / "members" / member / "log.txt").read_text(encoding="utf-8")
        assert log.count("M parameters") == 1, "trained once"
    assert (disturbed.run / "ensemble.json").exists()
    assert str(disturbed.run / "samples" / "top-1.png") in disturbed.out_resumed


@pytest.mark.long
def test_the_killed_one_resumes_with_the_same_samples_to_the_same_bits(disturbed, long_run):
    assert "resumes at step" not in disturbed.log_killed
    resumed_at = [int(line.rpartition(" ")[2]) for line in disturbed.log.splitlines() if "resumes at step" in line]
    assert len(resumed_at) == 3  # after kill -9, after Ctrl-C, after kill -9 of the parent
    assert 40 <= resumed_at[0] <= disturbed.ids_killed  # step 60 was reported, perhaps not yet saved
    assert resumed_at[0] % 20 == 0
    undisturbed = dict(sample_ids(long_run, KILLED))
    assert sorted(undisturbed) == list(range(STEPS[KILLED]))
    assert len(set(undisturbed.values())) > 0.9 * STEPS[KILLED]  # batches differ, so that agreement means something
    ids = sample_ids(disturbed.run, KILLED)
    assert {step for step, _ in ids} == set(range(STEPS[KILLED]))
    assert len(ids) >= STEPS[KILLED] + disturbed.ids_killed - resumed_at[0]
    assert ids[disturbed.ids_killed][0] == resumed_at[0]
    for step, of_step in ids:
        assert of_step == undisturbed[step]
    # A point is the mean since the one before; the stop between two of them splits that mean, and nothing else.
    split = {step for stop in resumed_at[1:] for step in range(stop, stop + 6)}
    ours, theirs = (dict(losses(run, KILLED)) for run in (disturbed.run, long_run))
    assert {s: v for s, v in ours.items() if s not in split} == {s: v for s, v in theirs.items() if s not in split}
    assert weights(disturbed.run, KILLED) == weights(long_run, KILLED)


@pytest.mark.long
def test_ctrl_c_writes_a_checkpoint_and_tells_how_to_resume(disturbed):
    assert disturbed.err_interrupted.splitlines() == ["interrupted; run the same command again to resume"]
    assert "each member finishes its step and writes a checkpoint" in disturbed.out_interrupted
    status = disturbed.status_interrupted
    assert status["state"] == "stopped"
    assert 120 <= status["step"] < STEPS[KILLED]
    assert f"step-{status['step']:08d}.ckpt" in disturbed.checkpoints_interrupted
    assert f"{KILLED}: resumes at step {status['step']}" in disturbed.log


@pytest.mark.long
def test_members_stop_when_what_started_them_is_killed(disturbed):
    status = disturbed.status_left
    assert status["state"] == "stopped"
    assert disturbed.status_interrupted["step"] + 5 <= status["step"] < STEPS[KILLED]
    assert f"{KILLED}: resumes at step {status['step']}" in disturbed.log
    assert "the fit that started this member is gone: stopping, as after SIGTERM" in disturbed.log


@pytest.mark.long
def test_two_fits_at_once_both_end_well(tmp_path):
    run = tmp_path / "run"
    fits = [start_shorter("fit", run) for _ in range(2)]
    with within(300):
        said = [finish(process)[0] for process in fits]
    assert all(f"ensemble: {run / 'ensemble.json'}" in out for out in said)
    for name in MEMBERS:
        assert (run / "members" / name / "log.txt").read_text().count("M parameters") == 1, "trained once"


@pytest.fixture
def gpus(monkeypatch):
    """Let torch see so many GPUs."""

    def have(count, visible=""):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    return have


@pytest.mark.parametrize(
    ("group", "devices", "visible", "count", "expected"),
    [
        (3, 1, "", 4, "3"),
        (1, 2, "", 4, "2,3"),
        (1, 1, "GPU-aa, GPU-bb", 2, "GPU-bb"),
        (2, 1, "", 2, "0"),
        (1, 2, "4,5,6", 3, "4,5"),
    ],
)
def test_members_get_gpus_that_are_there(gpus, group, devices, visible, count, expected):
    gpus(count, visible)

    assert local.gpu_variables(group, "auto", devices) == {"CUDA_VISIBLE_DEVICES": expected}


@pytest.mark.parametrize(
    ("count", "router", "expected"),
    [
        (8, {}, 8),
        (8, {"devices": 4}, 2),
        (0, {}, 6),
        (0, {"devices": 2}, 3),
        (0, {"devices": 2, "num_threads": 2}, 1),
        (0, {"num_threads": 12}, 1),
    ],
)
def test_as_many_jobs_as_gpus_or_cores_that_this_process_may_use(monkeypatch, gpus, count, router, expected):
    gpus(count)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(6)))
    experiment = load_experiment(TINY)
    experiment.islands = {"router": router}

    assert local.default_jobs(MEMBERS, experiment) == expected


class Ended:
    """A process that fails at once."""

    started = []

    def __init__(self, command, *, env, **_):
        self.started.append((command[-1].partition("=")[2], env["CUDA_VISIBLE_DEVICES"]))

    def wait(self, timeout=None):
        return 1

    poll = wait


def test_members_at_once_share_no_gpu_though_one_needs_more(tmp_path, monkeypatch, gpus):
    gpus(8)
    monkeypatch.setattr(local.subprocess, "Popen", Ended)
    monkeypatch.setattr(local, "relative_cost", lambda member: MEMBERS.index(member.name))  # the router goes first
    monkeypatch.setattr(local, "POLL_SECONDS", 0)
    experiment = load_experiment(TINY, [f"run_dir={tmp_path}", "island.accelerator=gpu"])
    experiment.islands = {"router": {"devices": 2, "strategy": "ddp"}}
    run = Run(experiment)
    monkeypatch.setattr(run, "member", lambda name: SimpleNamespace(name=name))
    for member in MEMBERS:
        run.folder.member(member).mkdir(parents=True)

    failures = local.fit_members(MEMBERS, run, 4, Console())

    assert {member: failure.code for member, failure in failures.items()} == dict.fromkeys(MEMBERS, 1)
    assert Ended.started == [("router", "0,1"), ("expert-1", "2,3"), ("expert-0", "4,5")]
