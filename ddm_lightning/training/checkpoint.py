"""Checkpoints: the training state as named tensors, in folders written in the background while training continues.

A folder is whole or absent. It holds safetensors files with each rank's shards (torch's distributed checkpoint,
readable by any number of ranks), ``trainer.pt`` with the Trainer's own state, and ``files.json`` with the SHA-256 of
each file. Reading runs no code: ``trainer.pt`` is loaded with ``weights_only``. ``callbacks`` says when one is saved.
"""

from __future__ import annotations

import itertools
import json
import pickle
import shutil
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import asdict
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.optim import Optimizer

from ddm_lightning.config.experiment import Experiment, IslandConfig
from ddm_lightning.core import remote
from ddm_lightning.core.devices import resolve_accelerator
from ddm_lightning.core.errors import UserError, say
from ddm_lightning.core.files import atomic_write_json, move_folder, sha256_file
from ddm_lightning.core.sharded import by_rows, local
from ddm_lightning.members.checkpoints import FILES, TEMPORARY, TRAINER_STATE, find_resumable, step_of
from ddm_lightning.members.member import Member
from ddm_lightning.members.roles import STUDENT
from ddm_lightning.members.run_folder import refuse_changes
from ddm_lightning.training.ema import averaging_of

_MODEL = "model/"
_OPTIMIZER = "optimizer/"
_OTHERS_TAKE_SECONDS = 60.0
# After so many bytes the next file begins: serialising one holds Python's global lock, 20 ms at this size.
_FILE_BYTES = 64 << 20
# Island settings that change the rounding, but ``ema``, which changes the averages. The first three also change the
# noise, the last one counts on a CPU alone.
_NUMERICS = (
    *("accelerator", "devices", "nodes", "strategy", "precision", "ema", "micro_batch_size"),
    *("attention", "compile", "activation_checkpointing", "num_threads"),
)

# One process needs no process group. A filter set in a thread would apply to all threads, so set it once here.
warnings.filterwarnings("ignore", "torch.distributed is disabled")


def _file_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Number of the file that stores each tensor, from 1; numbers that a large tensor spans are skipped."""
    starts = itertools.accumulate((local(tensor).nbytes for tensor in tensors.values()), initial=0)
    return {name: 1 + start // _FILE_BYTES for name, start in zip(tensors, starts, strict=False)}


class CheckpointWriter:
    """Write checkpoints one at a time, in a thread.

    Args:
        group: host process group of all ranks that hold parts of the tensors, used for nothing else; None if this
            process holds everything.
        is_rank_zero: whether this process is rank zero.
        from_device: whether tensors are on an accelerator and are copied through page-locked memory.
    """

    def __init__(self, group: ProcessGroup | None, *, is_rank_zero: bool, from_device: bool) -> None:
        self.group = group
        self.is_rank_zero = is_rank_zero
        self.from_device = from_device
        # The core of torch's DefaultStager, which in torch 2.11 frees its memory after a copy and cannot make another.
        self._stager = StateDictStager(pin_memory=from_device)
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None

    def start(self, path: Path, tensors: dict[str, Tensor], rest: Any, done: Callable[[], object]) -> None:
        """Copy ``tensors`` and ``rest``, then write them to the folder ``path`` in the background; a collective.

        Waits for the previous save first. Returns once the copy is made.

        Args:
            path: appears once everything is on disk.
            tensors: by name; DTensors are sharded over ranks, other tensors are equal on all ranks.
            rest: of rank zero; plain values and tensors that load without running code.
            done: called in rank zero's thread after the last byte is written.

        Raises:
            OSError: the previous checkpoint could not be written.
            UserError: ``rest`` holds other objects.
        """
        self.wait()
        packed = BytesIO()
        torch.save(rest, packed)
        packed.seek(0)
        try:  # now, rather than when a training is to resume
            torch.load(packed, map_location="meta", weights_only=True)
        except pickle.UnpicklingError:  # its message tells how to run the code in it
            raise UserError(
                "key 'island.callbacks': the state_dict of a callback holds more than plain values and tensors, so no "
                "training could resume; return numbers, texts, lists, dicts and tensors in it, or remove the callback"
            ) from None

        staged = self._stager.stage({name: value.contiguous() for name, value in tensors.items()}, self.from_device)
        if self.from_device:
            torch.accelerator.synchronize()  # the next step would change tensors that are still being copied

        self._pending = self._thread.submit(self._write, path, staged, packed.getvalue(), done)

    def _write(self, path: Path, tensors: dict[str, Tensor], rest: bytes, done: Callable[[], object]) -> None:
        temporary = path.with_name(TEMPORARY + path.name)
        try:
            if self.is_rank_zero and temporary.exists():
                shutil.rmtree(temporary)  # it may hold files of more ranks

            writer = HuggingFaceStorageWriter(str(temporary), _file_numbers(tensors), save_distributed=True)
            writer.per_thread_copy_ahead = 0  # tensors are on the host; copying ahead would queue on the first GPU
            save(
                dict(tensors),
                storage_writer=writer,
                # Of equal copies, the first node writes its own: nodes need not share a disk.
                planner=DefaultSavePlanner(dedup_save_to_lowest_rank=True),
                process_group=self.group,
                no_dist=self.group is None,
            )
            if self.is_rank_zero:
                (temporary / TRAINER_STATE).write_bytes(rest)
                names = sorted(path.name for path in temporary.iterdir())
                hashes = remote.in_threads(lambda name: sha256_file(temporary / name), names)
                atomic_write_json(temporary / FILES, dict(zip(names, hashes, strict=True)))
                move_folder(temporary, path)
                done()
        except CheckpointException as error:  # a BaseException, which would end the thread
            causes = [cause for cause, _ in error.failures.values()]
            known = [cause for cause in causes if isinstance(cause, OSError)]
            if known:
                raise OSError(known[0].errno, known[0].strerror, str(path)) from error

            raise causes[0] from error
        finally:
            if self.is_rank_zero:
                shutil.rmtree(temporary, ignore_errors=True)
            else:
                with suppress(OSError):
                    temporary.rmdir()  # of another node's disk, which holds nothing

    def raise_failure(self) -> None:
        """Re-raise the error of a finished save; do not wait for a running one.

        Raises:
            OSError: the disk is full or fails.
        """
        if self._pending is not None and self._pending.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the running save.

        Raises:
            OSError: the disk is full or fails.
            RuntimeError: the save failed for another reason.
        """
        if self._pending is not None:
            self._pending.result()

    def close(self) -> None:
        """End the thread after the running save, whose result is ignored. Several ranks wait for a minute at most."""
        if self._pending is not None:  # after an error, which is the one to show
            wait([self._pending], None if self.group is None else _OTHERS_TAKE_SECONDS)

        self._thread.shutdown(wait=self.group is None)
        self._stager.close()


