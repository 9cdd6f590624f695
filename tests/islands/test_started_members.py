"""Other programs in the place of members: in which order they start, with which settings, how they are stopped."""

import io
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from deadline import within
from rich.console import Console
from tiny_runs import MEMBERS, TINY

from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.islands import local
from ddm_lightning.members.run import Run


class _SlowToSave:
    """A process that needs an hour to leave its checkpoint, by a clock that only waiting for it moves."""

    seconds_left, killed = 3600.0, False

    def terminate(self):
        pass

    def kill(self):
        self.killed = True

    def poll(self):
        return None if self.seconds_left > 0 and not self.killed else local.STOPPED

    def wait(self, timeout=None):
        self.seconds_left -= self.seconds_left if timeout is None else timeout
        if self.poll() is None:
            raise subprocess.TimeoutExpired("member", timeout or 0.0)
        return local.STOPPED


def test_a_member_may_take_an_hour_to_leave_its_checkpoint():
    slow = _SlowToSave()
    out = io.StringIO()
    local._stop([local._Child("expert-0", slow, 0, Path())], [], Console(file=out, width=200))
    assert not slow.killed
    assert slow.seconds_left <= 0
    assert out.getvalue().splitlines() == [
        "stopping: each member finishes its step and writes a checkpoint; press Ctrl-C again to kill them"
    ]


# For a member in a long step, and for one that leaves its checkpoint.
BUSY = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); time.sleep(60)"
OBEDIENT = BUSY.replace("import", "import os,").replace("signal.SIG_IGN", "lambda *_: os._exit(130)")


@pytest.fixture
def alone(tiny_run, tmp_path):
    """A prepared run; signals that arrive when ``fit_members`` takes none do not end the tests; no child stays."""
    experiment = load_experiment(TINY, [f"run_dir={tiny_run}", "island.accelerator=cpu"])
    made = SimpleNamespace(run=Run.open(experiment, create=True), children=[], late=[])
    previous = signal.signal(signal.SIGUSR1, lambda *_: made.late.append(time.monotonic()))
    with within(60):
        yield made
    signal.signal(signal.SIGUSR1, previous)
    for child in made.children:
        child.kill()
        child.communicate()


def start_as(alone, code_of):
    """In place of ``Popen``: programs instead of members, which are deaf or not from the moment it returns."""
    popen = subprocess.Popen

    def spawn(command, **options):
        code = code_of(command[-1].removeprefix("member="))
        child = popen([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, start_new_session=True)
        alone.children.append(child)
        assert child.stdout is not None
        child.stdout.readline()
        return child

    return spawn


def test_each_failure_is_told_and_ends_no_other_member(alone, monkeypatch):
    ends = {"expert-0": "os.kill(os.getpid(), 9)", "expert-1": "os._exit(130)", "router": "os._exit(1)"}
    spawn = start_as(alone, lambda member: f"import os; print(flush=True); {ends[member]}")
    monkeypatch.setattr(subprocess, "Popen", spawn)
    failures = local.fit_members(MEMBERS, alone.run, 1, Console(file=io.StringIO()))
    assert failures == {
        "expert-0": (-9, "ended by SIGKILL; the same command resumes it"),
        "expert-1": (130, "stopped on request; the same command resumes it"),
        "router": (1, f"exit code 1; see {alone.run.folder.member('router') / 'log.txt'}"),
    }


def test_the_newest_error_line_of_a_log_is_told(alone, monkeypatch):
    """A log goes on from earlier starts."""
    for name in MEMBERS:
        alone.run.folder.member(name).mkdir(parents=True)
        (alone.run.folder.member(name) / "log.txt").write_text("error: before\nstarts\nerror: now\nends\n")
    monkeypatch.setattr(subprocess, "Popen", start_as(alone, lambda _: "import os; print(flush=True); os._exit(2)"))
    failures = local.fit_members(MEMBERS, alone.run, 3, Console(file=io.StringIO()))
    assert failures == dict.fromkeys(MEMBERS, (2, "now"))


def test_a_log_gets_lines_about_the_running_members(alone, monkeypatch, tmp_path):
    monkeypatch.setattr("ddm_lightning.core.formatting.LINE_SECONDS", 0.02)
    steps = {name: alone.run.status(name).max_steps for name in MEMBERS}
    line = f"expert-0: 0 of {steps['expert-0']}, waiting; expert-1: 0 of {steps['expert-1']}, waiting\n"
    shown = tmp_path / "shown"
    until_shown = f"while not os.path.exists({str(shown)!r}): time.sleep(0.01)"
    waits = f"import os, time; print(flush=True)\n{until_shown}\ntime.sleep(0.2)"
    monkeypatch.setattr(subprocess, "Popen", start_as(alone, lambda _: waits))

    class Log(io.StringIO):
        def write(self, text):
            written = super().write(text)
            if line in self.getvalue():
                shown.touch()
            return written

    out = Log()
    local.fit_members(MEMBERS, alone.run, 2, Console(file=out))
    assert out.getvalue().count(line) == 1


@pytest.mark.parametrize(
    ("codes", "expected"), [((2, 2, 2), 2), ((2, 1, 2), 1), ((2, 130, 2), 1), ((130, 2, 2), 1), ((130, 130, 130), 130)]
)
def test_errors_that_the_user_can_fix_end_in_their_exit_code(alone, monkeypatch, codes, expected):
    ends = dict(zip(MEMBERS, codes, strict=True))
    spawn = start_as(alone, lambda member: f"import os; print(flush=True); os._exit({ends[member]})")
    monkeypatch.setattr(subprocess, "Popen", spawn)
    assert main(["fit", "-c", str(TINY), f"run_dir={alone.run.folder.root}", "island.accelerator=cpu"]) == expected


def test_a_second_signal_kills_members_without_a_checkpoint(alone, monkeypatch):
    codes = {"expert-0": BUSY, "expert-1": OBEDIENT, "router": BUSY}
    monkeypatch.setattr(subprocess, "Popen", start_as(alone, codes.__getitem__))
    out = io.StringIO()
    ended_before_the_second = []

    def ask_twice():
        while len(alone.children) < 3:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)
        while "stopping" not in out.getvalue() or alone.children[started.index("expert-1")].poll() is None:
            time.sleep(0.05)
        time.sleep(2 * local.POLL_SECONDS)
        ended_before_the_second.extend(child.poll() for child in alone.children)
        os.kill(os.getpid(), signal.SIGUSR1)

    started = ["expert-0", "expert-1", "router"]
    monkeypatch.setattr(local, "relative_cost", lambda member: -started.index(member.name))
    thread = threading.Thread(target=ask_twice)
    thread.start()
    with pytest.raises(KeyboardInterrupt):
        local.fit_members(MEMBERS, alone.run, 3, Console(file=out, width=200))
    thread.join()
    assert ended_before_the_second == [None, 130, None]
    assert [child.returncode for child in alone.children] == [-signal.SIGKILL, 130, -signal.SIGKILL]
    said = [line for line in out.getvalue().splitlines() if "killed" in line]
    words = "killed before it wrote a checkpoint; it resumes at the previous one"
    assert said == [f"expert-0: {words}", f"router: {words}"]
    assert not alone.late


