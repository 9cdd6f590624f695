"""``prepare``: the stages from a source of images to shards.

A stage writes its files under temporary names, renames them, and records itself (``Ledger``) with a hash of its inputs:
its part of the configuration and the hashes of earlier files. So a second run does nothing, a killed run continues
where it stopped (``encode`` at the unfinished part), and a changed key reruns only the stages that depend on it.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ddm_lightning.config import Experiment
from ddm_lightning.config.load import prepare_to_json
from ddm_lightning.core.columns import save_array
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write, atomic_write_json, sha256_file, sha256_json
from ddm_lightning.core.formatting import amount
from ddm_lightning.encoders.interfaces import bytes_per_sample
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.partition.build import check_sizes, displaced_fractions, fit_partition
from ddm_lightning.prepare.encode import (
    CAPTIONS,
    FEATURES,
    LATENTS,
    RECORDS,
    PartJob,
    encode_parts,
    is_whole,
    read_state,
)
from ddm_lightning.prepare.index import write_index
from ddm_lightning.prepare.prepared import Ledger, Prepared, Stage
from ddm_lightning.prepare.progress import Reporter, SilentReporter
from ddm_lightning.prepare.reading import Plugins
from ddm_lightning.prepare.records import Part, Record, count_samples
from ddm_lightning.prepare.summary import manifest_of, outcome, write_images
from ddm_lightning.prepare.write_shards import check_compression, write_shards
from ddm_lightning.shards.manifest import DataSizes, Manifest, manifest_path
from ddm_lightning.shards.upload import upload_shards

_MAX_THUMBNAILS, _MIN_THUMBNAILS_PER_PART = 8192, 16


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
    preparation = Preparation(experiment, run_dir, reporter or SilentReporter())
    preparation.bring_up_to_date(check)
    preparation.handle_unlisted(prune)
    return Manifest.read(run_dir)


class Preparation:
    """One call of ``prepare``. Plug-ins are built only when a stage needs them."""

    def __init__(self, experiment: Experiment, run_dir: Path, reporter: Reporter) -> None:
        self.experiment = experiment
        self.config = experiment.prepare
        self.run_dir = run_dir
        self.reporter = reporter
        self.plugins = Plugins(self.config)
        self.folder = RunFolder(run_dir).prepared
        self.ledger = Ledger(self.folder)
        self.parts = self._list_parts()
        self._states: list[dict[str, Any]] = []
        self._num_kept = 0
        self._write_partition: Callable[[], None]
        self.stages = self._plan()

    @property
    def prepared(self) -> Prepared:
        """The folder as it is now; an instance caches the files it read."""
        return Prepared(self.folder)

    def _list_parts(self) -> list[Part]:
        try:
            parts = list(self.plugins.source.parts())
        except UserError as error:
            # Finished shards outlive their source.
            manifest = Manifest.read(self.run_dir) if manifest_path(self.run_dir).exists() else None
            if manifest is None or manifest.source != asdict(self.config.source):
                raise
            self.reporter.say(f"the source cannot be listed ({error}); its prepared parts are used")
            return self.prepared.parts
        if not parts:
            raise UserError(f"source {self.config.source.name!r}: has no samples; fix prepare.source")
        name, times = Counter(part.name for part in parts).most_common(1)[0]
        if times > 1:
            raise UserError(f"source {self.config.source.name!r}: has {times} parts named {name!r}; fix the source")
        return parts

    @property
    def _captions_used(self) -> bool:
        return self.config.caption_encoder is not None and self.experiment.condition.kind in ("text", "tokens")

    def _plan(self) -> list[Stage]:
        config, seed, files, groups = self.config, self.experiment.seed, self.ledger.files, self._group_files
        shards = {
            "held_out_fraction": config.held_out_fraction,
            "out_of_cluster_fraction": config.partition.out_of_cluster_fraction,
            "max_bytes": config.shards.max_bytes,
            "compression": config.shards.compression,
            "seed": seed,
        }
        stages = [
            Stage(
                "source",
                lambda: [asdict(part) for part in self.parts],
                ("parts.json",),
                lambda: self.prepared.write_parts(self.parts),
            ),
            Stage("encode", lambda: [files("source"), self._group_keys()], (), self._run_encode),
            Stage(
                "index",
                lambda: [groups(*self._group_keys()), config.max_bad_fraction, self._captions_used],
                ("index.json", "broken.jsonl"),
                lambda: write_index(self.prepared, self._group_keys(), config.max_bad_fraction, self._captions_used),
            ),
            Stage(
                "partition",
                lambda: [self._partition_inputs(), seed, groups(RECORDS, FEATURES), files("index")],
                ("partition.safetensors", "partition.json", "clusters.npy"),
                lambda: self._write_partition(),
                self._compute_partition,
            ),
            Stage(
                "shards",
                lambda: [shards, groups(*self._group_keys().keys() - {FEATURES}), files("index"), files("partition")],
                ("shards/*/*/index.json", "statistics.json"),
                lambda: write_shards(self.plugins, seed, self.prepared, self._tick("shards")),
            ),
            Stage("upload", lambda: [config.shards.remote, files("shards")], ("uploaded.json",), self._run_upload),
            Stage(
                "report",
                lambda: [
                    self._inputs_of_all(),
                    self.experiment.name,
                    *(files(stage) for stage in ("index", "partition", "shards")),
                ],
                ("clusters.png", "report/report.html", "report/*.png", "manifest.json"),
                self._run_report,
            ),
        ]
        return [stage for stage in stages if stage.name != "upload" or config.shards.remote]

    def bring_up_to_date(self, check: Callable[[DataSizes], None] | None = None) -> None:
        """Run the stages without a valid record, one process at a time."""
        if self._next_stage() is None:
            self.reporter.say(f"{self.folder}: up to date")
            return
        self.check_before_writing()
        if check is not None:
            check(self._sizes())
        with self._alone():
            self._remove_temporary()
            while (stage := self._next_stage()) is not None:
                # Without the manifest nobody takes a half-changed folder for a finished one.
                seconds = self.ledger.run(stage, lambda: manifest_path(self.run_dir).unlink(missing_ok=True))
                found = outcome(stage.name, self.prepared, self.config, self._num_kept)
                self.reporter.say(f"{stage.name}: done in {seconds:.1f} s{found}")
        if self.plugins.source.attribution:
            self.reporter.say(self.plugins.source.attribution)

    def pending(self) -> list[str]:
        """List the stages that would run now: the first unfinished one and all after it."""
        first = self._next_stage()
        return [] if first is None else [stage.name for stage in self.stages[self.stages.index(first) :]]

    def _next_stage(self) -> Stage | None:
        """Return the first stage without a valid record, from the files as they are now."""
        self.ledger.read()
        self._states = [read_state(self.prepared.folder_of(part)) for part in self.parts]
        for stage in self.stages:
            if not self.ledger.is_done(stage) or (stage.name == "encode" and self.unfinished_parts()):
                return stage
        return None

    def unfinished_parts(self) -> dict[int, dict[str, str]]:
        """Return the missing groups of columns, each with its key, by the number of the part."""
        wanted, group_keys = {}, self._group_keys()
        for number, (part, state) in enumerate(zip(self.parts, self._states, strict=True)):
            folder, samples = self.prepared.folder_of(part), sha256_json([part.name, part.fingerprint])
            keys = {name: f"{samples} {sha256_json(inputs)}" for name, inputs in group_keys.items()}
            missing = {
                name: key
                for name, key in keys.items()
                if name not in state or state[name]["key"] != key or not is_whole(folder, state[name])
            }
            if missing:
                # New records may have other rows.
                wanted[number] = keys if RECORDS in missing else missing
        return wanted

    def _group_keys(self) -> dict[str, Any]:
        """Return everything that each group of columns is made from, besides the part."""
        config = self.config
        base = {"source": asdict(config.source), "pictures": asdict(config.pictures)}
        latents = [base, asdict(config.image_encoder), config.horizontal_flips]
        keys: dict[str, Any] = {RECORDS: base, LATENTS: latents, FEATURES: [base, asdict(config.features)]}
        if config.caption_encoder is not None:
            keys[CAPTIONS] = [base, asdict(config.caption_encoder)]
        return keys

    def _group_files(self, *names: str) -> str:
        """Return a hash of the files of some groups, over all parts."""
        return sha256_json([[state.get(name, {}).get("files") for name in sorted(names)] for state in self._states])

    def _partition_inputs(self) -> dict[str, Any]:
        inputs = {**asdict(self.config.partition), "features": asdict(self.config.features)}
        del inputs["out_of_cluster_fraction"]  # an input of the shards
        path = self.config.partition.path
        # Another run's partition may have changed.
        return {**inputs, "existing": sha256_file(Path(path)) if path and Path(path).is_file() else None}

    def _inputs_of_all(self) -> dict[str, Any]:
        """Return the configuration without keys that change no byte."""
        inputs = asdict(self.config)
        for name in ("engine", "num_processes"):
            del inputs[name]
        del inputs["shards"]["remote"]
        return inputs

    def check_before_writing(self) -> None:
        """Build all plug-ins and compare sizes, so that bad input is refused before a file is touched."""
        start = time.monotonic()
        self.plugins.build_all()
        check_compression(self.config.shards)
        if self.experiment.condition.kind == "class" and self.plugins.source.num_classes < 2:
            name = self.config.source.name
            raise UserError(f"key 'condition.kind' = 'class': source {name!r} has no classes; use text or none")
        captions = self.plugins.caption_encoder
        if self.experiment.condition.kind == "tokens" and (captions is None or captions.token_shape is None):
            raise UserError(
                "key 'condition.kind' = 'tokens': prepare.caption_encoder stores one vector per caption; use "
                "clip-text or t5-text with store: tokens (or ids, encoded during training), or condition.kind = text"
            )
        if (num_samples := count_samples(self.parts)) is not None:
            check_sizes(self.config.partition, num_samples)
        if time.monotonic() - start > 1:
            self.reporter.say(f"plug-ins: ready in {time.monotonic() - start:.1f} s")

    def _sizes(self) -> DataSizes:
        """Return the sizes of the data to be written; the image size may come from the first readable image."""
        size = self.config.pictures.size
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
            self.reporter.say(f"{self.folder}: another process is preparing this run; waiting for it")
            acquired = lock.acquire()
        with acquired:
            yield

    def _remove_temporary(self) -> None:
        """Remove half-written files of a killed process; the lock excludes running ones."""
        for path in [*self.folder.glob(".tmp-*"), *self.folder.glob("parts/*/.tmp-*")]:
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
        found = f"encoded parts that the source no longer lists: {len(unlisted):,}, {amount(num_bytes)}"
        if prune:
            with self._alone():
                for folder in unlisted:
                    shutil.rmtree(folder)
        self.reporter.say(f"{found}; removed" if prune else f"{found}; prepare --prune removes them")

    def _run_encode(self) -> None:
        wanted, text = self.unfinished_parts(), prepare_to_json(self.config)
        max_thumbnails = max(_MIN_THUMBNAILS_PER_PART, _MAX_THUMBNAILS // len(self.parts))
        jobs = [
            PartJob(self.parts[number], self.prepared.folder_of(self.parts[number]), keys, max_thumbnails, text)
            for number, keys in wanted.items()
        ]
        encode_parts(jobs, self.plugins, self._tick("encode"), self._captions_used)
        self._num_kept = len(self.parts) - len(wanted)

    def _compute_partition(self) -> None:
        """Compute the partition and leave a function that writes it.

        ``partition.json`` holds the displaced fractions. The fine centroids are cached under a key of all their inputs,
        so that another number of clusters reuses them.
        """
        config, seed, prepared = self.config.partition, self.experiment.seed, self.prepared
        fine = [config.metric, config.num_fine_centroids, config.fit_fraction, config.num_iterations, config.device]
        fine_key = sha256_json([fine, seed, self._group_files(FEATURES), self.ledger.files("index")])
        features = prepared.rows(FEATURES, "features")
        partition, clusters = fit_partition(
            features,
            config,
            seed,
            labels=prepared.rows(RECORDS, "label")[:],
            keys=prepared.texts("keys"),
            features=sha256_json(asdict(self.config.features)),
            tick=self._tick("partition"),
            kept_fine=(prepared.fine_file, fine_key),
        )
        displaced = displaced_fractions(partition, features, clusters, config.device)
        self.reporter.advance("partition", len(features), len(features))

        def write() -> None:
            partition.save(prepared.partition_file)
            atomic_write(prepared.clusters_file, lambda path: save_array(path, clusters))
            atomic_write_json(prepared.partition_facts_file, {"displaced": displaced})

        self._write_partition = write

    def _run_upload(self) -> None:
        remote = self.config.shards.remote
        assert remote is not None
        hashes = upload_shards(self.prepared.shards, remote, self._tick("upload"))
        atomic_write_json(self.prepared.uploaded_file, {"remote": remote, "sha256": hashes})

    def _run_report(self) -> None:
        prepared = self.prepared
        write_images(self.experiment, self.plugins, prepared)
        manifest = manifest_of(self.experiment, self.plugins, prepared, self.ledger)
        manifest.write(self.run_dir)
        sizes = ", ".join(f"{name} {bytes_per_sample({name: text})}" for name, text in manifest.columns.items())
        self.reporter.say(f"bytes per sample: {sizes}, and its caption")
        self.reporter.advance("report", prepared.num_samples, prepared.num_samples)

    def _tick(self, stage: str) -> Callable[[int, int], None]:
        return lambda done, total: self.reporter.advance(stage, done, total)
