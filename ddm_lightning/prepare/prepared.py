"""The files of the stages below ``prepared/``, and the index of usable samples: whole, finite, with a unique key."""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from jaxtyping import Int, Shaped, UInt8, UInt64

from ddm_lightning.core import remote
from ddm_lightning.core.checks import read_record
from ddm_lightning.core.errors import UserError, note
from ddm_lightning.core.files import atomic_write_json, atomic_write_text, read_json
from ddm_lightning.partition.columns import PackedStrings, Rows, StoredArray, opened
from ddm_lightning.partition.partition import Samples
from ddm_lightning.prepare.encode import (
    CODES,
    FEATURES,
    LEDGER,
    MAX_THUMBNAILS,
    RECORDS,
    ROWS_FILE,
    SAMPLE,
    TEXTS_FILE,
    check_broken,
    is_sampled,
)
from ddm_lightning.prepare.filters import IN_DROP_KEYS
from ddm_lightning.prepare.ledger import Ledger, Published
from ddm_lightning.prepare.near_duplicates import find_near_duplicates
from ddm_lightning.prepare.records import BrokenSample, Part

GROUP_SIZE = 64
"""Consecutive parts whose samples are shuffled together; the same for any number of machines."""

_AGAIN = "delete it and run prepare again, where the images are"

Kept: TypeAlias = Sequence[Int[np.ndarray, "m"] | None]
"""Rows of each part; None for all of them."""


