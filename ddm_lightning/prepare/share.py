"""One machine's share of ``prepare``: its parts and groups; machine 1 also fits the clusters and merges.

Machines share nothing but the run's URL. Each publishes what it has made, waits for what it needs of others, and can be
replaced by one with an empty folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.prepare import ledger as ledgers
from ddm_lightning.prepare.encode import ROWS_FILE, TEXTS_FILE
from ddm_lightning.prepare.engine import Reporter
from ddm_lightning.prepare.ledger import Entries, Job, Published
from ddm_lightning.prepare.stages import Preparation, Stage
from ddm_lightning.prepare.write_shards import GroupJob
from ddm_lightning.shards.manifest import DataSizes, Manifest

RECHECK_SECONDS = 600.0
"""Time after which a waiting machine reads all ledgers anew: another may have found that its parts have changed."""
_OTHER = " (published, but of other settings or parts: compare the commands of all machines)"
_PARTITION = "partition"
"""Ledger at the URL of what machine 1 makes of all parts: the stages ``index`` and ``partition``."""


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


class SharedPreparation(Preparation):
    """One machine's call of ``prepare``.

    Args:
        experiment: the experiment, with a ``remote``.
        run_dir: this machine's folder of the run; may be empty.
        reporter: receives progress.
        share: what this machine does.
    """

    published: Published

    def __init__(self, experiment: Experiment, run_dir: Path, reporter: Reporter, share: Share) -> None:
        super().__init__(experiment, run_dir, reporter)
        self.share = share
        url = f"{(experiment.remote or '').rstrip('/')}/{self.folder.name}"
        self.published = Published(url, self.plugins.versions())
        self._read_ledgers()

    def is_own(self, number: int) -> bool:
        """Whether a part or group is this machine's."""
        return number % self.share.count == self.share.index - 1

    def _check_condition(self) -> None:
        """Leave it to the check of the manifest: a machine that joins late has nothing to read."""

    def bring_up_to_date(self, check: Callable[[DataSizes], None] | None = None) -> None:
        """Do this machine's share; the first machine writes the manifest at the end."""
        self.check_before_writing(check)
        with self._alone():
            self._agree_on_parts()
            read_at = time.monotonic()
            said = ""
            while waiting := self._advance():
                if waiting != said:
                    self.reporter.say(f"waiting for {waiting}; Ctrl-C leaves")
                    said = waiting

                time.sleep(ledgers.POLL_SECONDS)
                if time.monotonic() - read_at > RECHECK_SECONDS:
                    read_at = time.monotonic()
                    self._read_ledgers()

    def _advance(self) -> str:
        """Do what can be done of this machine's share; return what it has to wait for."""
        stages = {stage.name: stage for stage in self._stages()}
        if missing := self._bring("parts", stages["encode"]):
            return missing

        reductions = [stages["index"], stages["partition"]]
        found = self.published.read(_PARTITION) or {}
        if not self._has_partition(reductions, found):
            if self.share.index != 1:
                return f"the partition of machine 1{_OTHER * bool(found)}"

            self._fetch_sample()
            for stage in reductions:
                if not self._is_done(stage):
                    self._run(stage)

            made = {stage.name: self.ledger.entries[stage.name] for stage in reductions}
            self.published.publish(_PARTITION, self.folder, made)

        missing = self._bring("groups", stages["shards"])
        if self.share.index == 1 and not missing:
            self._fetch_sample()
            remote.in_threads(self._pull_indices, self.group_jobs())
            self._run(stages["merge"])

        if self.share.index == 1:
            return missing

        return ""

    def _fetch_sample(self) -> None:
        """Bring what the fit and the report read of all parts."""
        partition = self.config.partition
        if partition.fit_fraction == 1:
            features = "features.npy"
        else:
            features = "sample.npy"

        if partition.kind in ("random", "existing"):
            keys = [TEXTS_FILE]
        else:
            keys = []

        self.prepared.fetch(range(len(self.parts)), ROWS_FILE, features, "codes.npy", *keys)

    def _agree_on_parts(self) -> None:
        """Publish the list of parts, or compare it with that of other machines."""
        address = f"{self.published.url}/{self.prepared.parts_file.name}"
        with remote.reaching():
            is_same = remote.create(address, json.dumps([part.name for part in self.parts]).encode())

        if not is_same:
            raise UserError(
                f"{address}: lists other parts of the source than this machine finds; give all machines "
                "the same source, or set another remote"
            )

    def _bring(self, kind: str, stage: Stage) -> str:
        """Do this machine's share of a map; return what is missing of those of others."""
        jobs = stage.jobs()
        there = self._look(kind, jobs)
        if self.unfinished(jobs):
            self._run(stage)

        missing = [job for job in jobs if not job.ledger.is_published]
        owners = sorted({job.number % self.share.count + 1 for job in missing})
        self.reporter.advance(f"{kind} of all machines", len(jobs) - len(missing), len(jobs))
        self._renew()
        machines = f"machine{'s' * (len(owners) > 1)} {', '.join(map(str, owners))}"
        others = _OTHER * any(job.name in there for job in missing)
        if missing:
            return f"{kind} of {machines}{others}"

        return ""

    def _look(self, kind: str, jobs: Sequence[Job]) -> set[str]:
        """Take over the ledgers at the URL that are of the same inputs; empty this machine's others; return all."""
        there = self.published.names(kind)
        wanted = [job for job in jobs if job.name in there and not job.ledger.is_published]
        found = zip(wanted, remote.in_threads(lambda job: self.published.read(job.name) or {}, wanted), strict=True)
        for job, entries in found:
            # Only its owner compares the fingerprint of a part.
            if self.is_own(job.number):
                first = 0
            else:
                first = -1

            theirs = {name: entry["key"].split()[first:] for name, entry in entries.items()}
            if theirs == theirs | {name: key.split()[first:] for name, key in job.keys.items()}:
                job.ledger.entries = {
                    name: {**entry, "key": job.keys.get(name, entry["key"])} for name, entry in entries.items()
                }
                job.ledger.is_published = True
            elif self.is_own(job.number):
                self.published.forget(job.name)

        return there

    def _has_partition(self, stages: Sequence[Stage], entries: Entries) -> bool:
        """Bring the published results of these stages if they are of these parts; return whether they are."""
        before = dict(self.ledger.entries)
        self.ledger.entries |= entries  # the key of the partition depends on the index
        if {name: entry["key"] for name, entry in entries.items()} != {stage.name: stage.key for stage in stages}:
            self.ledger.entries = before
            return False

        self.published.pull(_PARTITION, self.folder, entries)
        self._renew()
        return True

    def _pull_indices(self, group: GroupJob) -> None:
        entries = group.ledger.entries
        wanted = (".npz", "index.json")
        self.published.pull(group.name, self.folder, entries, lambda path: path.endswith(wanted))


def prepare_share(
    experiment: Experiment, run_dir: Path, share: Share, reporter: Reporter, check: Callable[[DataSizes], None]
) -> Manifest | None:
    """Do one machine's share of ``prepare``; as ``stages.prepare``, for an experiment with a ``remote``.

    Returns:
        The manifest, from the first machine when all is done.

    Raises:
        UserError: bad input; or ledgers at the URL that are damaged or of other versions.
    """
    if experiment.remote is None:
        raise UserError("--parts: the machines share their work at a URL; set remote")

    SharedPreparation(experiment, run_dir, reporter, share).bring_up_to_date(check)
    if share.index == 1:
        return Manifest.read(run_dir)

    return None
