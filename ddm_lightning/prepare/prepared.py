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
from ddm_lightning.partition.columns import PackedStrings, RowNumbers, Rows, StoredArray, opened
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
    Hashes,
    Mask,
    check_broken,
    in_bucket,
    is_sampled,
)
from ddm_lightning.prepare.filters import IN_DROP_KEYS
from ddm_lightning.prepare.ledger import GROUP_SIZE, Ledger, Store
from ddm_lightning.prepare.near_duplicates import find_near_duplicates
from ddm_lightning.prepare.records import BrokenSample, Part

_AGAIN = "delete it and run prepare again, where the images are"

Kept: TypeAlias = Sequence[RowNumbers | None]
"""Rows of each part; None for all of them."""


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
        self.folder = folder
        self.first = first
        self.store = store
        self.parts_file = folder / "parts.json"
        self.index_file = folder / "index.json"
        self.broken_file = folder / "broken.jsonl"
        self.rule_file = folder / "rule.safetensors"
        self.split_file = folder / "split.json"
        self.clusters_file = folder / "clusters.npy"
        self.partition_file = folder / "partition.safetensors"
        self.shards = folder / "shards"
        if parts is not None:
            self.parts = parts
        if ledgers is not None:
            self.ledgers = ledgers

    @cached_property
    def parts(self) -> Sequence[Part]:
        """Parts of the source, from ``parts.json``."""
        return read_record(self.parts_file, list[Part], "the list of parts", _AGAIN)

    @cached_property
    def ledgers(self) -> Sequence[Ledger]:
        """The ``part.json`` of each part."""
        return [Ledger(self.folder_of(part) / LEDGER) for part in self.parts]

    def folder_of(self, part: Part) -> Path:
        """Return the folder of a part's columns. It depends on the part's name alone, not on other parts."""
        readable = re.sub(r"[^A-Za-z0-9-]+", "-", part.name)[-32:].strip("-")
        return self.folder / "parts" / f"{readable}-{hashlib.sha256(part.name.encode()).hexdigest()[:16]}"

    def part_folder(self, number: int) -> Path:
        """Return the folder of the columns of ``parts[number]``."""
        return self.folder_of(self.parts[number])

    @property
    def num_groups(self) -> int:
        """Number of groups of parts."""
        return math.ceil(len(self.parts) / GROUP_SIZE)

    def group(self, number: int) -> Prepared:
        """Return a group of consecutive parts, whose samples are shuffled together."""
        some = slice(number * GROUP_SIZE, (number + 1) * GROUP_SIZE)
        return Prepared(self.folder, self.parts[some], some.start, self.ledgers[some], self.store)

    def fetch(self, numbers: Iterable[int], *names: str) -> None:
        """Bring these files of some parts from the store, or all of them, unless they are here."""
        if (store := self.store) is None:
            return

        def pull(number: int) -> None:
            folder = self.part_folder(number)
            store.pull(f"parts/{folder.name}", folder, self.ledgers[number].entries, names)

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
        return [*filter(self.num_rows, range(len(self.parts)))]

    @cached_property
    def kept(self) -> Kept:
        """Usable rows of each of ``filled_parts``; None for all of them."""
        kept: list[RowNumbers | None] = []
        for number in self.filled_parts:
            dropped = self.index["dropped"].get(str(self.first + number))
            if dropped:
                kept.append(np.delete(np.arange(self.num_rows(number)), dropped))
            else:
                kept.append(None)

        return kept

    @property
    def all_rows(self) -> Kept:
        """All rows of each of ``filled_parts``."""
        return [None] * len(self.filled_parts)

    @property
    def first_row(self) -> int:
        """Number of usable samples in the parts of the source before these."""
        return sum(self.index["part_samples"][: self.first])

    @property
    def num_samples(self) -> int:
        """Number of usable samples in these parts."""
        return sum(self.index["part_samples"][self.first :][: len(self.parts)])

    def rows(self, column: str, kept: Kept | None = None) -> Rows:
        """Return a column of all usable samples, or of these rows of each of ``filled_parts``."""
        return Rows(self.arrays(column), kept or self.kept)

    def bucket_rows(self, number: int) -> tuple[Kept, Kept]:
        """Return the usable rows of a bucket in each of ``filled_parts``: numbers in the part, and in the bucket."""
        in_part = []
        in_file = []
        for part, usable in zip(self.filled_parts, self.kept, strict=True):
            is_here = np.load(self.part_folder(part) / ROWS_FILE)["bucket"] == number
            chosen, places = _places(is_here, usable)
            in_part.append(chosen)
            in_file.append(places)

        return in_part, in_file

    def facts(self, column: str, kept: Kept | None = None) -> Shaped[np.ndarray, "n"]:
        """Read a column of ``rows.npz`` of all usable samples, or of these rows of each of ``filled_parts``."""
        arrays = []
        for number in self.filled_parts:
            arrays.append(np.load(self.part_folder(number) / ROWS_FILE)[column])

        return Rows(arrays, kept or self.kept)[:]

    def texts(self, name: str, kept: Kept | None = None) -> Rows:
        """Return ``keys``, ``captions``, ``captions_2`` … of all usable samples, or of these rows of each part."""
        texts = []
        for number in self.filled_parts:
            texts.append(PackedStrings(self.part_folder(number) / TEXTS_FILE, name, self.num_rows(number)))

        return Rows(texts, kept or self.kept)

    def num_rows(self, number: int) -> int:
        """Return the number of rows of a part, dropped ones included.

        Raises:
            UserError: its ledger is damaged or missing.
        """
        ledger = self.ledgers[number]
        if RECORDS not in ledger.entries:
            raise UserError(f"{ledger.file}: is damaged or missing; {_AGAIN}")

        return int(ledger.entries[RECORDS]["num_rows"])

    def sample(self, fraction: float) -> tuple[Samples, Hashes]:
        """Return the usable samples on which a partition is fitted, and the hashes that decide their split.

        Args:
            fraction: as in ``is_sampled``.
        """
        column = FEATURES if fraction == 1 else SAMPLE
        in_part = []
        in_file = []
        for number, usable in zip(self.filled_parts, self.kept, strict=True):
            with np.load(self.part_folder(number) / ROWS_FILE) as rows:
                sampled = is_sampled(rows["key_hash"], fraction)

            chosen, places = _places(sampled, usable)
            in_part.append(chosen)
            in_file.append(places)

        features = Rows(self.arrays(column), in_file)
        samples = Samples(features, self.facts("label", in_part), self.texts("keys", in_part))
        return samples, self.facts("split_hash", in_part)

    def arrays(self, column: str, bucket: str | None = None) -> list[StoredArray]:
        """Return a column of each of ``filled_parts``, dropped rows included; of encoded images, that of a bucket."""
        arrays = []
        for number in self.filled_parts:
            array = StoredArray(self.part_folder(number) / f"{in_bucket(column, bucket)}.npy")
            if not bucket and column != SAMPLE and len(array) != self.num_rows(number):
                raise ValueError(f"column {column!r} has another number of rows than its parts; fix the encoder")

            arrays.append(array)

        return arrays

    def thumbnails(self) -> tuple[list[UInt8[np.ndarray, "s s 3"]], RowNumbers]:
        """Return small images of some samples, and their rows counted from the first of these parts."""
        images = list[Any]()
        rows = list[int]()
        start = 0
        for number, usable in zip(self.filled_parts, self.kept, strict=True):
            if usable is None:
                usable = np.arange(self.num_rows(number))

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


