"""Encode the parts of a source into columns: records, latents, captions and features, each in files of its own.

Columns come in groups. The key of a group identifies its inputs, so a new caption encoder computes only captions
again. ``part.json`` holds the keys; a group is listed only while its files are whole.
"""

from __future__ import annotations

import heapq
import json
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Shaped, UInt8
from PIL import Image

from ddm_lightning.core.columns import GrowingArray, Strings, save_array
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_folder, atomic_write_json, sha256_file
from ddm_lightning.prepare.engine import num_processes_for, run_local, run_ray
from ddm_lightning.prepare.reading import SAMPLES_AT_ONCE, Plugins, Reading, plugins_of
from ddm_lightning.prepare.records import Part, Record, count_samples

RECORDS, LATENTS, CAPTIONS, FEATURES = "records", "latents", "captions", "features"
_THUMBNAIL_SIZE = 96
# A few broken samples are not a fraction worth stopping for before so many were read.
_ENOUGH = 1000

Tick = Callable[[int], None]
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
    config: str
    """The ``prepare`` section as JSON, for a process without plug-ins."""


def encode_parts(
    jobs: Sequence[PartJob], plugins: Plugins, tick: Callable[[int, int], None], captions_used: bool
) -> None:
    """Compute the wanted groups of all jobs with the configured engine.

    Args:
        jobs: one per part.
        plugins: source and encoders.
        tick: called with samples done and samples in total.
        captions_used: whether a sample with an unreadable caption counts as broken.

    Raises:
        UserError: as ``encode_part``; or too many samples are broken.
    """
    total, done, counts = count_samples(job.part for job in jobs), 0, Counter[str]()

    def advance(in_part: int) -> None:
        tick(done + in_part, max(total or 0, done + in_part))

    for job in _run(jobs, plugins, total, advance):
        state = read_state(job.folder)[RECORDS]
        done += state["num_read"]
        counts.update(state["broken"])
        counts.update(state.get("unread_captions", {}).values() if captions_used else ())
        advance(0)
        check_broken(counts, done, plugins.config.max_bad_fraction, job.folder / RECORDS / "broken.jsonl")


def _run(
    jobs: Sequence[PartJob], plugins: Plugins, num_samples: int | None, advance: Callable[[int], None]
) -> Iterator[PartJob]:
    """Yield each job when it is done."""
    num_processes = num_processes_for(plugins.config.num_processes, len(jobs), num_samples)
    if plugins.config.engine == "ray":
        yield from (jobs[number] for number, _ in run_ray(encode_part_in_process, jobs))
    elif num_processes > 1:
        yield from (jobs[number] for number, _ in run_local(encode_part_in_process, jobs, num_processes))
    else:
        for job in jobs:
            encode_part(job, plugins, advance)
            yield job


def check_broken(
    counts: Mapping[str, int], num_read: int, max_bad_fraction: float, listed: Path, enough: int = _ENOUGH
) -> None:
    """Stop if too many samples are broken.

    Args:
        counts: broken samples by cause.
        num_read: samples read, broken ones included.
        max_bad_fraction: largest allowed fraction of broken samples.
        listed: file with one JSON object per broken sample.
        enough: the fraction counts only after so many samples.

    Raises:
        UserError: too many are broken; the line counts them by cause.
    """
    num_broken = sum(counts.values())
    if num_read < enough or num_broken <= max_bad_fraction * num_read:
        return
    causes = ", ".join(f"{cause}: {count}" for cause, count in sorted(counts.items(), key=lambda item: -item[1]))
    with listed.open(encoding="utf-8") as lines:
        first = json.loads(next(lines, "{}"))
    detail = f" ({first['detail']})" if first.get("detail") else ""
    example = f". For example {first['key']!r}: {first['cause']}{detail}" if first else ""
    raise UserError(
        f"{listed}: {num_broken} of {num_read} samples cannot be used ({causes}), more than "
        f"prepare.max_bad_fraction = {max_bad_fraction:g} allows; fix the source or raise it{example}"
    )


def encode_part(job: PartJob, plugins: Plugins, tick: Tick) -> None:
    """Write the wanted groups of one part.

    Raises:
        UserError: the source breaks its contract, or yields other samples than for the existing groups.
    """
    state = read_state(job.folder)
    job = replace(job, wanted=_without_unchanged(job, state, plugins))
    for name in job.wanted:
        state.pop(name, None)
    if RECORDS in job.wanted:
        state.clear()  # rows may be other samples now
    job.folder.mkdir(parents=True, exist_ok=True)
    atomic_write_json(job.folder / "part.json", state)
    image_groups = [name for name in job.wanted if name != CAPTIONS]
    if image_groups:
        _encode_images(job, image_groups, state, plugins, tick)
    if CAPTIONS in job.wanted:
        # The images have counted the samples already.
        _encode_captions(job, state, plugins, tick if not image_groups else lambda _: None)


