"""The files of the stages below ``prepared/``, and the index of usable samples: whole, finite, with a unique key."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int, Shaped, UInt8, UInt64

from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write_json, atomic_write_text, read_json
from ddm_lightning.partition.columns import PackedStrings, Rows, StoredArray
from ddm_lightning.prepare.encode import (
    FEATURES,
    LEDGER,
    MAX_THUMBNAILS,
    RECORDS,
    ROWS_FILE,
    SAMPLE,
    TEXTS_FILE,
    Ledger,
    check_broken,
    is_sampled,
)
from ddm_lightning.prepare.records import BrokenSample, Part
from ddm_lightning.prepare.store import Store

GROUP_SIZE = 64
"""Consecutive parts whose samples are shuffled together; the same for any number of machines."""


class FitSample(NamedTuple):
    """The usable samples on which the partition is fitted."""

    features: Rows
    labels: Int[np.ndarray, "n"]
    split_hash: UInt64[np.ndarray, "n"]
    keys: Rows


class Prepared:
    """One ``prepared/`` folder. Rows are the usable samples of all parts, in source order.

    An instance caches ``parts.json``, ``part.json`` and ``index.json``: make a new one when they change.

    Args:
        folder: the folder.
        parts: of the source; None for those in ``parts.json``.
        first: number of the first of ``parts`` in the source.
        ledgers: of the parts; None for those on this disk.
        store: where to find files that are not on this disk.
    """

    def __init__(
        self,
        folder: Path,
        parts: Sequence[Part] | None = None,
        first: int = 0,
        ledgers: Sequence[Ledger] | None = None,
        store: Store | None = None,
    ) -> None:
        self.folder, self.first, self.store = folder, first, store
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
        return [Part(**part) for part in json.loads(self.parts_file.read_text(encoding="utf-8"))]

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

    def fetch(self, numbers: Iterable[int], *names: str) -> list[Path]:
        """Bring these files of some parts from the store, or all of them; return those that were not here."""
        if (store := self.store) is None:
            return []

        def pull(number: int) -> list[Path]:
            folder, work = self.part_folder(number), self.ledgers[number].records
            return store.pull(f"parts/{folder.name}", folder, work, lambda path: not names or path in names)

        return list(chain(*remote.in_threads(pull, numbers)))

    @cached_property
    def index(self) -> Mapping[str, Any]:
        """``index.json``: number of samples, in all and in each part, and the dropped rows of each part."""
        return read_json(self.index_file, "the index of the samples", "run prepare again")

    @cached_property
    def filled_parts(self) -> list[int]:
        """Numbers of the parts with at least one row."""
        return [number for number in range(len(self.parts)) if self._num_rows(number)]

    @cached_property
    def kept(self) -> list[Int[np.ndarray, "m"] | None]:
        """Usable rows of each of ``filled_parts``; None for all of them."""
        dropped: Mapping[str, list[int]] = self.index["dropped"]
        num_rows = {str(self.first + number): self._num_rows(number) for number in self.filled_parts}
        return [np.delete(np.arange(num), dropped[key]) if key in dropped else None for key, num in num_rows.items()]

    @cached_property
    def first_row(self) -> int:
        """Number of usable samples in the parts of the source before these."""
        return sum(self.index["part_samples"][: self.first])

    def rows(self, group: str, column: str, unusable: bool = False) -> Rows:
        """Return a column of all usable samples; with ``unusable``, of all samples."""
        return Rows(self._arrays(group, column), None if unusable else self.kept)

    def facts(self, column: str, unusable: bool = False) -> Shaped[np.ndarray, "n"]:
        """Read a column of ``rows.npz`` of all usable samples; with ``unusable``, of all samples."""
        return Rows(self._facts(column), None if unusable else self.kept)[:]

    def texts(self, name: str, unusable: bool = False) -> Rows:
        """Return ``keys``, ``captions``, ``captions_2`` … of all usable samples; with ``unusable``, of all samples."""
        return Rows(self._texts(name), None if unusable else self.kept)

    def _facts(self, column: str) -> list[Shaped[np.ndarray, "n"]]:
        return [np.load(self.part_folder(number) / ROWS_FILE)[column] for number in self.filled_parts]

    def _texts(self, name: str) -> list[PackedStrings]:
        return [PackedStrings(self.part_folder(n) / TEXTS_FILE, name, self._num_rows(n)) for n in self.filled_parts]

    def _num_rows(self, number: int) -> int:
        return int(self.ledgers[number].records[RECORDS]["num_rows"])

    def sample(self, fraction: float) -> FitSample:
        """Return the usable samples on which a partition is fitted; ``fraction`` as in ``is_sampled``."""
        group, column = (FEATURES, "features") if fraction == 1 else (SAMPLE, "sample")
        in_part, in_file = [], []
        for number, usable in zip(self.filled_parts, self.kept, strict=True):
            with np.load(self.part_folder(number) / ROWS_FILE) as rows:
                sampled = is_sampled(rows["key_hash"], fraction)
            in_part.append(np.flatnonzero(sampled) if usable is None else usable[sampled[usable]])
            in_file.append((np.cumsum(sampled) - 1)[in_part[-1]])
        return FitSample(
            Rows(self._arrays(group, column), in_file),
            Rows(self._facts("label"), in_part)[:],
            Rows(self._facts("split_hash"), in_part)[:],
            Rows(self._texts("keys"), in_part),
        )

    def _arrays(self, group: str, column: str) -> list[StoredArray]:
        """Return a column of each of ``filled_parts``. Opens the first file only: all have the same header."""
        name = f"{column}.npy"
        first = StoredArray.of(self.part_folder(self.filled_parts[0]) / name)
        row_bytes = prod(first.shape[1:]) * first.dtype.itemsize
        arrays = []
        for number in self.filled_parts:
            num_bytes = self.ledgers[number].files(group)[name]["bytes"] - first.offset
            shape = (num_bytes // row_bytes, *first.shape[1:])
            arrays.append(replace(first, path=self.part_folder(number) / name, shape=shape))
            if num_bytes % row_bytes or (group != SAMPLE and shape[0] != self._num_rows(number)):
                raise ValueError(f"{arrays[-1].path}: rows differ in size from those of {first.path}")
        return arrays

    def thumbnails(self) -> tuple[UInt8[np.ndarray, "m s s 3"], Int[np.ndarray, "m"]]:
        """Return small images of some samples, and their rows counted from the first of these parts."""
        images, rows = [], []
        start = 0
        for number, kept in zip(self.filled_parts, self.kept, strict=True):
            with np.load(self.part_folder(number) / TEXTS_FILE) as texts:
                local, found = texts["thumbnail_rows"], texts["thumbnails"]
            shown = np.ones(len(local), bool) if kept is None else np.isin(local, kept)
            place = local[shown] if kept is None else np.searchsorted(kept, local[shown])
            if shown.any():
                images.append(found[shown])
                rows.append(place + start)
            start += self._num_rows(number) if kept is None else len(kept)
        if not images:
            return np.empty((0, 1, 1, 3), np.uint8), np.empty(0, np.int64)
        return np.concatenate(images), np.concatenate(rows)

    @property
    def clusters(self) -> Int[np.ndarray, "n"]:
        """Cluster of each sample of the fit, int32."""
        return np.load(self.clusters_file, mmap_mode="r")


Dropped = dict[int, dict[int, str]]
"""Cause by row, by number of the part."""


def write_index(prepared: Prepared, groups: Collection[str], max_bad_fraction: float) -> str:
    """Write ``index.json`` (samples, counts by cause, dropped rows) and ``broken.jsonl`` (each broken sample).

    Args:
        prepared: folder with encoded parts.
        groups: groups of columns in use. Failures in others, left by an earlier configuration, are ignored.
        max_bad_fraction: largest allowed fraction of broken samples.

    Returns:
        The counts in words.

    Raises:
        UserError: too many samples are broken, none is left, or parts differ in image size.
    """
    states = [ledger.records[RECORDS] for ledger in prepared.ledgers]
    sizes = {state["image_size"]: number for number, state in enumerate(states) if state["image_size"]}
    if len(sizes) > 1:
        several = ", ".join(f"{size} pixels in {prepared.parts[number].name!r}" for size, number in sizes.items())
        raise UserError(f"the source has images of several sizes ({several}); set prepare.images.size")
    dropped: Dropped = {}
    for number, ledger in enumerate(prepared.ledgers):
        unfit = {row: cause for name in groups for row, cause in ledger.records[name].get("unfit", {}).items()}
        if unfit:
            dropped[number] = {int(row): cause for row, cause in unfit.items()}
    _drop_duplicates(prepared, dropped)

    counts, filtered = Counter[str](), Counter[str]()
    for state in states:
        counts.update(state["broken"])
        filtered.update(state.get("filtered", {}))
    counts.update(cause for rows in dropped.values() for cause in rows.values())
    num_read = sum(state["num_read"] for state in states)
    num_samples = sum(state["num_rows"] for state in states) - sum(map(len, dropped.values()))
    broken = "".join(json.dumps(entry, ensure_ascii=False) + "\n" for entry in _broken(prepared, dropped))
    atomic_write_text(prepared.broken_file, broken)
    check_broken(counts, num_read, max_bad_fraction, prepared.broken_file, enough=1)
    of_filters = _in_words("; taken out by filters", filtered)
    if num_samples == 0:
        raise UserError(f"the source has no usable samples{of_filters}; fix prepare.source or prepare.filters")
    num_without_caption = 0
    for number in prepared.filled_parts:
        with np.load(prepared.part_folder(number) / ROWS_FILE) as rows:
            has_caption = np.delete(rows["has_caption"], list(dropped.get(number, {})))
        num_without_caption += int(np.count_nonzero(~has_caption))
    index = {
        "num_read": num_read,
        "num_samples": num_samples,
        "num_without_caption": num_without_caption,
        "image_size": next(iter(sizes)),
        "broken": dict(sorted(counts.items())),
        "filtered": dict(sorted(filtered.items())),
        "part_samples": [state["num_rows"] - len(dropped.get(number, ())) for number, state in enumerate(states)],
        "dropped": {str(number): sorted(rows) for number, rows in sorted(dropped.items())},
    }
    atomic_write_json(prepared.index_file, index)
    detail = f", {num_without_caption:,} of them without a caption" if num_without_caption else ""
    skipped = _in_words("; skipped", counts) + (f"; see {prepared.broken_file}" if counts else "")
    return f"{num_samples:,} of {num_read:,} samples{detail}{of_filters}{skipped}"


def _in_words(title: str, counts: Mapping[str, int]) -> str:
    causes = ", ".join(f"{cause}: {count:,}" for cause, count in sorted(counts.items()))
    return f"{title}: {causes}" if causes else ""


def _drop_duplicates(prepared: Prepared, dropped: Dropped) -> None:
    """Drop all but the first usable sample of each key."""
    if not prepared.filled_parts:
        return
    hashes: UInt64[np.ndarray, "n"] = prepared.facts("key_hash", unusable=True)
    keys = prepared.texts("keys", unusable=True)
    start_of = dict(zip(prepared.filled_parts, keys.starts.tolist(), strict=False))
    fit = np.ones(len(hashes), bool)
    for number, unfit in dropped.items():
        fit[start_of[number] + np.array(list(unfit))] = False
    places = np.flatnonzero(fit)
    order = places[hashes[places].argsort(kind="stable")]
    same = hashes[order[1:]] == hashes[order[:-1]]
    # Compare the keys behind equal hashes: 64 bits may collide.
    places = np.unique(np.concatenate([order[1:][same], order[:-1][same]]))
    parts = np.array(prepared.filled_parts)[np.unique(np.searchsorted(keys.starts, places, side="right") - 1)]
    prepared.fetch(parts.tolist(), TEXTS_FILE)
    first_of: dict[tuple[int, str], int] = {}
    for place, key in zip(places.tolist(), keys.take(places), strict=True):
        if first_of.setdefault((int(hashes[place]), key), place) != place:
            number = prepared.filled_parts[int(np.searchsorted(keys.starts, place, side="right")) - 1]
            dropped.setdefault(number, {})[place - start_of[number]] = "duplicate key"


def _broken(prepared: Prepared, dropped: Dropped) -> Iterator[dict[str, Any]]:
    for number, part in enumerate(prepared.parts):
        records, path = prepared.ledgers[number].records[RECORDS], prepared.part_folder(number) / TEXTS_FILE
        num_broken = sum(records["broken"].values())
        if num_broken or number in dropped:
            prepared.fetch([number], TEXTS_FILE)
        if num_broken:
            for line in PackedStrings(path, "broken", num_broken)[:]:
                yield {"part": part.name, **json.loads(line)}
        if number in dropped:
            rows = sorted(dropped[number])
            for row, key in zip(rows, PackedStrings(path, "keys", records["num_rows"])[np.array(rows)], strict=True):
                yield {"part": part.name, **asdict(BrokenSample(key, dropped[number][row]))}


class Thumbnails(NamedTuple):
    """Small images of some samples."""

    images: UInt8[np.ndarray, "m s s 3"]
    key_hash: UInt64[np.ndarray, "m"]
    clusters: Int[np.ndarray, "m"]
    captions: Sequence[str]

    @classmethod
    def read(cls, paths: Iterable[Path]) -> Thumbnails:
        """Read the lowest hashes of the files of all groups, in the order of the samples."""
        found = []
        for path in paths:
            with np.load(path) as arrays:
                columns = [arrays[name] for name in ("images", "key_hash", "clusters")]
            found.append((*columns, PackedStrings(path, "captions", len(columns[1]))[:]))
        images, hashes, clusters, captions = (
            np.concatenate([column for column in columns if len(column)] or columns[:1])
            for columns in zip(*found, strict=True)
        )
        lowest = np.sort(hashes.argsort(kind="stable")[:MAX_THUMBNAILS])
        return cls(images[lowest], hashes[lowest], clusters[lowest], captions[lowest].tolist())


def example_captions(folder: Path, num: int) -> list[str]:
    """About ``num`` captions from all over the data set, each once; none if ``folder`` was prepared elsewhere."""
    if not (files := sorted((folder / "groups").glob("*.npz"))):
        return []
    captions = Thumbnails.read(files).captions
    return list(dict.fromkeys(captions[:: max(1, len(captions) // num)]))
