"""How long does `fit` take to its first step, with shards at hand, from nothing and from a published checkpoint?

python benchmarks/start.py --json benchmarks/results/start.json
"""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from operator import attrgetter
from pathlib import Path

from common import MEMBER, Report, call, parse, parser, run, start
from step_clock import Seconds, median

from ddm_lightning.core.errors import UserError
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.members.status import MemberStatus

ROUNDS = (5, 1)
"""In all, and with ``--quick``."""
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


def cpu_seconds(pid: int) -> float:
    """Processor time of a process so far, of all its threads (fields 14 and 15 of proc(5))."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    run(main)