def _places(chosen: Mask, usable: RowNumbers | None) -> tuple[RowNumbers, RowNumbers]:
    """Return the chosen usable rows, and their numbers among all chosen ones."""
    rows = np.flatnonzero(chosen)
    if usable is not None:
        rows = usable[chosen[usable]]

    return rows, (np.cumsum(chosen) - 1)[rows]


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
    num_read = 0
    num_rows = [0]
    sizes = dict[int, str]()
    counts = Counter[str]()
    filtered = Counter[str]()
    for part, ledger in zip(prepared.parts, prepared.ledgers, strict=True):
        records = ledger.entries[RECORDS]
        num_read += records["num_read"]
        num_rows.append(records["num_rows"])
        counts.update(records["broken"])
        filtered.update(records["filtered"])
        if records["image_size"]:
            sizes[records["image_size"]] = part.name

    if len(sizes) > 1:
        several = ", ".join(f"{size} pixels in {name!r}" for size, name in sizes.items())
        raise UserError(f"the source has images of several sizes ({several}); set prepare.images.size")

    starts = np.cumsum(num_rows)
    causes = _unfit_rows(prepared, column_sets, starts)
    usable = np.ones(starts[-1], bool)
    usable[list(causes)] = False
    again = _duplicates(prepared, usable)
    usable[again] = False
    causes |= dict.fromkeys(again.tolist(), "duplicate key")
    counts.update(causes.values())

    broken = [json.dumps(sample, ensure_ascii=False) + "\n" for sample in _broken(prepared, causes, starts)]
    atomic_write_text(prepared.broken_file, "".join(broken))
    check_broken(counts, num_read, max_bad_fraction, prepared.broken_file, enough=1)

    if near_duplicates is not None and prepared.filled_parts:
        found = find_near_duplicates(_codes(prepared, usable, starts), near_duplicates)
        near = np.flatnonzero(usable)[found]
        usable[near] = False
        filtered["near-duplicate"] = len(near)

    part_samples = []
    dropped = {}
    for number, part_usable in enumerate(np.split(usable, starts[1:-1])):
        part_samples.append(int(part_usable.sum()))
        if not part_usable.all():
            dropped[number] = np.flatnonzero(~part_usable).tolist()

    num_samples = sum(part_samples)
    of_filters = _in_words("; taken out by filters", filtered)
    if num_samples == 0:
        raise UserError(f"the source has no usable samples{of_filters}; fix prepare.source or prepare.filters")

    if filtered.get(IN_DROP_KEYS) == 0:
        first_key = prepared.texts("keys", prepared.all_rows)[int(usable.argmax())]
        note(f"key 'prepare.drop_keys': no key of the file is a sample's, such as {first_key!r}")

    has_caption = prepared.facts("has_caption", prepared.all_rows)
    num_without_caption = int(np.count_nonzero(usable & ~has_caption))
    index = {
        "num_read": num_read,
        "num_samples": num_samples,
        "num_without_caption": num_without_caption,
        "image_size": next(iter(sizes)),
        "broken": dict(sorted(counts.items())),
        "filtered": dict(sorted(filtered.items())),
        "part_samples": part_samples,
        "dropped": dropped,
    }
    atomic_write_json(prepared.index_file, index)
    line = f"{num_samples:,} of {num_read:,} samples"
    if num_without_caption:
        line += f", {num_without_caption:,} of them without a caption"

    line += of_filters
    if counts:
        line += f"{_in_words('; skipped', counts)}; see {prepared.broken_file}"

    return line


