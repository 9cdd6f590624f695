"""Encode the parts of a source into columns: records, latents, captions and features.

Columns come in sets. The key of a set identifies its inputs, so a new caption encoder computes only captions again.
``part.json`` holds the keys; a set is listed only while its files are whole. ``rows.npz`` and the features of the fit
sample are all that the fit of the partition reads.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from operator import itemgetter
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from jaxtyping import Bool, Shaped, UInt64

from ddm_lightning.core.devices import tf32
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_files
from ddm_lightning.encoders.interfaces import Images, numbered
from ddm_lightning.partition.columns import GrowingArray, PackedStrings, RowNumbers, packed_strings
from ddm_lightning.prepare.ledger import Entries, Job, OnProgress
from ddm_lightning.prepare.near_duplicates import codes_of
from ddm_lightning.prepare.plugins import ENOUGH, Plugins, inputs_of_images, num_captions
from ddm_lightning.prepare.reading import Chunk, Reading, one_ahead, to_square
from ddm_lightning.prepare.records import Part, Pixels, Record
from ddm_lightning.shards.manifest import IMAGE_COLUMNS

RECORDS = "records"
LATENTS = "latents"
CAPTIONS = "captions"
FEATURES = "features"
SAMPLE = "sample"
CODES = "codes"
LEDGER = "part.json"
ROWS_FILE = "rows.npz"
TEXTS_FILE = "texts.npz"
MAX_THUMBNAILS = 8192
"""Images kept small for the report: of each part its share, but at least one."""
_THUMBNAIL_SIZE = 96  # pixels
_CAPTIONS_AT_ONCE = 256
_NO_IMAGE = np.empty((0, 0, 3), np.uint8)

Hashes: TypeAlias = UInt64[np.ndarray, "n"]
"""64-bit hashes of keys or of groups, one per sample."""
Mask: TypeAlias = Bool[np.ndarray, "n"]


@dataclass(frozen=True)
class PartJob(Job):
    """The columns of one part; a key is a hash of the part, a space, and a hash of everything else."""

    part: Part
    num_parts: int
    """Parts of the source, which share the thumbnails."""

    @property
    def num_samples(self) -> int:
        """Samples read, broken ones included."""
        return int(self.ledger.entries[RECORDS]["num_read"])


def inputs_of_columns(plugins: Plugins) -> dict[str, Any]:
    """Return the inputs of each column set, other than the part."""
    config = plugins.config
    base: dict[str, Any] = {"source": asdict(config.source), "images": inputs_of_images(config.images)}
    if plugins.filters or config.keep:
        base |= {"filters": plugins.filters.inputs, "keep": config.keep}
    if config.captions:  # not their weights
        base["captions"] = [caption.column for caption in config.captions]

    inputs: dict[str, Any] = {
        RECORDS: base,
        LATENTS: [base, asdict(config.image_encoder), config.horizontal_flips],
        FEATURES: [base, asdict(config.features)],
    }
    if config.partition.fit_fraction < 1:
        inputs[SAMPLE] = [inputs[FEATURES], config.partition.fit_fraction]
    if config.near_duplicates is not None:
        inputs[CODES] = inputs[FEATURES]
    if config.caption_encoder is not None:
        inputs[CAPTIONS] = [base, asdict(config.caption_encoder)]

    return inputs


def check_broken(
    counts: Mapping[str, int], num_read: int, max_bad_fraction: float, listed: Path, enough: int = ENOUGH
) -> None:
    """Stop if too many samples are broken.

    Args:
        counts: broken samples by cause.
        num_read: samples read, broken ones included.
        max_bad_fraction: largest allowed fraction of broken samples.
        listed: file that lists broken samples.
        enough: number of samples from which on the fraction is checked.

    Raises:
        UserError: too many are broken; the line counts them by cause.
    """
    num_broken = sum(counts.values())
    if num_read < enough or num_broken <= max_bad_fraction * num_read:
        return

    causes = ", ".join(f"{cause}: {count}" for cause, count in Counter(counts).most_common())
    raise UserError(
        f"{listed}: {num_broken} of {num_read} samples cannot be used ({causes}), "
        f"more than prepare.max_bad_fraction = {max_bad_fraction:g} allows; fix the source or raise that limit"
    )


@tf32()
def encode_part(job: PartJob, plugins: Plugins, on_progress: OnProgress) -> Entries:
    """Write the missing columns of one part, and publish it; return the entries of its ledger.

    Raises:
        UserError: the source breaks its contract, or now yields other samples than those of the existing columns.
    """
    ledger = job.ledger
    wanted = _wanted(job, plugins)
    # New records may hold other samples, so they outdate every column set.
    if RECORDS in wanted:
        ledger.forget(*ledger.entries)
    else:
        ledger.forget(*wanted)

    of_images = [name for name in (RECORDS, LATENTS, FEATURES) if name in wanted]
    if of_images:
        _encode_images(job, of_images, plugins, on_progress)
    if CAPTIONS in wanted:
        _encode_captions(job, plugins, None if of_images else on_progress)
    if SAMPLE in wanted:
        # A copy, so that the fit need not read the features of all samples.
        fraction = plugins.config.partition.fit_fraction
        _derive(job, SAMPLE, lambda features, hashes: features[is_sampled(hashes, fraction)])
    if CODES in wanted:
        _derive(job, CODES, lambda features, _: codes_of(features))

    ledger.save()
    job.publish()
    return ledger.entries


def _wanted(job: PartJob, plugins: Plugins) -> set[str]:
    """Return the column sets to compute; not those of unchanged samples in files that were only touched or copied."""
    ledger = job.ledger
    keys = job.keys
    missing = {name for name, key in keys.items() if not ledger.is_done(name, key)}
    if RECORDS in missing:
        missing = set(keys)
    elif FEATURES in missing:
        missing |= {SAMPLE, CODES} & keys.keys()

    # Sets of which only the part's hash, before the space, has changed. The part's content decides on them.
    entries = ledger.entries
    alike = set()
    for name in missing:
        if ledger.is_done(name) and entries[name]["key"].split()[-1] == keys[name].split()[-1]:
            alike.add(name)

    if RECORDS not in alike or job.part.num_samples not in (None, entries[RECORDS]["num_read"]):
        return missing

    reading = Reading(plugins.read(job.part), plugins)
    for _ in reading.chunks():
        pass

    if reading.content.hexdigest() != entries[RECORDS]["content"]:
        return missing

    for name in alike:
        entries[name]["key"] = keys[name]

    return missing - alike


def key_hash(text: str) -> int:
    """Return a 64-bit hash of a key, or of a group; it decides which samples are held out."""
    return int.from_bytes(blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def is_sampled(key_hash: Hashes, fraction: float) -> Mask:
    """Choose the samples on which the partition is fitted, by their keys alone."""
    if fraction == 1:
        return np.ones(len(key_hash), bool)

    # Mixed (Knuth's multiplicative hash), because low hashes are held out.
    return key_hash * np.uint64(0x9E3779B97F4A7C15) < np.uint64(fraction * 2.0**64)


def _encode_images(job: PartJob, names: Collection[str], plugins: Plugins, on_progress: OnProgress) -> None:
    reading = Reading(plugins.read(job.part), plugins)
    texts = _Records(job.num_parts, plugins)
    with _writing(job, *names) as sets:
        for chunk in one_ahead(reading.chunks()):
            on_progress(reading.num_read)
            texts.add(chunk)
            if LATENTS in names:
                for number, bucket in enumerate(plugins.bucket_names):
                    places, images = chunk.of_bucket(number)
                    for name, rows in latent_rows(plugins, images, number).items():
                        column = in_bucket(name, bucket)
                        sets[LATENTS].add(column, rows, "encoded image is not finite", places)

            if FEATURES in names:
                sets[FEATURES].add(FEATURES, plugins.features.encode(chunk.squares), "features are not finite")

        on_progress(reading.num_read)
        if RECORDS in names:
            texts.write(sets[RECORDS], reading)
        elif reading.num_rows != (expected := job.ledger.entries[RECORDS]["num_rows"]):
            raise UserError(
                f"part {job.part.name!r} of the source: has {reading.num_rows} samples instead of {expected}, "
                f"with the same fingerprint; delete {job.ledger.folder}"
            )


def in_bucket(column: str, bucket: str | None) -> str:
    """Return the name of a column of encoded images in one bucket; its own name without buckets."""
    if bucket is None:
        return column

    return f"{column}-{bucket}"


def latent_rows(plugins: Plugins, images: Images, bucket: int = 0) -> dict[str, Shaped[np.ndarray, "n c h w"]]:
    """Encode images into the columns of the shards: ``x_0`` and, if configured, ``x_0_flipped``.

    Args:
        plugins: with the encoder.
        images: of one bucket, perhaps none.
        bucket: its number.
    """
    encoder = plugins.image_encoder
    flips = plugins.config.horizontal_flips
    if not len(images):  # empty rows, so that each column has a file
        shape = plugins.stored_shape(plugins.buckets[bucket].x_shape)
        return dict.fromkeys(IMAGE_COLUMNS[: 1 + flips], np.empty((0, *shape), encoder.dtype))

    rows = {"x_0": encoder.encode(images)}
    if flips:
        rows["x_0_flipped"] = encoder.encode(np.ascontiguousarray(images[:, :, ::-1]))

    return rows


def _encode_captions(job: PartJob, plugins: Plugins, on_progress: OnProgress | None) -> None:
    encoder = plugins.caption_encoder
    texts = job.ledger.folder / TEXTS_FILE
    assert encoder is not None
    num = num_captions(plugins.config)
    num_rows = job.ledger.entries[RECORDS]["num_rows"]
    with _writing(job, CAPTIONS) as sets:
        for number in range(num):
            captions = PackedStrings(texts, numbered("captions", number), num_rows)[:].tolist()
            for first in range(0, num_rows, _CAPTIONS_AT_ONCE):
                rows = encoder.encode(captions[first : first + _CAPTIONS_AT_ONCE])
                for name in encoder.columns:
                    sets[CAPTIONS].add(numbered(name, number), rows[name], "encoded caption is not finite")

                if on_progress is not None:
                    on_progress((number * num_rows + min(first + _CAPTIONS_AT_ONCE, num_rows)) // num)


def _derive(job: PartJob, name: str, column: Callable[[np.ndarray, np.ndarray], np.ndarray]) -> None:
    """Write a column made from the features and the hashes of the keys."""
    folder = job.ledger.folder
    with _writing(job, name) as sets:
        if job.ledger.entries[RECORDS]["num_rows"]:
            features = np.load(folder / "features.npy", mmap_mode="r")
            sets[name].add(name, column(features, np.load(folder / ROWS_FILE)["key_hash"]))


@contextmanager
def _writing(job: PartJob, *names: str) -> Iterator[dict[str, _ColumnSet]]:
    """Yield column sets to write. Unless the block raises, their files appear, and then their entries."""
    ledger = job.ledger
    with atomic_files(ledger.folder) as temporary, ExitStack() as stack:
        sets = {name: stack.enter_context(_ColumnSet(temporary)) for name in names}
        yield sets

    for name, one in sets.items():
        ledger.add(name, job.keys[name], [ledger.folder / path.name for path in one.paths], **one.facts)

    ledger.save()


class _ColumnSet(ExitStack):
    """Files of one column set: ``.npy`` columns, opened at their first rows. Notes rows that are not finite."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.paths: list[Path] = []
        self.facts: dict[str, Any] = {"unfit": {}}
        """Cause by unusable row."""
        self._arrays: dict[str, GrowingArray] = {}

    def add(
        self, name: str, rows: Shaped[np.ndarray, "n ..."], cause: str = "", places: RowNumbers | None = None
    ) -> None:
        """Append rows to a column; note those that are not finite under ``cause``.

        Args:
            name: of the column.
            rows: to append.
            cause: why those that are not finite cannot be used.
            places: rows of the part; None for those of the file.
        """
        if name not in self._arrays:
            self.paths.append(self.folder / f"{name}.npy")
            array = GrowingArray(self.paths[-1], rows.dtype, rows.shape[1:])
            self._arrays[name] = self.enter_context(array)

        array = self._arrays[name]
        if cause and rows.dtype.kind == "f":
            bad = ~np.isfinite(rows).all(axis=tuple(range(1, rows.ndim)))
            if places is None:
                places = array.num_rows + np.arange(len(rows))

            self.facts["unfit"] |= dict.fromkeys(places[bad].astype(str).tolist(), cause)

        array.append(rows)