def read_trainer_state(path: Path) -> dict[str, Any]:
    """Everything in the checkpoint ``path`` besides named tensors."""
    return torch.load(path / TRAINER_STATE, map_location="cpu", weights_only=True)


def stored_sizes(path: Path) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Shape and type of each tensor in the checkpoint ``path``, by name."""
    return {
        name: (stored.size, stored.properties.dtype)
        for name, stored in HuggingFaceStorageReader(str(path)).read_metadata().state_dict_metadata.items()
        if isinstance(stored, TensorStorageMetadata)
    }


def read_tensors(path: Path, into: dict[str, Tensor], group: ProcessGroup | None = None) -> None:
    """Fill tensors, sharded or not, from the checkpoint ``path`` by name; a collective of ``group``."""
    load(into, storage_reader=HuggingFaceStorageReader(str(path)), process_group=group, no_dist=group is None)


def tensors_of(module: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Tensor]:
    """State of ``module`` and ``optimizer`` as ``model/NAME`` and ``optimizer/KEY/NAME``, sharing their memory.

    Names, because PyTorch numbers an optimizer's parameters by its groups, not in the module's order. A tied weight is
    included once, under its first name.

    Raises:
        UserError: the module's ``state_dict`` holds a value that is not a tensor.
    """
    found = {}
    seen = set()
    for name, value in module.state_dict().items():
        if not isinstance(value, Tensor):
            raise UserError(f"the network's state_dict has {name}, a {type(value).__name__}: it may hold tensors only")

        place = (local(value).data_ptr(), value.shape)
        if place not in seen or not local(value).numel():
            found[_MODEL + name] = value.detach()

        seen.add(place)

    if optimizer is not None:
        averaging_of(optimizer).wait()
        for name, parameter in module.named_parameters():
            for key, value in optimizer.state.get(parameter, {}).items():
                found[f"{_OPTIMIZER}{key}/{name}"] = value.detach()

    return found


def named_groups(module: nn.Module, optimizer: Optimizer) -> list[dict[str, Any]]:
    """The optimizer's parameter groups as plain values, with names instead of parameters."""
    names = {parameter: name for name, parameter in module.named_parameters()}
    return [{**group, "params": [names[p] for p in group["params"]]} for group in optimizer.param_groups]


def load_groups(optimizer: Optimizer, groups: list[dict[str, Any]]) -> None:
    """Restore the optimizer's parameter groups from the result of ``named_groups``."""
    for live, group in zip(optimizer.param_groups, groups, strict=True):
        live.update({key: value for key, value in group.items() if key != "params"})


