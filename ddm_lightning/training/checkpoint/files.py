"""A checkpoint on disk: a folder that is whole or absent, written in the background while training goes on.

The folder holds safetensors files of each rank's shards (torch's distributed checkpoint, which any number of ranks
reads), ``rest.pt`` with the Trainer's own state, and ``files.json`` with the hash of each file. Reading it runs no
code: ``rest.pt`` is read as weights alone.
"""

from __future__ import annotations

import errno
import json
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.checkpoint.storage import WriteResult

from ddm_lightning.core.checks import SHA256
from ddm_lightning.core.devices import local
from ddm_lightning.core.errors import first_line
from ddm_lightning.core.files import atomic_write_json, move_folder, sha256_file

FILES, REST = "files.json", "rest.pt"
TEMPORARY = ".tmp-"
SUFFIX = ".safetensors"
_OTHERS_TAKE_SECONDS = 60.0
# A file is put together in memory while no other Python thread runs: of this size that takes 20 ms.
_MOST_BYTES_A_FILE = 64 << 20

# One process needs no process group. Once for all: a filter for a while, in a thread, is one for all threads.
warnings.filterwarnings("ignore", "torch.distributed is disabled")


class _HashingWriter(HuggingFaceStorageWriter):
    """Each rank hashes what it has written; the first one gathers the hashes, with the rest of the checkpoint."""

    def __init__(self, folder: Path, rest: bytes, tensors: Mapping[str, Tensor]) -> None:
        super().__init__(str(folder), fqn_to_index_mapping=_files_of(tensors), save_distributed=True)
        # Tensors are on the host already; what copies them there ahead of time would queue on the first GPU.
        self.per_thread_copy_ahead = 0
        self.folder, self.rest = folder, rest

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> torch.futures.Future[list[WriteResult]]:
        """Write this rank's tensors."""
        written = super().write_data(plan, planner)
        names = {result.storage_data.relative_path for result in written.wait()}
        if names:
            sums = {name: sha256_file(self.folder / name) for name in names}
            atomic_write_json(self.folder / f"sums-{plan.storage_data['shard_index']}.json", sums)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write what is not a tensor, and the list of all files; on the first rank, behind all others."""
        super().finish(metadata, results)
        with (self.folder / REST).open("wb") as stream:
            stream.write(self.rest)
            stream.flush()
            os.fsync(stream.fileno())
        sums = {REST: sha256_file(self.folder / REST)}
        for path in self.folder.glob("sums-*.json"):
            sums |= json.loads(path.read_text(encoding="utf-8"))
            path.unlink()
        atomic_write_json(self.folder / FILES, dict(sorted(sums.items())))


def _files_of(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The number of the file that holds each tensor, from 1."""
    numbers, number, filled = {}, 1, 0
    for name, tensor in tensors.items():
        here = local(tensor)
        if filled and filled + here.nbytes > _MOST_BYTES_A_FILE:
            number, filled = number + 1, 0
        numbers[name] = number
        filled += here.nbytes
    return numbers


