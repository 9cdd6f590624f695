"""Save and load weights: safetensors only, hashed, finite, never unpickled."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.files import atomic_write, check_file, sha256_file
from ddm_lightning.core.formatting import format_bytes

# Not 8-bit floats: those in use need scales that no network here knows.
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


def save_weights(path: Path, state_dict: Mapping[str, Tensor], owner: str) -> str:
    """Write ``state_dict`` to ``path``, atomically.

    Args:
        path: file to write; it may be a temporary name, so error lines name ``owner`` instead.
        state_dict: weights by name.
        owner: begins the error line.

    Returns:
        SHA-256 of the file.

    Raises:
        UserError: a weight is not finite.
        OSError: the file cannot be written, such as on a full disk.
    """
    # Copies, because safetensors refuses tensors that share memory (tied weights).
    state = {key: value.detach().to("cpu", copy=True).contiguous() for key, value in state_dict.items()}
    bad = _first_non_finite(state)
    if bad is not None:
        raise UserError(f"{owner}: weight {bad!r} is not finite: the training diverged; lower its learning rate")

    atomic_write(path, lambda temporary: _save(state, temporary))
    return sha256_file(path)


def _save(state: dict[str, Tensor], path: Path) -> None:
    """Call ``save_file``; turn its error, which has the system's error number in its text only, into an ``OSError``."""
    try:
        save_file(state, path)
    except SafetensorError as error:
        number = re.search(r"os error (\d+)", str(error))
        if number is None:
            raise

        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def load_weights(path: Path, sha256: str, remedy: str) -> dict[str, Tensor]:
    """Read weights onto the CPU.

    Args:
        path: the safetensors file.
        sha256: expected hash of the file.
        remedy: what the user can do about a bad file; ends every error line.

    Raises:
        UserError: ``check_recorded`` refuses the file, it exceeds the memory, or a weight is not finite.
    """
    check_memory(check_recorded(path, sha256, remedy).values(), str(path))
    state = load_file(path)
    bad = _first_non_finite(state)
    if bad is not None:
        raise UserError(f"{path}: weight {bad!r} is not finite in float32; {remedy}")

    return state


def read_header(path: Path, remedy: str, *, link: bool = False) -> dict[str, Tensor]:
    """Read types and shapes of the weights in a file, as tensors on the meta device.

    Args:
        path: the safetensors file.
        remedy: ends every error line.
        link: as in ``check_file``.

    Raises:
        UserError: the file is missing, a pickle or damaged, or holds unsupported types or too many weights.
    """
    try:
        check_file(path, link=link)
        header = {}
        with safe_open(path, "np") as stored:  # runs nothing; compares the header with the size of the file
            names = stored.keys()
            if len(names) > 1 << 16:
                raise ValueError(f"too many weights: {len(names)}")

            for name in names:
                part = stored.get_slice(name)
                dtype = _DTYPES[part.get_dtype()]
                header[name] = torch.empty(part.get_shape(), dtype=dtype, device="meta")

        return header
    except FileNotFoundError:
        raise UserError(f"{path}: the weights are missing; {remedy}") from None
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError, KeyError, MemoryError) as error:
        problem = f"holds weights of type {error}" if isinstance(error, KeyError) else first_line(error)
        raise UserError(f"{path}: not a whole safetensors file ({problem}); {remedy}") from None


def prefixed(weights: Mapping[str, Tensor], network: nn.Module) -> Mapping[str, Tensor]:
    """Weights by their names in a network; only the model that it ``wraps`` may be given, without the rest."""
    inner = getattr(network, "wraps", "")
    if any(name.startswith(inner) for name in weights):
        return weights

    return {inner + name: value for name, value in weights.items()}


def misfits(has: Mapping[str, Tensor], needs: Mapping[str, Tensor]) -> dict[str, str]:
    """Describe weights that are missing, unknown, or of another shape or kind, by name.

    Args:
        has: weights, or a header from ``read_header``.
        needs: the network's ``state_dict``.
    """
    problems = {}
    for key in {**needs, **has}:
        given = _described(has[key]) if key in has else "missing"
        wanted = _described(needs[key]) if key in needs else "absent"
        if given != wanted:
            problems[key] = f"{key!r} is {given} instead of {wanted}"

    return problems


def in_short(problems: Mapping[str, str]) -> str:
    """The first three of the result of ``misfits``, and the number of the others."""
    line = ", ".join([*problems.values()][:3])
    if len(problems) > 3:
        line += f" and {len(problems) - 3} more"

    return line


def _described(weight: Tensor) -> str:
    kind = "floats" if weight.is_floating_point() else str(weight.dtype).removeprefix("torch.")
    return f"{kind} {list(weight.shape)}"


def check_memory(tensors: Iterable[Tensor], source: str) -> None:
    """Check that ``tensors`` fit into the free memory of this machine.

    Args:
        tensors: tensors on any device.
        source: begins the error line.

    Raises:
        UserError: the tensors do not fit.
    """
    needed = sum(tensor.nbytes for tensor in tensors)
    free = free_bytes()
    if needed > free:
        raise UserError(
            f"{source}: needs {format_bytes(needed)} of memory, {format_bytes(free)} is free; use a larger machine"
        )


def free_bytes() -> float:
    """Memory available to this process; infinite if unknown."""
    free = math.inf
    meminfo = Path("/proc/meminfo")  # of Linux
    if meminfo.exists():
        available = re.search(r"MemAvailable: *(\d+) kB", meminfo.read_text())
        if available:
            free = int(available[1]) << 10

    limit = Path("/sys/fs/cgroup/memory.max")  # of a container; may hold "max"
    if limit.exists() and limit.read_text().strip().isdigit():
        free = min(free, int(limit.read_text()))

    return free


def check_recorded(path: Path, sha256: str, remedy: str) -> dict[str, Tensor]:
    """Check the header and the hash of a file.

    Args:
        path: the safetensors file.
        sha256: expected hash of the file.
        remedy: ends every error line.

    Returns:
        Header, as from ``read_header``.

    Raises:
        UserError: ``read_header`` refuses the file, or its hash differs.
    """
    header = read_header(path, remedy)
    found = sha256_file(path)
    if found != sha256:
        raise UserError(
            f"{path}: SHA-256 is {found[:12]}…, but {sha256[:12]}… was recorded: the file is damaged or replaced; "
            f"{remedy}"
        )

    return header


def _first_non_finite(state: Mapping[str, Tensor]) -> str | None:
    # In float32, as the networks compute: a float64 may be too large for it.
    for key, value in state.items():
        if value.is_floating_point() and not value.float().isfinite().all():
            return key

    return None
