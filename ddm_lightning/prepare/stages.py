"""``prepare``: the stages from a source of images to shards.

Two stages are maps: ``encode`` over parts, ``shards`` over groups of parts. ``index`` and ``partition`` need only
hashes and the features of a sample of all parts, and ``merge`` only counts and indices of all groups.

A stage writes its files under temporary names, renames them, and enters itself in a ``Ledger`` with a hash of its
inputs: its part of the configuration and the hashes of earlier files. So a second run does nothing, a killed run
continues where it stopped (at the unfinished part or group), and a changed key reruns only the stages that depend on
it.
"""

from __future__ import annotations

import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import torch
from filelock import Timeout

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write, atomic_write_json, locked, sha256_file, sha256_json
from ddm_lightning.core.formatting import format_bytes
from ddm_lightning.members.preflight import missing_condition
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.partition.build import check_partition, fit_partition
from ddm_lightning.partition.columns import save_array
from ddm_lightning.partition.partition import Partition
from ddm_lightning.prepare.encode import (
    CODES,
    FEATURES,
    RECORDS,
    SAMPLE,
    TEXTS_FILE,
    PartJob,
    check_broken,
    encode_part,
    inputs_of_columns,
)
from ddm_lightning.prepare.engine import Reporter, run_jobs
from ddm_lightning.prepare.ledger import Job, Ledger, Published, hash_of_files
from ddm_lightning.prepare.merge import merge_groups
from ddm_lightning.prepare.prepared import Prepared, Thumbnails, write_index
from ddm_lightning.prepare.reading import Plugins
from ddm_lightning.prepare.records import Part, Record, count_samples
from ddm_lightning.prepare.report import report_partition
from ddm_lightning.prepare.write_shards import GROUP, GroupJob, Split, write_group
from ddm_lightning.shards.manifest import DataSizes, Manifest, manifest_path

# Part of every stage's hash. Raise it when the output of a stage changes.
STAGES_VERSION = 5
_SPLIT = re.compile("train(ing)?|val(id|idation)?|dev|test(ing)?", re.IGNORECASE)


