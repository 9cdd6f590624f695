"""Sets of images to compare, read in parts: from a run's shards, from a folder or file, or generated."""

from __future__ import annotations

import hashlib
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias
from zipfile import BadZipFile

import numpy as np
import torch
from jaxtyping import Int, UInt8
from PIL import Image

from ddm_lightning.core.buckets import Bucket, nearest
from ddm_lightning.core.devices import resolve_precision
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.files import atomic_write, sha256_file, sha256_json
from ddm_lightning.core.grids import save_png
from ddm_lightning.core.registry import IMAGE_ENCODERS
from ddm_lightning.encoders.interfaces import ImageEncoder, StoredForm
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.members.run import Run
from ddm_lightning.prepare.reading import cropped
from ddm_lightning.prepare.records import BrokenSample
from ddm_lightning.prepare.sources import decode
from ddm_lightning.prepare.sources.urls import Files
from ddm_lightning.shards.manifest import HELD_OUT, TRAIN, Manifest, shard_name
from ddm_lightning.shards.mds import Shards, open_shards
from ddm_lightning.shards.verify import verify_shards
from ddm_lightning.use.ensemble import DecentralizedEnsemble
from ddm_lightning.use.rows import built_encoder, text_condition

PART_SIZE = 256
Images = UInt8[np.ndarray, "n h w 3"]


Sections: TypeAlias = dict[Bucket | None, range]
"""Positions of the images in each bucket; of all images, under None, without buckets."""


