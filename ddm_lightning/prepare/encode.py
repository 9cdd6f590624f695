"""Encode the parts of a source into columns: records, latents, captions and features.

Columns come in groups. The key of a group identifies its inputs, so a new caption encoder computes only captions
again. ``part.json`` holds the keys; a group is listed only while its files are whole. ``rows.npz`` and the features of
the fit sample are all that the fit of the partition reads.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Shaped, UInt8, UInt64
from PIL import Image

from ddm_lightning.config.experiment import PrepareConfig
from ddm_lightning.core.devices import tf32
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.files import atomic_files, atomic_write_json, sha256_file
from ddm_lightning.encoders.interfaces import numbered
from ddm_lightning.partition.columns import GrowingArray, PackedStrings, packed_strings
from ddm_lightning.prepare.engine import run_jobs
from ddm_lightning.prepare.reading import Plugins, Reading, one_ahead
from ddm_lightning.prepare.records import BrokenSample, Part, Record, count_samples
from ddm_lightning.prepare.store import Store

RECORDS, LATENTS, CAPTIONS, FEATURES, SAMPLE = "records", "latents", "captions", "features", "sample"
LEDGER, ROWS_FILE, TEXTS_FILE = "part.json", "rows.npz", "texts.npz"
MAX_THUMBNAILS = 8192
"""Images kept small for the report: those with the lowest hashes of all parts."""
_THUMBNAIL_SIZE = 96
_CAPTIONS_AT_ONCE = 256
# Samples to read before the fraction of broken ones can stop ``prepare``.
_ENOUGH = 1000

OnProgress = Callable[[int], None]
"""Called with the number of samples read so far."""


@dataclass(frozen=True)
class PartJob:
    """The columns to compute for one part."""

    part: Part
    folder: Path
    """Folder of its columns."""
    wanted: Mapping[str, str]
    """Key of each group to compute: a hash of the part, a space, a hash of everything else it is made from."""
    num_parts: int
    """Parts of the source, which share the budget of thumbnails."""
    store: Store | None = None
    """Where to publish the part."""


def encode_parts(
    jobs: Sequence[PartJob], plugins: Plugins, on_progress: Callable[[int, int], None]
) -> Iterator[tuple[int, dict[str, Any]]]:
    """Compute the wanted groups of all jobs with the configured engine; yield the number and records of finished ones.

    Args:
        jobs: one per part.
        plugins: source and encoders.
        on_progress: called with samples done and samples in total.

    Raises:
        UserError: as ``encode_part``; or too many samples are broken.
    """
    total = count_samples(job.part for job in jobs)
    done = 0
    counts = Counter[str]()

    def advance(in_part: int) -> None:
        on_progress(done + in_part, max(total or 0, done + in_part))

    for number, records in run_jobs(encode_part, jobs, plugins, total, advance, plugins.config.engine):
        yield number, records
        done += records[RECORDS]["num_read"]
        counts.update(records[RECORDS]["broken"])
        advance(0)
        check_broken(counts, done, plugins.config.max_bad_fraction, jobs[number].folder / TEXTS_FILE)


def check_broken(
    counts: Mapping[str, int], num_read: int, max_bad_fraction: float, listed: Path, enough: int = _ENOUGH
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
    causes = ", ".join(f"{cause}: {count}" for cause, count in sorted(counts.items(), key=lambda item: -item[1]))
    raise UserError(
        f"{listed}: {num_broken} of {num_read} samples cannot be used ({causes}), "
        f"more than prepare.max_bad_fraction = {max_bad_fraction:g} allows; fix the source or raise that limit"
    )


@tf32()
def encode_part(job: PartJob, plugins: Plugins, on_progress: OnProgress) -> dict[str, Any]:
    """Write the wanted groups of one part; return its records.

    Raises:
        UserError: the source breaks its contract, or now yields other samples than those of the existing groups; or a
            GPU has too little memory.
    """
    ledger = Ledger(job.folder / LEDGER)
    job = replace(job, wanted=_without_unchanged(job, ledger, plugins))
    # New records may hold other samples, so they outdate every group.
    ledger.forget(*(list(ledger.records) if RECORDS in job.wanted else job.wanted))
    image_groups = [name for name in (RECORDS, LATENTS, FEATURES) if name in job.wanted]
    try:
        if image_groups:
            _encode_images(job, image_groups, ledger, plugins, on_progress)
        if CAPTIONS in job.wanted:
            # Encoding the images has already reported the number of samples.
            _encode_captions(job, ledger, plugins, on_progress if not image_groups else lambda _: None)
        if SAMPLE in job.wanted:
            _copy_sample(job, ledger, plugins)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"part {job.part.name!r}: out of GPU memory ({first_line(error)}); "
            "lower prepare.num_processes (each process loads its own networks), then run the same command again"
        ) from None
    ledger.save()
    if job.store is not None:
        job.store.publish(f"parts/{job.folder.name}", job.folder, ledger.records)
    return ledger.records


def _without_unchanged(job: PartJob, ledger: Ledger, plugins: Plugins) -> dict[str, str]:
    """Return the wanted groups, without those of unchanged samples whose files were only touched or copied."""
    made = {name: ledger.records[name] for name in job.wanted if ledger.is_done(name)}
    alike = [name for name, record in made.items() if record["key"].split()[-1] == job.wanted[name].split()[-1]]
    if RECORDS not in alike or job.part.num_samples not in (None, made[RECORDS]["num_read"]):
        return dict(job.wanted)
    reading = Reading(job.part, plugins)
    for _ in reading.chunks():
        pass
    if reading.content.hexdigest() != made[RECORDS]["content"]:
        return dict(job.wanted)
    for name in alike:
        made[name]["key"] = job.wanted[name]
    return {name: key for name, key in job.wanted.items() if name not in alike}


class Ledger:
    """A JSON file of finished work: by name, the key of its inputs, its files with sizes and hashes, and facts.

    An unreadable file counts as an empty one, so the work is done again.

    Args:
        file: the JSON file.
        folder: of the finished files; None for that of the JSON file.
        records: None to read the JSON file.
    """

    def __init__(self, file: Path, folder: Path | None = None, records: Mapping[str, Any] | None = None) -> None:
        self.file, self.folder = file, folder or file.parent
        if records is None:
            try:
                records = json.loads(file.read_text(encoding="utf-8"))
            except (OSError, ValueError):
                records = None
        self.records: dict[str, Any] = records if isinstance(records, dict) else {}

    def is_done(self, name: str, key: str | None = None) -> bool:
        """Whether the work is recorded, under ``key`` unless that is None, and its files exist with their sizes."""
        record = self.records.get(name)
        if record is None or key not in (None, record["key"]):
            return False
        files = {self.folder / path: entry["bytes"] for path, entry in record["files"].items()}
        return all(path.is_file() and path.stat().st_size == size for path, size in files.items())

    def forget(self, *names: str) -> None:
        """Remove work whose files are about to be replaced, first its record: a kill then leaves no false entry."""
        gone = [self.records.pop(name) for name in names if name in self.records]
        if gone:
            self.save()
            for path in (path for record in gone for path in record["files"]):
                (self.folder / path).unlink(missing_ok=True)

    def record(self, name: str, key: str, paths: Iterable[Path], **facts: Any) -> None:
        """Record finished work; ``save`` makes it last."""
        files = {
            path.relative_to(self.folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
            for path in sorted(paths)
        }
        self.records[name] = {"key": key, **facts, "files": files}

    def save(self) -> None:
        """Write the JSON file."""
        atomic_write_json(self.file, self.records)

    def files(self, name: str) -> dict[str, Any]:
        """Return the files of recorded work; empty before it is done."""
        return self.records.get(name, {}).get("files", {})


def key_hash(text: str) -> int:
    """Return a 64-bit hash of a key, or of a group; it decides which samples are held out."""
    return int.from_bytes(blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def is_sampled(key_hash: UInt64[np.ndarray, "n"], fraction: float) -> Bool[np.ndarray, "n"]:
    """Choose the samples on which the partition is fitted, by their keys alone."""
    if fraction == 1:
        return np.ones(len(key_hash), bool)
    # Mixed (Knuth's multiplicative hash), because low hashes are held out.
    return key_hash * np.uint64(0x9E3779B97F4A7C15) < np.uint64(fraction * 2.0**64)


def _encode_images(job: PartJob, names: list[str], ledger: Ledger, plugins: Plugins, on_progress: OnProgress) -> None:
    reading, texts = Reading(job.part, plugins), _Records(job.num_parts, num_captions(plugins.config))
    size = 0
    with _writing(job.folder, *names) as groups:
        for num_read, records, images in one_ahead(reading.chunks()):
            on_progress(num_read)
            size = images.shape[1]
            if RECORDS in names:
                texts.add(records, images)
                if num_captions(plugins.config) > 1:
                    present = [[*map(bool, record.captions)] for record in records]
                    groups[RECORDS].add("has_caption", np.array(present, np.uint8))
                for number, name in enumerate(plugins.config.keep):
                    groups[RECORDS].add(f"kept-{number}", np.array([record.values[name] for record in records]))
            if LATENTS in names:
                for name, rows in latent_rows(plugins, images).items():
                    groups[LATENTS].add(name, rows, "encoded image is not finite")
            if FEATURES in names:
                groups[FEATURES].add("features", plugins.features.encode(images), "features are not finite")
        on_progress(reading.num_read)
        if RECORDS in names:
            groups[RECORDS].paths += texts.write(groups[RECORDS].folder, reading.broken)
        elif reading.num_rows != (expected := ledger.records[RECORDS]["num_rows"]):
            raise UserError(
                f"part {job.part.name!r} of the source: has {reading.num_rows} samples instead of {expected}, "
                f"with the same fingerprint; delete {job.folder}"
            )
    for name in names:
        facts = {"unfit": groups[name].unfit} if name != RECORDS else {**reading.facts(), "image_size": size}
        ledger.record(name, job.wanted[name], groups[name].written(job.folder), **facts)
    ledger.save()


def latent_rows(plugins: Plugins, images: UInt8[np.ndarray, "n h w 3"]) -> dict[str, Shaped[np.ndarray, "n c h w"]]:
    """Encode images into the columns of the shards: ``x_0`` and, if configured, ``x_0_flipped``."""
    encoder = plugins.image_encoder
    rows = {"x_0": encoder.encode(images)}
    if plugins.config.horizontal_flips:
        rows["x_0_flipped"] = encoder.encode(np.ascontiguousarray(images[:, :, ::-1]))
    return rows


def num_captions(config: PrepareConfig) -> int:
    """Return the number of captions of each sample."""
    return max(1, len(config.captions))


def _encode_captions(job: PartJob, ledger: Ledger, plugins: Plugins, on_progress: OnProgress) -> None:
    encoder = plugins.caption_encoder
    assert encoder is not None
    num, num_rows = num_captions(plugins.config), ledger.records[RECORDS]["num_rows"]
    with _writing(job.folder, CAPTIONS) as groups:
        for number in range(num):
            captions = PackedStrings(job.folder / TEXTS_FILE, numbered("captions", number), num_rows)[:].tolist()
            for first in range(0, num_rows, _CAPTIONS_AT_ONCE):
                rows = encoder.encode(captions[first : first + _CAPTIONS_AT_ONCE])
                for name in encoder.columns:
                    groups[CAPTIONS].add(numbered(name, number), rows[name], "encoded caption is not finite")
                on_progress((number * num_rows + min(first + _CAPTIONS_AT_ONCE, num_rows)) // num)
    written = groups[CAPTIONS].written(job.folder)
    ledger.record(CAPTIONS, job.wanted[CAPTIONS], written, unfit=groups[CAPTIONS].unfit)
    ledger.save()


def _copy_sample(job: PartJob, ledger: Ledger, plugins: Plugins) -> None:
    """Copy the features of the fit sample, so that the fit need not read the others."""
    with _writing(job.folder, SAMPLE) as groups:
        if ledger.records[RECORDS]["num_rows"]:
            with np.load(job.folder / ROWS_FILE) as rows:
                chosen = is_sampled(rows["key_hash"], plugins.config.partition.fit_fraction)
            groups[SAMPLE].add("sample", np.load(job.folder / "features.npy", mmap_mode="r")[chosen])
    ledger.record(SAMPLE, job.wanted[SAMPLE], groups[SAMPLE].written(job.folder))


@contextmanager
def _writing(folder: Path, *names: str) -> Iterator[dict[str, _Group]]:
    """Yield the groups of columns to write; their files move into ``folder`` unless the block raises."""
    with atomic_files(folder) as temporary, ExitStack() as stack:
        yield {name: stack.enter_context(_Group(temporary)) for name in names}


class _Group(ExitStack):
    """Files of one group: ``.npy`` columns, opened at their first rows. Notes rows that are not finite."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.paths: list[Path] = []
        self.unfit: dict[str, str] = {}
        """Cause by unusable row."""
        self._arrays: dict[str, GrowingArray] = {}

    def add(self, name: str, rows: Shaped[np.ndarray, "n ..."], cause: str = "") -> None:
        """Append rows to a column; note those that are not finite under ``cause``."""
        if name not in self._arrays:
            self.paths.append(self.folder / f"{name}.npy")
            array = GrowingArray(self.paths[-1], rows.dtype, rows.shape[1:])
            self._arrays[name] = self.enter_context(array)
        array = self._arrays[name]
        if cause and rows.dtype.kind == "f":
            bad = ~np.isfinite(rows.reshape(len(rows), -1)).all(1)
            self.unfit.update({str(array.num_rows + row): cause for row in np.flatnonzero(bad).tolist()})
        array.append(rows)

    def written(self, folder: Path) -> list[Path]:
        """Return the files, which are now in ``folder``."""
        return [folder / path.name for path in self.paths]


