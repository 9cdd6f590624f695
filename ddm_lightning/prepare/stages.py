"""``prepare``: the stages from a source of images to shards.

Two stages are maps: ``encode`` over parts, ``shards`` over groups of parts. ``index`` and ``partition`` need only
hashes and the features of a sample of all parts, and ``merge`` only counts and indices of all groups.

A stage writes its files under temporary names, renames them, and records itself in a ``Ledger`` with a hash of its
inputs: its part of the configuration and the hashes of earlier files. So a second run does nothing, a killed run
continues where it stopped (at the unfinished part or group), and a changed key reruns only the stages that depend on
it.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write, atomic_write_json, sha256_file, sha256_json
from ddm_lightning.core.formatting import format_bytes
from ddm_lightning.encoders.interfaces import bytes_per_sample
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.partition.build import check_sizes, fit_partition
from ddm_lightning.partition.columns import save_array
from ddm_lightning.prepare.encode import CAPTIONS, FEATURES, LATENTS, RECORDS, SAMPLE, Ledger, PartJob, encode_parts
from ddm_lightning.prepare.engine import Reporter, run_jobs
from ddm_lightning.prepare.merge import merge_groups
from ddm_lightning.prepare.prepared import GROUP_SIZE, Prepared, Thumbnails, write_index
from ddm_lightning.prepare.reading import Plugins
from ddm_lightning.prepare.records import Part, Record, count_samples
from ddm_lightning.prepare.report import report_partition
from ddm_lightning.prepare.store import Store
from ddm_lightning.prepare.write_shards import GROUP, GroupJob, Split, write_group
from ddm_lightning.shards.manifest import DataSizes, Manifest, manifest_path

# Part of every stage's hash. Raise it when the output of a stage changes.
STAGES_VERSION = 5


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
    torch.set_float32_matmul_precision("highest")  # nearest centroids depend on float32's rounding
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
    unfinished: Callable[[], object] = lambda: None
    """Returns what a map has still to do; nothing if it is done."""

    @property
    def key(self) -> str:
        """Hash of the inputs."""
        return sha256_json({"version": STAGES_VERSION, "inputs": self.inputs()})


class Preparation:
    """One call of ``prepare``. Plug-ins are built only when a stage needs them."""

    waits_for_others = True
    """Whether to wait while another process prepares the same folder."""

    store: Store | None = None
    """Where parts and groups are published, if several machines share the work."""

    def __init__(self, experiment: Experiment, run_dir: Path, reporter: Reporter) -> None:
        self.experiment = experiment
        self.config = experiment.prepare
        self.plugins = Plugins(experiment.prepare)
        self.run_dir = run_dir
        self.reporter = reporter
        self.folder = RunFolder(run_dir).prepared
        self.parts = self._list_parts()
        self._read_records()

    def _read_records(self) -> None:
        self.ledger = Ledger(self.folder / "stages.json")
        self.prepared = Prepared(self.folder, self.parts, store=self.store)

    def _list_parts(self) -> list[Part]:
        name = self.config.source.name
        try:
            parts = list(self.plugins.source.parts())
        except UserError as error:
            # Finished shards outlive their source.
            manifest = Manifest.read(self.run_dir) if manifest_path(self.run_dir).exists() else None
            if manifest is None or manifest.source != asdict(self.config.source):
                raise
            self.reporter.say(f"the source cannot be listed ({error}); its prepared parts are used")
            return Prepared(self.folder).parts
        if not parts:
            raise UserError(f"source {name!r}: has no samples; fix prepare.source")
        part, times = Counter(part.name for part in parts).most_common(1)[0]
        if times > 1:
            raise UserError(f"source {name!r}: has {times} parts named {part!r}; fix the source")
        return parts

    def _stages(self) -> list[Stage]:
        config, seed = self.config, self.experiment.seed
        files, groups, keys = self.ledger.files, self._group_files, self._group_keys()
        parts = [asdict(part) for part in self.parts]
        other = Path(config.partition.path or "")  # the partition of another run, which may have changed
        fit = [asdict(config.partition), asdict(config.features), sha256_file(other) if other.is_file() else None]
        # The engine and the number of processes change no byte.
        everything = asdict(replace(config, engine="local", num_processes=0))
        return [
            Stage(
                "source",
                lambda: parts,
                ("parts.json",),
                lambda: atomic_write_json(self.prepared.parts_file, parts),
            ),
            Stage("encode", lambda: keys, (), self._encode, unfinished=self.unfinished_parts),
            Stage(
                "index",
                lambda: [
                    groups(*keys),
                    [ledger.records[RECORDS].get("filtered") for ledger in self.prepared.ledgers],
                    config.max_bad_fraction,
                ],
                ("index.json", "broken.jsonl"),
                lambda: write_index(self.prepared, keys.keys() - {SAMPLE}, config.max_bad_fraction),
            ),
            Stage(
                "partition",
                lambda: [fit, seed, config.held_out_fraction, groups(*self._fit_groups), files("index")],
                ("rule.safetensors", "split.json", "clusters.npy"),
                self._write_partition,
                self._compute_partition,
            ),
            Stage(
                "shards",
                lambda: [job.key for job in self.group_jobs()],
                (),
                self._write_shards,
                unfinished=self.unfinished_groups,
            ),
            Stage(
                "merge",
                lambda: [everything, self.experiment.name, files("index"), [job.key for job in self.group_jobs()]],
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
            self._remove_temporary()
            for stage in self._stages():
                if not self._is_done(stage):
                    self._run(stage)
        if self.plugins.source.attribution:
            self.reporter.say(self.plugins.source.attribution)

    def _run(self, stage: Stage) -> None:
        start = time.monotonic()
        stage.compute()
        # Remove the manifest first, so that a half-changed folder does not look finished.
        manifest_path(self.run_dir).unlink(missing_ok=True)
        self.ledger.forget(stage.name)
        found = stage.write()
        self.ledger.record(stage.name, stage.key, chain(*map(self.folder.glob, stage.outputs)))
        self.ledger.save()
        self.reporter.say(f"{stage.name}: done in {time.monotonic() - start:.1f} s" + (f": {found}" if found else ""))

    def pending(self) -> list[Stage]:
        """List the first stage that is not done and all later ones."""
        stages = self._stages()
        return next((stages[number:] for number, stage in enumerate(stages) if not self._is_done(stage)), [])

    def _is_done(self, stage: Stage) -> bool:
        return self.ledger.is_done(stage.name, stage.key) and not stage.unfinished()

    def unfinished_parts(self) -> dict[int, dict[str, str]]:
        """Map the number of each unfinished part to its missing groups of columns, each with its key."""
        wanted = {}
        for number, (keys, ledger) in enumerate(zip(self._part_keys(), self.prepared.ledgers, strict=True)):
            if missing := {name: key for name, key in keys.items() if not ledger.is_done(name, key)}:
                # New records may have other rows.
                wanted[number] = keys if RECORDS in missing else missing
                if FEATURES in missing and SAMPLE in keys:
                    missing[SAMPLE] = keys[SAMPLE]
        return wanted

    def _part_keys(self) -> list[dict[str, str]]:
        """Return the key of each group of columns of each part."""
        inputs = {name: sha256_json(inputs) for name, inputs in self._group_keys().items()}
        samples = [sha256_json([part.name, part.fingerprint]) for part in self.parts]
        return [{name: f"{part} {digest}" for name, digest in inputs.items()} for part in samples]

    def _group_keys(self) -> dict[str, Any]:
        """Return the inputs of each group of columns, other than the part."""
        config = self.config
        base: dict[str, Any] = {"source": asdict(config.source), "images": asdict(config.images)}
        if self.plugins.filters or config.keep:
            base |= {"filters": self.plugins.filters.inputs, "keep": config.keep}
        keys: dict[str, Any] = {
            RECORDS: base,
            LATENTS: [base, asdict(config.image_encoder), config.horizontal_flips],
            FEATURES: [base, asdict(config.features)],
        }
        if (fraction := config.partition.fit_fraction) < 1:
            keys[SAMPLE] = [keys[FEATURES], fraction]
        if config.captions:  # not their weights
            base["captions"] = [caption.column for caption in config.captions]
        if config.caption_encoder is not None:
            keys[CAPTIONS] = [base, asdict(config.caption_encoder)]
        return keys

    @property
    def _fit_groups(self) -> tuple[str, str]:
        """Groups of columns that the fit of the partition reads."""
        return RECORDS, FEATURES if self.config.partition.fit_fraction == 1 else SAMPLE

    def _group_files(self, *names: str) -> str:
        """Return a hash of the files of some groups of columns, over all parts."""
        return _hash_of(self.prepared.ledgers, names)

    def group_jobs(self) -> list[GroupJob]:
        """List the groups of parts whose shards are written together, with keys of all that they are made from."""
        config, seed, names = self.config, self.experiment.seed, self._group_keys().keys() - {SAMPLE}
        stored = [config.held_out_fraction, asdict(config.shards), seed, self.ledger.files("index")]
        stored.append(self.ledger.files("partition"))
        jobs = []
        for first in range(0, len(self.parts), GROUP_SIZE):
            some = slice(first, first + GROUP_SIZE)
            key = sha256_json([STAGES_VERSION, stored, _hash_of(self.prepared.ledgers[some], names)])
            records = [ledger.records for ledger in self.prepared.ledgers[some]]
            jobs.append(GroupJob(first // GROUP_SIZE, self.folder, self.parts[some], first, seed, key, records))
        return jobs

    def unfinished_groups(self) -> list[GroupJob]:
        """List the groups whose shards are not written."""
        return [job for job in self.group_jobs() if not job.ledger.is_done(GROUP, job.key)]

    def check_before_writing(self, check: Callable[[DataSizes], None] | None) -> None:
        """Build all plug-ins and compare sizes, so that bad input is refused before a file is touched; see ``prepare``.

        Raises:
            UserError: bad input.
        """
        self.plugins.versions()
        if self.experiment.condition.kind == "class" and self.plugins.source.num_classes < 2:
            raise UserError(
                f"key 'condition.kind' = 'class': source {self.config.source.name!r} has no classes; use text or none"
            )
        if (num_samples := count_samples(self.parts)) is not None:
            check_sizes(self.config.partition, num_samples)
        if check is not None:
            check(self.sizes())

    def sizes(self) -> DataSizes:
        """Return the sizes of the data to be written; the image size may come from the first readable image.

        Raises:
            UserError: bad input.
        """
        size = self.config.images.size
        if size is None:
            samples = (sample for part in self.parts for sample in self.plugins.source.read(part))
            first = next((sample for sample in samples if isinstance(sample, Record)), None)
            if first is None:
                raise UserError(f"source {self.config.source.name!r}: no sample can be read; fix prepare.source")
            size = first.image.shape[0]
        captions = self.plugins.caption_encoder
        return DataSizes(
            self.plugins.image_encoder.x_shape(size),
            captions.size if captions else 0,
            captions.token_shape if captions else None,
            self.plugins.source.num_classes,
        )

    @contextmanager
    def _alone(self) -> Iterator[None]:
        self.folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(self.folder / ".lock")
        try:
            acquired = lock.acquire(blocking=False)
        except Timeout:
            if not self.waits_for_others:
                raise UserError(
                    f"{self.folder}: another process prepares here; give each machine a run_dir of its own"
                ) from None
            self.reporter.say(f"{self.folder}: another process is preparing this run; waiting for it")
            acquired = lock.acquire()
            self._read_records()
        with acquired:
            yield

    def _remove_temporary(self) -> None:
        """Remove half-written files of a killed process; the lock excludes running ones."""
        for path in chain(
            *map(self.folder.glob, (".tmp-*", "report/.tmp-*", "groups/.tmp-*", "parts/*/.tmp-*", "shards/*/*/.tmp-*"))
        ):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

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
        wanted, ledgers = self.unfinished_parts(), self.prepared.ledgers
        jobs = [
            PartJob(self.parts[number], self.prepared.part_folder(number), keys, len(self.parts), self.store)
            for number, keys in wanted.items()
        ]
        for number, records in encode_parts(jobs, self.plugins, partial(self.reporter.advance, "encode")):
            ledgers[[*wanted][number]].records = records
        self.prepared = Prepared(self.folder, self.parts, ledgers=ledgers, store=self.store)  # may have other rows
        num_parts, num_kept = len(self.parts), len(self.parts) - len(wanted)
        return f"{num_parts:,} part{'s' * (num_parts != 1)}" + (f", {num_kept:,} already encoded" if num_kept else "")

    def _compute_partition(self) -> None:
        """Fit the partition.

        The fine centroids are cached under a key of all their inputs, so that another number of clusters reuses them.
        """
        config, seed = self.config.partition, self.experiment.seed
        fine = [config.metric, config.num_fine_centroids, config.fit_fraction, config.num_iterations, config.device]
        fine_key = sha256_json([fine, seed, self._group_files(*self._fit_groups), self.ledger.files("index")])
        sample = self.prepared.sample(config.fit_fraction)
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
        prepared, (partition, clusters) = self.prepared, self._fitted
        hashes = prepared.sample(self.config.partition.fit_fraction).split_hash
        split = Split.of(hashes, clusters, partition.num_clusters, self.config.held_out_fraction)
        partition.save(prepared.rule_file)
        atomic_write(prepared.clusters_file, lambda path: save_array(path, clusters))
        atomic_write_json(prepared.split_file, asdict(split))
        self.reporter.advance("partition", len(clusters), len(clusters))
        sizes = partition.counts.tolist()
        return f"{len(sizes)} clusters of {min(sizes):,} to {max(sizes):,} samples"

    def _write_shards(self) -> str:
        jobs, sizes = self.unfinished_groups(), self.prepared.index["part_samples"]
        total = sum(sum(sizes[job.first : job.first + len(job.parts)]) for job in jobs)
        done, num_bytes = 0, 0
        advance = partial(self.reporter.advance, "shards")
        run = run_jobs(
            write_group, jobs, self.plugins, total, lambda here: advance(done + here, total), self.config.engine
        )
        for _, record in run:
            done += sum(folder["samples"] for folder in record["folders"].values())
            num_bytes += sum(file["bytes"] for file in record["files"].values())
            advance(done, total)
        return f"{done:,} samples, {format_bytes(num_bytes)}"

    def _group_ledgers(self) -> list[Ledger]:
        return [job.ledger for job in self.group_jobs()]

    def _merge(self) -> None:
        ledgers = self._group_ledgers()
        groups = [ledger.records[GROUP] for ledger in ledgers]
        for path in list((self.folder / "groups").iterdir()):
            if path.with_suffix(".json") not in [ledger.file for ledger in ledgers]:
                path.unlink()
        manifest = merge_groups(self.experiment, self.plugins, self.prepared, groups)
        thumbnails = Thumbnails.read(ledger.file.with_suffix(".npz") for ledger in ledgers)
        report_partition(self.experiment, self.plugins, self.prepared, thumbnails)
        manifest.write(self.run_dir)
        sizes = ", ".join(f"{name} {bytes_per_sample({name: text})}" for name, text in manifest.columns.items())
        self.reporter.say(f"bytes per sample: {sizes}, and its caption")
        self.reporter.advance("merge", manifest.num_samples, manifest.num_samples)


def _hash_of(ledgers: Sequence[Ledger], names: Iterable[str]) -> str:
    """Return a hash of the files of some groups of columns, over some parts."""
    return sha256_json([[ledger.files(name) for name in sorted(names)] for ledger in ledgers])