def load_tensors(
    path: Path, module: nn.Module, optimizer: Optimizer | None = None, group: ProcessGroup | None = None
) -> None:
    """Load weights, moments and averages in place, whatever number of ranks saved them.

    Args:
        path: the checkpoint.
        module: sharded or not.
        optimizer: None to load the weights alone.
        group: all ranks that hold parts of the weights; the call is a collective of it.

    Raises:
        UserError: the checkpoint is of another network.
    """
    stored = stored_sizes(path)
    into = tensors_of(module)
    shapes = {name: value.shape for name, value in into.items()}
    found = {name: size for name, (size, _) in stored.items() if name.startswith(_MODEL)}
    if shapes != found:
        name = min(key for key in shapes.keys() | found.keys() if shapes.get(key) != found.get(key))
        raise UserError(
            f"{path}: is the checkpoint of another network, which differs in {name.removeprefix(_MODEL)}; "
            "remove it, or set the experiment back"
        )

    if optimizer is not None:
        parameters = dict(module.named_parameters())
        for full_name, (size, dtype) in stored.items():
            if full_name.startswith(_OPTIMIZER):
                key, _, name = full_name.removeprefix(_OPTIMIZER).partition("/")
                parameter = parameters[name]
                home = averaging_of(optimizer).home(parameter, key)
                optimizer.state[parameter][key] = (
                    torch.empty_like(by_rows(parameter, size, dtype), device=home)
                    if size[:1] == parameter.shape[:1]
                    else torch.empty(size, dtype=dtype, device=parameter.device)
                )

        into = tensors_of(module, optimizer)

    read_tensors(path, into, group)


def choose(folder: Path, origin: Mapping[str, Any]) -> Path | None:
    """Choose the checkpoint to resume from; None if there is none.

    Remove what a killed process left half-written, and rename damaged checkpoints, of which the oldest is kept. The
    caller holds the member's lock, so no other process writes here.

    Args:
        folder: a member's checkpoints.
        origin: that of the member, from ``origin_of``.

    Raises:
        UserError: as ``find_resumable`` and ``check_origin``.
    """
    path, damaged = find_resumable(folder)
    for unfinished in folder.glob(f"{TEMPORARY}*"):
        shutil.rmtree(unfinished, ignore_errors=True)

    for other, problem in damaged.items():
        say(f"{other}: damaged checkpoint ({problem}); falling back to the one before it")
        for earlier in folder.glob("*.damaged"):
            shutil.rmtree(earlier, ignore_errors=True)

        other.rename(other.with_suffix(".damaged"))

    if path is not None:
        changed = check_origin(path, origin)
        say(f"{origin['member']}: resumes at step {step_of(path)}")
        if changed:
            say(f"{origin['member']}: {changed}")

    return path


def origin_of(member: Member, experiment: Experiment) -> dict[str, Any]:
    """Name of a member, its experiment and initial weights as plain values, which load with ``weights_only``."""
    record = asdict(experiment)
    record["island"]["accelerator"] = resolve_accelerator(experiment.island.accelerator)
    initial = member.initial
    return {"member": member.name, "experiment": record, "initial_sha256": initial and initial.sha256}


def check_origin(path: Path, own: Mapping[str, Any]) -> str | None:
    """Describe island settings that differ from the checkpoint's; None if none that matters does.

    A checkpoint may have been copied, and the experiment changed since.

    Args:
        path: the checkpoint.
        own: the origin of this start, from ``origin_of``.

    Raises:
        UserError: the checkpoint is another member's, of another experiment, teacher or initial weights.
    """
    saved = read_trainer_state(path)
    member = own["member"]
    if saved["member"] != member:
        raise UserError(
            f"{path}: is a checkpoint of {saved['member']}, not of {member}; move it to that folder, or remove it"
        )

    refuse_changes(path, saved["experiment"], own["experiment"])
    if member == STUDENT:
        keys = ["teacher", "global_batch_size"]
        if own["experiment"]["expert"]["train"]["schedule"] != "constant":
            keys.append("max_steps")

        for key in keys:
            was = saved["experiment"]["distill"][key]
            now = own["experiment"]["distill"][key]
            if was != now:
                raise UserError(
                    f"{path}: was trained with distill.{key} = {was!r}, not {now!r}; set it back, or use another "
                    "folder with run_dir=…"
                )

    started = saved["initial_sha256"]
    if started != own["initial_sha256"]:
        raise UserError(
            f"{path}: started from weights with SHA-256 {started}, and init_from has {own['initial_sha256']}; put the "
            "right ones there, or use another folder with run_dir=…"
        )

    new = own["experiment"]["island"]
    old = vars(IslandConfig()) | saved["experiment"]["island"]  # written before a key, it had the default
    names = [*_NUMERICS]
    if new["accelerator"] != "cpu":
        names.remove("num_threads")

    differing = [name for name in names if old[name] != new[name]]
    if not differing:
        return None

    settings = []
    for name in differing:
        settings.append(f"island.{name}={json.dumps(new[name])} (was {json.dumps(old[name])})")

    effects = []
    if {"accelerator", "devices", "nodes"} & {*differing}:
        effects.append("noise")
    if differing != ["ema"]:
        effects.append("rounding")
    if "ema" in differing:
        effects.append("averages")

    return f"from here on with {', '.join(settings)}: the same samples, other {' and '.join(effects)}"
