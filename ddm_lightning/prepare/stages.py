"""``prepare``: the stages from a source of pictures to shards, each done once.

A stage writes its files under temporary names, renames them, then records itself (``ledger.py``) with a hash of
what it read: its part of the configuration and the hashes of the files before it. So a second run finds
everything recorded and does nothing, a killed one goes on where it was (in ``encode`` at the part where it
was), and a changed key runs again what hangs on it.
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
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write_json, sha256_file, sha256_json
from ddm_lightning.core.formatting import amount
from ddm_lightning.encoders.interfaces import bytes_per_sample
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.partition.build import check_sizes
from ddm_lightning.prepare import steps
from ddm_lightning.prepare.encode import CAPTIONS, FEATURES, LATENTS, RECORDS, is_whole, read_state
from ddm_lightning.prepare.index import write_index
from ddm_lightning.prepare.ledger import Ledger, Stage
from ddm_lightning.prepare.plugins import Plugins
from ddm_lightning.prepare.prepared import Prepared
from ddm_lightning.prepare.progress import Reporter, SilentReporter
from ddm_lightning.prepare.records import Part, Record
from ddm_lightning.prepare.summary import outcome
from ddm_lightning.prepare.write_shards import check_compression
from ddm_lightning.shards.manifest import DataSizes, Manifest, manifest_path
from ddm_lightning.shards.upload import upload_shards


def prepare(
    experiment: Experiment,
    run_dir: Path,
    reporter: Reporter | None = None,
    check: Callable[[DataSizes], None] | None = None,
    prune: bool = False,
) -> Manifest:
    """Bring ``run_dir``/prepared up to date with the experiment.

    Several processes may call it at once: one works, the others wait and find the work done.

    Args:
        experiment: its ``prepare`` section and its seed say what to make.
        run_dir: the run folder.
        reporter: hears of progress; None is silent.
        check: called before anything is written, to refuse what will not fit the data.
        prune: whether to remove encoded parts that the source no longer lists.

    Raises:
        UserError: bad input; nothing is written, or, where only a stage can find out (too many broken samples,
            features that do not cluster evenly enough), no further stage.
    """
    preparation = Preparation(experiment, run_dir, reporter or SilentReporter())
    preparation.bring_up_to_date(check)
    preparation.handle_unlisted(prune)
    return Manifest.read(run_dir)


class Preparation:
    """One call of ``prepare``; plug-ins are built when a stage is going to need them, not before."""

    def __init__(self, experiment: Experiment, run_dir: Path, reporter: Reporter) -> None:
        self.experiment = experiment
        self.config = experiment.prepare
        self.run_dir = run_dir
        self.reporter = reporter
        self.plugins = Plugins(self.config)
        self.prepared = Prepared(RunFolder(run_dir).prepared)
        self.ledger = Ledger(self.prepared.folder)
        self.parts = self._list_parts()
        self._states: list[dict[str, Any]] = []
        self._num_kept = 0
        self._write_partition: Callable[[], None]
        self.stages = self._plan()

    def _list_parts(self) -> list[Part]:
        try:
            parts = list(self.plugins.source.parts())
        except UserError as error:
            # The shards outlive what they were made of.
            if manifest_path(self.run_dir).exists() and Manifest.read(self.run_dir).source == asdict(
                self.config.source
            ):
                self.reporter.say(f"the source cannot be listed ({error}); what was prepared of it is used")
                return self.prepared.parts
            raise
        if not parts:
            raise UserError(f"source {self.config.source.name!r}: has no samples; mend prepare.source")
        name, times = Counter(part.name for part in parts).most_common(1)[0]
        if times > 1:
            raise UserError(f"source {self.config.source.name!r}: has {times} parts named {name!r}; mend the source")
        return parts

    @property
    def _captions_used(self) -> bool:
        return self.config.caption_encoder is not None and self.experiment.condition.kind in ("text", "tokens")

    def _plan(self) -> list[Stage]:
        config, seed = self.config, self.experiment.seed
        shards = {
            "held_out_fraction": config.held_out_fraction,
            "out_of_cluster_fraction": config.partition.out_of_cluster_fraction,
            "max_bytes": config.shards.max_bytes,
            "compression": config.shards.compression,
            "seed": seed,
        }
        remote = config.shards.remote
        upload = Stage("upload", lambda: [remote, self._files_of("shards")], ("uploaded.json",), self._run_upload)
        return [
            Stage("source", lambda: [asdict(part) for part in self.parts], ("parts.json",), self._run_source),
            Stage("encode", lambda: [self._files_of("source"), self._group_keys()], (), self._run_encode),
            Stage(
                "index",
                lambda: [self._group_files(*self._group_keys()), config.max_bad_fraction, self._captions_used],
                ("index.json", "broken.jsonl"),
                lambda: write_index(
                    Prepared(self.prepared.folder), self._group_keys(), config.max_bad_fraction, self._captions_used
                ),
            ),
            Stage(
                "partition",
                lambda: [self._partition_inputs(), seed, self._group_files(RECORDS, FEATURES), self._files_of("index")],
                ("partition.safetensors", "partition.json", "clusters.npy"),
                lambda: self._write_partition(),
                self._compute_partition,
            ),
            Stage(
                "shards",
                lambda: [
                    shards,
                    self._group_files(*(name for name in self._group_keys() if name != FEATURES)),
                    self._files_of("index"),
                    self._files_of("partition"),
                ],
                ("shards/*/*/index.json", "statistics.json"),
                self._run_shards,
            ),
            *([upload] if remote else []),
            Stage(
                "report",
                lambda: [
                    self._inputs_of_all(),
                    self.experiment.name,
                    self._files_of("index"),
                    self._files_of("partition"),
                    self._files_of("shards"),
                ],
                ("clusters.png", "report/report.html", "report/*.png", "manifest.json"),
                self._run_report,
            ),
        ]

    def bring_up_to_date(self, check: Callable[[DataSizes], None] | None = None) -> None:
        """Run the stages that have no record, one process at a time."""
        folder = self.prepared.folder
        if self._next_stage() is None:
            self.reporter.say(f"{folder}: up to date")
            return
        self.check_before_writing()
        if check is not None:
            check(self._sizes())
        with self._alone():
            self._sweep()
            while (stage := self._next_stage()) is not None:
                # Without the manifest nobody takes a folder in the middle of a change for a finished one.
                seconds = self.ledger.run(stage, lambda: manifest_path(self.run_dir).unlink(missing_ok=True))
                found = outcome(stage.name, Prepared(self.prepared.folder), self.config, self._num_kept)
                self.reporter.say(f"{stage.name}: done in {seconds:.1f} s{found}")
        if self.plugins.source.attribution:
            self.reporter.say(self.plugins.source.attribution)

    def pending(self) -> list[str]:
        """Names of the stages that would run now, as far as that can be told: what hangs on one of them runs too."""
        first = self._next_stage()
        return [] if first is None else [stage.name for stage in self.stages[self.stages.index(first) :]]

    def _next_stage(self) -> Stage | None:
        """The first stage whose record is missing or does not fit, by what is on the disk now."""
        self.ledger.read()
        self._states = [read_state(self.prepared.folder_of(part)) for part in self.parts]
        for stage in self.stages:
            if not self.ledger.is_done(stage) or (stage.name == "encode" and self.unfinished_parts()):
                return stage
        return None

    def unfinished_parts(self) -> dict[int, dict[str, str]]:
        """Groups of columns yet to be computed, each with its key, by the number of the part."""
        wanted, group_keys = {}, self._group_keys()
        for number, (part, state) in enumerate(zip(self.parts, self._states, strict=True)):
            folder = self.prepared.folder_of(part)
            samples = sha256_json([part.name, part.fingerprint])
            keys = {name: f"{samples} {sha256_json(inputs)}" for name, inputs in group_keys.items()}
            missing = {
                name: key
                for name, key in keys.items()
                if name not in state or state[name]["key"] != key or not is_whole(folder, state[name])
            }
            if missing:
                # Rows may be others when the records are made anew.
                wanted[number] = keys if RECORDS in missing else missing
        return wanted

    def _group_keys(self) -> dict[str, Any]:
        """What each group of columns is made from, besides the part."""
        config = self.config
        base = {"source": asdict(config.source), "pictures": asdict(config.pictures)}
        keys: dict[str, Any] = {
            RECORDS: base,
            LATENTS: [base, asdict(config.image_encoder), config.horizontal_flips],
            FEATURES: [base, asdict(config.features)],
        }
        if config.caption_encoder is not None:
            keys[CAPTIONS] = [base, asdict(config.caption_encoder)]
        return keys

    def _group_files(self, *names: str) -> str:
        """A hash of the files of some groups, over all parts."""
        return sha256_json(
            [[state.get(name, {}).get("files") for name in sorted(set(names))] for state in self._states]
        )

    def _partition_inputs(self) -> dict[str, Any]:
        inputs = {**asdict(self.config.partition), "features": asdict(self.config.features)}
        del inputs["out_of_cluster_fraction"]  # the shards' alone
        path = self.config.partition.path
        # Another run's partition may have been made anew.
        return {**inputs, "existing": sha256_file(Path(path)) if path and Path(path).is_file() else None}

    def _files_of(self, stage: str) -> dict[str, Any]:
        return self.ledger.files(stage)

    def _inputs_of_all(self) -> dict[str, Any]:
        """The configuration, without what changes no byte."""
        inputs = asdict(self.config)
        for name in ("engine", "num_processes"):
            del inputs[name]
        del inputs["shards"]["remote"]
        return inputs

    def check_before_writing(self) -> None:
        """Build every plug-in and compare sizes, so that bad input is told before a file is touched."""
        start = time.monotonic()
        self.plugins.all()
        check_compression(self.config.shards)
        if self.experiment.condition.kind == "class" and self.plugins.source.num_classes < 2:
            raise UserError(
                f"key 'condition.kind' = 'class': source {self.config.source.name!r} has no classes; use text or none"
            )
        captions = self.plugins.caption_encoder
        if self.experiment.condition.kind == "tokens" and (captions is None or captions.token_shape is None):
            raise UserError(
                "key 'condition.kind' = 'tokens': prepare.caption_encoder stores one vector a caption; use clip-text "
                "or t5-text with store: tokens (or ids, encoded while training), or condition.kind = text"
            )
        sizes = [part.num_samples for part in self.parts]
        if None not in sizes:
            check_sizes(self.config.partition, sum(size or 0 for size in sizes))
        if time.monotonic() - start > 1:
            self.reporter.say(f"plug-ins: ready in {time.monotonic() - start:.1f} s")

    def _sizes(self) -> DataSizes:
        """Of the data that is going to be written, by the first picture that can be read."""
        size = self.config.pictures.size
        if size is None:
            found = (found for part in self.parts for found in self.plugins.source.read(part))
            first = next((found for found in found if isinstance(found, Record)), None)
            if first is None:
                raise UserError(f"source {self.config.source.name!r}: no sample can be read; mend prepare.source")
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
        folder = self.prepared.folder
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            self.reporter.say(f"{folder}: another process is preparing this run; waiting for it")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _sweep(self) -> None:
        """Remove what a killed process left half-written; the lock says that nobody is writing now."""
        for path in [*self.prepared.folder.glob(".tmp-*"), *self.prepared.folder.glob("parts/*/.tmp-*")]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def handle_unlisted(self, prune: bool) -> None:
        """Report encoded parts that the source no longer lists; remove them if ``prune``."""
        listed = {self.prepared.folder_of(part) for part in self.parts}
        unlisted = [folder for folder in self.prepared.folder.glob("parts/*") if folder not in listed]
        if not unlisted:
            return
        num_bytes = sum(path.stat().st_size for folder in unlisted for path in folder.rglob("*") if path.is_file())
        found = f"encoded parts that the source no longer lists: {len(unlisted):,}, {amount(num_bytes)}"
        if prune:
            with self._alone():
                for folder in unlisted:
                    shutil.rmtree(folder)
        self.reporter.say(f"{found}; removed" if prune else f"{found}; prepare --prune removes them")

    def _run_source(self) -> None:
        self.prepared.write_parts(self.parts)

    def _run_encode(self) -> None:
        wanted = self.unfinished_parts()
        steps.encode(self.plugins, self.prepared, self.parts, wanted, self._tick("encode"), self._captions_used)
        self._num_kept = len(self.parts) - len(wanted)

    def _compute_partition(self) -> None:
        config, seed = self.config.partition, self.experiment.seed
        # All that the fine centroids depend on; another number of clusters takes those that are there.
        fine = [config.metric, config.num_fine_centroids, config.fit_fraction, config.num_iterations, config.device]
        key = sha256_json([fine, seed, self._group_files(FEATURES), self._files_of("index")])
        prepared = Prepared(self.prepared.folder)
        self._write_partition = steps.compute_partition(self.plugins, seed, prepared, self._tick("partition"), key)

    def _run_shards(self) -> None:
        steps.write_shards(self.plugins, self.experiment.seed, Prepared(self.prepared.folder), self._tick("shards"))

    def _run_upload(self) -> None:
        remote = self.config.shards.remote
        assert remote is not None
        hashes = upload_shards(self.prepared.shards, remote, self._tick("upload"))
        atomic_write_json(self.prepared.uploaded_file, {"remote": remote, "sha256": hashes})

    def _run_report(self) -> None:
        # Here, because matplotlib would be imported by each process that works on parts.
        from ddm_lightning.prepare.summary import manifest_of, write_pictures

        prepared = Prepared(self.prepared.folder)
        write_pictures(self.experiment, self.plugins, prepared)
        manifest = manifest_of(self.experiment, self.plugins, prepared, self.ledger)
        manifest.write(self.run_dir)
        sizes = ", ".join(f"{name} {bytes_per_sample({name: text})}" for name, text in manifest.columns.items())
        self.reporter.say(f"bytes a sample: {sizes}, and its caption")
        self.reporter.advance("report", prepared.num_samples, prepared.num_samples)

    def _tick(self, stage: str) -> Callable[[int, int], None]:
        return lambda done, total: self.reporter.advance(stage, done, total)
