"""Encode the parts of a source into columns: records, latents, captions and features, each in files of its own.

Columns come in groups. The key of a group identifies its inputs, so a new caption encoder computes only captions
again. ``part.json`` holds the keys; a group is listed only while its files are whole.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Shaped, UInt8
from PIL import Image

from ddm_lightning.core.devices import tf32
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.files import atomic_folder, atomic_write_json, sha256_file
from ddm_lightning.partition.columns import GrowingArray, Strings, save_array
from ddm_lightning.prepare.engine import run_jobs
from ddm_lightning.prepare.reading import Plugins, Reading, one_ahead
from ddm_lightning.prepare.records import BrokenSample, Part, Record, count_samples

RECORDS, LATENTS, CAPTIONS, FEATURES = "records", "latents", "captions", "features"
LEDGER = "part.json"
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
    max_thumbnails: int
    """Number of images kept small for the report: those with the lowest hashes."""


def encode_parts(jobs: Sequence[PartJob], plugins: Plugins, on_progress: Callable[[int, int], None]) -> None:
    """Compute the wanted groups of all jobs with the configured engine.

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

    for number, state in run_jobs(encode_part, jobs, plugins, total, advance, plugins.config.engine):
        done += state["num_read"]
        counts.update(state["broken"])
        advance(0)
        check_broken(counts, done, plugins.config.max_bad_fraction, jobs[number].folder / RECORDS / "broken.jsonl")


