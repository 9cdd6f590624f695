"""The files of the stages below ``prepared/``, and the ledger of finished stages."""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int, UInt8

from ddm_lightning.core.columns import Rows, StoredArray, Strings
from ddm_lightning.core.files import atomic_write_json, read_json, sha256_json
from ddm_lightning.prepare.encode import RECORDS, is_whole, list_files, read_state
from ddm_lightning.prepare.records import Part

# Part of every stage's hash. Raise it when a stage writes something else.
STAGES_VERSION = 4


class Prepared:
    """One ``prepared/`` folder. Rows are the usable samples of all parts, in source order.

    An instance caches ``parts.json``, ``part.json`` and ``index.json``: make a new one when they change.
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
        """Parts of the source, from ``parts.json``."""
        return [Part(**part) for part in json.loads(self.parts_file.read_text(encoding="utf-8"))]

    def write_parts(self, parts: Sequence[Part]) -> None:
        """Write ``parts.json``."""
        atomic_write_json(self.parts_file, [asdict(part) for part in parts])

    def folder_of(self, part: Part) -> Path:
        """Return the folder of a part's columns. It depends on the part's name alone, not on other parts."""
        readable = re.sub(r"[^A-Za-z0-9-]+", "-", part.name)[-32:].strip("-")
        return self.folder / "parts" / f"{readable}-{hashlib.sha256(part.name.encode()).hexdigest()[:16]}"

    def part_folder(self, number: int) -> Path:
        """Return the folder of the columns of ``parts[number]``."""
        return self.folder_of(self.parts[number])

    @cached_property
    def states(self) -> list[dict[str, Any]]:
        """The ``part.json`` of each part."""
        return [read_state(self.part_folder(number)) for number in range(len(self.parts))]

    @cached_property
    def index(self) -> Mapping[str, Any]:
        """``index.json``: number of samples, and the dropped rows of each part."""
        return json.loads(self.index_file.read_text(encoding="utf-8"))

    @cached_property
    def full_parts(self) -> list[int]:
        """Numbers of the parts with at least one row."""
        return [number for number, state in enumerate(self.states) if state[RECORDS]["num_rows"]]

    @cached_property
    def kept(self) -> list[Int[np.ndarray, "m"] | None]:
        """Usable rows of each of ``full_parts``; None for all of them."""
        dropped: Mapping[str, list[int]] = self.index["dropped"]
        return [
            np.delete(np.arange(self.states[number][RECORDS]["num_rows"]), dropped[str(number)])
            if str(number) in dropped
            else None
            for number in self.full_parts
        ]

    def rows(self, group: str, column: str, unusable: bool = False) -> Rows:
        """Return a column of all usable samples; with ``unusable``, of all samples."""
        return Rows(self._arrays(group, column), None if unusable else self.kept)

    def texts(self, name: str, unusable: bool = False) -> Rows:
        """Return ``keys`` or ``captions`` of all usable samples; with ``unusable``, of all samples."""
        strings = [Strings(ends.path.parent, name, ends) for ends in self._arrays(RECORDS, f"{name}-ends")]
        return Rows(strings, None if unusable else self.kept)

    def _arrays(self, group: str, column: str) -> list[StoredArray]:
        """Return a column of each of ``full_parts``. Opens the first file only: all have the same header."""
        name = f"{group}/{column}.npy"
        first = StoredArray.of(self.part_folder(self.full_parts[0]) / name)
        arrays = []
        for number in self.full_parts:
            state = self.states[number]
            shape = (state[RECORDS]["num_rows"], *first.shape[1:])
            arrays.append(replace(first, path=self.part_folder(number) / name, shape=shape))
            if first.offset + arrays[-1].nbytes != state[group]["files"][name]["bytes"]:
                raise ValueError(f"{arrays[-1].path}: rows differ in size from those of {first.path}")
        return arrays

    def thumbnails(self) -> tuple[UInt8[np.ndarray, "m s s 3"], Int[np.ndarray, "m"]]:
        """Return small images of some samples, and their rows."""
        images, rows = [], []
        starts = self.rows(RECORDS, "label").starts
        for number, kept, start in zip(self.full_parts, self.kept, starts, strict=False):
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

    @property
    def num_samples(self) -> int:
        """Number of usable samples."""
        return int(self.index["num_samples"])

    @property
    def image_size(self) -> int:
        """Height and width in pixels of the encoded square images."""
        return int(self.index["picture_size"])


@dataclass(frozen=True)
class Stage:
    """A stage of ``prepare``."""

    name: str
    inputs: Callable[[], Any]
    """Everything the stage reads, by content, as plain JSON. Called when the stages before it are done."""
    outputs: tuple[str, ...]
    """Patterns of its result files below ``prepared/``."""
    run: Callable[[], None]
    compute: Callable[[], None] = lambda: None
    """Work that may be refused: done before ``run``, while the old result is still in place."""


class Ledger:
    """``stages.json``: the finished stages of one ``prepared/`` folder, their inputs and files."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.file = folder, folder / "stages.json"
        self.records: dict[str, Any] = {}

    def read(self) -> None:
        """Read the file again; raise ``UserError`` if it is unreadable."""
        self.records = {}
        if self.file.exists():
            self.records = read_json(self.file, "the record of the stages", "delete it and run prepare again")

    def is_done(self, stage: Stage) -> bool:
        """Whether the stage ran on its present inputs and its files exist with their sizes."""
        record = self.records.get(stage.name)
        return record is not None and record["inputs_sha256"] == _key(stage) and is_whole(self.folder, record)

    def run(self, stage: Stage, before_replacing: Callable[[], None]) -> float:
        """Run the stage and record it; return its seconds."""
        key, start = _key(stage), time.monotonic()
        stage.compute()
        # Forgotten first: a stage killed while it replaces its files must not look done.
        before_replacing()
        if self.records.pop(stage.name, None) is not None:
            atomic_write_json(self.file, self.records)
        stage.run()
        seconds = time.monotonic() - start
        files = list_files(self.folder, (path for pattern in stage.outputs for path in self.folder.glob(pattern)))
        self.records[stage.name] = {"inputs_sha256": key, "files": files, "seconds": round(seconds, 3)}
        atomic_write_json(self.file, self.records)
        return seconds

    def files(self, stage: str) -> dict[str, Any]:
        """Return the files of a stage with sizes and hashes; empty before it is done."""
        return self.records.get(stage, {}).get("files", {})


def _key(stage: Stage) -> str:
    return sha256_json({"version": STAGES_VERSION, "inputs": stage.inputs()})