def sections(counts: Mapping[Bucket | None, int], num: int) -> Sections:
    """Divide ``num`` images by shares, as evenly spaced ones of sorted images are divided; those without are left out.

    Args:
        counts: images that stand for each bucket's share.
        num: number of images.
    """
    found: Sections = {}
    first = before = 0
    for name, count in counts.items():
        before += count
        end = -(-before * num // sum(counts.values()))
        if first < end:
            found[name] = range(first, end)

        first = end

    return found


def lengths(groups: Mapping[Bucket | None, Sized]) -> dict[Bucket | None, int]:
    """Number of images in each bucket."""
    return {bucket: len(group) for bucket, group in groups.items()}


def parts(images: ImageSet, bucket: Bucket | None = None) -> list[range]:
    """Positions of the images, or of those of one bucket, in parts of at most ``PART_SIZE`` images of one shape."""
    found = []
    for own, rows in images.sections.items():
        if bucket in (None, own):
            for first in range(0, len(rows), PART_SIZE):
                found.append(rows[first : first + PART_SIZE])

    return found


class ShardImages:
    """Training or held-out images of a run's shards, as the image encoder decodes them.

    Args:
        shards: folder ``prepared/shards``.
        manifest: the run's; None if the shards are not here.
        side: ``TRAIN`` or ``HELD_OUT``.
        max_num: takes this many, evenly spaced, if there are more.

    Raises:
        UserError: see ``open_side``.
    """

    def __init__(self, shards: Path, manifest: Manifest | None, side: str, max_num: int | None = None) -> None:
        self._shards, counts, hashes = open_side(shards, manifest, side)
        assert manifest is not None, "``open_side`` refuses that"
        self.name = side
        self._encoder: ImageEncoder = built_encoder(IMAGE_ENCODERS, manifest.image_encoder)
        self._stored = StoredForm(manifest.stores, manifest.normalisation)
        self.num = min(len(self._shards), max_num or len(self._shards))
        self.sections = sections(counts, self.num)
        self.shape = self._encoder.decode(torch.zeros(1, *manifest.x_shape)).shape[1:]
        made_by = [asdict(manifest.image_encoder), manifest.provenance.get("image_encoder")]
        self.sha256 = sha256_json([hashes, made_by, self.num])

    def column(self, rows: Sequence[int], name: str) -> list[Any]:
        """Return a column of some samples, such as ``caption`` or ``label``."""
        places = self._places(rows)
        for column in self._shards.columns:
            if column.name == name and not column.num_bytes:
                return self._shards.texts(places, name)

        return self._shards.take(places, (name,))[name].tolist()

    def images(self, rows: range) -> Images:
        """Decode one part."""
        stored = self._shards.take(self._places(rows), ("x_0",))["x_0"]
        return self._encoder.decode(self._stored.mean(stored))

    def _places(self, rows: Sequence[int]) -> Int[np.ndarray, "m"]:
        return np.asarray(rows, np.int64) * len(self._shards) // self.num


def open_side(shards: Path, manifest: Manifest | None, side: str) -> tuple[Shards, dict[Bucket | None, int], list[str]]:
    """Open the training or held-out shards of all clusters, those of one bucket after the other.

    Returns:
        The shards, the number of samples of each bucket, and the hashes of the shards' indices.

    Raises:
        UserError: a shard is missing or damaged, or this side has no samples.
    """
    folders = []
    hashes = []
    counts = Counter[Bucket | None]()
    for bucket, clusters in manifest.by_bucket.items() if manifest else ():
        for k, cluster in enumerate(clusters):
            num_samples = cluster.held_out if side == HELD_OUT else cluster.train
            counts[bucket] += num_samples
            if manifest and num_samples:
                name = shard_name(k, side, bucket.name if bucket else None)
                folders.append(shards / name)
                hashes.append(manifest.index_sha256[name])
                verify_shards(folders[-1], hashes=side == HELD_OUT, index_sha256=hashes[-1])

    if not folders:
        raise UserError(
            f"{shards}: no {side} samples here; "
            "copy or prepare some (prepare.held_out_fraction); evaluate.reference=FOLDER compares with other images"
        )

    return open_shards(folders), counts, hashes


class FileImages:
    """Images of one size from a folder, sorted by name, or from an ``.npz`` file (uint8 [n, h, w, 3]).

    A folder is read as the source ``imagefolder`` reads it. With buckets, images are sorted by them, resized and
    cropped as ``prepare`` does.

    Args:
        path: the folder, searched recursively, or the file.
        buckets: of the images to compare with.

    Raises:
        UserError: there are none, or the file holds something else.
    """

    def __init__(self, path: Path, buckets: Sequence[Bucket] = ()) -> None:
        self.name = str(path)
        self._path = path
        self._buckets = buckets
        self._files = None
        if path.is_dir():
            self._files = Files(str(path), "images", follow_links=True)

        self._source: Any = self._files.images if self._files else _read_npz(path)
        self.num = len(self._source)
        if not self.num:
            raise UserError(f"{path}: holds no images; give a folder or an .npz file with some")

        if self._files is None:
            self.sha256 = sha256_file(path)
        else:
            contents = self._contents(self._files.images)
            hashes = {name: hashlib.sha256(data).hexdigest() for name, data in contents}
            # With the decoder's hash, because features are kept under this name.
            self.sha256 = sha256_json([sha256_file(Path(decode.__file__)), hashes])

        self.sections = sections({None: 1}, self.num)
        if buckets:
            self._sort_by_bucket()

        self.shape = self.images(range(1)).shape[1:]

    def _sort_by_bucket(self) -> None:
        sizes = [bucket.size for bucket in self._buckets]
        groups: dict[Bucket | None, list[Any]] = {bucket: [] for bucket in self._buckets}
        for name, image in zip(self._source, self._read(self._source), strict=True):
            bucket = self._buckets[nearest(sizes, *image.shape[:2])]
            groups[bucket].append(name)

        self._source = [*chain(*groups.values())]
        self.sections = sections(lengths(groups), self.num)
        self.sha256 = sha256_json([self.sha256, sizes])

    def _contents(self, names: Sequence[str]) -> Iterator[tuple[str, bytes]]:
        assert self._files is not None
        for name, data in zip(names, self._files.contents(names), strict=True):
            if isinstance(data, Exception):
                raise UserError(f"{self._path / name}: cannot be read ({first_line(data)}); remove or replace it")

            yield name, data

    def images(self, rows: range) -> Images:
        """Read one part.

        Raises:
            UserError: a file is no image, or without buckets has another size than the first one.
        """
        chosen = self._source[rows.start : rows.stop]
        bucket, _ = section_of(self, rows.start)
        images = list[UInt8[np.ndarray, "h w 3"]]()
        for image, name in zip(self._read(chosen), chosen, strict=True):
            if bucket is not None:
                images.append(cropped(image, bucket.size))
                continue

            first = getattr(self, "shape", (images or [image])[0].shape)
            if image.shape != first:
                raise UserError(
                    f"{self._path / str(name)}: has {image.shape[0]} × {image.shape[1]} pixels, and the first image "
                    f"has {first[0]} × {first[1]}; resize them to one size"
                )

            images.append(image)

        return np.stack(images)

    def _read(self, chosen: Sequence[Any]) -> Iterator[UInt8[np.ndarray, "h w 3"]]:
        if self._files is None:
            yield from chosen
            return

        for name, data in self._contents(chosen):
            image = decode.decode(data, name)
            if isinstance(image, BrokenSample):
                raise UserError(f"{self._path / name}: {image.cause} ({image.detail}); remove or replace it")

            yield image


def _read_npz(path: Path) -> Images:
    try:
        # Opened here, because NumPy leaves a damaged file open.
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as stored:
            name = "images" if "images" in stored.files else stored.files[0]
            array = stored[name]

        if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] != 3:
            raise ValueError(f"holds {array.dtype} {list(array.shape)}, not uint8 [n, h, w, 3]")
    except (OSError, ValueError, IndexError, TypeError, AttributeError, EOFError, BadZipFile, zlib.error) as error:
        raise UserError(
            f"{path}: is neither a folder nor an .npz file of images ({first_line(error)}); give one of these"
        ) from None

    return array


