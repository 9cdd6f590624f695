"""One part of a source to columns: pictures, captions and features, each in files of its own.

Columns come in groups, each with a key that says what it was made from, so that a new caption encoder
computes captions again and nothing else. ``part.json`` holds the keys; a group is in it only while its
files are whole.
"""

from __future__ import annotations

import heapq
import json
import time
from collections.abc import Callable, Mapping
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
from ddm_lightning.prepare.plugins import Plugins, plugins_of
from ddm_lightning.prepare.reading import SAMPLES_AT_ONCE, Reading
from ddm_lightning.prepare.records import Part, Record

RECORDS, LATENTS, CAPTIONS, FEATURES = "records", "latents", "captions", "features"
_THUMBNAIL_SIZE = 96

Tick = Callable[[int], None]
"""Called with the samples read so far."""


@dataclass(frozen=True)
class PartJob:
    """What there is to do for one part."""

    part: Part
    folder: Path
    """Where its columns go."""
    wanted: Mapping[str, str]
    """Groups to compute, each with its key: a hash of the part, a space, a hash of what else it is made from."""
    max_thumbnails: int
    """Pictures kept small for the report: those of the lowest hashes."""
    config: str
    """The ``prepare`` section as JSON, for a process that has yet to build the plug-ins."""


def encode_part(job: PartJob, plugins: Plugins, tick: Tick) -> None:
    """Write the wanted groups of one part.

    Raises:
        UserError: the source breaks its contract, or gave other samples than it did for the groups that are there.
    """
    state = read_state(job.folder)
    job = replace(job, wanted=_without_unchanged(job, state, plugins))
    for name in job.wanted:
        state.pop(name, None)
    if RECORDS in job.wanted:
        state.clear()  # rows may mean other samples now
    job.folder.mkdir(parents=True, exist_ok=True)
    atomic_write_json(job.folder / "part.json", state)
    pictured = [name for name in job.wanted if name != CAPTIONS]
    if pictured:
        _encode_pictures(job, pictured, state, plugins, tick)
    if CAPTIONS in job.wanted:
        # After the pictures, the samples have been counted already.
        _encode_captions(job, state, plugins, tick if not pictured else lambda _: None)


def _without_unchanged(job: PartJob, state: dict[str, Any], plugins: Plugins) -> dict[str, str]:
    """The wanted groups, without those whose part has a new fingerprint but the same samples: touched, or copied."""
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
    """``encode_part`` in a process that keeps its plug-ins from one part to the next."""
    encode_part(job, plugins_of(job.config), lambda _: None)


def read_state(folder: Path) -> dict[str, Any]:
    """What ``part.json`` says; empty when there is none, or none that can be read."""
    try:
        state = json.loads((folder / "part.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return state if isinstance(state, dict) else {}


def is_whole(folder: Path, group: Mapping[str, Any]) -> bool:
    """Whether a group's files are there with their sizes."""
    files = {folder / name: entry["bytes"] for name, entry in group["files"].items()}
    return all(path.is_file() and path.stat().st_size == size for path, size in files.items())


def key_hash(text: str) -> int:
    """64 bits of a key; they also decide what is held out."""
    return int.from_bytes(blake2b(text.encode("utf-8"), digest_size=8).digest(), "little")


def _encode_pictures(job: PartJob, names: list[str], state: dict[str, Any], plugins: Plugins, tick: Tick) -> None:
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
                for name, rows in _record_rows(records).items():
                    arrays[RECORDS].add(name, rows)
            if LATENTS in names:
                for name, rows in latent_rows(plugins, images).items():
                    arrays[LATENTS].add(name, rows, "encoded picture is not finite")
            if FEATURES in names:
                arrays[FEATURES].add("features", plugins.features.encode(images), "features are not finite")
        if RECORDS in names:
            texts.write(folders[RECORDS], reading)
        elif reading.num_rows != state[RECORDS]["num_rows"]:
            raise UserError(
                f"part {job.part.name!r} of the source: gives {reading.num_rows} samples, it gave "
                f"{state[RECORDS]['num_rows']} before, and its files have kept time and size; delete {job.folder}"
            )
    for name in names:
        extra: dict[str, Any] = {"unfit": arrays[name].unfit}
        if name == RECORDS:
            extra = {"num_rows": reading.num_rows, "num_read": reading.num_read}
            extra |= {"broken": reading.causes, "picture_size": size, "content": reading.content.hexdigest()}
            extra |= {"unread_captions": reading.unread_captions, "odd_shapes": +reading.odd_shapes}
        _record(job, name, state, extra, time.monotonic() - start)


def _record_rows(records: list[Record]) -> dict[str, Shaped[np.ndarray, "n"]]:
    return {
        "label": np.array([record.label for record in records], np.int32),
        "key_hash": np.array([key_hash(record.key) for record in records], np.uint64),
        "split_hash": np.array([key_hash(record.group or record.key) for record in records], np.uint64),
    }


def latent_rows(plugins: Plugins, images: UInt8[np.ndarray, "n h w 3"]) -> dict[str, Shaped[np.ndarray, "n c h w"]]:
    """What the shards store of pictures: ``x_0`` and, where the configuration asks for it, ``x_0_flipped``."""
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
    """Enter a group that is whole into ``part.json``."""
    files = {
        path.relative_to(job.folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted((job.folder / name).iterdir())
    }
    state[name] = {"key": job.wanted[name], **extra, "files": files, "seconds": round(seconds, 3)}
    atomic_write_json(job.folder / "part.json", state)


class _Arrays:
    """``.npy`` columns in one folder, opened at their first rows, and the rows that are not finite."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.unfit: dict[str, str] = {}
        """Row -> why it cannot be used."""
        self._arrays: dict[str, GrowingArray] = {}

    def add(self, name: str, rows: Shaped[np.ndarray, "n ..."], cause: str = "") -> None:
        """Append rows to a column; those that are not finite are noted under ``cause``."""
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
    """Keys, captions and thumbnails of one part, which are written when it has been read."""

    def __init__(self, max_thumbnails: int) -> None:
        self._keys: list[str] = []
        self._captions: list[str] = []
        self._max_thumbnails = max_thumbnails
        # The lowest hashes so far, the highest of them on top.
        self._thumbnails: list[tuple[int, int, UInt8[np.ndarray, "h w 3"]]] = []

    def add(self, records: list[Record], images: UInt8[np.ndarray, "n h w 3"], first_row: int) -> None:
        """Keep what is needed of one chunk."""
        for row, (record, image) in enumerate(zip(records, images, strict=True), first_row):
            self._keys.append(record.key)
            self._captions.append(str(record.caption))
            rank = -key_hash(record.key)
            if len(self._thumbnails) < self._max_thumbnails:
                heapq.heappush(self._thumbnails, (rank, -row, _thumbnail(image)))
            elif self._thumbnails and (rank, -row) > self._thumbnails[0][:2]:
                heapq.heapreplace(self._thumbnails, (rank, -row, _thumbnail(image)))

    def write(self, folder: Path, reading: Reading) -> None:
        """Everything to files; thumbnails in the order of their rows."""
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
    """A copy, no larger than is worth showing."""
    if image.shape[0] <= _THUMBNAIL_SIZE:
        return image.copy()
    small = (_THUMBNAIL_SIZE, _THUMBNAIL_SIZE)
    return np.asarray(Image.fromarray(image).resize(small, Image.Resampling.LANCZOS))
