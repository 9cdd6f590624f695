"""``prepare``: the stages from a source of images to shards.

Two stages are maps: ``encode`` over parts, ``shards`` over groups of parts. ``index`` and ``partition`` need only
hashes and the features of a sample of all parts, and ``merge`` only counts and indices of all groups.

A stage writes its files under temporary names, renames them, and enters itself in a ``Ledger`` with a hash of its
inputs: its part of the configuration and the hashes of earlier files. So a second run does nothing, a killed run
continues where it stopped (at the unfinished part or group), and a changed key reruns only the stages that depend on
it.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain, dropwhile
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from filelock import Timeout

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write, atomic_write_json, locked, sha256_file, sha256_json
from ddm_lightning.core.formatting import format_bytes
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.partition.build import check_partition, fit_partition
from ddm_lightning.partition.columns import save_array
from ddm_lightning.partition.partition import Partition
from ddm_lightning.prepare import ledger as finished_work
from ddm_lightning.prepare.conditions import check_classes, check_samples
from ddm_lightning.prepare.encode import (
    CODES,
    FEATURES,
    RECORDS,
    ROWS_FILE,
    SAMPLE,
    TEXTS_FILE,
    PartJob,
    check_broken,
    encode_part,
    inputs_of_columns,
)
from ddm_lightning.prepare.engine import Reporter, run_jobs
from ddm_lightning.prepare.ledger import Entries, Job, Ledger, Store, hash_of_files
from ddm_lightning.prepare.merge import merge_groups
from ddm_lightning.prepare.prepared import Prepared, Thumbnails, write_index
from ddm_lightning.prepare.reading import Plugins
from ddm_lightning.prepare.records import Part, count_samples
from ddm_lightning.prepare.report import report_partition
from ddm_lightning.prepare.share import Share, agree_on_parts, take_over
from ddm_lightning.prepare.write_shards import GROUP, GroupJob, Split, write_group
from ddm_lightning.shards.manifest import DataSizes, Manifest, manifest_path

# Part of every stage's hash. Raise it when the output of a stage changes.
STAGES_VERSION = 5
RECHECK_SECONDS = 600.0
"""Time after which a waiting machine reads all ledgers anew: another may have found that its parts have changed."""
_OTHER = " (published, but of other settings or parts: compare the commands of all machines)"
_PARTITION = "partition"
"""Ledger in the store of what machine 1 makes of all parts: the stages ``index`` and ``partition``."""

Check: TypeAlias = Callable[[DataSizes], None]


def prepare(
    experiment: Experiment,
    run_dir: Path,
    reporter: Reporter | None = None,
    check: Check | None = None,
    prune: bool = False,
) -> Manifest:
    """Bring ``run_dir``/prepared up to date with the experiment.

    Several processes may call it at once: one works, the others wait.

    Args:
        experiment: its ``prepare`` section and its seed are used.
        run_dir: the run folder.
        reporter: receives progress; None for silence.
        check: called before anything is written; refuses experiments that do not fit the data.
        prune: whether to remove encoded parts that the source no longer lists.

    Raises:
        UserError: bad input. Nothing is written; if only a stage can detect it (too many broken samples, unbalanced
            clusters), no further stage runs.
    """
    preparation = Preparation(experiment, run_dir, reporter or Reporter())
    if preparation.pending():
        preparation.bring_up_to_date(check)
    else:
        preparation.reporter.say(f"{preparation.folder}: up to date")

    preparation.handle_unlisted(prune)
    return Manifest.read(run_dir)


def prepare_share(
    experiment: Experiment, run_dir: Path, share: Share, reporter: Reporter, check: Check
) -> Manifest | None:
    """Do one machine's share of ``prepare``, for an experiment with a ``remote``.

    Machines share nothing but that URL. Each publishes what it has made, waits for what it needs of others, and can be
    replaced by one with an empty folder. Machine 1 also fits the clusters and merges.

    Returns:
        The manifest, from the first machine when all is done.

    Raises:
        UserError: bad input; or ledgers at the URL that are damaged or of other versions.
    """
    if experiment.remote is None:
        raise UserError("--parts: the machines share their work at a URL; set remote")

    Preparation(experiment, run_dir, reporter, share).bring_up_to_date(check)
    if share.is_first:
        return Manifest.read(run_dir)

    return None


@dataclass(frozen=True)
class Stage:
    """A stage of ``prepare``."""

    name: str
    inputs: Callable[[], Any]
    """Everything the stage reads, by content, as plain JSON; called when the stages before it are done."""
    outputs: tuple[str, ...]
    """Patterns of its result files below ``prepared/``."""
    write: Callable[[], str | None]
    """Writes the result files; may return a line to print."""
    compute: Callable[[], object] | None = None
    """Called before ``write``, while the old files are still there; raises for bad input."""
    jobs: Callable[[], Sequence[Job]] = list
    """Lists the jobs of a map, which have keys of their own."""

    @property
    def key(self) -> str:
        """Hash of the inputs."""
        return sha256_json({"version": STAGES_VERSION, "inputs": self.inputs()})


_Job = TypeVar("_Job", bound=Job)


class Preparation:
    """One call of ``prepare``. Plug-ins are built only when a stage needs them.

    Args:
        experiment: its ``prepare`` section and its seed are used.
        run_dir: this machine's folder of the run.
        reporter: receives progress.
        share: what this machine does, for others to take over from the store at the experiment's ``remote``; None to
            do all here, without a store.

    Raises:
        UserError: the source cannot be listed, unless its shards are finished; it has no parts; or two of one name.
    """

    def __init__(self, experiment: Experiment, run_dir: Path, reporter: Reporter, share: Share | None = None) -> None:
        self.experiment = experiment
        self.config = experiment.prepare
        self.plugins = Plugins(experiment.prepare)
        self.run_dir = run_dir
        self.folder = RunFolder(run_dir).prepared
        self.reporter = reporter
        self.columns = inputs_of_columns(self.plugins)
        self.parts = self._list_parts()
        self.share = share or Share(1, 1)
        self.store: Store | None = None
        if share is not None:
            url = f"{(experiment.remote or '').rstrip('/')}/{self.folder.name}"
            self.store = Store(url, self.plugins.versions())

        self._read_ledgers()

    def _list_parts(self) -> Sequence[Part]:
        try:
            return self.plugins.parts
        except UserError as error:
            # Finished shards outlive their source.
            parts_file = Prepared(self.folder).parts_file
            source = asdict(self.config.source)
            is_finished = parts_file.exists() and manifest_path(self.run_dir).exists()
            if not is_finished or Manifest.read(self.run_dir).source != source:
                raise

            self.reporter.say(f"the source cannot be listed ({error}); only its prepared parts can be used")
            return Prepared(self.folder).parts

    def _read_ledgers(self) -> None:
        self.ledger = Ledger(self.folder / "stages.json")
        self.prepared = Prepared(self.folder, self.parts, store=self.store)
        self.groups = []
        for number in range(self.prepared.num_groups):
            self.groups.append(Ledger(self.folder / "groups" / f"{number:05}.json", self.folder))

    def _stages(self) -> list[Stage]:
        config = self.config
        seed = self.experiment.seed
        columns = self.columns
        ledgers = self.prepared.ledgers
        index_files = partial(self.ledger.files, "index")
        parts = [asdict(part) for part in self.parts]
        source = Stage(
            "source",
            inputs=lambda: parts,
            outputs=("parts.json",),
            write=lambda: atomic_write_json(self.prepared.parts_file, parts),
        )
        encode = Stage("encode", lambda: columns, (), self._encode, jobs=self.part_jobs)

        limits = [config.max_bad_fraction]
        if config.near_duplicates is not None:
            limits.append(config.near_duplicates)

        index = Stage(
            "index",
            inputs=lambda: [
                hash_of_files(ledgers, columns),
                [ledger.entries[RECORDS]["filtered"] for ledger in ledgers],
                *limits,
            ],
            outputs=("index.json", "broken.jsonl"),
            write=lambda: write_index(self.prepared, columns.keys() - {SAMPLE, CODES}, *limits),
        )

        fit = [asdict(config.partition), asdict(config.features), self._hash_of_other_partition()]
        partition = Stage(
            "partition",
            inputs=lambda: [fit, seed, config.held_out_fraction, self._fitted_files(), index_files()],
            outputs=("rule.safetensors", "split.json", "clusters.npy"),
            write=self._write_partition,
            compute=self._compute_partition,
        )
        shards = Stage("shards", self._group_keys, (), self._write_shards, jobs=self.group_jobs)

        # The engine and the number of processes change no byte.
        everything = asdict(replace(config, engine="local", num_processes=0))
        report = ("clusters.png", "report/report.html")
        merge = Stage(
            "merge",
            inputs=lambda: [everything, self.experiment.name, index_files(), self._group_keys()],
            outputs=("partition.safetensors", "shards/*/*/index.json", *report, "manifest.json"),
            write=self._merge,
        )
        return [source, encode, index, partition, shards, merge]

    def _hash_of_other_partition(self) -> str | None:
        """Return a hash of another run's partition, if it is used; it may have changed."""
        path = Path(self.config.partition.path or "").expanduser()
        if path.is_file():
            return sha256_file(path)

        return None

    def bring_up_to_date(self, check: Check | None = None) -> None:
        """Run the stages without a valid record, one process at a time; wait for other machines."""
        self.check_before_writing(check)
        with self._alone():
            if self.store is not None:
                agree_on_parts(self.store, self.parts)

            read_at = time.monotonic()
            said = ""
            while waiting := self._advance():
                if waiting != said:
                    self.reporter.say(f"waiting for {waiting}; Ctrl-C leaves")
                    said = waiting

                time.sleep(finished_work.POLL_SECONDS)
                if time.monotonic() - read_at > RECHECK_SECONDS:
                    read_at = time.monotonic()
                    self._read_ledgers()

        if self.plugins.source.attribution:
            self.reporter.say(self.plugins.source.attribution)

    def _advance(self) -> str:
        """Do what can be done of this machine's share; return what it has to wait for."""
        source, encode, index, partition, shards, merge = self._stages()
        if self.store is None:
            self._run_unless_done(source)

        missing = self._map("parts", encode) or self._reduce(index, partition)
        if missing:
            return missing

        missing = self._map("groups", shards)
        if not self.share.is_first:
            return ""
        if missing:
            return missing

        if not self._is_done(merge):
            self._fetch_sample()
            remote.in_threads(self._pull_indices, self.group_jobs())
            self._run(merge)

        return ""

    def _map(self, kind: str, stage: Stage) -> str:
        """Do this machine's share of the jobs of a stage; return what is missing of those of others."""
        there = set[str]()
        jobs = stage.jobs()
        if self.store is not None:
            there = take_over(self.store, self.share, kind, jobs)

        self._run_unless_done(stage)
        self._renew()
        missing = [job for job in jobs if job.ledger.is_stored != bool(self.store)]
        if self.store is not None:
            self.reporter.advance(f"{kind} of all machines", len(jobs) - len(missing), len(jobs))
        if not missing:
            return ""

        owners = sorted({self.share.owner_of(job.number) for job in missing})
        machines = f"machine{'s' * (len(owners) > 1)} {', '.join(map(str, owners))}"
        others = _OTHER * any(job.name in there for job in missing)
        return f"{kind} of {machines}{others}"

    def _reduce(self, *stages: Stage) -> str:
        """Run stages that need all parts, or take over what machine 1 has made; return what is missing."""
        if self.store is not None:
            found = self.store.read(_PARTITION)
            if self._has_results(stages, found):
                self.store.pull(_PARTITION, self.folder, found)
                self._renew()
                return ""

            if not self.share.is_first:
                return f"the partition of machine 1{_OTHER * bool(found)}"

        self._fetch_sample()
        for stage in stages:
            self._run_unless_done(stage)

        if self.store is not None:
            made = {stage.name: self.ledger.entries[stage.name] for stage in stages}
            self.store.publish(_PARTITION, self.folder, made)

        return ""

    def _has_results(self, stages: Sequence[Stage], found: Entries) -> bool:
        """Take over the entries of these stages if they are of the same inputs; return whether they are."""
        before = dict(self.ledger.entries)
        self.ledger.entries |= found  # the key of the partition depends on the index
        for stage in stages:
            if stage.name not in found or found[stage.name]["key"] != stage.key:
                self.ledger.entries = before
                return False

        return True

    def _fetch_sample(self) -> None:
        """Bring what the fit and the report read of all parts."""
        partition = self.config.partition
        names = [ROWS_FILE, "codes.npy", "sample.npy"]
        if partition.fit_fraction == 1:
            names[-1] = "features.npy"
        if partition.kind in ("random", "existing"):
            names.append(TEXTS_FILE)

        self.prepared.fetch(range(len(self.parts)), *names)

    def _pull_indices(self, group: GroupJob) -> None:
        if self.store is not None:
            self.store.pull(group.name, self.folder, group.ledger.entries, (".npz", "index.json"))

    def check_before_writing(self, check: Check | None) -> None:
        """Build all plug-ins and compare sizes, so that bad input is refused before a file is touched; see ``prepare``.

        Raises:
            UserError: bad input.
        """
        self.plugins.versions()
        condition = self.experiment.condition.kind
        check_classes(condition, self.plugins)
        if self.unfinished(self.part_jobs()):
            _ = self.plugins.parts  # refuses a source that is gone, or lacks a column
            is_new = not any(RECORDS in ledger.entries for ledger in self.prepared.ledgers)
            # A machine that joins others late has nothing to read.
            if is_new and self.store is None:
                check_samples(condition, self.plugins)

        check_partition(self.config.partition, count_samples(self.parts))
        if self.config.partition.path is not None:
            path = Path(self.config.partition.path).expanduser()
            if not path.is_file():
                raise UserError(
                    f"key 'prepare.partition.path': {path} is no file; give another run's "
                    "prepared/partition.safetensors"
                )

            Partition.load(path)

        if check is not None:
            check(self.plugins.sizes())

    def _run_unless_done(self, stage: Stage) -> None:
        if not self._is_done(stage):
            self._run(stage)

    def _run(self, stage: Stage) -> None:
        start = time.monotonic()
        if stage.compute is not None:
            stage.compute()

        # Remove the manifest first, so that a half-changed folder does not look finished.
        manifest_path(self.run_dir).unlink(missing_ok=True)
        self.ledger.forget(stage.name)
        found = stage.write()
        self.ledger.add(stage.name, stage.key, chain(*map(self.folder.glob, stage.outputs)))
        self.ledger.save()
        self._renew()
        line = f"{stage.name}: done in {time.monotonic() - start:.1f} s"
        if found:
            line += f": {found}"

        self.reporter.say(line)

    def pending(self) -> list[Stage]:
        """List the first stage that is not done and all later ones."""
        return [*dropwhile(self._is_done, self._stages())]

    def _is_done(self, stage: Stage) -> bool:
        return self.ledger.is_done(stage.name, stage.key) and not self.unfinished(stage.jobs())

    def _renew(self) -> None:
        """Forget what is cached of files that have changed."""
        self.prepared = Prepared(self.folder, self.parts, ledgers=self.prepared.ledgers, store=self.store)

    def _fitted_files(self) -> str:
        """Return a hash of the files that the fit of the partition reads."""
        features = SAMPLE
        if self.config.partition.fit_fraction == 1:
            features = FEATURES

        return hash_of_files(self.prepared.ledgers, (RECORDS, features))

    def part_jobs(self) -> list[PartJob]:
        """List the parts, with keys of all that their columns are made from."""
        digests = {name: sha256_json(inputs) for name, inputs in self.columns.items()}
        jobs = []
        for number, (part, ledger) in enumerate(zip(self.parts, self.prepared.ledgers, strict=True)):
            samples = sha256_json([part.name, part.fingerprint])
            keys = {name: f"{samples} {digest}" for name, digest in digests.items()}
            name = f"parts/{ledger.folder.name}"
            jobs.append(PartJob(number, name, ledger, keys, self.store, part, len(self.parts)))

        return jobs

    def group_jobs(self) -> list[GroupJob]:
        """List the groups of parts whose shards are written together, with keys of all that they are made from."""
        config = self.config
        seed = self.experiment.seed
        stored = [config.held_out_fraction, asdict(config.shards), seed]
        stored += [self.ledger.files("index"), self.ledger.files("partition"), *config.keep]
        columns = self.columns.keys() - {SAMPLE, CODES}
        jobs = []
        for number, ledger in enumerate(self.groups):
            prepared = self.prepared.group(number)
            name = f"groups/{number:05}"
            if prepared.filled_parts:
                files = hash_of_files(prepared.ledgers, columns)
                keys = {GROUP: sha256_json([STAGES_VERSION, stored, files])}
                jobs.append(GroupJob(number, name, ledger, keys, self.store, prepared, seed))

        return jobs

    def _group_keys(self) -> list[str]:
        return [job.keys[GROUP] for job in self.group_jobs()]

    def unfinished(self, jobs: Sequence[_Job]) -> list[_Job]:
        """List this machine's jobs whose work is not done, or not published."""
        return [job for job in jobs if self.share.is_own(job.number) and not job.is_done()]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let one process at a time work in the folder."""
        torch.set_float32_matmul_precision("highest")  # nearest centroids depend on float32's rounding
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = self.folder / ".lock"
        try:
            acquired = locked(lock)
        except Timeout:
            if self.store is not None:  # the other would wait for this machine's share
                raise UserError(
                    f"{self.folder}: another process prepares here; give each machine a run_dir of its own"
                ) from None

            self.reporter.say(f"{lock}: another process is preparing this run; waiting for it")
            acquired = locked(lock, -1)
            self._read_ledgers()

        with acquired:
            for path in self.folder.rglob(".tmp-*"):  # of a killed process; the lock excludes running ones
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()

            yield

    def handle_unlisted(self, prune: bool) -> None:
        """Report encoded parts that the source no longer lists; remove them if ``prune``."""
        listed = {*map(self.prepared.folder_of, self.parts)}
        unlisted = sorted({*self.folder.glob("parts/*")} - listed)
        if not unlisted:
            return

        num_bytes = 0
        for path in chain.from_iterable(folder.rglob("*") for folder in unlisted):
            if path.is_file():
                num_bytes += path.stat().st_size

        outcome = "prepare --prune removes them"
        if prune:
            outcome = "removed"
            with self._alone():
                for folder in unlisted:
                    shutil.rmtree(folder)

        size = format_bytes(num_bytes)
        self.reporter.say(f"encoded parts that the source no longer lists: {len(unlisted):,}, {size}; {outcome}")

    def _encode(self) -> str:
        jobs = self.unfinished(self.part_jobs())
        broken = Counter[str]()
        num_read = 0
        total = count_samples(job.part for job in jobs)
        for job in run_jobs("encode", encode_part, jobs, self.plugins, total, self.reporter):
            num_read += job.num_samples
            broken.update(job.ledger.entries[RECORDS]["broken"])
            check_broken(broken, num_read, self.config.max_bad_fraction, job.ledger.folder / TEXTS_FILE)

        num_parts = len(self.parts)
        line = f"{num_parts:,} part{'s' * (num_parts != 1)}"
        num_kept = num_parts - len(jobs)
        if num_kept:
            line += f", {num_kept:,} already encoded"

        return line

    def _compute_partition(self) -> None:
        """Fit the partition.

        The fine centroids are cached under a key of all their inputs, so that another number of clusters reuses them.
        """
        config = self.config.partition
        seed = self.experiment.seed
        fine = [config.metric, config.num_fine_centroids, config.fit_fraction, config.num_iterations, config.device]
        fine_key = sha256_json([fine, seed, self._fitted_files(), self.ledger.files("index")])
        sample, _ = self.prepared.sample(config.fit_fraction)
        self._fitted = fit_partition(
            sample.features,
            config,
            seed,
            labels=sample.labels,
            keys=sample.keys,
            features=sha256_json(asdict(self.config.features)),
            on_progress=partial(self.reporter.advance, "partition"),
            kept_fine=(self.folder / "fine.safetensors", fine_key),
        )

    def _write_partition(self) -> str:
        """Write the rule of the fitted partition, the clusters of the sample and the split by hashes."""
        prepared = self.prepared
        (partition, clusters) = self._fitted
        _, hashes = prepared.sample(self.config.partition.fit_fraction)
        split = Split.of(hashes, clusters, self.config.held_out_fraction)
        partition.save(prepared.rule_file)
        atomic_write(prepared.clusters_file, lambda path: save_array(path, clusters))
        atomic_write_json(prepared.split_file, asdict(split))
        self.reporter.advance("partition", len(clusters), len(clusters))
        sizes = partition.counts.tolist()
        return f"{len(sizes)} clusters of {min(sizes):,} to {max(sizes):,} samples"

    def _write_shards(self) -> str:
        jobs = self.unfinished(self.group_jobs())
        num_bytes = 0
        total = sum(job.num_samples for job in jobs)
        for job in run_jobs("shards", write_group, jobs, self.plugins, total, self.reporter):
            # The group's other file holds thumbnails.
            for name, file in job.ledger.files(GROUP).items():
                if name.startswith("shards/"):
                    num_bytes += file["bytes"]

        return f"{total:,} samples, {format_bytes(num_bytes)}"

    def _merge(self) -> None:
        groups = {}
        for job in self.group_jobs():
            groups[job.ledger.file] = job.ledger.entries[GROUP]

        for path in list((self.folder / "groups").iterdir()):
            if path.with_suffix(".json") not in groups:
                path.unlink()

        manifest = merge_groups(self.experiment, self.plugins, self.prepared, [*groups.values()])
        thumbnails = Thumbnails.read(path.with_suffix(".npz") for path in groups)
        report_partition(self.experiment, self.plugins, self.prepared, thumbnails)
        manifest.write(self.run_dir)
        self.reporter.advance("merge", manifest.num_samples, manifest.num_samples)
