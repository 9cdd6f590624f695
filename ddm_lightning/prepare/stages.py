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
from itertools import chain, takewhile
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

import torch
from filelock import Timeout

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write, atomic_write_json, locked, sha256_file, sha256_json
from ddm_lightning.core.formatting import format_bytes
from ddm_lightning.members.run_folder import RunFolder, changed_since_prepared
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
from ddm_lightning.prepare.ledger import Job, Ledger, Store, hash_of_files
from ddm_lightning.prepare.merge import buckets_in_words, merge_groups
from ddm_lightning.prepare.plugins import Plugins, inputs_of_images
from ddm_lightning.prepare.prepared import Prepared, Thumbnails, write_index
from ddm_lightning.prepare.records import Part, count_samples
from ddm_lightning.prepare.report import report_partition
from ddm_lightning.prepare.share import Share, agree_on_parts, take_over
from ddm_lightning.prepare.write_shards import GROUP, GroupJob, Split, write_group
from ddm_lightning.shards.manifest import HELD_OUT, TRAIN, DataSizes, Manifest, manifest_path

# Part of every stage's hash. Raise it when the output of a stage changes.
STAGES_VERSION = 5
STAGES = ("source", "encode", "index", "partition", "shards", "merge")
RECHECK_SECONDS = 600.0
"""Time after which a waiting machine reads all ledgers anew: another may have found that its parts have changed."""
# Ends a line about work that is awaited, although something is published in its place.
_DIFFERS = " (published, but of other settings or parts: compare the commands of all machines)"

# Of all clusters, with or without folders of buckets.
_INDICES = tuple(f"shards/**/{split}/index.json" for split in (TRAIN, HELD_OUT))

Check: TypeAlias = Callable[[DataSizes], None]


def prepare(
    experiment: Experiment,
    run_dir: Path,
    reporter: Reporter | None = None,
    check: Check | None = None,
    prune: bool = False,
    share: Share | None = None,
) -> Manifest | None:
    """Bring ``run_dir``/prepared up to date with the experiment, or do one machine's share of that.

    Several processes may call it at once: one works, the others wait. Machines with shares have nothing in common but
    the experiment's ``remote``. Each publishes its results, waits for the results that it needs of others, and can be
    replaced by one with an empty folder. Machine 1 also fits the clusters and merges.

    Args:
        experiment: its ``prepare`` section and its seed are used.
        run_dir: the run folder.
        reporter: receives progress; None for silence.
        check: called before anything is written; refuses experiments that do not fit the data.
        prune: whether to remove encoded parts that the source no longer lists.
        share: this machine's share of parts and groups; None to do all here, without a URL.

    Returns:
        The manifest; None if another machine ends the work.

    Raises:
        UserError: bad input. Nothing is written; if only a stage can detect it (too many broken samples, unbalanced
            clusters), no further stage runs. Also if ledgers at the URL are damaged or of other versions.
    """
    preparation = Preparation(experiment, run_dir, reporter or Reporter(), share)
    preparation.bring_up_to_date(check)
    preparation.handle_unlisted(prune)
    if preparation.share.is_first:
        return Manifest.read(run_dir)

    return None


@dataclass(frozen=True)
class Stage:
    """A stage of ``prepare``."""

    name: str
    inputs: Any
    """Everything the stage reads, by content, as plain JSON."""
    write: Callable[[], str | None]
    """Writes the result files; may return a line to print."""
    outputs: tuple[str, ...] = ()
    """Patterns of its result files below ``prepared/``."""
    begin: Callable[[], object] = lambda: None
    """Called before ``write``, while the old files are still there; raises for bad input."""
    jobs: Sequence[Job] = ()
    """The jobs, if the stage is a map; each has keys of its own."""
    kind: str = ""
    """``parts`` or ``groups``: what the jobs are for, and the folder of their ledgers."""

    @property
    def key(self) -> str:
        """Hash of the inputs."""
        return sha256_json({"version": STAGES_VERSION, "inputs": self.inputs})


_Job = TypeVar("_Job", bound=Job)