class _Records:
    """Keys, captions, labels, hashes and thumbnails of one part, written at its end."""

    def __init__(self, num_parts: int, plugins: Plugins) -> None:
        self._config = plugins.config
        self._sides = [side for bucket in plugins.buckets for side in bucket.size]
        self._records: list[Record] = []
        """Without images."""
        self._max_thumbnails = max(1, MAX_THUMBNAILS // num_parts)
        self._thumbnails: list[tuple[int, int, Pixels]] = []
        """Hash, row and image of the lowest hashes so far, which are a random sample."""

    def add(self, chunk: Chunk) -> None:
        """Collect one chunk."""
        found = self._thumbnails
        for record, image in zip(chunk.records, chunk.images, strict=True):
            found.append((key_hash(record.key), len(self._records), image))
            self._records.append(replace(record, image=_NO_IMAGE))

        self._thumbnails = []
        for rank, row, image in sorted(found, key=itemgetter(0, 1))[: self._max_thumbnails]:
            # With margins, so that images of all shapes are of one size.
            small = to_square(image, min(max([len(image), *self._sides]), _THUMBNAIL_SIZE), "pad")
            # A copy, because an image of the size of a thumbnail would keep its whole chunk in memory.
            self._thumbnails.append((rank, row, small.copy()))

    def write(self, columns: _ColumnSet, reading: Reading) -> None:
        """Write all files; thumbnails in the order of their rows."""
        records = self._records
        keys = [record.key for record in records]
        rows_file = columns.folder / ROWS_FILE
        of_buckets = {}
        if reading.sizes:
            of_buckets = {"bucket": np.array(reading.buckets, np.int32), "cropped": np.array(reading.cropped)}

        np.savez(
            rows_file,
            key_hash=np.array([*map(key_hash, keys)], np.uint64),
            # The hash of the group decides the split.
            split_hash=np.array([key_hash(record.group or record.key) for record in records], np.uint64),
            label=np.array([record.label for record in records], np.int32),
            has_caption=np.array([bool(record.caption) for record in records], bool),
            **of_buckets,
        )

        num = num_captions(self._config)
        texts = packed_strings("keys", keys)
        for number in range(num):
            # A missing caption is replaced by the sample's first one.
            captions = [(record.captions and record.captions[number]) or record.caption for record in records]
            texts |= packed_strings(numbered("captions", number), captions)

        texts |= packed_strings("broken", [json.dumps(asdict(one), ensure_ascii=False) for one in reading.broken])
        shown = sorted(self._thumbnails, key=itemgetter(1))
        texts_file = columns.folder / TEXTS_FILE
        np.savez(
            texts_file,
            **texts,
            thumbnails=np.array([image for _, _, image in shown]),
            thumbnail_rows=np.array([row for _, row, _ in shown], np.int64),
        )

        if records and num > 1:
            captions_of = np.array([record.captions for record in records], object)
            columns.add("has_caption", captions_of.astype(bool).astype(np.uint8))

        for number, name in enumerate(self._config.keep):
            if records:
                columns.add(f"kept-{number}", np.array([record.values[name] for record in records]))

        columns.paths += [rows_file, texts_file]
        columns.facts = reading.facts()
