"""The files of the stages below ``prepared/``, and the index of usable samples: whole, finite, with a unique key."""

from __future__ import annotations

import hashlib
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8, UInt64

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write_json, atomic_write_text
from ddm_lightning.partition.columns import Rows, StoredArray, Strings
from ddm_lightning.prepare.encode import LEDGER, RECORDS, Ledger, check_broken
from ddm_lightning.prepare.records import BrokenSample, Part


class Prepared:
    """One ``prepared/`` folder. Rows are the usable samples of all parts, in source order.

    An instance caches ``parts.json``, ``part.json`` and ``index.json``: make a new one when they change.

    Args:
        folder: the folder.
        parts: of the source; None for those in ``parts.json``.
    """

    def __init__(self, folder: Path, parts: list[Part] | None = None) -> None:
        self.folder = folder
        self.parts_file = folder / "parts.json"
        self.index_file = folder / "index.json"
        self.broken_file = folder / "broken.jsonl"
        self.partition_file = folder / "partition.safetensors"
        self.partition_facts_file = folder / "partition.json"
        self.clusters_file = folder / "clusters.npy"
        self.shards = folder / "shards"
        self.statistics_file = folder / "statistics.json"
        if parts is not None:
            self.parts = parts

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

    @cached_property
    def index(self) -> Mapping[str, Any]:
        """``index.json``: number of samples, and the dropped rows of each part."""
        return json.loads(self.index_file.read_text(encoding="utf-8"))

    @cached_property
    def filled_parts(self) -> list[int]:
        """Numbers of the parts with at least one row."""
        return [number for number, ledger in enumerate(self.ledgers) if ledger.records[RECORDS]["num_rows"]]

    @cached_property
    def kept(self) -> list[Int[np.ndarray, "m"] | None]:
        """Usable rows of each of ``filled_parts``; None for all of them."""
        dropped: Mapping[str, list[int]] = self.index["dropped"]
        num_rows = {str(number): self.ledgers[number].records[RECORDS]["num_rows"] for number in self.filled_parts}
        return [np.delete(np.arange(num), dropped[key]) if key in dropped else None for key, num in num_rows.items()]

    def rows(self, group: str, column: str, unusable: bool = False) -> Rows:
        """Return a column of all usable samples; with ``unusable``, of all samples."""
        return Rows(self._arrays(group, column), None if unusable else self.kept)

    def texts(self, name: str, unusable: bool = False) -> Rows:
        """Return ``keys`` or ``captions`` of all usable samples; with ``unusable``, of all samples."""
        strings = [Strings(ends.path.parent, name, ends) for ends in self._arrays(RECORDS, f"{name}-ends")]
        return Rows(strings, None if unusable else self.kept)

    def _arrays(self, group: str, column: str) -> list[StoredArray]:
        """Return a column of each of ``filled_parts``. Opens the first file only: all have the same header."""
        name = f"{group}/{column}.npy"
        first = StoredArray.of(self.part_folder(self.filled_parts[0]) / name)
        arrays = []
        for number in self.filled_parts:
            state = self.ledgers[number].records
            num_rows = state[RECORDS]["num_rows"]
            arrays.append(replace(first, path=self.part_folder(number) / name, shape=(num_rows, *first.shape[1:])))
            if first.offset + arrays[-1].nbytes != state[group]["files"][name]["bytes"]:
                raise ValueError(f"{arrays[-1].path}: rows differ in size from those of {first.path}")
        return arrays

    def thumbnails(self) -> tuple[UInt8[np.ndarray, "m s s 3"], Int[np.ndarray, "m"]]:
        """Return small images of some samples, and their rows."""
        images, rows = [], []
        starts = self.rows(RECORDS, "label").starts
        for number, kept, start in zip(self.filled_parts, self.kept, starts, strict=False):
            folder = self.part_folder(number) / RECORDS
            local = np.load(folder / "thumbnail_rows.npy")
            shown = np.ones(len(local), bool) if kept is None else np.isin(local, kept)
            place = local[shown] if kept is None else np.searchsorted(kept, local[shown])
            images.append(np.load(folder / "thumbnails.npy")[shown])
            rows.append(place + start)
        return np.concatenate(images), np.concatenate(rows)

    @property
    def clusters(self) -> Int[np.ndarray, "n"]:
        """Cluster of each sample, int32."""
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
        lengths = Strings(prepared.part_folder(number) / RECORDS, "captions").num_bytes()
        num_without_caption += int(np.count_nonzero(np.delete(lengths, list(dropped.get(number, {}))) == 0))
    index = {
        "num_read": num_read,
        "num_samples": num_samples,
        "num_without_caption": num_without_caption,
        "image_size": next(iter(sizes)),
        "broken": dict(sorted(counts.items())),
        "filtered": dict(sorted(filtered.items())),
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
    rows = prepared.rows(RECORDS, "key_hash", unusable=True)
    hashes: UInt64[np.ndarray, "n"] = rows[:]
    start_of = dict(zip(prepared.filled_parts, rows.starts.tolist(), strict=False))
    fit = np.ones(len(hashes), bool)
    for number, unfit in dropped.items():
        fit[start_of[number] + np.array(list(unfit))] = False
    places = np.flatnonzero(fit)
    order = places[hashes[places].argsort(kind="stable")]
    same = hashes[order[1:]] == hashes[order[:-1]]
    # Compare the keys behind equal hashes: 64 bits may collide.
    places = np.unique(np.concatenate([order[1:][same], order[:-1][same]]))
    first_of: dict[tuple[int, str], int] = {}
    for place, key in zip(places.tolist(), prepared.texts("keys", unusable=True).take(places), strict=True):
        if first_of.setdefault((int(hashes[place]), key), place) != place:
            number = prepared.filled_parts[int(np.searchsorted(rows.starts, place, side="right")) - 1]
            dropped.setdefault(number, {})[place - start_of[number]] = "duplicate key"


def _broken(prepared: Prepared, dropped: Dropped) -> Iterator[dict[str, Any]]:
    for number, part in enumerate(prepared.parts):
        folder = prepared.part_folder(number) / RECORDS
        with (folder / "broken.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                yield {"part": part.name, **json.loads(line)}
        if number in dropped:
            rows = sorted(dropped[number])
            for row, key in zip(rows, Strings(folder, "keys")[np.array(rows)], strict=True):
                yield {"part": part.name, **asdict(BrokenSample(key, dropped[number][row]))}


def example_captions(folder: Path, num: int) -> list[str]:
    """About ``num`` captions from all over the training set, each once; none without encoded parts in ``folder``."""
    with suppress(OSError, KeyError):  # parts may be elsewhere, or removed
        texts = Prepared(folder).texts("captions")
        return list(dict.fromkeys(texts.take(np.arange(0, len(texts), max(1, len(texts) // num)))))
    return []
