"""The files between the stages, below ``prepared/``; what lies in parts is read as if it were whole."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from ddm_lightning.core.columns import StoredArray, Strings
from ddm_lightning.core.files import atomic_write_json
from ddm_lightning.partition.rows import Rows
from ddm_lightning.prepare.encode import RECORDS, read_state
from ddm_lightning.prepare.records import Part


class Prepared:
    """One ``prepared/`` folder. Rows are the samples that can be used, in source order.

    An instance keeps what it read of ``parts.json`` and ``index.json``: make a new one when they change.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.parts_file = folder / "parts.json"
        self.index_file = folder / "index.json"
        self.broken_file = folder / "broken.jsonl"
        self.fine_file = folder / "fine.safetensors"
        self.partition_file = folder / "partition.safetensors"
        self.partition_facts_file = folder / "partition.json"
        self.clusters_file = folder / "clusters.npy"
        self.shards = folder / "shards"
        self.statistics_file = folder / "statistics.json"
        self.uploaded_file = folder / "uploaded.json"
        self.report = folder / "report"
        self.grid = folder / "clusters.png"

    @cached_property
    def parts(self) -> list[Part]:
        """The parts of the source, as they were listed."""
        return [Part(**part) for part in json.loads(self.parts_file.read_text(encoding="utf-8"))]

    def write_parts(self, parts: Sequence[Part]) -> None:
        """Write ``parts.json``."""
        atomic_write_json(self.parts_file, [asdict(part) for part in parts])

    def folder_of(self, part: Part) -> Path:
        """The columns of a part; by its name, so that they stay when parts come and go before it."""
        readable = re.sub(r"[^A-Za-z0-9-]+", "-", part.name)[-32:].strip("-")
        return self.folder / "parts" / f"{readable}-{hashlib.sha256(part.name.encode()).hexdigest()[:16]}"

    def part_folder(self, number: int) -> Path:
        """The columns of one of ``parts``."""
        return self.folder_of(self.parts[number])

    @cached_property
    def states(self) -> list[dict[str, Any]]:
        """Each part's ``part.json``."""
        return [read_state(self.part_folder(number)) for number in range(len(self.parts))]

    @cached_property
    def index(self) -> Mapping[str, Any]:
        """``index.json``: how many samples there are, and which rows of which part are left out."""
        found: dict[str, Any] = json.loads(self.index_file.read_text(encoding="utf-8"))
        return found

    @cached_property
    def full_parts(self) -> list[int]:
        """Numbers of the parts that hold rows at all."""
        return [number for number, state in enumerate(self.states) if state[RECORDS]["num_rows"]]

    @cached_property
    def kept(self) -> list[Int[np.ndarray, "m"] | None]:
        """For each of ``full_parts`` the rows that count; None for all of them."""
        dropped: Mapping[str, list[int]] = self.index["dropped"]
        return [
            np.delete(np.arange(self.states[number][RECORDS]["num_rows"]), dropped[str(number)])
            if str(number) in dropped
            else None
            for number in self.full_parts
        ]

    def rows(self, group: str, column: str) -> Rows:
        """A column of every sample that can be used."""
        return Rows(self._arrays(group, column), self.kept)

    def all_rows(self, group: str, column: str) -> Rows:
        """A column of every sample that was read, those that cannot be used included."""
        return Rows(self._arrays(group, column))

    def texts(self, name: str) -> Rows:
        """``keys`` or ``captions`` of every sample that can be used."""
        return Rows(self._strings(name), self.kept)

    def all_texts(self, name: str) -> Rows:
        """``keys`` or ``captions`` of every sample that was read."""
        return Rows(self._strings(name))

    def _arrays(self, group: str, column: str) -> list[StoredArray]:
        """A column of each of ``full_parts``; only the first file is opened, the others have the same header."""
        name = f"{group}/{column}.npy"
        first = StoredArray.of(self.part_folder(self.full_parts[0]) / name)
        arrays = []
        for number in self.full_parts:
            state = self.states[number]
            shape = (state[RECORDS]["num_rows"], *first.shape[1:])
            arrays.append(replace(first, path=self.part_folder(number) / name, shape=shape))
            if first.offset + arrays[-1].nbytes != state[group]["files"][name]["bytes"]:
                raise ValueError(f"{arrays[-1].path}: has rows of another size than {first.path}")
        return arrays

    def _strings(self, name: str) -> list[Strings]:
        return [Strings(ends.path.parent, name, ends) for ends in self._arrays(RECORDS, f"{name}-ends")]

    def thumbnails(self) -> tuple[UInt8[np.ndarray, "m s s 3"], Int[np.ndarray, "m"]]:
        """Small pictures of some samples, and the rows that they are of."""
        pictures, rows = [], []
        starts = self.rows(RECORDS, "label").starts
        for number, kept, start in zip(self.full_parts, self.kept, starts, strict=False):
            folder = self.part_folder(number) / RECORDS
            local = np.load(folder / "thumbnail_rows.npy")
            shown = np.ones(len(local), bool) if kept is None else np.isin(local, kept)
            place = local[shown] if kept is None else np.searchsorted(kept, local[shown])
            pictures.append(np.load(folder / "thumbnails.npy")[shown])
            rows.append(place + start)
        return np.concatenate(pictures), np.concatenate(rows)

    @property
    def clusters(self) -> Int[np.ndarray, "n"]:
        """The cluster of each sample, int32."""
        return np.load(self.clusters_file, mmap_mode="r")

    @property
    def num_samples(self) -> int:
        """Samples that can be used."""
        return int(self.index["num_samples"])

    @property
    def picture_size(self) -> int:
        """Height and width in pixels of the square pictures that were encoded."""
        return int(self.index["picture_size"])