class CheckpointWriter:
    """Writes checkpoints one after the other, in a thread.

    Args:
        group: on the hosts, of all ranks that hold parts of the tensors; None for this process alone. Nothing else may
            use it.
        leads: whether this is the first of those ranks.
        from_device: whether tensors are on an accelerator, and are copied through page-locked memory.
    """

    def __init__(self, group: ProcessGroup | None, *, leads: bool, from_device: bool) -> None:
        self.group, self.leads = group, leads
        self.from_device = from_device
        # What is behind torch's DefaultStager, which with torch 2.11 gives its memory back after each copy and cannot
        # make a second one.
        self._stager = StateDictStager(pin_memory=from_device)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    def start(self, path: Path, tensors: dict[str, Tensor], rest: Any, done: Callable[[], object]) -> None:
        """Copy ``tensors`` and ``rest`` and begin to write them to the folder ``path``; a collective.

        Waits for the checkpoint before it, and returns as soon as the copy is made.

        Args:
            path: appears when all of it is on the disk.
            tensors: by name; those sharded over ranks are DTensors, all others are the same on each rank.
            rest: of the first rank: plain values and tensors, nothing that takes code to be read.
            done: called in the thread of the first rank, behind the last byte.

        Raises:
            OSError: the checkpoint before could not be written.
        """
        self.wait()
        packed = BytesIO()
        torch.save(rest, packed)
        staged = self._stager.stage({name: value.contiguous() for name, value in tensors.items()}, self.from_device)
        if self.from_device:
            torch.accelerator.synchronize()  # copies are queued behind the step, and the next one changes tensors
        self._pending = self._thread.submit(self._write, path, staged, packed.getvalue(), done)

    def _write(self, path: Path, tensors: dict[str, Tensor], rest: bytes, done: Callable[[], object]) -> None:
        temporary = path.with_name(TEMPORARY + path.name)
        try:
            if self.leads and temporary.exists():
                shutil.rmtree(temporary)  # files of another number of ranks would pass for this one's
            save(
                dict(tensors),
                storage_writer=_HashingWriter(temporary, rest, tensors),
                process_group=self.group,
                no_dist=self.group is None,
            )
            if self.leads:
                move_folder(temporary, path)
                done()
        except CheckpointException as error:  # no Exception, so that it would end the thread
            causes = [cause for cause, _ in error.failures.values()]
            known = next((cause for cause in causes if isinstance(cause, OSError)), None)
            if known is None:
                raise RuntimeError(f"{path}: {first_line(causes[0])}") from error
            raise OSError(known.errno, os.strerror(known.errno or errno.EIO), str(path)) from error
        finally:
            if self.leads:
                shutil.rmtree(temporary, ignore_errors=True)

    def raise_failure(self) -> None:
        """Raise what a checkpoint that is not under way any more failed of, without waiting for one that is.

        Raises:
            OSError: the disk is full, or fails.
        """
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait until nothing is under way.

        Raises:
            OSError: the disk is full, or fails.
            RuntimeError: anything else that kept it from being written.
        """
        if self._pending is not None:
            try:
                self._pending.result()
            finally:
                if self._pending.done():  # a signal ends the waiting, not the writing
                    self._pending = None

    def wait_after_failure(self) -> None:
        """Wait for what is under way, whatever becomes of it; not for ever, as another rank may have no part in it."""
        if self._pending is not None:
            wait([self._pending], None if self.group is None else _OTHERS_TAKE_SECONDS)

    def close(self) -> None:
        """End the thread behind what is under way, and wait for that where it does not take others."""
        self._thread.shutdown(wait=self.group is None)
        self._stager.close()


def read_rest(path: Path, device: str = "cpu") -> dict[str, Any]:
    """What ``path`` holds besides named tensors."""
    rest: dict[str, Any] = torch.load(path / REST, map_location=device, weights_only=True)
    return rest


def stored_sizes(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Size and type of each tensor of ``path``, by its name."""
    found = HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata
    return {
        name: (stored.size, stored.properties.dtype)
        for name, stored in found.items()
        if isinstance(stored, TensorStorageMetadata)
    }


def read_tensors(path: Path, into: dict[str, Tensor], group: ProcessGroup | None = None) -> None:
    """Fill tensors, sharded or not, with those of ``path`` by the same names; a collective of ``group``."""
    reader = HuggingFaceStorageReader(str(path))
    load(into, storage_reader=reader, process_group=group, no_dist=group is None)


def damage_of(path: Path) -> str | None:
    """Why ``path`` is no whole checkpoint, or None."""
    try:
        sums = json.loads((path / FILES).read_text(encoding="utf-8"))
        if not isinstance(sums, dict) or REST not in sums or not all(SHA256[0](value) for value in sums.values()):
            return f"{FILES} is no list of files and hashes"
        there = {found.name for found in path.iterdir()}
        for name in sorted(sums.keys() - there):
            return f"{name} is missing"
        for name in sorted(name for name in there - sums.keys() if name.endswith(SUFFIX)):
            return f"{name} is not of it"  # and would be read
        for name, expected in sums.items():
            if sha256_file(path / name) != expected:
                return f"{name} is not what was written"
        read_rest(path, "meta")
    except pickle.UnpicklingError:  # torch's message tells how to run what is in it
        return f"{REST} holds more than plain values"
    except (ValueError, OSError, RuntimeError, EOFError) as error:
        return first_line(error)
    return None