def check_broken(
    counts: Mapping[str, int], num_read: int, max_bad_fraction: float, listed: Path, enough: int = _ENOUGH
) -> None:
    """Stop if too many samples are broken.

    Args:
        counts: broken samples by cause.
        num_read: samples read, broken ones included.
        max_bad_fraction: largest allowed fraction of broken samples.
        listed: file with one JSON object per broken sample.
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
    """Write the wanted groups of one part; return the recorded facts of its samples.

    Raises:
        UserError: the source breaks its contract, or now yields other samples than those of the existing groups; or a
            GPU has too little memory.
    """
    ledger = Ledger(job.folder / LEDGER)
    job = replace(job, wanted=_without_unchanged(job, ledger, plugins))
    job.folder.mkdir(parents=True, exist_ok=True)
    # New records may hold other samples, so they outdate every group.
    ledger.forget(*(list(ledger.records) if RECORDS in job.wanted else job.wanted))
    image_groups = [name for name in job.wanted if name != CAPTIONS]
    try:
        if image_groups:
            _encode_images(job, image_groups, ledger, plugins, on_progress)
        if CAPTIONS in job.wanted:
            # Encoding the images has already reported the number of samples.
            _encode_captions(job, ledger, plugins, on_progress if not image_groups else lambda _: None)
    except torch.OutOfMemoryError as error:
        raise UserError(
            f"part {job.part.name!r}: out of GPU memory ({first_line(error)}); "
            "lower prepare.num_processes (each process loads its own networks), then run the same command again"
        ) from None
    return ledger.records[RECORDS]


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
    """

    def __init__(self, file: Path) -> None:
        self.file, self.folder = file, file.parent
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
        """Remove entries of work whose files are about to be replaced; a killed process then leaves no false entry."""
        for name in names:
            self.records.pop(name, None)
        atomic_write_json(self.file, self.records)

    def record(self, name: str, key: str, paths: Iterable[Path], **facts: Any) -> None:
        """Record finished work."""
        files = {
            path.relative_to(self.folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
            for path in sorted(paths)
        }
        self.records[name] = {"key": key, **facts, "files": files}
        atomic_write_json(self.file, self.records)

    def files(self, name: str) -> dict[str, Any]:
        """Return the files of recorded work; empty before it is done."""
        return self.records.get(name, {}).get("files", {})


def key_hash(text: str) -> int:
    """Return a 64-bit hash of a key, or of a group; it decides which samples are held out."""
    return int.from_bytes(blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def _encode_images(job: PartJob, names: list[str], ledger: Ledger, plugins: Plugins, on_progress: OnProgress) -> None:
    reading, texts = Reading(job.part, plugins), _Texts(job.max_thumbnails)
    size = 0
    with ExitStack() as stack:
        folders = {name: stack.enter_context(atomic_folder(job.folder / name)) for name in names}
        arrays = {name: stack.enter_context(_Arrays(folder)) for name, folder in folders.items()}
        for num_read, records, images in one_ahead(reading.chunks()):
            on_progress(num_read)
            size = images.shape[1]
            if RECORDS in names:
                texts.add(records, images)
                arrays[RECORDS].add("label", np.array([record.label for record in records], np.int32))
                arrays[RECORDS].add("key_hash", np.array([key_hash(record.key) for record in records], np.uint64))
                arrays[RECORDS].add(
                    "split_hash", np.array([key_hash(record.group or record.key) for record in records], np.uint64)
                )
                for number, name in enumerate(plugins.config.keep):
                    arrays[RECORDS].add(f"kept-{number}", np.array([record.values[name] for record in records]))
            if LATENTS in names:
                for name, rows in latent_rows(plugins, images).items():
                    arrays[LATENTS].add(name, rows, "encoded image is not finite")
            if FEATURES in names:
                arrays[FEATURES].add("features", plugins.features.encode(images), "features are not finite")
        on_progress(reading.num_read)
        if RECORDS in names:
            texts.write(folders[RECORDS], reading.broken)
        elif reading.num_rows != (expected := ledger.records[RECORDS]["num_rows"]):
            raise UserError(
                f"part {job.part.name!r} of the source: has {reading.num_rows} samples instead of {expected}, "
                f"with the same fingerprint; delete {job.folder}"
            )
    for name in names:
        facts = {"unfit": arrays[name].unfit} if name != RECORDS else {**reading.facts(), "image_size": size}
        ledger.record(name, job.wanted[name], (job.folder / name).iterdir(), **facts)


def latent_rows(plugins: Plugins, images: UInt8[np.ndarray, "n h w 3"]) -> dict[str, Shaped[np.ndarray, "n c h w"]]:
    """Encode images into the columns of the shards: ``x_0`` and, if configured, ``x_0_flipped``."""
    encoder = plugins.image_encoder
    rows = {"x_0": encoder.encode(images)}
    if plugins.config.horizontal_flips:
        rows["x_0_flipped"] = encoder.encode(np.ascontiguousarray(images[:, :, ::-1]))
    return rows


def _encode_captions(job: PartJob, ledger: Ledger, plugins: Plugins, on_progress: OnProgress) -> None:
    encoder = plugins.caption_encoder
    assert encoder is not None
    captions = Strings(job.folder / RECORDS, "captions")
    with atomic_folder(job.folder / CAPTIONS) as folder, _Arrays(folder) as arrays:
        for first in range(0, len(captions), _CAPTIONS_AT_ONCE):
            rows = encoder.encode(captions[first : first + _CAPTIONS_AT_ONCE].tolist())
            for name in encoder.columns:
                arrays.add(name, rows[name], "encoded caption is not finite")
            on_progress(min(first + _CAPTIONS_AT_ONCE, len(captions)))
    ledger.record(CAPTIONS, job.wanted[CAPTIONS], (job.folder / CAPTIONS).iterdir(), unfit=arrays.unfit)


class _Arrays(ExitStack):
    """``.npy`` columns in one folder, opened at their first rows; notes rows that are not finite."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder
        self.unfit: dict[str, str] = {}
        """Cause by unusable row."""
        self._arrays: dict[str, GrowingArray] = {}

    def add(self, name: str, rows: Shaped[np.ndarray, "n ..."], cause: str = "") -> None:
        """Append rows to a column; note those that are not finite under ``cause``."""
        if name not in self._arrays:
            array = GrowingArray(self.folder / f"{name}.npy", rows.dtype, rows.shape[1:])
            self._arrays[name] = self.enter_context(array)
        array = self._arrays[name]
        if cause and rows.dtype.kind == "f":
            bad = ~np.isfinite(rows.reshape(len(rows), -1)).all(1)
            self.unfit.update({str(array.num_rows + row): cause for row in np.flatnonzero(bad).tolist()})
        array.append(rows)


class _Texts:
    """Keys, captions and thumbnails of one part, written at its end."""

    def __init__(self, max_thumbnails: int) -> None:
        self._keys: list[str] = []
        self._captions: list[str] = []
        self._max_thumbnails = max_thumbnails
        self._thumbnails: list[tuple[int, int, UInt8[np.ndarray, "h w 3"]]] = []
        """Hash, row and image of the lowest hashes so far."""

    def add(self, records: list[Record], images: UInt8[np.ndarray, "n h w 3"]) -> None:
        """Collect one chunk."""
        first_row = len(self._keys)
        self._keys += [record.key for record in records]
        self._captions += [record.caption for record in records]
        new = [(key_hash(record.key), first_row + i, images[i]) for i, record in enumerate(records)]
        lowest = sorted([*self._thumbnails, *new], key=lambda one: one[:2])[: self._max_thumbnails]
        self._thumbnails = [
            (rank, row, _thumbnail(image) if row >= first_row else image) for rank, row, image in lowest
        ]

    def write(self, folder: Path, broken: list[BrokenSample]) -> None:
        """Write all files; thumbnails in the order of their rows."""
        Strings.write(folder, "keys", self._keys)
        Strings.write(folder, "captions", self._captions)
        if shown := {row: image for _, row, image in self._thumbnails}:
            save_array(folder / "thumbnails.npy", np.stack([shown[row] for row in sorted(shown)]))
            save_array(folder / "thumbnail_rows.npy", np.array(sorted(shown), np.int64))
        lines = "".join(json.dumps(asdict(one)) + "\n" for one in broken)
        (folder / "broken.jsonl").write_text(lines, encoding="utf-8")


def _thumbnail(image: UInt8[np.ndarray, "h w 3"]) -> UInt8[np.ndarray, "h2 w2 3"]:
    """Copy a square image, at most 96 pixels high and wide."""
    side = min(len(image), _THUMBNAIL_SIZE)
    return np.asarray(Image.fromarray(image).resize((side, side), Image.Resampling.LANCZOS))