class Prepared:
    """One ``prepared/`` folder. Rows are the usable samples of all parts, in source order.

    An instance caches ``parts.json``, ``part.json`` and ``index.json``: make a new one when they change.

    Args:
        folder: the folder.
        parts: of the source; None for those in ``parts.json``.
        first: number of the first of ``parts`` in the source.
        ledgers: of the parts; None for those on this disk.
        published: where to find files that are not on this disk.
    """

    def __init__(
        self,
        folder: Path,
        parts: Sequence[Part] | None = None,
        first: int = 0,
        ledgers: Sequence[Ledger] | None = None,
        published: Published | None = None,
    ) -> None:
        self.folder = folder
        self.first = first
        self.published = published
        self.parts_file = folder / "parts.json"
        self.index_file = folder / "index.json"
        self.broken_file = folder / "broken.jsonl"
        self.rule_file = folder / "rule.safetensors"
        self.split_file = folder / "split.json"
        self.clusters_file = folder / "clusters.npy"
        self.partition_file = folder / "partition.safetensors"
        self.shards = folder / "shards"
        if parts is not None:
            self.parts = list(parts)
        if ledgers is not None:
            self.ledgers = list(ledgers)

    @cached_property
    def parts(self) -> list[Part]:
        """Parts of the source, from ``parts.json``."""
        return read_record(self.parts_file, list[Part], "the list of parts", _AGAIN)

    def folder_of(self, part: Part) -> Path:
        """Return the folder of a part's columns. It depends on the part's name alone, not on other parts."""
        readable = re.sub(r"[^A-Za-z0-9-]+", "-", part.name)[-32:].strip("-")
        return self.folder / "parts" / f"{readable}-{hashlib.sha256(part.name.encode()).hexdigest()[:16]}"

    def part_folder(self, number: int) -> Path:
        """Return the folder of the columns of ``parts[number]``."""
        return self.folder_of(self.parts[number])

    @cached_property
    def ledgers(self) -> list[Ledger]:
        """The ``part.json`` of each part."""
        return [Ledger(self.folder_of(part) / LEDGER) for part in self.parts]

    @property
    def num_groups(self) -> int:
        """Number of groups of parts."""
        return math.ceil(len(self.parts) / GROUP_SIZE)

    def group(self, number: int) -> Prepared:
        """Return a group of consecutive parts, whose samples are shuffled together."""
        some = slice(number * GROUP_SIZE, (number + 1) * GROUP_SIZE)
        return Prepared(self.folder, self.parts[some], some.start, self.ledgers[some], self.published)

    def fetch(self, numbers: Iterable[int], *names: str) -> None:
        """Bring these files of some parts from the URL, or all of them, unless they are here."""
        if (published := self.published) is None:
            return

        def pull(number: int) -> None:
            folder = self.part_folder(number)
            entries = self.ledgers[number].entries
            published.pull(f"parts/{folder.name}", folder, entries, lambda path: not names or path in names)

        remote.in_threads(pull, numbers)

    @cached_property
    def index(self) -> Mapping[str, Any]:
        """``index.json``: number of samples, in all and in each part, and the dropped rows of each part."""
        found = read_json(self.index_file, "the index of the samples", _AGAIN)
        if not isinstance(found, dict) or not found.keys() >= {"dropped", "part_samples"}:
            raise UserError(f"{self.index_file}: is no index of the samples; {_AGAIN}")

        return found

    @cached_property
    def filled_parts(self) -> list[int]:
        """Numbers of the parts with at least one row."""
        return [number for number in range(len(self.parts)) if self._num_rows(number)]

    @cached_property
    def kept(self) -> Kept:
        """Usable rows of each of ``filled_parts``; None for all of them."""
        dropped: Mapping[str, list[int]] = self.index["dropped"]
        return self.without([dropped.get(str(self.first + number), ()) for number in self.filled_parts])

    @property
    def first_row(self) -> int:
        """Number of usable samples in the parts of the source before these."""
        return sum(self.index["part_samples"][: self.first])

    @property
    def num_samples(self) -> int:
        """Number of usable samples in these parts."""
        return sum(self.index["part_samples"][self.first :][: len(self.parts)])

    def rows(self, column_set: str, column: str) -> Rows:
        """Return a column of all usable samples."""
        return Rows(self._arrays(column_set, column), self.kept)

    def facts(self, column: str, kept: Kept | None = None) -> Shaped[np.ndarray, "n"]:
        """Read a column of ``rows.npz`` of all usable samples, or of these rows of each of ``filled_parts``."""
        arrays = []
        for number in self.filled_parts:
            arrays.append(np.load(self.part_folder(number) / ROWS_FILE)[column])

        return Rows(arrays, kept or self.kept)[:]

    def texts(self, name: str, kept: Kept | None = None) -> Rows:
        """Return ``keys``, ``captions``, ``captions_2`` … of all usable samples, or of these rows of each part."""
        paths = []
        for number in self.filled_parts:
            paths.append((self.part_folder(number) / TEXTS_FILE, self._num_rows(number)))

        return Rows([PackedStrings(path, name, num_rows) for path, num_rows in paths], kept or self.kept)

    def without(self, dropped: Sequence[Collection[int]]) -> Kept:
        """Return the rows of each of ``filled_parts`` that are left without these."""
        return [
            np.delete(np.arange(self._num_rows(number)), list(rows)) if rows else None
            for number, rows in zip(self.filled_parts, dropped, strict=True)
        ]

    def _num_rows(self, number: int) -> int:
        if RECORDS not in self.ledgers[number].entries:
            raise UserError(f"{self.ledgers[number].file}: is damaged or missing; {_AGAIN}")

        return int(self.ledgers[number].entries[RECORDS]["num_rows"])

    def sample(self, fraction: float) -> tuple[Samples, UInt64[np.ndarray, "n"]]:
        """Return the usable samples on which a partition is fitted, and the hashes that decide their split.

        Args:
            fraction: as in ``is_sampled``.
        """
        column_set, column = (FEATURES, "features") if fraction == 1 else (SAMPLE, "sample")
        in_part = []
        in_file = []
        for number, usable in zip(self.filled_parts, self.kept, strict=True):
            with np.load(self.part_folder(number) / ROWS_FILE) as rows:
                sampled = is_sampled(rows["key_hash"], fraction)

            in_part.append(np.flatnonzero(sampled) if usable is None else usable[sampled[usable]])
            in_file.append((np.cumsum(sampled) - 1)[in_part[-1]])

        features = Rows(self._arrays(column_set, column), in_file)
        samples = Samples(features, self.facts("label", in_part), self.texts("keys", in_part))
        return samples, self.facts("split_hash", in_part)

    def _arrays(self, column_set: str, column: str) -> list[StoredArray]:
        """Return a column of each of ``filled_parts``."""
        arrays = []
        for number in self.filled_parts:
            arrays.append(StoredArray(self.part_folder(number) / f"{column}.npy"))

        if column_set != SAMPLE and [*map(len, arrays)] != [*map(self._num_rows, self.filled_parts)]:
            raise ValueError(f"column {column!r} has another number of rows than its parts; fix the encoder")

        return arrays

    def thumbnails(self) -> tuple[list[UInt8[np.ndarray, "s s 3"]], Int[np.ndarray, "m"]]:
        """Return small images of some samples, and their rows counted from the first of these parts."""
        images = list[Any]()
        rows = list[int]()
        start = 0
        for number, usable in zip(self.filled_parts, self.kept, strict=True):
            if usable is None:
                usable = np.arange(self._num_rows(number))

            with np.load(self.part_folder(number) / TEXTS_FILE) as texts:
                _, places, shown = np.intersect1d(usable, texts["thumbnail_rows"], True, return_indices=True)
                images += [*texts["thumbnails"][shown]]

            rows += (start + places).tolist()
            start += len(usable)

        return images, np.array(rows, np.int64)

    @property
    def clusters(self) -> Int[np.ndarray, "n"]:
        """Cluster of each sample of the fit, int32."""
        return np.load(self.clusters_file, mmap_mode="r")