def _without_unchanged(job: PartJob, state: dict[str, Any], plugins: Plugins) -> dict[str, str]:
    """Drop groups from the wanted ones if only the fingerprint is new: the files were touched or copied."""
    wanted = dict(job.wanted)

    def is_alike(name: str) -> bool:
        made = state.get(name)
        return made is not None and made["key"].split()[-1] == wanted[name].split()[-1] and is_whole(job.folder, made)

    if RECORDS not in wanted or not is_alike(RECORDS) or job.part.num_samples not in (None, state[RECORDS]["num_read"]):
        return wanted
    reading = Reading(job.part, plugins, lambda _: None)
    for _ in reading.chunks():
        pass
    if reading.content.hexdigest() != state[RECORDS].get("content"):
        return wanted
    for name in [name for name in wanted if is_alike(name)]:
        state[name]["key"] = wanted.pop(name)
    return wanted


def encode_part_in_process(job: PartJob) -> None:
    """Run ``encode_part`` in a process that reuses its plug-ins for the next part."""
    encode_part(job, plugins_of(job.config), lambda _: None)


def read_state(folder: Path) -> dict[str, Any]:
    """Read ``part.json``; empty if it is missing or unreadable."""
    try:
        state = json.loads((folder / "part.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def is_whole(folder: Path, record: Mapping[str, Any]) -> bool:
    """Whether the recorded files exist with their sizes."""
    files = {folder / name: entry["bytes"] for name, entry in record["files"].items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in files.items())


def list_files(folder: Path, paths: Iterable[Path]) -> dict[str, dict[str, Any]]:
    """Return size and hash of files, by their sorted paths relative to ``folder``."""
    return {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(paths)
    }


def key_hash(text: str) -> int:
    """Return a 64-bit hash of a key, or of a group; it decides which samples are held out."""
    return int.from_bytes(blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def _encode_images(job: PartJob, names: list[str], state: dict[str, Any], plugins: Plugins, tick: Tick) -> None:
    start = time.monotonic()
    reading = Reading(job.part, plugins, tick)
    size = 0
    with ExitStack() as stack:
        folders = {name: stack.enter_context(atomic_folder(job.folder / name)) for name in names}
        arrays = {name: stack.enter_context(_Arrays(folder)) for name, folder in folders.items()}
        texts = _Texts(job.max_thumbnails)
        for records, images in reading.chunks():
            size = images.shape[1]
            if RECORDS in names:
                texts.add(records, images, reading.num_rows - len(records))
                groups = [record.group or record.key for record in records]
                arrays[RECORDS].add("label", np.array([record.label for record in records], np.int32))
                arrays[RECORDS].add("key_hash", np.array([key_hash(record.key) for record in records], np.uint64))
                arrays[RECORDS].add("split_hash", np.array([key_hash(group) for group in groups], np.uint64))
            if LATENTS in names:
                for name, rows in latent_rows(plugins, images).items():
                    arrays[LATENTS].add(name, rows, "encoded image is not finite")
            if FEATURES in names:
                arrays[FEATURES].add("features", plugins.features.encode(images), "features are not finite")
        if RECORDS in names:
            texts.write(folders[RECORDS], reading)
        elif reading.num_rows != state[RECORDS]["num_rows"]:
            raise UserError(
                f"part {job.part.name!r} of the source: has {reading.num_rows} samples instead of "
                f"{state[RECORDS]['num_rows']}, with the same fingerprint; delete {job.folder}"
            )
    for name in names:
        extra: dict[str, Any] = {"unfit": arrays[name].unfit}
        if name == RECORDS:
            extra = {"num_rows": reading.num_rows, "num_read": reading.num_read}
            extra |= {"broken": reading.causes, "picture_size": size, "content": reading.content.hexdigest()}
            extra |= {"unread_captions": reading.unread_captions, "odd_shapes": +reading.odd_shapes}
        _record(job, name, state, extra, time.monotonic() - start)


def latent_rows(plugins: Plugins, images: UInt8[np.ndarray, "n h w 3"]) -> dict[str, Shaped[np.ndarray, "n c h w"]]:
    """Encode images into the columns of the shards: ``x_0`` and, if configured, ``x_0_flipped``."""
    encoder = plugins.image_encoder
    rows = {"x_0": encoder.encode(images)}
    if plugins.config.horizontal_flips:
        rows["x_0_flipped"] = encoder.encode(np.ascontiguousarray(images[:, :, ::-1]))
    return rows


def _encode_captions(job: PartJob, state: dict[str, Any], plugins: Plugins, tick: Tick) -> None:
    start = time.monotonic()
    encoder = plugins.caption_encoder
    assert encoder is not None
    captions = Strings(job.folder / RECORDS, "captions")
    with atomic_folder(job.folder / CAPTIONS) as folder, _Arrays(folder) as arrays:
        for first in range(0, len(captions), SAMPLES_AT_ONCE):
            rows = encoder.encode(captions[first : first + SAMPLES_AT_ONCE].tolist())
            for name in encoder.columns:
                arrays.add(name, rows[name], "encoded caption is not finite")
            tick(min(first + SAMPLES_AT_ONCE, len(captions)))
    _record(job, CAPTIONS, state, {"unfit": arrays.unfit}, time.monotonic() - start)


def _record(job: PartJob, name: str, state: dict[str, Any], extra: dict[str, Any], seconds: float) -> None:
    """Enter a finished group into ``part.json``."""
    files = list_files(job.folder, (job.folder / name).iterdir())
    state[name] = {"key": job.wanted[name], **extra, "files": files, "seconds": round(seconds, 3)}
    atomic_write_json(job.folder / "part.json", state)


class _Arrays:
    """``.npy`` columns in one folder, opened at their first rows; notes rows that are not finite."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unfit: dict[str, str] = {}
        """Cause by unusable row."""
        self._arrays: dict[str, GrowingArray] = {}

    def add(self, name: str, rows: Shaped[np.ndarray, "n ..."], cause: str = "") -> None:
        """Append rows to a column; note those that are not finite under ``cause``."""
        if name not in self._arrays:
            self._arrays[name] = GrowingArray(self.folder / f"{name}.npy", rows.dtype, rows.shape[1:])
        array = self._arrays[name]
        if cause and rows.dtype.kind == "f":
            bad = ~np.isfinite(rows.reshape(len(rows), -1)).all(1)
            self.unfit.update({str(array.num_rows + row): cause for row in np.flatnonzero(bad).tolist()})
        array.append(rows)

    def __enter__(self) -> _Arrays:
        return self

    def __exit__(self, *error: Any) -> None:
        with ExitStack() as stack:
            for array in self._arrays.values():
                stack.push(array.__exit__)
            stack.__exit__(*error)


class _Texts:
    """Keys, captions and thumbnails of one part, written at its end."""

    def __init__(self, max_thumbnails: int) -> None:
        self._keys: list[str] = []
        self._captions: list[str] = []
        self._max_thumbnails = max_thumbnails
        # A heap of the lowest hashes so far, the highest of them on top.
        self._thumbnails: list[tuple[int, int, UInt8[np.ndarray, "h w 3"]]] = []

    def add(self, records: list[Record], images: UInt8[np.ndarray, "n h w 3"], first_row: int) -> None:
        """Collect one chunk."""
        for row, (record, image) in enumerate(zip(records, images, strict=True), first_row):
            self._keys.append(record.key)
            self._captions.append(str(record.caption))
            rank = -key_hash(record.key)
            if len(self._thumbnails) < self._max_thumbnails:
                heapq.heappush(self._thumbnails, (rank, -row, _thumbnail(image)))
            elif self._thumbnails and (rank, -row) > self._thumbnails[0][:2]:
                heapq.heapreplace(self._thumbnails, (rank, -row, _thumbnail(image)))

    def write(self, folder: Path, reading: Reading) -> None:
        """Write all files; thumbnails in the order of their rows."""
        Strings.write(folder, "keys", self._keys)
        Strings.write(folder, "captions", self._captions)
        shown = sorted(((-row, image) for _, row, image in self._thumbnails), key=lambda pair: pair[0])
        if shown:
            save_array(folder / "thumbnails.npy", np.stack([image for _, image in shown]))
            save_array(folder / "thumbnail_rows.npy", np.array([row for row, _ in shown], np.int64))
        with (folder / "broken.jsonl").open("w", encoding="utf-8") as lines:
            for broken in reading.broken:
                lines.write(json.dumps(asdict(broken)) + "\n")


def _thumbnail(image: UInt8[np.ndarray, "h w 3"]) -> UInt8[np.ndarray, "h2 w2 3"]:
    """Copy an image, at most 96 pixels high and wide."""
    if image.shape[0] <= _THUMBNAIL_SIZE:
        return image.copy()
    small = (_THUMBNAIL_SIZE, _THUMBNAIL_SIZE)
    return np.asarray(Image.fromarray(image).resize(small, Image.Resampling.LANCZOS))
