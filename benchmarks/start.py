"""How long does `fit` take to its first step, `sample` to an image, and `status`?

`fit` has shards at hand and starts from nothing or from a published checkpoint. The others are compared with an earlier
commit in fresh processes, in turns.

python benchmarks/start.py --json benchmarks/results/start.json
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path
from statistics import median as middle

from common import MEMBER, REPOSITORY, TINY, Report, call, parse, parser, run, start
from step_clock import Seconds, median

from ddm_lightning.core.errors import UserError
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.members.status import MemberStatus

ROUNDS = (4, 1)
"""In all, and with ``--quick``."""
BASE = "fd829a81"
"""Commit to compare with."""
_SHELL = ("-m", "ddm_lightning")
_PYTHON = """
import sys
from ddm_lightning import DecentralizedEnsemble
DecentralizedEnsemble.from_pretrained(sys.argv[1], "cpu").sample(num=1, seed=0)
"""
_MOST_SECONDS = 300.0
_WAIT_SECONDS = 0.01


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    options = parse(parser(__doc__ or "", fixed=True), arguments)
    times: dict[str, list[Seconds]] = {"fresh": [], "elsewhere": []}
    with tempfile.TemporaryDirectory(prefix="start-") as folder:
        home = Path(folder) / "home"
        store = Path(folder) / "store"
        call("prepare", options, f"run_dir={home}", f"remote={store}")
        for number in range(ROUNDS[options.quick]):
            shutil.rmtree(store / "members", ignore_errors=True)
            for name, each in times.items():
                place = Path(folder) / f"{name}-{number}"
                shutil.copytree(home / "prepared", place / "prepared")
                each.append(first_step(options, place, store))

    title = f"Start of a member of {Path(options.config).name}"
    report = Report(title, ["start", "seconds", "CPU seconds", "lowest", "highest"])
    for name, each in times.items():
        seconds = median(each)
        cpu = median(each, "cpu")
        report.figures[f"seconds_{name}"] = seconds
        report.figures[f"cpu_seconds_{name}"] = cpu
        cpus = sorted(map(attrgetter("cpu"), each))
        report.row(name, *map("{:.2f}".format, (seconds, cpu, cpus[0], cpus[-1])))

    compare(report, ROUNDS[options.quick])
    report.note("Medians. Other processes on the machine lengthen the seconds, and hardly the CPU seconds.")
    report.finish(options.json)


def first_step(options: Namespace, place: Path, store: Path) -> Seconds:
    """Start the member, wait for its first step and its first publication, and kill it.

    The CPU time is that of all its threads: what it takes on a core of its own.

    Raises:
        UserError: it took no step.
    """
    began = time.monotonic()
    member = start(
        "fit",
        options,
        f"run_dir={place}",
        f"remote={store}",
        f"member={MEMBER}",
        "expert.train.max_steps=1000000",
        "island.log_every_n_steps=1",
        "island.checkpoint_every_n_steps=1",
        "island.publish_every_n_minutes=0.001",
    )
    folder = RunFolder(place).member(MEMBER)
    found = None
    try:
        while found is None or not any(store.glob("members/*/checkpoints/*/files.json")):
            if member.poll() is not None or time.monotonic() > began + _MOST_SECONDS:
                raise UserError(f"the member took no step: {member.output()}")

            if found is None and MemberStatus.read(folder, MEMBER, 0).samples_per_second:
                found = Seconds(time.monotonic() - began, cpu_seconds(member.pid))

            time.sleep(_WAIT_SECONDS)
    finally:
        member.kill()
        member.wait()

    return found


def compare(report: Report, num_rounds: int) -> None:
    """Add the CPU seconds of `sample`, of a call from Python and of `status`, and their ratios to those of ``BASE``."""
    git = ("git", "-C", REPOSITORY, "worktree")
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder) / "base"
        trained = f"{folder}/run"
        commands = {
            "first_image_over_today": (*_SHELL, "sample", "-c", trained, "--num=1", f"--out={folder}/a.png"),
            "first_image_over_today_python": ("-c", _PYTHON, trained),
            "status_over_today": (*_SHELL, "status", "-c", trained),
        }
        subprocess.run([*git, "add", base, BASE], check=True)
        try:
            seconds_of(base, *_SHELL, "fit", "-c", str(TINY), f"run_dir={trained}")
            for name, words in commands.items():
                pairs = [(seconds_of(base, *words), seconds_of(REPOSITORY, *words)) for _ in range(num_rounds)]
                report.figures[name] = middle(now / before for before, now in pairs)
                name = name.replace("over_today", "seconds")
                for side, each in zip((BASE, "now"), zip(*pairs, strict=True), strict=True):
                    report.row(f"{name}, {side}", "", *map("{:.2f}".format, (middle(each), min(each), max(each))))
                    report.figures[name] = middle(each)
        finally:
            subprocess.run([*git, "remove", "--force", base])


def seconds_of(code: Path, *words: str) -> float:
    """CPU seconds of a fresh process of Python with the code of a checkout."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{code}:{code}/data"}
    before = sum(os.times()[2:4])
    subprocess.run([sys.executable, *words], check=True, cwd=code, capture_output=True, env=environment)
    return sum(os.times()[2:4]) - before


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, of all its threads (fields 14 and 15 of proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    run(main)
