"""Weights on disk: safetensors only, hashed, finite, and never unpickled."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from ddm_lightning.errors import UserError
from ddm_lightning.files import atomic_write, sha256_file


def save_weights(path: Path, state_dict: Mapping[str, Tensor], owner: str) -> str:
    """Write ``state_dict`` to ``path``, whole or not at all.

    Args:
        path: where to; may be a temporary name, so error lines name ``owner`` instead.
        state_dict: the weights.
        owner: whose weights they are.

    Returns:
        The file's SHA-256.

    Raises:
        UserError: a weight is not finite.
        OSError: the system refuses it; the disk is full, for one.
    """
    # Copies, because safetensors refuses tensors that share memory (tied weights).
    state = {key: value.detach().to("cpu", copy=True).contiguous() for key, value in state_dict.items()}
    bad = _first_non_finite(state)
    if bad is not None:
        raise UserError(f"{owner}: weight {bad!r} is not finite, the training diverged; lower its learning rate")
    atomic_write(path, lambda temporary: _save(state, temporary))
    return sha256_file(path)


def _save(state: dict[str, Tensor], path: Path) -> None:
    """``save_file``, with the system's errors as such: safetensors has its own, of which only the words tell."""
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
        sha256: what its hash must be.
        remedy: what the user can do about a bad file; ends every error line.

    Raises:
        UserError: the file is missing, a pickle, not the hashed one, damaged, or holds a weight that is not finite.
    """
    check_recorded(path, sha256, remedy)
    try:
        state = load_file(path)
    except (SafetensorError, OSError) as error:
        raise UserError(f"{path}: not a whole safetensors file ({error}); {remedy}") from None
    bad = _first_non_finite(state)
    if bad is not None:
        raise UserError(f"{path}: weight {bad!r} is not finite; {remedy}")
    return state


def check_recorded(path: Path, sha256: str, remedy: str) -> None:
    """Look at a file's hash, and whether it is a pickle.

    Args:
        path: the safetensors file.
        sha256: what its hash must be.
        remedy: ends every error line.

    Raises:
        UserError: the file is missing, a pickle, or not the hashed one.
    """
    if not path.is_file():
        raise UserError(f"{path}: the weights are missing; {remedy}")
    _refuse_pickle(path, remedy)
    found = sha256_file(path)
    if found != sha256:
        raise UserError(
            f"{path}: SHA-256 is {found[:12]}…, but {sha256[:12]}… was recorded: "
            f"the file is damaged, cut short or another one; {remedy}"
        )


def _refuse_pickle(path: Path, remedy: str) -> None:
    """Refuse what ``torch.save`` or ``pickle`` wrote, by its first bytes and without opening it as such."""
    with path.open("rb") as stream:
        head = stream.read(9)
    is_zip, is_pickle = head.startswith(b"PK\x03\x04"), re.match(rb"\x80[\x02-\x05]", head) is not None
    # Safetensors begins with 8 bytes of length, which may look like anything, and then with JSON.
    if (is_zip or is_pickle) and head[8:] != b"{":
        kind = "a PyTorch checkpoint (a zip of pickles)" if is_zip else "a pickle"
        raise UserError(f"{path}: is {kind}, which can run code, expected safetensors; it was not loaded; {remedy}")


def _first_non_finite(state: Mapping[str, Tensor]) -> str | None:
    for key, value in state.items():
        # Through float64, because isfinite knows no 8-bit floats.
        if value.is_floating_point() and not bool(torch.isfinite(value.double()).all()):
            return key
    return None