def prepare(
    experiment: Experiment,
    run_dir: Path,
    reporter: Reporter | None = None,
    check: Callable[[DataSizes], None] | None = None,
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
    preparation.bring_up_to_date(check)
    preparation.handle_unlisted(prune)
    return Manifest.read(run_dir)


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
    compute: Callable[[], object] = lambda: None
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
        run_dir: the run folder.
        reporter: receives progress.

    Raises:
        UserError: the source cannot be listed, unless its shards are finished; it has no parts; or two of one name.
    """

    published: Published | None = None
    """Where parts and groups are published, if several machines share the work."""

    def __init__(self, experiment: Experiment, run_dir: Path, reporter: Reporter) -> None:
        self.experiment = experiment
        self.config = experiment.prepare
        self.plugins = Plugins(experiment.prepare)
        self.run_dir = run_dir
        self.folder = RunFolder(run_dir).prepared
        self.reporter = reporter
        self.columns = inputs_of_columns(self.plugins)
        self.parts = self._list_parts()
        self._read_ledgers()

    def _list_parts(self) -> list[Part]:
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
        self.prepared = Prepared(self.folder, self.parts, published=self.published)
        numbers = range(self.prepared.num_groups)
        self.groups = [Ledger(self.folder / "groups" / f"{number:05}.json", self.folder) for number in numbers]

    def is_own(self, number: int) -> bool:
        """Whether a part or group is this machine's."""
        return True

    def _stages(self) -> list[Stage]:
        config = self.config
        seed = self.experiment.seed
        files = self.ledger.files
        columns = self.columns
        parts = [asdict(part) for part in self.parts]
        other = Path(config.partition.path or "").expanduser()  # the partition of another run, which may have changed
        fit = [asdict(config.partition), asdict(config.features), sha256_file(other) if other.is_file() else None]
        limits = [config.max_bad_fraction] + ([] if config.near_duplicates is None else [config.near_duplicates])
        # The engine and the number of processes change no byte.
        everything = asdict(replace(config, engine="local", num_processes=0))
        return [
            Stage(
                "source",
                lambda: parts,
                ("parts.json",),
                lambda: atomic_write_json(self.prepared.parts_file, parts),
            ),
            Stage("encode", lambda: columns, (), self._encode, jobs=self.part_jobs),
            Stage(
                "index",
                lambda: [
                    hash_of_files(self.prepared.ledgers, columns),
                    [ledger.entries[RECORDS].get("filtered") for ledger in self.prepared.ledgers],
                    *limits,
                ],
                ("index.json", "broken.jsonl"),
                lambda: write_index(self.prepared, columns.keys() - {SAMPLE, CODES}, *limits),
            ),
            Stage(
                "partition",
                lambda: [fit, seed, config.held_out_fraction, self._fitted_files(), files("index")],
                ("rule.safetensors", "split.json", "clusters.npy"),
                self._write_partition,
                self._compute_partition,
            ),
            Stage("shards", self._group_keys, (), self._write_shards, jobs=self.group_jobs),
            Stage(
                "merge",
                lambda: [everything, self.experiment.name, files("index"), self._group_keys()],
                (
                    "partition.safetensors",
                    "shards/*/*/index.json",
                    "clusters.png",
                    "report/report.html",
                    "manifest.json",
                ),
                self._merge,
            ),
        ]

    def bring_up_to_date(self, check: Callable[[DataSizes], None] | None = None) -> None:
        """Run the stages without a valid record, one process at a time."""
        if not self.pending():
            self.reporter.say(f"{self.folder}: up to date")
            return

        self.check_before_writing(check)
        with self._alone():
            for stage in self._stages():
                if not self._is_done(stage):
                    self._run(stage)

        if self.plugins.source.attribution:
            self.reporter.say(self.plugins.source.attribution)

    def check_before_writing(self, check: Callable[[DataSizes], None] | None) -> None:
        """Build all plug-ins and compare sizes, so that bad input is refused before a file is touched; see ``prepare``.

        Raises:
            UserError: bad input.
        """
        self.plugins.versions()
        source = self.plugins.source
        names = getattr(source, "class_names", None) or ()
        are_splits = names and all(map(_SPLIT.fullmatch, names))
        if self.experiment.condition.kind == "class" and (source.num_classes < 2 or are_splits):
            raise UserError(
                f"key 'condition.kind' = 'class': source {self.config.source.name!r} has no classes, only "
                f"{', '.join(names) or 'images'}; use text or none, or give the folder of the classes"
            )

        if self.unfinished(self.part_jobs()):
            _ = self.plugins.parts  # refuses a source that is gone, or lacks a column
            if not any(RECORDS in ledger.entries for ledger in self.prepared.ledgers):
                self._check_condition()

        check_partition(self.config.partition, count_samples(self.parts))
        if self.config.partition.path is not None:
            if not (path := Path(self.config.partition.path).expanduser()).is_file():
                raise UserError(
                    f"key 'prepare.partition.path': {path} is no file; give another run's "
                    "prepared/partition.safetensors"
                )

            Partition.load(path)

        if check is not None:
            check(self.plugins.sizes())

    def _check_condition(self) -> None:
        """Look for a caption, or for two classes, if the condition needs them.

        Raises:
            UserError: there are none.
        """
        kind = self.experiment.condition.kind
        seen = set[Any]()
        num_read = 0
        if kind == "none":
            return

        for found in self.plugins.look():
            num_read += 1
            if isinstance(found, Record):
                seen.add(found.label if kind == "class" else found.caption)
            if len(seen - {""}) > (kind == "class"):
                return

        # Sorted by class, the first thousand of a larger source may have one.
        if seen and (kind != "class" or num_read == count_samples(self.parts)):
            raise missing_condition(kind, num_read)

    def _run(self, stage: Stage) -> None:
        start = time.monotonic()
        stage.compute()
        # Remove the manifest first, so that a half-changed folder does not look finished.
        manifest_path(self.run_dir).unlink(missing_ok=True)
        self.ledger.forget(stage.name)
        found = stage.write()
        self.ledger.add(stage.name, stage.key, chain(*map(self.folder.glob, stage.outputs)))
        self.ledger.save()
        self._renew()
        self.reporter.say(f"{stage.name}: done in {time.monotonic() - start:.1f} s" + (f": {found}" if found else ""))

    def pending(self) -> list[Stage]:
        """List the first stage that is not done and all later ones."""
        stages = self._stages()
        return next((stages[number:] for number, stage in enumerate(stages) if not self._is_done(stage)), [])

    def _is_done(self, stage: Stage) -> bool:
        return self.ledger.is_done(stage.name, stage.key) and not self.unfinished(stage.jobs())

    def _renew(self) -> None:
        """Forget what is cached of files that have changed."""
        self.prepared = Prepared(self.folder, self.parts, ledgers=self.prepared.ledgers, published=self.published)

    def _fitted_files(self) -> str:
        """Return a hash of the files that the fit of the partition reads."""
        if self.config.partition.fit_fraction == 1:
            features = FEATURES
        else:
            features = SAMPLE

        return hash_of_files(self.prepared.ledgers, (RECORDS, features))

    def part_jobs(self) -> list[PartJob]:
        """List the parts, with keys of all that their columns are made from."""
        digests = {name: sha256_json(inputs) for name, inputs in self.columns.items()}
        jobs = []
        for number, (part, ledger) in enumerate(zip(self.parts, self.prepared.ledgers, strict=True)):
            samples = sha256_json([part.name, part.fingerprint])
            keys = {name: f"{samples} {digest}" for name, digest in digests.items()}
            name = f"parts/{ledger.folder.name}"
            jobs.append(PartJob(number, name, ledger, keys, self.published, part, len(self.parts)))

        return jobs

    def group_jobs(self) -> list[GroupJob]:
        """List the groups of parts whose shards are written together, with keys of all that they are made from."""
        config = self.config
        seed = self.experiment.seed
        stored = [config.held_out_fraction, asdict(config.shards), seed]
        stored += [self.ledger.files("index"), self.ledger.files("partition"), *config.keep]
        jobs = []
        for number, ledger in enumerate(self.groups):
            prepared = self.prepared.group(number)
            name = f"groups/{number:05}"
            if prepared.filled_parts:
                files = hash_of_files(prepared.ledgers, self.columns.keys() - {SAMPLE, CODES})
                keys = {GROUP: sha256_json([STAGES_VERSION, stored, files])}
                jobs.append(GroupJob(number, name, ledger, keys, self.published, prepared, seed))

        return jobs

    def _group_keys(self) -> list[str]:
        return [job.keys[GROUP] for job in self.group_jobs()]

    def unfinished(self, jobs: Sequence[_Job]) -> list[_Job]:
        """List this machine's jobs whose work is not done, or not published."""
        return [job for job in jobs if self.is_own(job.number) and not job.is_done()]

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Let one process at a time work in the folder."""
        torch.set_float32_matmul_precision("highest")  # nearest centroids depend on float32's rounding
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = self.folder / ".lock"
        try:
            acquired = locked(lock)
        except Timeout:
            if self.published is not None:  # the other would wait for this machine's share
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
        listed = {self.prepared.folder_of(part) for part in self.parts}
        unlisted = [folder for folder in self.folder.glob("parts/*") if folder not in listed]
        if not unlisted:
            return

        num_bytes = sum(path.stat().st_size for folder in unlisted for path in folder.rglob("*") if path.is_file())
        if prune:
            with self._alone():
                for folder in unlisted:
                    shutil.rmtree(folder)

        self.reporter.say(
            f"encoded parts that the source no longer lists: {len(unlisted):,}, {format_bytes(num_bytes)}; "
            + ("removed" if prune else "prepare --prune removes them")
        )

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
        num_kept = len(self.parts) - len(jobs)
        return f"{num_parts:,} part{'s' * (num_parts != 1)}" + (f", {num_kept:,} already encoded" if num_kept else "")

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
        split = Split.of(hashes, clusters, partition.num_clusters, self.config.held_out_fraction)
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
            files = job.ledger.files(GROUP).items()
            num_bytes += sum(file["bytes"] for name, file in files if name.startswith("shards/"))

        return f"{total:,} samples, {format_bytes(num_bytes)}"

    def _merge(self) -> None:
        ledgers = [job.ledger for job in self.group_jobs()]
        for path in list((self.folder / "groups").iterdir()):
            if path.with_suffix(".json") not in [ledger.file for ledger in ledgers]:
                path.unlink()

        groups = [ledger.entries[GROUP] for ledger in ledgers]
        manifest = merge_groups(self.experiment, self.plugins, self.prepared, groups)
        thumbnails = Thumbnails.read(ledger.file.with_suffix(".npz") for ledger in ledgers)
        report_partition(self.experiment, self.plugins, self.prepared, thumbnails)
        manifest.write(self.run_dir)
        self.reporter.advance("merge", manifest.num_samples, manifest.num_samples)
