"""``stages.json``: which stages are done, from what, and what they left."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddm_lightning.core.files import atomic_write_json, read_json, sha256_file, sha256_json

# Part of every stage's hash: raise it when a stage comes to write something else.
STAGES_VERSION = 4


@dataclass(frozen=True)
class Stage:
    """A step of ``prepare``."""

    name: str
    inputs: Callable[[], Any]
    """Everything that it reads, by content, as plain JSON; called when the stages before it are done."""
    outputs: tuple[str, ...]
    """Patterns of the files that stand for its result, below ``prepared/``."""
    run: Callable[[], None]
    compute: Callable[[], None] = lambda: None
    """Work that may be refused; done before ``run`` while the old result is still there."""


class Ledger:
    """The records of the stages of one ``prepared/`` folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.file = folder / "stages.json"
        self.records: dict[str, Any] = {}

    def read(self) -> None:
        """Take what is on the disk now; raises ``UserError`` for a file that cannot be read."""
        self.records = {}
        if self.file.exists():
            self.records = read_json(self.file, "the record of the stages", "delete it and run prepare again")

    def is_done(self, stage: Stage) -> bool:
        """Whether the stage was done from what it would read now, and its files are there with their sizes."""
        record = self.records.get(stage.name)
        if record is None or record["inputs_sha256"] != self._key(stage):
            return False
        files = {self.folder / name: entry["bytes"] for name, entry in record["files"].items()}
        return all(path.is_file() and path.stat().st_size == size for path, size in files.items())

    def run(self, stage: Stage, before_replacing: Callable[[], None]) -> float:
        """Run the stage and record it; the seconds that it took."""
        key = self._key(stage)
        start = time.monotonic()
        stage.compute()
        # Forgotten before it is touched: a stage killed while it replaces its files must not look done.
        before_replacing()
        if self.records.pop(stage.name, None) is not None:
            atomic_write_json(self.file, self.records)
        stage.run()
        seconds = time.monotonic() - start
        found = sorted(path for pattern in stage.outputs for path in self.folder.glob(pattern))
        files = {
            path.relative_to(self.folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
            for path in found
        }
        self.records[stage.name] = {"inputs_sha256": key, "files": files, "seconds": round(seconds, 3)}
        atomic_write_json(self.file, self.records)
        return seconds

    def files(self, stage: str) -> dict[str, Any]:
        """The files that a stage left, with sizes and hashes; empty before it is done."""
        files: dict[str, Any] = self.records.get(stage, {}).get("files", {})
        return files

    def seconds(self) -> dict[str, float]:
        """How long each stage took when it was last done."""
        return {name: record["seconds"] for name, record in self.records.items()}

    def _key(self, stage: Stage) -> str:
        return sha256_json({"version": STAGES_VERSION, "inputs": stage.inputs()})