class Generated:
    """Images of a run's ensemble, generated in parts and kept in ``folder``.

    Conditions are those of the held-out samples (of training samples if none are held out), repeated in
    shuffled order; without shards, ``sample.prompts`` or all classes in turn. All randomness of an image is keyed by
    its number, so neither parts nor ranks matter. With buckets, conditions are those of samples of the image's own.

    Args:
        run: its experiment's seed and sections ``sample`` and ``evaluate`` are used.
        manifest: the run's; None if the shards are not here.

    Raises:
        UserError: no ensemble, neither shards nor prompts, or damaged shards.
    """

    folder: Path
    sha256: str

    def __init__(self, run: Run, manifest: Manifest | None) -> None:
        experiment = run.experiment
        self.name = experiment.sample.member or experiment.sample.strategy
        self._ensemble = DecentralizedEnsemble.open(experiment)
        self._evaluate = experiment.evaluate
        meta = self._ensemble.meta
        self._kind = meta.condition.kind
        self.num = experiment.evaluate.num_images
        self.shape = self._ensemble.decode(torch.zeros(1, *meta.x_shape)).shape[1:]
        self.buckets = meta.buckets
        self.sections: Sections = {None: range(self.num)}
        self._given: ShardImages | None = None
        self._own: Sequence[Any] = experiment.sample.prompts
        if self._kind == "class":
            self._own = range(meta.condition.size)

        if self._kind != "none" and manifest is not None:
            side = HELD_OUT if any(cluster.held_out for cluster in manifest.clusters) else TRAIN
            self._given = ShardImages(run.folder.shards, manifest, side)
        elif self._kind != "none" and not self._own:
            raise UserError(
                f"{run.folder.shards}: no shards with captions; copy them to this folder, or set sample.prompts"
            )

        sample = asdict(experiment.sample)
        sample["precision"] = resolve_precision(experiment.sample.precision, self._ensemble.device)
        del sample["prompts"], sample["num_per_prompt"], sample["size"], sample["exact"]
        conditions: Any = self._own or None
        if self._given is not None:
            conditions = {"of": self._given.name, "sha256": self._given.sha256}

        self.settings = {
            "experiment": experiment.name,
            "weights_sha256": sha256_file(run.folder.sampled_from(experiment.sample.member)),
            "seed": experiment.seed,
            "sample": sample,
            "num_images": experiment.evaluate.num_images,
            "batch_size": experiment.evaluate.batch_size,
            "image_format": experiment.evaluate.image_format,
            "conditions": conditions,
        }

    def divide_as(self, other: ImageSet) -> None:
        """Give each bucket the share of the images that it has of others."""
        self.sections = sections(lengths(other.sections), self.num)
        for bucket, rows in self.sections.items():
            if bucket is not None:
                self.settings[f"num_{bucket.name}"] = len(rows)

    def given(self, rows: range, column: str) -> list[Any]:
        """Return a column, such as ``caption``, of the samples whose conditions are used."""
        if self._given is None:
            return [self._own[row % len(self._own)] for row in rows]

        bucket, own = section_of(self, rows.start)
        given = self._given.sections.get(bucket, range(self._given.num))
        generator = keyed_generator(self._ensemble.about.seed, "conditions")
        order = torch.randperm(len(given), generator=generator)
        chosen = given.start + order[(torch.tensor(rows) - own.start) % len(order)]
        return self._given.column(chosen.tolist(), column)

    def _condition(self, rows: range) -> Condition | None:
        if self._kind == "none":
            return None
        if self._kind == "class":
            return Condition.of(torch.tensor([int(label) for label in self.given(rows, "label")]))

        return text_condition(self.given(rows, "caption"), self._ensemble.meta)

    def images(self, rows: range, progress: Callable[[float], object] | None = None) -> Images:
        """Return one part, generated now if it is not there, with ``progress`` as in ``sampler.sample``."""
        path = self.folder / "parts" / f"{rows.start:08d}.npz"
        settings = self._evaluate
        if not path.exists():
            clusters = None
            # One member alone makes images of all clusters.
            if self._given is not None and self._ensemble.about.sample.member is None:
                clusters = torch.tensor(self.given(rows, "cluster"))

            bucket, _ = section_of(self, rows.start)
            x_0 = self._ensemble.latents(
                self._condition(rows),
                len(rows),
                bucket.x_shape if bucket else None,
                batch_size=settings.batch_size,
                keys=[("evaluate", row) for row in rows],
                progress=progress,
                clusters=clusters,
            )
            images = self._ensemble.decode(x_0)
            if settings.image_format == "png":
                for row, image in zip(rows, images, strict=True):
                    save_png(self.folder / "images" / f"{row:06d}.png", Image.fromarray(image))

            atomic_write(path, lambda temporary: np.savez(temporary, images=images))

        return _read_npz(path)


ImageSet: TypeAlias = ShardImages | FileImages | Generated
"""Images in a fixed order: their ``name``, ``sha256``, ``num``, ``sections`` and ``shape`` (with buckets, of some of
them), and ``images`` of one of ``parts``."""


def section_of(images: ImageSet, row: int) -> tuple[Bucket | None, range]:
    """Return the bucket of an image, and the positions of all that are in it."""
    return next((bucket, rows) for bucket, rows in images.sections.items() if row in rows)
