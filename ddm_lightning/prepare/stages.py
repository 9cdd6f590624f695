"""``prepare``: the stages from a source of pictures to shards, each done once.

A stage writes its files under temporary names, renames them, then records itself in ``stages.json``
with a hash of what it read: its part of the configuration and the hashes of the files before it. So a
second run finds everything recorded and does nothing, a killed one goes on at the stage that has no
record, and a changed key runs again what hangs on it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from ddm_lightning.config import Experiment
from ddm_lightning.errors import UserError
from ddm_lightning.files import atomic_write_json, read_json, sha256_file, sha256_json
from ddm_lightning.prepare import steps
from ddm_lightning.prepare.interfaces import CaptionEncoder, Features, ImageEncoder, Source
from ddm_lightning.prepare.manifest import (
    HELD_OUT,
    TRAIN,
    ClusterSamples,
    DataSizes,
    Manifest,
    manifest_path,
    shard_name,
)
from ddm_lightning.prepare.partition import Partition, check_sizes
from ddm_lightning.prepare.progress import Reporter, SilentReporter
from ddm_lightning.prepare.registry import CAPTION_ENCODERS, FEATURES, IMAGE_ENCODERS, SOURCES
from ddm_lightning.prepare.report import save_cluster_grid
from ddm_lightning.prepare.shards import check_compression, write_shards
from ddm_lightning.prepare.steps import Prepared, Tick
from ddm_lightning.prepare.verify import verify_shards
from ddm_lightning.run_folder import RunFolder

# Part of every stage's hash: raise it when a stage comes to write something else.
_STAGES_VERSION = 1
_COMMON_PACKAGES = ("ddm_lightning", "torch", "numpy", "pillow", "mosaicml-streaming")


def prepare(
    experiment: Experiment,
    run_dir: Path,
    reporter: Reporter | None = None,
    check: Callable[[DataSizes], None] | None = None,
) -> Manifest:
    """Bring ``run_dir``/prepared up to date with the experiment.

    Several processes may call it at once: one works, the others wait and find the work done.

    Args:
        experiment: its ``prepare`` section and its seed say what to make.
        run_dir: the run folder.
        reporter: hears of progress; None is silent.
        check: called before anything is written, to refuse what will not fit the data.

    Raises:
        UserError: bad input; nothing is written, or, where only a stage can find out (features that do not
            cluster evenly enough), no further stage.
    """
    preparation = _Preparation(experiment, run_dir, reporter or SilentReporter())
    preparation.bring_up_to_date(check)
    return Manifest.read(run_dir)


@dataclass(frozen=True)
class _Stage:
    name: str
    inputs: Mapping[str, Any]
    """The part of the configuration that it reads, as plain JSON."""
    upstream: tuple[str, ...]
    """Stages whose files it reads."""
    outputs: tuple[str, ...]
    """Patterns of the files that stand for its result, below ``prepared/``."""
    run: Callable[[Tick], None]


class _Preparation:
    """One call of ``prepare``; plug-ins are built when a stage is going to need them, not before."""

    def __init__(self, experiment: Experiment, run_dir: Path, reporter: Reporter) -> None:
        self.experiment = experiment
        self.config = experiment.prepare
        self.run_dir = run_dir
        self.reporter = reporter
        self.prepared = Prepared(RunFolder(run_dir).prepared)
        self.records_file = self.prepared.folder / "stages.json"
        self.records: dict[str, Any] = {}
        self.stages = self._plan()

    @cached_property
    def source(self) -> Source:
        source: Source = SOURCES.build(self.config.source.name, self.config.source.params)
        return source

    @cached_property
    def image_encoder(self) -> ImageEncoder:
        encoder: ImageEncoder = IMAGE_ENCODERS.build(self.config.image_encoder.name, self.config.image_encoder.params)
        return encoder

    @cached_property
    def caption_encoder(self) -> CaptionEncoder | None:
        if self.config.caption_encoder is None:
            return None
        encoder: CaptionEncoder = CAPTION_ENCODERS.build(
            self.config.caption_encoder.name, self.config.caption_encoder.params
        )
        return encoder

    @cached_property
    def features(self) -> Features:
        features: Features = FEATURES.build(self.config.features.name, self.config.features.params)
        return features

    def _plugins(self) -> list[Source | ImageEncoder | CaptionEncoder | Features]:
        """All plug-ins; building them checks their names, parameters and packages."""
        captions = [] if self.caption_encoder is None else [self.caption_encoder]
        return [self.source, self.image_encoder, *captions, self.features]

    def _plan(self) -> list[_Stage]:
        config, seed = self.config, self.experiment.seed
        captions: list[_Stage] = []
        if config.caption_encoder is not None:
            inputs = asdict(config.caption_encoder)
            captions.append(_Stage("captions", inputs, ("source",), ("captions.npy",), self._run_captions))
        shards = {
            "image_encoder": asdict(config.image_encoder),
            "held_out_fraction": config.held_out_fraction,
            "shards": asdict(config.shards),
            "seed": seed,
        }
        upstream = ("source", *(stage.name for stage in captions), "partition")
        return [
            _Stage("source", asdict(config.source), (), ("source/*",), self._run_source),
            _Stage("features", asdict(config.features), ("source",), ("features.npy",), self._run_features),
            *captions,
            _Stage(
                "partition",
                {"partition": asdict(config.partition), "seed": seed},
                ("features",),
                ("partition.safetensors", "clusters.npy"),
                self._run_partition,
            ),
            _Stage("shards", shards, upstream, ("shards/*/*/index.json",), self._run_shards),
            _Stage(
                "report",
                {"prepare": asdict(config), "name": self.experiment.name, "seed": seed},
                (*upstream, "shards"),
                ("clusters.png", "manifest.json"),
                self._run_report,
            ),
        ]

    def bring_up_to_date(self, check: Callable[[DataSizes], None] | None = None) -> None:
        """Run the stages that have no record, one process at a time."""
        folder = self.prepared.folder
        if not self._pending():
            self.reporter.say(f"{folder}: up to date")
            return
        self._check_before_writing()
        if check is not None:
            check(self._sizes())
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock")
        try:
            lock.acquire(blocking=False)
        except Timeout:
            self.reporter.say(f"{folder}: another process is preparing this run; waiting for it")
            lock.acquire()
        try:
            self._sweep()
            while pending := self._pending():
                self._run(pending[0])
        finally:
            lock.release()
        if self.source.attribution:
            self.reporter.say(self.source.attribution)

    def _pending(self) -> list[_Stage]:
        """Stages whose record is missing or does not fit, by what is on the disk now."""
        self.records = {}
        if self.records_file.exists():
            self.records = read_json(self.records_file, "the record of the stages", "delete it and run prepare again")
        return [stage for stage in self.stages if not self._is_recorded(stage)]

    def _is_recorded(self, stage: _Stage) -> bool:
        record = self.records.get(stage.name)
        if record is None or record["inputs_sha256"] != self._inputs_sha256(stage):
            return False
        files = {self.prepared.folder / name: entry["bytes"] for name, entry in record["files"].items()}
        return all(path.is_file() and path.stat().st_size == size for path, size in files.items())

    def _inputs_sha256(self, stage: _Stage) -> str:
        upstream = {name: self.records.get(name, {}).get("files") for name in stage.upstream}
        return sha256_json({"version": _STAGES_VERSION, "inputs": stage.inputs, "upstream": upstream})

    def _check_before_writing(self) -> None:
        """Build every plug-in and compare sizes, so that bad input is told before a file is touched."""
        start = time.monotonic()
        self._plugins()
        check_compression(self.config.shards)
        if self.experiment.condition.kind == "class" and self.source.num_classes < 2:
            raise UserError(
                f"key 'condition.kind' = 'class': source {self.config.source.name!r} has no classes; use text or none"
            )
        is_read = self._is_recorded(self.stages[0])
        check_sizes(self.config.partition, len(self.prepared.images) if is_read else len(self.source))
        self.reporter.say(f"plug-ins: ready in {time.monotonic() - start:.1f} s")

    def _sizes(self) -> DataSizes:
        """Of the data that is going to be written, by the first picture."""
        first = next(iter(self.source), None)
        if first is None:
            raise UserError(f"source {self.config.source.name!r}: yields no samples; mend the source")
        captions = self.caption_encoder
        return DataSizes(
            self.image_encoder.x_shape(first.image.shape[0]), captions.size if captions else 0, self.source.num_classes
        )

    def _sweep(self) -> None:
        """Remove what a killed process left half-written; the lock says that nobody is writing now."""
        for path in self.prepared.folder.glob(".tmp-*"):
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()

    def _run(self, stage: _Stage) -> None:
        # Forgotten before it is touched: a stage killed while it replaces its files must not look done.
        # Without the manifest nobody takes a folder in the middle of a change for a finished one.
        manifest_path(self.run_dir).unlink(missing_ok=True)
        if self.records.pop(stage.name, None) is not None:
            atomic_write_json(self.records_file, self.records)
        inputs_sha256 = self._inputs_sha256(stage)
        start = time.monotonic()
        stage.run(lambda done, total: self.reporter.advance(stage.name, done, total))
        seconds = time.monotonic() - start
        folder = self.prepared.folder
        found = sorted(path for pattern in stage.outputs for path in folder.glob(pattern))
        entries = [{"bytes": path.stat().st_size, "sha256": sha256_file(path)} for path in found]
        files = {path.relative_to(folder).as_posix(): entry for path, entry in zip(found, entries, strict=True)}
        self.records[stage.name] = {"inputs_sha256": inputs_sha256, "files": files, "seconds": round(seconds, 3)}
        atomic_write_json(self.records_file, self.records)
        self.reporter.say(f"{stage.name}: done in {seconds:.1f} s")

    def _run_source(self, tick: Tick) -> None:
        steps.write_source(self.source, self.config.source.name, self.prepared, tick)

    def _run_features(self, tick: Tick) -> None:
        steps.write_features(self.features, self.config.features.name, self.prepared, tick)

    def _run_captions(self, tick: Tick) -> None:
        assert self.caption_encoder is not None
        steps.write_captions(self.caption_encoder, self.prepared, tick)

    def _run_partition(self, tick: Tick) -> None:
        steps.write_partition(self.config.partition, self.experiment.seed, self.prepared, tick)

    def _run_shards(self, tick: Tick) -> None:
        keys, captions, labels = self.prepared.records()
        write_shards(
            self.prepared.shards,
            images=self.prepared.images,
            keys=keys,
            captions=captions,
            labels=labels,
            texts=None if self.caption_encoder is None else self.prepared.texts,
            clusters=self.prepared.clusters,
            num_clusters=self.config.partition.num_clusters,
            encoder=self.image_encoder,
            held_out_fraction=self.config.held_out_fraction,
            config=self.config.shards,
            seed=self.experiment.seed,
            tick=tick,
        )

    def _run_report(self, tick: Tick) -> None:
        images = self.prepared.images
        save_cluster_grid(
            self.prepared.grid,
            images,
            self.prepared.clusters,
            self.config.partition.num_clusters,
            title=f"{self.experiment.name}: clusters of {self.config.source.name}, by {self.config.features.name}",
            attribution=self.source.attribution,
            seed=self.experiment.seed,
        )
        self._manifest(len(images), images.shape[1]).write(self.run_dir)
        tick(len(images), len(images))

    def _manifest(self, num_samples: int, image_size: int) -> Manifest:
        partition = Partition.load(self.prepared.partition_file)
        indices = self.records["shards"]["files"]
        samples = {name.removeprefix("shards/").removesuffix("/index.json"): 0 for name in indices}
        for name in samples:
            samples[name] = verify_shards(self.prepared.shards / name, hashes=False)
        clusters = tuple(
            ClusterSamples(samples.get(shard_name(k, TRAIN), 0), samples.get(shard_name(k, HELD_OUT), 0))
            for k in range(partition.num_clusters)
        )
        encoder, captions = self.image_encoder, self.caption_encoder
        return Manifest(
            source=asdict(self.config.source),
            attribution=self.source.attribution,
            image_encoder=asdict(self.config.image_encoder),
            x_shape=encoder.x_shape(image_size),
            normalisation=encoder.normalisation,
            caption_encoder=asdict(self.config.caption_encoder) if self.config.caption_encoder else None,
            text_size=captions.size if captions else 0,
            num_classes=self.source.num_classes,
            features=asdict(self.config.features),
            num_samples=num_samples,
            clusters=clusters,
            priors=tuple(partition.priors.tolist()),
            index_sha256={name: indices[f"shards/{name}/index.json"]["sha256"] for name in samples},
            partition_sha256=self.records["partition"]["files"]["partition.safetensors"]["sha256"],
            versions=self._versions(),
        )

    def _versions(self) -> dict[str, str]:
        packages = {name for plugin in self._plugins() for name in plugin.packages}
        return {name: version(name) for name in sorted({*_COMMON_PACKAGES, *packages})}