def _in_words(title: str, counts: Mapping[str, int]) -> str:
    causes = ", ".join(f"{cause}: {count:,}" for cause, count in sorted(counts.items()))
    if causes:
        return f"{title}: {causes}"

    return ""


def _unfit_rows(prepared: Prepared, column_sets: Collection[str], starts: RowNumbers) -> dict[int, str]:
    """Return the cause of each row, counted over all parts, that a column set cannot hold."""
    causes = {}
    for ledger, start in zip(prepared.ledgers, starts.tolist(), strict=False):
        for name in column_sets:
            for row, cause in ledger.entries[name].get("unfit", {}).items():
                causes[start + int(row)] = cause

    return causes


def _duplicates(prepared: Prepared, usable: Mask) -> RowNumbers:
    """Return all but the first usable row of each key, by 64-bit hashes."""
    if not len(usable):
        return np.array([], np.int64)

    hashes = prepared.facts("key_hash", prepared.all_rows)
    order = hashes.argsort(kind="stable")
    order = order[usable[order]]
    return order[1:][hashes[order[1:]] == hashes[order[:-1]]]


def _codes(prepared: Prepared, usable: Mask, starts: RowNumbers) -> UInt64[np.ndarray, "m 4"]:
    """Return the codes of the usable rows, read part by part: all at once, they would take twice the memory."""
    arrays = prepared.arrays(CODES)
    codes = np.empty((np.count_nonzero(usable), *arrays[0].shape[1:]), np.uint64)
    stop = 0
    for array, part_usable in zip(arrays, filter(len, np.split(usable, starts[1:-1])), strict=True):
        start = stop
        stop += np.count_nonzero(part_usable)
        codes[start:stop] = array[np.flatnonzero(part_usable)]

    return codes


def _broken(prepared: Prepared, causes: Mapping[int, str], starts: RowNumbers) -> Iterator[dict[str, Any]]:
    rows = np.array(sorted(causes), np.int64)
    rows_of = np.split(rows, np.searchsorted(rows, starts[1:-1]))
    counts = {}
    for number, ledger in enumerate(prepared.ledgers):
        num_broken = sum(ledger.entries[RECORDS]["broken"].values())
        if num_broken or len(rows_of[number]):
            counts[number] = num_broken

    prepared.fetch(counts, TEXTS_FILE)
    for number, num_broken in counts.items():
        part = prepared.parts[number].name
        path = prepared.part_folder(number) / TEXTS_FILE
        for line in PackedStrings(path, "broken", num_broken)[:]:
            yield {"part": part, **json.loads(line)}

        keys = PackedStrings(path, "keys", prepared.num_rows(number))[rows_of[number] - starts[number]]
        for row, key in zip(rows_of[number].tolist(), keys, strict=True):
            yield {"part": part, **asdict(BrokenSample(key, causes[row]))}


class Thumbnails(NamedTuple):
    """Small images of some samples."""

    images: UInt8[np.ndarray, "m s s 3"]
    clusters: RowNumbers
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
        stacked = np.empty((0, 1, 1, 3), np.uint8)
        if images:
            stacked = np.stack(images[every])

        return cls(stacked, np.array(clusters[every], np.int32), captions[every])


def example_captions(folder: Path, num: int) -> list[str]:
    """About ``num`` captions from all over the data set, each once; none if ``folder`` was prepared elsewhere."""
    captions = Thumbnails.read(sorted((folder / "groups").glob("*.npz"))).captions
    return list(dict.fromkeys(captions[:: max(1, len(captions) // num)]))