class _Records:
    """Keys, captions, labels, hashes and thumbnails of one part, written at its end."""

    def __init__(self, num_parts: int, num_captions: int) -> None:
        self._records: list[tuple[str, int, int, int]] = []
        """Key, label, hash of the key, hash that decides the split."""
        self._captions: list[list[str]] = [[] for _ in range(num_captions)]
        # Twice the share of a part, for those of many samples; of few parts, each may have all of them.
        self._budget = 2 * MAX_THUMBNAILS / num_parts
        self._max_thumbnails = min(MAX_THUMBNAILS, round(2 * self._budget) + 16)
        self._thumbnails: list[tuple[int, int, UInt8[np.ndarray, "h w 3"]]] = []
        """Hash, row and image of the lowest hashes so far."""

    def add(self, records: list[Record], images: UInt8[np.ndarray, "n h w 3"]) -> None:
        """Collect one chunk."""
        first_row = len(self._records)
        hashes = [key_hash(record.key) for record in records]
        self._records += [
            (record.key, record.label, own, key_hash(record.group) if record.group else own)
            for record, own in zip(records, hashes, strict=True)
        ]
        for number, captions in enumerate(self._captions):
            # A missing caption is replaced by the sample's first one.
            captions += [(record.captions and record.captions[number]) or record.caption for record in records]
        new = [(own, first_row + i, images[i]) for i, own in enumerate(hashes)]
        lowest = sorted([*self._thumbnails, *new], key=lambda one: one[:2])[: self._max_thumbnails]
        self._thumbnails = [
            (rank, row, _thumbnail(image) if row >= first_row else image) for rank, row, image in lowest
        ]

    def write(self, folder: Path, broken: list[BrokenSample]) -> list[Path]:
        """Write both files; thumbnails in the order of their rows."""
        keys, labels, key_hashes, split_hashes = zip(*self._records, strict=True) if self._records else [()] * 4
        # Parts of equal size share the budget by the lowest hashes, as if they were one.
        limit = self._budget / max(1, len(keys)) * 2.0**64
        shown = {row: image for rank, row, image in self._thumbnails if rank < limit}
        images = np.stack([shown[row] for row in sorted(shown)]) if shown else np.empty((0, 1, 1, 3), np.uint8)
        paths = [folder / ROWS_FILE, folder / TEXTS_FILE]
        np.savez(
            paths[0],
            key_hash=np.array(key_hashes, np.uint64),
            split_hash=np.array(split_hashes, np.uint64),
            label=np.array(labels, np.int32),
            has_caption=np.array([bool(caption) for caption in self._captions[0]], bool),
        )
        texts = {numbered("captions", number): captions for number, captions in enumerate(self._captions)}
        np.savez(
            paths[1],
            **packed_strings("keys", keys),
            **{name: array for texts_of in texts.items() for name, array in packed_strings(*texts_of).items()},
            **packed_strings("broken", [json.dumps(asdict(one), ensure_ascii=False) for one in broken]),
            thumbnails=images,
            thumbnail_rows=np.array(sorted(shown), np.int64),
        )
        return paths


def _thumbnail(image: UInt8[np.ndarray, "h w 3"]) -> UInt8[np.ndarray, "h2 w2 3"]:
    """Copy a square image, at most 96 pixels high and wide."""
    side = min(len(image), _THUMBNAIL_SIZE)
    return np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.LANCZOS))
