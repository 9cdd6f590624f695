"""Hit islands by faults: does every member end in the same bits, does one harm another, and how much time is lost?

Each trial trains four members of ``tiny_2x``, each on an island of its own: a small disk, and nothing in common with
the others but an S3 or SFTP server on loopback. Faults strike three of them and the store at random moments; what ends
is started again. An undisturbed training of the same members gives the bits that all have to end with.

    python benchmarks/faults.py --json benchmarks/results/faults.json

Each finished trial is written to the JSON file at once; the same command goes on from there.

``goodput`` is, summed over members and trials,

    time of useful steps / (time from first step to last - time that the faults take themselves)

A step is useful if it is not repeated later; one of more than five seconds is a stall and counts as the median. A fault
itself takes the time until a new process begins its first step (kills, ends of leases, full and lost disks: detection,
start, download), or until a pause ends (SIGSTOP). A store that fails, a moved clock and a second process take no time:
what they cost counts against the members, as do repeated steps.
"""

from __future__ import annotations

import json
import os
import random
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import cached_property
from itertools import chain
from operator import itemgetter
from pathlib import Path
from statistics import mean
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
from common import Report, all_of, commit, load, parse, parser, run, start, store
from faults_island import (
    CLOCK,
    FULL_DISK,
    HARMED,
    LEASE,
    PAUSES,
    TAKEN_OVER,
    Island,
    flip,
    small_disk,
)

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.islands.shared import publish_prepared, pull_artifact
from ddm_lightning.members.meta import WEIGHTS_FILE
from ddm_lightning.members.run import Run
from ddm_lightning.prepare.stages import prepare

MEMBERS = ("expert-0", "expert-1", "router", "monolith")
NUM_FAULTS = (200, 1)
"""In all, and with ``--quick``."""
FEW = ("SIGKILL", "SIGSTOP for 5 s", "two processes for a member")
LOSSES = (FULL_DISK, "lost disk, restart elsewhere", "lost disk, corrupted download")
ALL = (*FEW, *PAUSES, *LOSSES, "SIGTERM", LEASE, TAKEN_OVER, CLOCK, "SIGKILL", CLOCK, "SIGKILL", CLOCK, FEW[1])
SIZE = SimpleNamespace(max_steps=400, step_seconds=0.4, outages=4, faults=ALL)
QUICK = SimpleNamespace(max_steps=120, step_seconds=0.05, outages=1, faults=FEW)
OUTAGES = ("store down", "store silent", "store answers garbage", "store answers a web page")
HARMS = (HARMED, "artifacts_lost", "bits_lost")
_OUTAGE_SECONDS = 10.0
_PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 26\r\n\r\n<html>Please log in</html>"


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    cli = parser(__doc__ or "", fixed=True)
    cli.add_argument("--faults", type=int, help=f"trials go on until so many (default: {NUM_FAULTS[0]})")
    options = parse(cli, arguments)
    wanted = options.faults or NUM_FAULTS[options.quick]
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        trials = Trials(options, Path(folder))
        while len(trials.faults) < wanted:
            trials.add()

    trials.report().finish(options.json)


