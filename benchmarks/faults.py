"""Hit islands by faults: does every member end in the same bits, does one harm another, and how much time is lost?

Each trial trains four members of ``tiny_2x``, each on an island of its own: a small disk, and nothing in common with
the others but an S3 or SFTP server on loopback. Faults strike three of them and the store at random moments; what ends
is started again. An undisturbed training of the same members gives the bits that all have to end with.

    python benchmarks/faults.py --json benchmarks/results/faults.json
    python benchmarks/faults.py --simulate --json benchmarks/results/faults_simulated.json

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
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from common import REPOSITORY, Report, all_of, commit, load, parse, parser, run, start
from faults_island import CLOCK, FULL_DISK, LEASE, Island, clock_variables, flip, small_disk
from faults_model import simulate

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.islands.shared import publish_prepared, pull_artifact
from ddm_lightning.members.artifact import WEIGHTS_FILE
from ddm_lightning.members.run import Run
from ddm_lightning.prepare.stages import prepare

sys.path.append(str(REPOSITORY / "tests" / "shards"))
import servers  # type: ignore[import-not-found]  # of the tests

MEMBERS = ("expert-0", "expert-1", "router", "monolith")
NUM_FAULTS = 200
SIZE = SimpleNamespace(
    max_steps=400,
    step_seconds=0.4,
    outages=4,
    faults=(
        *("SIGKILL", "SIGSTOP for 5 s", CLOCK) * 3,
        *("SIGTERM", LEASE, "SIGSTOP for 5 s"),
        *("SIGSTOP for a minute", "SIGSTOP for a minute, taken over elsewhere", "two processes for a member"),
        *(FULL_DISK, "lost disk, restart elsewhere", "lost disk, corrupted download"),
    ),
)
QUICK = SimpleNamespace(
    max_steps=120, step_seconds=0.05, outages=1, faults=("SIGKILL", "SIGSTOP for 5 s", "two processes for a member")
)
OUTAGES = ("store down", "store silent", "store answers garbage", "store answers a web page")
_OUTAGE_SECONDS = 10.0
_PAGE = b"HTTP/1.1 200 OK\r\nContent-Type: text/html\r\nContent-Length: 26\r\n\r\n<html>Please log in</html>"


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    cli = parser(__doc__ or "", fixed=True)
    cli.add_argument("--faults", type=int, default=None, help=f"trials go on until so many (default: {NUM_FAULTS})")
    cli.add_argument("--seed", type=int, default=0, help="of the kinds and moments of faults")
    cli.add_argument("--simulate", action="store_true", help="compare islands with one large job at published rates")
    options = parse(cli, arguments)
    if options.simulate:
        simulate(options)
        return

    if options.faults is not None:
        wanted = options.faults
    elif options.quick:
        wanted = 1
    else:
        wanted = NUM_FAULTS

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
        self.bits: dict[str, str] = {}
        """SHA-256 of the weights of each member that nothing disturbed; made for the first trial."""
        if options.quick:
            self.size = QUICK
        else:
            self.size = SIZE

        options.overrides = [
            f"expert.train.max_steps={self.size.max_steps}",
            f"router.train.max_steps={self.size.max_steps}",
            "island.accelerator=cpu",
            "island.log_every_n_steps=50",
            f"island.validate_every_n_steps={self.size.max_steps // 3}",
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

    def add(self) -> None:
        """Run the next trial, and write all results so far."""
        if not self.bits:
            prepare(self._load(self.home), self.home)
            start("fit", self.options, f"run_dir={self.home}", f"member={','.join(MEMBERS)}").ended()
            artifact = Run(self._load(self.home)).folder.artifact
            self.bits = {name: sha256_file(artifact(name) / WEIGHTS_FILE) for name in MEMBERS}

        number = len(self.records)
        folder = self.folder / f"trial-{number}"
        began = time.monotonic()
        if number % 2:
            server = servers.sftp
        else:
            server = servers.s3

        faults = plan(number, self.size, self.options.seed)
        outages = plan_outages(number, self.size, self.options.seed)
        (folder / "store").mkdir(parents=True)
        with ExitStack() as stack:
            stack.enter_context(patch.dict(os.environ, STEP_SECONDS=str(self.size.step_seconds)))
            setting = SimpleNamespace(setenv=os.environ.__setitem__)  # as pytest's monkeypatch
            url, line = stack.enter_context(server(folder / "store", folder, setting))
            remote.disconnect()
            publish_prepared(Run(self._load(self.home, url)), lambda _done, _total: None)
            store = threading.Lock()
            over = threading.Event()
            islands = []
            for name in MEMBERS:
                can = {FULL_DISK: stack.enter_context(small_disk(folder / name)), CLOCK: clock_variables(folder / "c")}
                usable = [fault for fault in faults[name] if can.get(fault[0], True)]
                islands.append(Island(name, self.options, folder / name, url, usable, store, over))

            with ThreadPoolExecutor() as pool:
                failing = pool.submit(fail_store, outages, line, store, over)
                try:
                    all_of([pool.submit(island.train) for island in islands], lambda _: None)
                finally:
                    over.set()
                    for training in [training for island in islands for training in island.trainings]:
                        training.process.kill()

            record = {"trial": number, "store": server.__name__, "commit": commit(), "seed": self.options.seed}
            record |= self._judge(islands, url, folder / "reader", number)
            record["faults"] += [*failing.result(), *(one for island in islands for one in island.struck)]

        self.records.append({**record, "seconds": time.monotonic() - began})
        print(f"trial {number}: {self.report().notes[-1]}", flush=True)
        self.report().write(self.options.json)

    def _judge(self, islands: Sequence[Island], url: str, folder: Path, number: int) -> dict[str, Any]:
        """Read every artifact as a stranger would, then damage one, which has to be noticed and mended."""
        lost = []
        wrong = []
        reader, second = (Run(self._load(folder / place, url)) for place in ("first", "second"))
        for name in MEMBERS:
            try:
                pull_artifact(name, reader)
                if sha256_file(reader.folder.artifact(name) / WEIGHTS_FILE) != self.bits[name]:
                    wrong.append(name)
            except (OSError, UserError) as error:
                lost.append(f"{name}: {error}")

        island = islands[number % len(islands)]
        flip(f"{url}/members/{island.member}/artifact/{WEIGHTS_FILE}", random.Random(number))
        try:
            pull_artifact(island.member, second)
            lost.append(f"{island.member}: nobody noticed the damage")
        except UserError:
            island.repeat()
            pull_artifact(island.member, second)

        times = [one.useful_and_total() for one in islands]
        return {
            "faults": [("corrupted artifact", island.member, 0.0)],
            "members_harmed": [line for one in islands for line in one.harm]
            + [f"{one.member}: other weights" for one in islands if one.member in wrong and not one.faults],
            "artifacts_lost": lost,
            "bits_lost": wrong,
            "starts_refused": [line for one in islands for line in one.refused],
            "useful_seconds": sum(useful for useful, _ in times),
            "total_seconds": sum(total for _, total in times),
        }

    def _load(self, folder: Path, url: str | None = None) -> Experiment:
        return load(self.options, f"run_dir={folder}", *([] if url is None else [f"remote={url}"]))

    def report(self) -> Report:
        """Table by kind of fault, and figures over all trials."""
        title = f"{len(self.faults)} faults in {len(self.records)} trials of {len(MEMBERS)} members"
        report = Report(title, ["fault", "times", "seconds it takes itself"])
        for kind in sorted({kind for kind, _, _ in self.faults}):
            seconds = [took for name, _, took in self.faults if name == kind]
            report.row(kind, str(len(seconds)), f"{sum(seconds) / len(seconds):.1f}")

        useful, total = (sum(one[f"{key}_seconds"] for one in self.records) for key in ("useful", "total"))
        report.figures = {"faults": len(self.faults)}
        for key in ("members_harmed", "artifacts_lost", "bits_lost"):
            found = []
            for one in self.records:
                for line in one[key]:
                    found.append(line)

            report.figures[key] = len(found)
            report.notes += [f"{key}: {line}" for line in found]

        report.figures |= {"goodput": useful / total, "hours_of_training": total / 3600}
        report.note(", ".join(f"{name} {value:.4g}" for name, value in report.figures.items()))
        report.details = {"trials": self.records}
        return report


def plan(number: int, size: SimpleNamespace, seed: int) -> dict[str, list[tuple[str, int]]]:
    """Deal the faults of a trial to all members but one, each at a random step."""
    generator = random.Random(f"{seed} {number}")
    hit = [member for index, member in enumerate(MEMBERS) if index != number % len(MEMBERS)]
    kinds = generator.sample(size.faults, len(size.faults))
    found: dict[str, list[tuple[str, int]]] = {member: [] for member in MEMBERS}
    for index, member in enumerate(hit):
        mine = kinds[index :: len(hit)]
        steps = sorted(generator.sample(range(size.max_steps // 20, int(0.85 * size.max_steps)), len(mine)))
        found[member] = list(zip(mine, steps, strict=True))

    return found


def plan_outages(number: int, size: SimpleNamespace, seed: int) -> list[tuple[str, float]]:
    """Kind of each failure of the store, and the seconds since the one before it has ended."""
    generator = random.Random(f"{seed} {number} store")
    kinds = []
    for index in range(size.outages):
        kinds.append(OUTAGES[(number * size.outages + index) % len(OUTAGES)])

    longest = size.max_steps * size.step_seconds / (size.outages + 1)
    return [(kind, generator.uniform(0.2, 1.0) * longest) for kind in kinds]


def fail_store(
    outages: Sequence[tuple[str, float]], line: servers.Line, store: threading.Lock, over: threading.Event
) -> list[tuple[str, str, float]]:
    """Let the store fail as planned until ``over``; return what happened."""
    answers = {"store answers garbage": random.Random(0).randbytes(4096), "store answers a web page": _PAGE}
    struck = []
    for kind, after in outages:
        if not over.wait(after):
            with store:
                line.fail(0, silent=kind == "store silent", answer=answers.get(kind))
                over.wait(_OUTAGE_SECONDS)
                line.fail(0, times=0)

            struck.append((kind, "store", 0.0))

    return struck


if __name__ == "__main__":
    run(main)
