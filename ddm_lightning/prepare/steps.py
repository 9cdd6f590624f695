"""What each stage of ``prepare`` does with the files of the stages before it."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8

from ddm_lightning.config import PartitionConfig
from ddm_lightning.errors import UserError
from ddm_lightning.files import atomic_folder, atomic_write
from ddm_lightning.prepare.interfaces import CaptionEncoder, Features, Source
from ddm_lightning.prepare.partition import fit_partition
from ddm_lightning.prepare.records import Record

Tick = Callable[[int, int], None]
"""Called with samples done and samples in all."""

_SAMPLES_AT_ONCE = 256


class Prepared:
    """The files between the stages, below ``prepared/``; arrays are memory maps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.source = folder / "source"
        self.features_file = folder / "features.npy"
        self.captions_file = folder / "captions.npy"
        self.partition_file = folder / "partition.safetensors"
        self.clusters_file = folder / "clusters.npy"
        self.shards = folder / "shards"
        self.grid = folder / "clusters.png"

    @property
    def images(self) -> UInt8[np.ndarray, "n h w 3"]:
        """The pictures, in source order."""
        return _load(self.source / "images.npy")

    @property
    def features(self) -> Float[np.ndarray, "n d"]:
        """Their features."""
        return _load(self.features_file)

    @property
    def texts(self) -> Float[np.ndarray, "n size"]:
        """Their caption vectors."""
        return _load(self.captions_file)

    @property
    def clusters(self) -> Int[np.ndarray, "n"]:
        """Their clusters."""
        return _load(self.clusters_file)

    def records(self) -> tuple[list[str], list[str], list[int]]:
        """Keys, captions and labels, in source order."""
        with (self.source / "records.jsonl").open(encoding="utf-8") as lines:
            records = [json.loads(line) for line in lines]
        return [r["key"] for r in records], [r["caption"] for r in records], [r["label"] for r in records]


def _load(path: Path) -> np.ndarray:
    # Copy-on-write, because torch warns of arrays that it could not write to.
    loaded: np.ndarray = np.load(path, mmap_mode="c", allow_pickle=False)
    return loaded


def write_source(source: Source, name: str, prepared: Prepared, tick: Tick) -> None:
    """``source/images.npy`` and ``source/records.jsonl``.

    Raises:
        UserError: the source yields no square RGB pictures of one size, a label out of range, or another
            number of samples than it announced.
    """

    def refuse(problem: str) -> UserError:
        return UserError(f"source {name!r}: {problem}; mend the source (prepare/interfaces.py says what it must yield)")

    total = len(source)
    images: np.memmap | None = None
    count = 0
    with atomic_folder(prepared.source) as folder, (folder / "records.jsonl").open("w", encoding="utf-8") as lines:
        for record in source:
            if images is None:
                images = _create(folder / "images.npy", (total, *record.image.shape), np.dtype(np.uint8))
            problem = _problem_of(record, images.shape[1:], source.num_classes)
            if problem or count == total:
                raise refuse(problem or f"yields more than the {total} samples of its length")
            images[count] = record.image
            count += 1
            lines.write(json.dumps({"key": record.key, "caption": record.caption, "label": record.label}) + "\n")
            tick(count, total)
        if images is None or count != total:
            raise refuse(f"yields {count} samples, its length says {total}")
        images.flush()


def _problem_of(record: Record, shape: tuple[int, ...], num_classes: int) -> str:
    image = record.image
    if image.dtype != np.uint8 or image.ndim != 3 or image.shape[0] != image.shape[1] or image.shape[2] != 3:
        return f"sample {record.key!r} is no square uint8 RGB picture ({image.dtype} {list(image.shape)})"
    if image.shape != shape:
        return f"sample {record.key!r} has shape {list(image.shape)}, the first one {list(shape)}"
    if not 0 <= record.label < num_classes:
        return f"sample {record.key!r} has label {record.label}, outside 0 to {num_classes - 1}"
    return ""


def write_features(features: Features, name: str, prepared: Prepared, tick: Tick) -> None:
    """``features.npy``.

    Raises:
        UserError: the feature network gives NaN or infinity.
    """
    images = prepared.images

    def write(path: Path) -> None:
        out = _create(path, (len(images), features.size), np.dtype(np.float32))
        for start in range(0, len(images), _SAMPLES_AT_ONCE):
            rows = features.encode(images[start : start + _SAMPLES_AT_ONCE])
            if not np.isfinite(rows).all():
                raise UserError(f"feature network {name!r}: gives values that are not finite; check its weights")
            out[start : start + len(rows)] = rows
            tick(start + len(rows), len(images))
        out.flush()

    atomic_write(prepared.features_file, write)


def write_captions(encoder: CaptionEncoder, prepared: Prepared, tick: Tick) -> None:
    """``captions.npy``."""
    _, captions, _ = prepared.records()

    def write(path: Path) -> None:
        out = _create(path, (len(captions), encoder.size), np.dtype(np.float32))
        for start in range(0, len(captions), _SAMPLES_AT_ONCE):
            rows = encoder.encode(captions[start : start + _SAMPLES_AT_ONCE])
            out[start : start + len(rows)] = rows
            tick(start + len(rows), len(captions))
        out.flush()

    atomic_write(prepared.captions_file, write)


def write_partition(config: PartitionConfig, seed: int, prepared: Prepared, tick: Tick) -> None:
    """``partition.safetensors`` and ``clusters.npy``."""
    features = torch.from_numpy(prepared.features)
    tick(0, len(features))
    partition = fit_partition(features, config, seed)
    partition.save(prepared.partition_file)
    clusters = partition.assign(features).to(torch.int32).numpy()
    atomic_write(prepared.clusters_file, lambda path: np.save(path, clusters))
    tick(len(features), len(features))


def _create(path: Path, shape: tuple[int, ...], dtype: np.dtype) -> np.memmap:
    """An ``.npy`` file that is filled block by block, for arrays larger than memory."""
    created: np.memmap = np.lib.format.open_memmap(  # type: ignore[no-untyped-call]
        path, mode="w+", dtype=dtype, shape=shape
    )
    return created