class Trials:
    """All trials, those of earlier starts included.

    Args:
        options: the command line.
        folder: an empty folder.
    """

    def __init__(self, options: Namespace, folder: Path) -> None:
        self.options = options
        self.folder = folder
        self.home = folder / "undisturbed"
        self.size = (SIZE, QUICK)[options.quick]
        num_steps = self.size.max_steps
        options.overrides = [
            f"expert.train.max_steps={num_steps}",
            f"router.train.max_steps={num_steps}",
            "island.accelerator=cpu",
            "island.log_every_n_steps=50",
            f"island.validate_every_n_steps={num_steps // 3}",
            "island.checkpoint_every_n_steps=2",
            "island.publish_every_n_minutes=0.03",
        ]
        self.records: list[dict[str, Any]] = []
        if options.json is not None and options.json.exists():
            self.records = json.loads(options.json.read_text(encoding="utf-8"))["trials"]

        os.environ["OMP_NUM_THREADS"] = "1"

    @property
    def faults(self) -> list[tuple[str, str, float]]:
        """Kind, member and own seconds of each fault so far."""
        return [fault for record in self.records for fault in record["faults"]]

    @cached_property
    def bits(self) -> dict[str, str]:
        """SHA-256 of the weights of each member that nothing disturbed."""
        experiment = self._load(self.home)
        prepare(experiment, self.home)
        start("fit", self.options, f"run_dir={self.home}", f"member={','.join(MEMBERS)}").ended()
        folder = Run(experiment).folder
        return {name: sha256_file(folder.artifact(name) / WEIGHTS_FILE) for name in MEMBERS}

    def add(self) -> None:
        """Run the next trial, and write all results so far."""
        _ = self.bits  # before anything is disturbed
        number = len(self.records)
        folder = self.folder / f"trial-{number}"
        began = time.monotonic()
        kind = ("s3", "sftp")[number % 2]
        record: dict[str, Any] = {"trial": number, "store": kind, "commit": commit()}
        for key in ("faults", *HARMS):
            record[key] = []

        with ExitStack() as stack:
            stack.enter_context(patch.dict(os.environ, STEP_SECONDS=str(self.size.step_seconds)))
            url, line = stack.enter_context(store(folder, kind))
            remote.disconnect()
            prepared = Run(self._load(self.home, f"remote={url}"))
            publish_prepared(prepared, lambda _done, _total: None)
            works = threading.Lock()
            over = threading.Event()
            islands = []
            for name, mine in plan(number, self.size).items():
                if FULL_DISK in dict(mine):
                    stack.enter_context(small_disk(folder / name))

                islands.append(Island(name, self.options, folder / name, url, mine, works, over, record))

            with ThreadPoolExecutor() as pool:
                failing = pool.submit(fail_store, plan_outages(number, self.size), line, works, over)
                try:
                    all_of([pool.submit(island.train) for island in islands])
                finally:
                    over.set()
                    for training in chain.from_iterable(island.trainings for island in islands):
                        training.kill()

            record["faults"] += failing.result()
            self._judge(islands, url, folder / "reader", record)

        record["seconds"] = time.monotonic() - began
        self.records.append(record)
        print(f"trial {number}: {self.report().notes[-1]}", flush=True)
        self.report().write(self.options.json)

    def _judge(self, islands: Sequence[Island], url: str, folder: Path, record: dict[str, Any]) -> None:
        """Read every artifact as a stranger would, then damage one, which has to be noticed and mended."""
        reader = Run(self._load(folder / "first", f"remote={url}"))
        for island in islands:
            name = island.member
            try:
                pull_artifact(name, reader)
            except (OSError, UserError) as error:
                record["artifacts_lost"].append(f"{name}: {error}")
                continue

            if sha256_file(reader.folder.artifact(name) / WEIGHTS_FILE) != self.bits[name]:
                record["bits_lost"].append(name)
                if not island.faults:
                    record[HARMED].append(f"{name}: other weights")

        number = record["trial"]
        island = islands[number % len(islands)]
        name = island.member
        second = Run(self._load(folder / "second", f"remote={url}"))
        record["faults"].append(("corrupted artifact", name, 0.0))
        flip(f"{url}/members/{name}/artifact/{WEIGHTS_FILE}", random.Random(number))
        try:
            pull_artifact(name, second)
            record["artifacts_lost"].append(f"{name}: nobody noticed the damage")
        except UserError:
            remote.remove(f"{url}/members/{name}/artifact")  # a member sends an artifact again that is gone
            island.repeat()
            pull_artifact(name, second)

        times = [island.useful_and_total() for island in islands]
        record["useful_seconds"], record["total_seconds"] = np.sum(times, axis=0).tolist()

    def _load(self, folder: Path, *overrides: str) -> Experiment:
        return load(self.options, f"run_dir={folder}", *overrides)

    def report(self) -> Report:
        """Table by kind of fault, and figures over all trials."""
        title = f"{len(self.faults)} faults in {len(self.records)} trials of {len(MEMBERS)} members"
        report = Report(title, ["fault", "times", "seconds it takes itself"])
        seconds: dict[str, list[float]] = {}
        for kind, _, took in sorted(self.faults):
            seconds.setdefault(kind, []).append(took)

        for kind, each in seconds.items():
            report.row(kind, str(len(each)), f"{mean(each):.1f}")

        figures = report.figures
        figures["faults"] = len(self.faults)
        for key in HARMS:
            found = list(chain.from_iterable(map(itemgetter(key), self.records)))
            figures[key] = len(found)
            report.notes += map(f"{key}: {{}}".format, found)

        seconds_of = itemgetter("useful_seconds", "total_seconds")
        each = list(map(seconds_of, self.records))
        useful, total = np.sum(each, axis=0)
        figures["goodput"] = useful / total
        figures["hours_of_training"] = total / 3600
        report.note(", ".join(map("{0[0]} {0[1]:.4g}".format, figures.items())))
        report.details = {"trials": self.records}
        return report


def plan(number: int, size: SimpleNamespace) -> dict[str, list[tuple[str, int]]]:
    """Deal the faults of a trial to all members but one, each at a random step."""
    generator = random.Random(number)
    hit = list(MEMBERS)
    spared = hit.pop(number % len(MEMBERS))
    found: dict[str, list[tuple[str, int]]] = {spared: []}
    kinds = generator.sample(size.faults, len(size.faults))
    for index, member in enumerate(hit):
        mine = kinds[index :: len(hit)]
        possible = range(size.max_steps // 20, int(0.85 * size.max_steps))
        steps = generator.sample(possible, len(mine))
        found[member] = list(zip(mine, sorted(steps), strict=True))

    return found


def plan_outages(number: int, size: SimpleNamespace) -> list[tuple[str, float]]:
    """Kind of each failure of the store, and the seconds since the one before it has ended."""
    generator = random.Random(f"{number} store")
    longest = size.max_steps * size.step_seconds / (size.outages + 1)
    found = []
    for index in range(number * size.outages, (number + 1) * size.outages):
        after = generator.uniform(0.2, 1.0) * longest
        found.append((OUTAGES[index % len(OUTAGES)], after))

    return found


def fail_store(
    outages: Sequence[tuple[str, float]], line: Any, works: threading.Lock, over: threading.Event
) -> list[tuple[str, str, float]]:
    """Let the store fail as planned until ``over``; return what happened."""
    answers = {"store answers garbage": random.Random(0).randbytes(4096), "store answers a web page": _PAGE}
    struck = []
    for kind, after in outages:
        if not over.wait(after):
            with works:
                line.fail(0, silent=kind == "store silent", answer=answers.get(kind))
                over.wait(_OUTAGE_SECONDS)
                line.fail(0, times=0)

            struck.append((kind, "store", 0.0))

    return struck


if __name__ == "__main__":
    run(main)