class Preparation:
    """One call of ``prepare``, with the same arguments. Plug-ins are built only when a stage needs them.

    Raises:
        UserError: the source cannot be listed, unless its shards are finished; it has no parts, or two of one name; or
            there is no ``remote`` for shares.
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
            if experiment.remote is None:
                raise UserError("--parts: the machines share their work at a URL; set remote")

            url = f"{experiment.remote.rstrip('/')}/{self.folder.name}"
            self.store = Store(url, self.plugins.versions())

        self._read_ledgers()
        self._changed = changed_since_prepared(experiment)
        self._keep_rule()

    def _keep_rule(self) -> None:
        """Go on without ``images.reduce`` in a folder whose parts were made without it."""
        images = replace(self.config.images, reduce=False)
        config = replace(self.config, images=images)
        columns = inputs_of_columns(Plugins(config))
        digest = sha256_json(columns[RECORDS])
        keys = [ledger.entries[RECORDS]["key"] for ledger in self.prepared.ledgers if RECORDS in ledger.entries]
        if any(key.endswith(digest) for key in keys):
            self.experiment = replace(self.experiment, prepare=config)
            self.config = self.plugins.config = config
            self.columns = columns

    def _list_parts(self) -> Sequence[Part]:
        try:
            return self.plugins.parts
        except UserError as error:
            # Finished shards outlive their source.
            prepared = Prepared(self.folder)
            is_finished = prepared.parts_file.exists() and manifest_path(self.run_dir).exists()
            if not is_finished or Manifest.read(self.run_dir).source != asdict(self.config.source):
                raise

            self.reporter.say(f"the source cannot be listed ({error}); only its prepared parts can be used")
            return prepared.parts

    def _read_ledgers(self) -> None:
        """Read the ledgers of stages, parts and groups from the folder."""
        self.ledger = Ledger(self.folder / "stages.json")
        self.prepared = Prepared(self.folder, self.parts, store=self.store)
        self.groups = []
        for number in range(self.prepared.num_groups):
            self.groups.append(Ledger(self.folder / "groups" / f"{number:05}.json", self.folder))

    def _stages(self) -> Iterator[Stage]:
        """Yield the stages; the inputs of each are known when those before it are done."""
        config = self.config
        columns = self.columns
        if self.store is None:
            parts = [*map(asdict, self.parts)]
            yield Stage("source", parts, partial(atomic_write_json, self.prepared.parts_file, parts), ("parts.json",))

        jobs = self.part_jobs()
        yield Stage("encode", columns, partial(self._encode, jobs), jobs=jobs, kind="parts")

        ledgers = self.prepared.ledgers
        filtered = [ledger.entries[RECORDS]["filtered"] for ledger in ledgers]
        limits = [config.max_bad_fraction]
        if config.near_duplicates is not None:  # without it, the hash is that of earlier versions
            limits.append(config.near_duplicates)

        yield Stage(
            "index",
            [hash_of_files(ledgers, columns), filtered, *limits],
            lambda: write_index(
                self.prepared, columns.keys() - {SAMPLE, CODES}, config.max_bad_fraction, config.near_duplicates
            ),
            ("index.json", "broken.jsonl"),
            self._fetch_sample,
        )

        index_files = self.ledger.files("index")
        features = FEATURES if config.partition.fit_fraction == 1 else SAMPLE
        samples = [hash_of_files(ledgers, (RECORDS, features)), index_files]
        fit = [asdict(config.partition), asdict(config.features), self._hash_of_other_partition()]
        yield Stage(
            "partition",
            [fit, self.experiment.seed, config.held_out_fraction, *samples],
            self._write_partition,
            ("rule.safetensors", "split.json", "clusters.npy"),
            partial(self._fit_partition, samples),
        )

        groups = self.group_jobs()
        keys = [job.keys[GROUP] for job in groups]
        yield Stage("shards", keys, partial(self._write_shards, groups), jobs=groups, kind="groups")

        if not self.share.is_first:
            return

        # The engine and the number of processes change no byte.
        everything = asdict(replace(config, engine="local", num_processes=0))
        everything["images"] = inputs_of_images(config.images)
        report = ("clusters.png", "report/report.html")
        yield Stage(
            "merge",
            [everything, self.experiment.name, index_files, keys],
            partial(self._merge, groups),
            ("partition.safetensors", *_INDICES, *report, "manifest.json"),
            partial(self._fetch_for_merge, groups),
        )

    def _hash_of_other_partition(self) -> str | None:
        """Return a hash of another run's partition, if it is used; it may have changed.

        Raises:
            UserError: it cannot be read.
        """
        given = self.config.partition.path
        if given is None:
            return None

        path = Path(given).expanduser()
        if not path.is_file():
            raise UserError(
                f"key 'prepare.partition.path': {path} is no file; give another run's prepared/partition.safetensors"
            )

        Partition.load(path)
        return sha256_file(path)

    def bring_up_to_date(self, check: Check | None) -> None:
        """Run the stages without a valid record, one process at a time; wait for other machines."""
        if self.store is None and not self.pending():
            self.reporter.say(f"{self.folder}: up to date")
            return

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
        for stage in self._stages():
            missing = ""
            if self.store is None or stage.name == "merge":
                self._run_unless_done(stage)
            elif stage.jobs:
                missing = self._do_share(self.store, stage)
            else:
                missing = self._take_or_make(self.store, stage)

            if missing:
                return missing

        return ""

    def _do_share(self, store: Store, stage: Stage) -> str:
        """Do this machine's share of a stage's jobs; return the jobs of others that it has to wait for."""
        jobs = stage.jobs
        published = take_over(store, self.share, stage.kind, jobs)
        self._run_unless_done(stage)
        missing = [job for job in jobs if not job.ledger.is_stored]
        self.reporter.advance(f"{stage.kind} of all machines", len(jobs) - len(missing), len(jobs))
        # Machine 1 alone merges, so it alone waits for the shards of others.
        if not missing or (stage.name == "shards" and not self.share.is_first):
            return ""

        owners = sorted({self.share.owner_of(job.number) for job in missing})
        plural = "s" if len(owners) > 1 else ""
        machines = f"machine{plural} {', '.join(map(str, owners))}"
        differs = ""
        if any(job.name in published for job in missing):
            differs = _DIFFERS

        return f"{stage.kind} of {machines}{differs}"

    def _take_or_make(self, store: Store, stage: Stage) -> str:
        """Take over a stage of all parts from machine 1, or run it on machine 1; return what is missing."""
        name = f"partition/{stage.name}"
        found = store.read(name)
        if stage.name in found and found[stage.name]["key"] == stage.key:
            self.ledger.entries |= found
            store.pull(name, self.folder, found)
            self._renew()
        elif self.share.is_first:
            self._run_unless_done(stage)
            store.publish(name, self.folder, {stage.name: self.ledger.entries[stage.name]})
        else:
            return f"the {stage.name} of machine 1{_DIFFERS if found else ''}"

        return ""

    def _fetch_sample(self) -> None:
        """Download the columns of all parts that the fit and the report read."""
        partition = self.config.partition
        features = "sample.npy"
        if partition.fit_fraction == 1:
            features = "features.npy"

        names = [ROWS_FILE, "codes.npy", features]
        if partition.kind in ("random", "existing"):
            names.append(TEXTS_FILE)

        self.prepared.fetch(range(len(self.parts)), *names)

    def _fetch_for_merge(self, groups: Sequence[GroupJob]) -> None:
        """Download the files that the report and the merged indices read."""
        self._fetch_sample()
        remote.in_threads(lambda job: job.pull(".npz", "index.json"), groups)

    def check_before_writing(self, check: Check | None) -> None:
        """Build all plug-ins and compare sizes, so that bad input is refused before a file is touched; see ``prepare``.

        Raises:
            UserError: bad input.
        """
        self.plugins.versions()
        check_classes(self.experiment.condition.kind, self.plugins)
        if self.unfinished(self.part_jobs()):
            _ = self.plugins.parts  # refuses a source that is gone, or lacks a column
            is_new = not any(RECORDS in ledger.entries for ledger in self.prepared.ledgers)
            # A machine that joins others late has nothing to read.
            if is_new and self.store is None:
                check_samples(self.experiment.condition.kind, self.plugins)

        check_partition(self.config.partition, count_samples(self.parts))
        self._hash_of_other_partition()
        if check is not None:
            check(self.plugins.sizes())

    def _run_unless_done(self, stage: Stage) -> None:
        if self._is_done(stage):
            return

        if self._changed:
            self.reporter.say(f"settings changed: {self._changed}; {stage.name} and what depends on it are made anew")
            self._changed = ""

        start = time.monotonic()
        stage.begin()
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

    def pending(self) -> tuple[str, ...]:
        """Name the first stage that is not done and all later ones."""
        done = list(takewhile(self._is_done, self._stages()))
        return STAGES[len(done) :]

    def _is_done(self, stage: Stage) -> bool:
        return self.ledger.is_done(stage.name, stage.key) and not self.unfinished(stage.jobs)

    def _renew(self) -> None:
        """Reopen the folder, so that nothing cached of changed files is used."""
        self.prepared = Prepared(self.folder, self.parts, ledgers=self.prepared.ledgers, store=self.store)

    def part_jobs(self) -> list[PartJob]:
        """List a job per part, with a key per column set: a hash of its inputs."""
        digests = {name: sha256_json(inputs) for name, inputs in self.columns.items()}
        jobs = []
        for number, (part, ledger) in enumerate(zip(self.parts, self.prepared.ledgers, strict=True)):
            samples = sha256_json([part.name, part.fingerprint])
            keys = {name: f"{samples} {digest}" for name, digest in digests.items()}
            name = f"parts/{ledger.folder.name}"
            jobs.append(PartJob(number, name, ledger, keys, self.store, part, len(self.parts)))

        return jobs

    def group_jobs(self) -> list[GroupJob]:
        """List a job per group of parts, whose shards are written together; its key is a hash of their inputs."""
        config = self.config
        seed = self.experiment.seed
        common = [config.held_out_fraction, asdict(config.shards), seed]
        common += [self.ledger.files("index"), self.ledger.files("partition"), *config.keep]
        columns = self.columns.keys() - {SAMPLE, CODES}
        jobs = []
        for number, ledger in enumerate(self.groups):
            prepared = self.prepared.group(number)
            name = f"groups/{number:05}"
            if prepared.filled_parts:
                files = hash_of_files(prepared.ledgers, columns)
                keys = {GROUP: sha256_json([STAGES_VERSION, common, files])}
                jobs.append(GroupJob(number, name, ledger, keys, self.store, prepared, seed))

        return jobs

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

    def _encode(self, parts: Sequence[PartJob]) -> str:
        jobs = self.unfinished(parts)
        broken = Counter[str]()
        num_read = 0
        total = count_samples(job.part for job in jobs)
        for job in run_jobs("encode", encode_part, jobs, self.plugins, total, self.reporter):
            num_read += job.num_samples
            broken.update(job.ledger.entries[RECORDS]["broken"])
            check_broken(broken, num_read, self.config.max_bad_fraction, job.ledger.folder / TEXTS_FILE)

        num_parts = len(parts)
        line = f"{num_parts:,} part" if num_parts == 1 else f"{num_parts:,} parts"
        num_kept = num_parts - len(jobs)
        if num_kept:
            line += f", {num_kept:,} already encoded"

        return line

    def _fit_partition(self, samples: list[Any]) -> None:
        """Fit the partition.

        The fine centroids are cached under a key of all their inputs, so that another number of clusters reuses them.

        Args:
            samples: hashes of the files that the fit reads.
        """
        self._fetch_sample()
        config = self.config.partition
        seed = self.experiment.seed
        fine = [config.metric, config.num_fine_centroids, config.fit_fraction, config.num_iterations, config.device]
        fine_key = sha256_json([fine, seed, *samples])
        sample, hashes = self.prepared.sample(config.fit_fraction)
        self._partition, self._clusters = fit_partition(
            sample,
            config,
            seed,
            features=sha256_json(asdict(self.config.features)),
            on_progress=partial(self.reporter.advance, "partition"),
            fine_cache=(self.folder / "fine.safetensors", fine_key),
        )
        self._split = Split.of(hashes, self._clusters, self.config.held_out_fraction)

    def _write_partition(self) -> str:
        """Write the rule of the fitted partition, the clusters of the sample and the split by hashes."""
        prepared = self.prepared
        clusters = self._clusters
        self._partition.save(prepared.rule_file)
        atomic_write(prepared.clusters_file, lambda path: save_array(path, clusters))
        atomic_write_json(prepared.split_file, asdict(self._split))
        self.reporter.advance("partition", len(clusters), len(clusters))
        sizes = self._partition.counts.tolist()
        return f"{len(sizes)} clusters of {min(sizes):,} to {max(sizes):,} samples"

    def _write_shards(self, groups: Sequence[GroupJob]) -> str:
        jobs = self.unfinished(groups)
        num_bytes = 0
        total = sum(job.num_samples for job in jobs)
        for job in run_jobs("shards", write_group, jobs, self.plugins, total, self.reporter):
            # The group's other file holds thumbnails.
            for name, file in job.ledger.files(GROUP).items():
                if name.startswith("shards/"):
                    num_bytes += file["bytes"]

        return f"{total:,} samples, {format_bytes(num_bytes)}"

    def _merge(self, groups: Sequence[GroupJob]) -> str:
        entries = {job.ledger.file.stem: job.ledger.entries[GROUP] for job in groups}
        # Remove ledgers and thumbnails of groups that are no more.
        for path in list((self.folder / "groups").iterdir()):
            if path.stem not in entries:
                path.unlink()

        manifest = merge_groups(self.experiment, self.plugins, self.prepared, [*entries.values()])
        thumbnails = Thumbnails.read(job.ledger.file.with_suffix(".npz") for job in groups)
        report_partition(self.experiment, self.plugins, self.prepared, thumbnails, manifest)
        manifest.write(self.run_dir)
        self.reporter.advance("merge", manifest.num_samples, manifest.num_samples)
        return buckets_in_words(manifest)
