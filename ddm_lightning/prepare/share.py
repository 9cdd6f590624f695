"""One machine's share of ``prepare``: its parts and groups; machine 1 also fits the clusters and merges.

Machines share nothing but the run's URL. Each publishes what it has made, waits for what it needs of others, and can be
replaced by one with an empty folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_json
from ddm_lightning.prepare.encode import ROWS_FILE, TEXTS_FILE, Ledger
from ddm_lightning.prepare.engine import Reporter
from ddm_lightning.prepare.prepared import Prepared
from ddm_lightning.prepare.stages import STAGES_VERSION, Preparation
from ddm_lightning.prepare.store import Records, Store
from ddm_lightning.prepare.write_shards import GROUP, GroupJob
from ddm_lightning.shards.manifest import DataSizes, Manifest

_POLL_SECONDS = 5.0


@dataclass(frozen=True)
class Share:
    """Parts and groups whose number modulo ``count`` is ``index`` - 1."""

    index: int
    count: int

    @classmethod
    def parse(cls, text: str) -> Share:
        """Read ``--parts``.

        Raises:
            UserError: it is not ``i/n`` with i from 1 to n.
        """
        index, slash, count = text.partition("/")
        if not (slash and index.isdecimal() and count.isdecimal() and 1 <= int(index) <= int(count)):
            raise UserError(f"--parts {text}: give the number of this machine and of all machines, such as 1/8 to 8/8")
        return cls(int(index), int(count))

    def has(self, number: int) -> bool:
        """Whether a part or group is this machine's."""
        return number % self.count == self.index - 1


