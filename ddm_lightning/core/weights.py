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
_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16} | {
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
    state = {}
    for key, value in state_dict.items():
        state[key] = value.detach().to("cpu", copy=True).contiguous()

    if (bad := _first_non_finite(state)) is not None:
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
    if (bad := _first_non_finite(state)) is not None:
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
        with safe_open(path, "np") as stored:  # runs nothing; compares the header with the size of the file
            slices = {key: stored.get_slice(key) for key in stored.keys()}  # noqa: SIM118

        if len(slices) > 1 << 16:
            raise ValueError(f"too many weights: {len(slices)}")

        return {
            key: torch.empty(part.get_shape(), dtype=_DTYPES[part.get_dtype()], device="meta")
            for key, part in slices.items()
        }
    except FileNotFoundError:
        raise UserError(f"{path}: the weights are missing; {remedy}") from None
    except (SafetensorError, OSError, ValueError, TypeError, RuntimeError, KeyError, MemoryError) as error:
        if isinstance(error, KeyError):
            problem = f"holds weights of type {error}"
        else:
            problem = first_line(error)

        raise UserError(f"{path}: not a whole safetensors file ({problem}); {remedy}") from None


def prefixed(weights: Mapping[str, Tensor], network: nn.Module) -> Mapping[str, Tensor]:
    """Weights by their names in a network; only the model that it ``wraps`` may be given, without the rest."""
    inner = getattr(network, "wraps", "")
    is_inner = inner and not any(name.startswith(inner) for name in weights)
    if is_inner:
        return {inner + name: value for name, value in weights.items()}

    return weights


def misfits(has: Mapping[str, Tensor], needs: Mapping[str, Tensor]) -> dict[str, str]:
    """Describe weights that are missing, unknown, or of another shape or kind, by name.

    Args:
        has: weights, or a header from ``read_header``.
        needs: the network's ``state_dict``.
    """
    given, wanted = ({key: _described(weight) for key, weight in one.items()} for one in (has, needs))
    return {
        key: f"{key!r} is {given.get(key, 'missing')} instead of {wanted.get(key, 'absent')}"
        for key in {**wanted, **given}
        if given.get(key) != wanted.get(key)
    }


def in_short(problems: Mapping[str, str]) -> str:
    """The first three of the result of ``misfits``, and the number of the others."""
    if len(problems) > 3:
        more = f" and {len(problems) - 3} more"
    else:
        more = ""

    return ", ".join([*problems.values()][:3]) + more


def _described(weight: Tensor) -> str:
    if weight.is_floating_point():
        kind = "floats"
    else:
        kind = str(weight.dtype).removeprefix("torch.")

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
    # of Linux; of a container
    meminfo = Path("/proc/meminfo")
    limit = Path("/sys/fs/cgroup/memory.max")
    found = None
    if meminfo.exists():
        found = re.search(r"MemAvailable: *(\d+) kB", meminfo.read_text())

    if limit.exists():
        most = limit.read_text().strip()
    else:
        most = ""

    return min(int(found[1]) << 10 if found else math.inf, int(most) if most.isdigit() else math.inf)


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
    floats = (key for key, value in state.items() if value.is_floating_point())
    return next((key for key in floats if not bool(torch.isfinite(state[key].float()).all())), None)