def test_a_forwarded_signal_does_not_count_twice(alone, monkeypatch):
    clock = SimpleNamespace(now=5.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(local, "time", clock)
    with local._stop_requests() as requests:
        for seconds_later, expected in ((0.0, 1), (0.1, 1), (local.POLL_SECONDS, 2)):
            clock.now += seconds_later
            os.kill(os.getpid(), signal.SIGUSR1)
            assert len(requests) == expected
    os.kill(os.getpid(), signal.SIGUSR1)
    assert len(alone.late) == 1  # whoever took it before takes it again


def test_a_signal_while_a_member_is_started_leaves_none_behind(alone, monkeypatch):
    spawn = start_as(alone, lambda _: OBEDIENT)
    asked = []

    def asked_meanwhile(*arguments, **options):
        child = spawn(*arguments, **options)
        asked.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGUSR1)
        return child

    monkeypatch.setattr(subprocess, "Popen", asked_meanwhile)
    with pytest.raises(KeyboardInterrupt):
        local.fit_members(MEMBERS, alone.run, 2, Console(file=io.StringIO()))
    assert [child.returncode for child in alone.children] == [130]  # the other place stays empty
    assert time.monotonic() - asked[0] < 30, "half of what it sleeps"
    assert not alone.late


def test_the_longest_members_are_started_first(alone, monkeypatch):
    """The router sees more samples, and does less at each."""
    own = [f"run_dir={alone.run.folder.root}", "island.accelerator=cpu", "expert.network.params.depth=8"]
    experiment = load_experiment(TINY, [*own, "expert.train.max_steps=60", "router.train.max_steps=70"])
    started = []
    spawn = start_as(alone, lambda member: started.append(member) or "print(flush=True)")
    monkeypatch.setattr(subprocess, "Popen", spawn)

    local.fit_members(["router", "expert-0", "expert-1"], Run(experiment), 1, Console(file=io.StringIO()))

    assert started == ["expert-0", "expert-1", "router"]


def test_a_member_gets_the_settings_of_the_fit_that_starts_it(alone, monkeypatch):
    monkeypatch.setattr(local, "STARTED", time.monotonic() - 600)  # ten minutes ago
    own = [f"run_dir={alone.run.folder.root}", "island.accelerator=cpu", "island.max_minutes=60"]
    experiment = load_experiment(TINY, own)
    experiment.islands = {"expert": {"num_threads": 3}, "router": {"attention": "sdpa"}}
    run = Run.open(experiment, create=True)
    threads, read = {}, {}
    popen = subprocess.Popen

    def spawn(command, *, env, **_):
        Run.open(alone.run.experiment, create=True)  # by another fit, with other settings of the island
        member = command[-1].removeprefix("member=")
        threads[member] = env["OMP_NUM_THREADS"]
        read[member] = load_experiment(command[command.index("-c") + 1])
        return popen([sys.executable, "-S", "-c", ""])

    monkeypatch.setattr(subprocess, "Popen", spawn)

    local.fit_members(MEMBERS, run, 1, Console(file=io.StringIO()))

    assert load_experiment(alone.run.folder.experiment).island.max_minutes is None
    assert threads == {"expert-0": "3", "expert-1": "3", "router": "1"}
    for member, found in read.items():
        assert found.islands[member].pop("max_minutes") == pytest.approx(50, abs=0.5)
        assert found == replace(experiment, islands={member: {}, **experiment.islands})