class SharedPreparation(Preparation):
    """One machine's call of ``prepare``.

    Args:
        experiment: the experiment, with a ``remote``.
        run_dir: this machine's folder of the run; may be empty.
        reporter: receives progress.
        share: what this machine does.
    """

    store: Store
    waits_for_others = False  # which would wait for this machine's share

    def __init__(self, experiment: Experiment, run_dir: Path, reporter: Reporter, share: Share) -> None:
        super().__init__(experiment, run_dir, reporter)
        self.share = share
        self.store = Store(f"{(experiment.remote or '').rstrip('/')}/{self.folder.name}", self.plugins.versions())
        self._read_records()

    def bring_up_to_date(self, check: Callable[[DataSizes], None] | None = None) -> None:
        """Do this machine's share; the first machine writes the manifest at the end."""
        self.check_before_writing(check)
        with self._alone():
            self._remove_temporary()
            self._agree_on_parts()
            stages = {stage.name: stage for stage in self._stages()}
            if self.unfinished_parts():
                self._run(stages["encode"])
            if self.share.index == 1:
                self._gather("parts", range(len(self.parts)))
                for name in ("index", "partition"):
                    if not self._is_done(stages[name]):
                        self._run(stages[name])
                self.store.publish("fit", self.folder, self._fit())
            else:
                self._pull_fit()
                self._gather("parts", [number for job in self._own_groups() for number in self._parts_of(job)])
            if self.unfinished_groups():
                self._run(stages["shards"])
            if self.share.index == 1:
                self._gather("groups", range(len(self.group_jobs())))
                self._run(stages["merge"])

    def _read_records(self) -> None:
        super()._read_records()
        self._records: dict[str, Records] = {}
        """Records at the URL, by name."""

    def _agree_on_parts(self) -> None:
        """Publish the list of parts, or compare it with that of other machines."""
        address = f"{self.store.url}/{self.prepared.parts_file.name}"
        names = json.dumps([part.name for part in self.parts]).encode()
        with remote.reaching():
            is_same = remote.create(address, names)
        if not is_same:
            raise UserError(
                f"{remote.shown(address)}: lists other parts of the source than this machine finds; give all machines "
                "the same source, or set another remote"
            )

    def unfinished_parts(self) -> dict[int, dict[str, str]]:
        """As ``Preparation``, of this machine's parts that are not at the URL."""
        own = [number for number in range(len(self.parts)) if self.share.has(number)]
        self._look("parts", own)
        missing = super().unfinished_parts()
        keys = self._part_keys()
        return {number: missing.get(number, {}) for number in own if not self._has_part(number, keys[number])}

    def unfinished_groups(self) -> list[GroupJob]:
        """List this machine's groups that are not at the URL."""
        jobs = self._own_groups()
        self._look("groups", [job.number for job in jobs])
        return [job for job in jobs if not self._has_group(job)]

    def _own_groups(self) -> list[GroupJob]:
        return [replace(job, store=self.store) for job in self.group_jobs() if self.share.has(job.number)]

    def _parts_of(self, job: GroupJob) -> range:
        return range(job.first, job.first + len(job.parts))

    def _has_group(self, job: GroupJob) -> bool:
        record = self._records.get(f"groups/{job.number:05}")
        return record is not None and record[GROUP]["key"] == job.key

    def _part_name(self, number: int) -> str:
        return f"parts/{self.prepared.part_folder(number).name}"

    def _names(self, kind: str, numbers: Iterable[int]) -> list[str]:
        return [self._part_name(number) if kind == "parts" else f"{kind}/{number:05}" for number in numbers]

    def _has_part(self, number: int, keys: dict[str, str]) -> bool:
        """Whether a part is at the URL with all its columns; only its owner compares fingerprints."""
        record, cut = self._records.get(self._part_name(number)), 0 if self.share.has(number) else 1
        return record is not None and all(
            name in record and record[name]["key"].split()[cut:] == key.split()[cut:] for name, key in keys.items()
        )

    def _look(self, kind: str, numbers: Iterable[int]) -> None:
        """Read the records of some parts or groups that are at the URL."""
        there = self.store.names(kind)
        names = (name for name in self._names(kind, numbers) if name not in self._records)
        wanted = [name for name in names if name.partition("/")[2] in there]
        found = zip(wanted, remote.in_threads(self.store.read, wanted), strict=True)
        self._records |= {name: work for name, work in found if work is not None}

    def _gather(self, kind: str, numbers: Iterable[int]) -> None:
        """Wait until all these parts, or groups, are at the URL; keep their records."""
        numbers, keys, jobs = list(numbers), self._part_keys(), self.group_jobs() if kind == "groups" else []

        def is_there(number: int) -> bool:
            return self._has_group(jobs[number]) if kind == "groups" else self._has_part(number, keys[number])

        def look() -> int:
            missing = [number for number in numbers if not is_there(number)]
            for name in self._names(kind, missing):
                self._records.pop(name, None)  # of other settings
            self._look(kind, missing)
            return sum(not is_there(number) for number in missing)

        self._wait(kind, look, len(numbers))
        if kind == "parts":
            for number in numbers:
                self.prepared.ledgers[number].records = self._records[self._part_name(number)]
            self.prepared = Prepared(self.folder, self.parts, ledgers=self.prepared.ledgers, store=self.store)
            if self.share.index == 1:
                self.prepared.fetch(numbers, ROWS_FILE, *self._sample_files())
        for name in self._names(kind, numbers) if kind == "groups" else ():
            self.store.pull(name, self.folder, self._records[name], lambda path: path.endswith((".npz", "index.json")))

    def _wait(self, what: str, count_missing: Callable[[], int], total: int) -> None:
        has_said = False
        while missing := count_missing():
            if not has_said:
                self.reporter.say(f"waiting for {missing:,} of {total:,} {what} of other machines; Ctrl-C leaves")
                has_said = True
            self.reporter.advance(f"wait for {what}", total - missing, total)
            time.sleep(_POLL_SECONDS)

    def _sample_files(self) -> tuple[str, ...]:
        partition = self.config.partition
        file = "features.npy" if partition.fit_fraction == 1 else "sample.npy"
        return (file, TEXTS_FILE) if partition.kind == "random" else (file,)

    def _fit(self) -> Records:
        """Return the work of the reductions before the shards, as it is published."""
        partition = [asdict(self.config.partition), asdict(self.config.features), self.config.held_out_fraction]
        key = sha256_json([STAGES_VERSION, partition, self.experiment.seed, self._group_keys()])
        return {
            "fit": {"key": key, "files": {}},
            **{name: self.ledger.records.get(name) for name in ("index", "partition")},
        }

    def _pull_fit(self) -> None:
        """Wait for the fit of the first machine, and bring its files."""
        key, found = self._fit()["fit"]["key"], dict[str, Any]()

        def look() -> int:
            found.update(self.store.read("fit") or {})
            return int(found.get("fit", {}).get("key") != key)

        self._wait("fits", look, 1)
        self.store.pull("fit", self.folder, found)
        self.ledger.records |= {name: found[name] for name in ("index", "partition")}
        self.prepared = Prepared(self.folder, self.parts, ledgers=self.prepared.ledgers, store=self.store)

    def _group_ledgers(self) -> list[Ledger]:
        return [
            Ledger(job.ledger.file, self.folder, self._records[f"groups/{job.number:05}"]) for job in self.group_jobs()
        ]


def prepare_share(
    experiment: Experiment, run_dir: Path, share: Share, reporter: Reporter, check: Callable[[DataSizes], None]
) -> Manifest | None:
    """Do one machine's share of ``prepare``; as ``stages.prepare``, for an experiment with a ``remote``.

    Returns:
        The manifest, from the first machine when all is done.

    Raises:
        UserError: bad input; or records at the URL that are damaged or of other versions.
    """
    torch.set_float32_matmul_precision("highest")  # nearest centroids depend on float32's rounding
    if experiment.remote is None:
        raise UserError("--parts: the machines share their work at a URL; set remote")
    SharedPreparation(experiment, run_dir, reporter, share).bring_up_to_date(check)
    return Manifest.read(run_dir) if share.index == 1 else None