Dropped = dict[int, dict[int, str]]
"""Cause by row, by number of the part."""


def write_index(
    prepared: Prepared, column_sets: Collection[str], max_bad_fraction: float, near_duplicates: float | None = None
) -> str:
    """Write ``index.json`` (samples, counts by cause, dropped rows) and ``broken.jsonl`` (each broken sample).

    Args:
        prepared: folder with encoded parts.
        column_sets: those in use. Failures in others, left by an earlier configuration, are ignored.
        max_bad_fraction: largest allowed fraction of broken samples.
        near_duplicates: cosine similarity from which on images count as the same; None keeps all.

    Returns:
        The counts in words.

    Raises:
        UserError: too many samples are broken, none is left, or parts differ in image size.
    """
    states = [ledger.entries[RECORDS] for ledger in prepared.ledgers]
    sizes = {state["image_size"]: number for number, state in enumerate(states) if state["image_size"]}
    if len(sizes) > 1:
        several = ", ".join(f"{size} pixels in {prepared.parts[number].name!r}" for size, number in sizes.items())
        raise UserError(f"the source has images of several sizes ({several}); set prepare.images.size")

    dropped: Dropped = {}
    for number, ledger in enumerate(prepared.ledgers):
        unfit = {}
        for name in column_sets:
            for row, cause in ledger.entries[name].get("unfit", {}).items():
                unfit[row] = cause

        if unfit:
            dropped[number] = {int(row): cause for row, cause in unfit.items()}

    _drop_duplicates(prepared, dropped)

    counts = Counter[str]()
    filtered = Counter[str]()
    for state in states:
        counts.update(state["broken"])
        filtered.update(state.get("filtered", {}))

    counts.update(cause for rows in dropped.values() for cause in rows.values())
    num_read = sum(state["num_read"] for state in states)
    broken = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in _broken(prepared, dropped))
    atomic_write_text(prepared.broken_file, broken)
    check_broken(counts, num_read, max_bad_fraction, prepared.broken_file, enough=1)
    lost = {number: sorted(rows) for number, rows in sorted(dropped.items())}
    if near_duplicates is not None and prepared.filled_parts:
        filtered["near-duplicate"] = _drop_near_duplicates(prepared, lost, near_duplicates)

    part_samples = [state["num_rows"] - len(lost.get(number, ())) for number, state in enumerate(states)]
    num_samples = sum(part_samples)
    of_filters = _in_words("; taken out by filters", filtered)
    if num_samples == 0:
        raise UserError(f"the source has no usable samples{of_filters}; fix prepare.source or prepare.filters")

    usable = prepared.without([lost.get(number, ()) for number in prepared.filled_parts])
    if filtered.get(IN_DROP_KEYS) == 0:
        note(
            f"key 'prepare.drop_keys': no key of the file is a sample's, such as {prepared.texts('keys', usable)[0]!r}"
        )

    num_without_caption = int(np.count_nonzero(~prepared.facts("has_caption", usable)))
    index = {
        "num_read": num_read,
        "num_samples": num_samples,
        "num_without_caption": num_without_caption,
        "image_size": next(iter(sizes)),
        "broken": dict(sorted(counts.items())),
        "filtered": dict(sorted(filtered.items())),
        "part_samples": part_samples,
        "dropped": {str(number): rows for number, rows in lost.items()},
    }
    atomic_write_json(prepared.index_file, index)
    if num_without_caption:
        detail = f", {num_without_caption:,} of them without a caption"
    else:
        detail = ""

    skipped = _in_words("; skipped", counts) + (f"; see {prepared.broken_file}" if counts else "")
    return f"{num_samples:,} of {num_read:,} samples{detail}{of_filters}{skipped}"


def _in_words(title: str, counts: Mapping[str, int]) -> str:
    causes = ", ".join(f"{cause}: {count:,}" for cause, count in sorted(counts.items()))
    if causes:
        return f"{title}: {causes}"

    return ""


def _drop_duplicates(prepared: Prepared, dropped: Dropped) -> None:
    """Drop all but the first usable sample of each key, by 64-bit hashes."""
    if not prepared.filled_parts:
        return

    hashes = prepared.facts("key_hash", [None] * len(prepared.filled_parts))
    num_rows = [prepared._num_rows(number) for number in prepared.filled_parts]
    starts = np.cumsum([0, *num_rows[:-1]])
    start_of = dict(zip(prepared.filled_parts, starts.tolist(), strict=True))
    usable = np.ones(len(hashes), bool)
    for number, unfit in dropped.items():
        usable[start_of[number] + np.array(list(unfit))] = False

    order = hashes.argsort(kind="stable")
    order = order[usable[order]]
    again = order[1:][hashes[order[1:]] == hashes[order[:-1]]]
    parts = np.searchsorted(starts, again, side="right") - 1
    for part, place in zip(parts.tolist(), again.tolist(), strict=True):
        number = prepared.filled_parts[part]
        dropped.setdefault(number, {})[place - start_of[number]] = "duplicate key"


def _drop_near_duplicates(prepared: Prepared, lost: dict[int, list[int]], similarity: float) -> int:
    """Add the rows that are like an earlier usable one to those lost of each part; return their number."""
    usable = prepared.without([lost.get(number, ()) for number in prepared.filled_parts])
    arrays = prepared._arrays(CODES, "codes")
    sizes = [len(array if rows is None else rows) for array, rows in zip(arrays, usable, strict=True)]
    ends = np.cumsum(sizes)
    codes = np.empty((ends[-1], *arrays[0].shape[1:]), np.uint64)
    for array, rows, here in zip(arrays, usable, np.split(codes, ends[:-1]), strict=True):
        if rows is None:
            here[:] = array[:]
        else:
            here[:] = array[rows]

    found = np.split(find_near_duplicates(codes, similarity), ends[:-1])
    for number, rows, again in zip(prepared.filled_parts, usable, found, strict=True):
        if again.any():
            if rows is None:
                near = np.flatnonzero(again)
            else:
                near = rows[again]

            lost[number] = sorted([*lost.get(number, ()), *near.tolist()])

    return int(sum(map(np.count_nonzero, found)))


def _broken(prepared: Prepared, dropped: Dropped) -> Iterator[dict[str, Any]]:
    states = [ledger.entries[RECORDS] for ledger in prepared.ledgers]
    named = [number for number, state in enumerate(states) if state["broken"] or number in dropped]
    prepared.fetch(named, TEXTS_FILE)
    for number in named:
        part = prepared.parts[number].name
        path = prepared.part_folder(number) / TEXTS_FILE
        rows = dropped.get(number, {})
        for line in PackedStrings(path, "broken", sum(states[number]["broken"].values()))[:]:
            yield {"part": part, **json.loads(line)}

        keys = PackedStrings(path, "keys", states[number]["num_rows"])[np.array(sorted(rows), np.int64)]
        for row, key in zip(sorted(rows), keys, strict=True):
            yield {"part": part, **asdict(BrokenSample(key, rows[row]))}


class Thumbnails(NamedTuple):
    """Small images of some samples."""

    images: UInt8[np.ndarray, "m s s 3"]
    clusters: Int[np.ndarray, "m"]
    captions: Sequence[str]

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Thumbnails:
        """Read the files of all groups, in the order of the samples."""
        images = list[Any]()
        clusters = list[int]()
        captions = list[str]()
        for path in paths:
            with opened(path) as arrays:
                images += [*arrays["images"]]
                clusters += arrays["clusters"].tolist()

            captions += PackedStrings(path, "captions", len(clusters) - len(captions))[:].tolist()

        # More parts than ``MAX_THUMBNAILS`` have one each.
        every = slice(None, None, max(1, math.ceil(len(images) / MAX_THUMBNAILS)))
        if images:
            stacked = np.stack(images[every])
        else:
            stacked = np.empty((0, 1, 1, 3), np.uint8)

        return cls(stacked, np.array(clusters[every], np.int32), captions[every])


def example_captions(folder: Path, num: int) -> list[str]:
    """About ``num`` captions from all over the data set, each once; none if ``folder`` was prepared elsewhere."""
    if not (files := sorted((folder / "groups").glob("*.npz"))):
        return []

    captions = Thumbnails.read(files).captions
    return list(dict.fromkeys(captions[:: max(1, len(captions) // num)]))
