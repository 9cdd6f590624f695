"""A member's checkpoints as folders, to find, check and send; ``training/checkpoint.py`` writes and loads them."""

from __future__ import annotations

import pickle
import re
from pathlib import Path

import torch

from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.files import parse_json, sha256_file

FILES = "files.json"
"""Lists the SHA-256 of the other files; written last."""
TRAINER_STATE = "trainer.pt"
TEMPORARY = ".tmp-"
"""Begins names of folders that are not whole yet."""
_NAME = re.compile(r"step-\d{8,}\.ckpt")


def damage_of(path: Path) -> str | None:
    """Describe the damage of the checkpoint ``path``; None if it is whole."""
    try:
        sums = parse_json((path / FILES).read_bytes())
        names = [TRAINER_STATE, *sorted(found.name for found in path.glob("*.safetensors"))]
        if not isinstance(sums, dict) or sums.keys() != {*names}:
            return f"{FILES} lists other files than {', '.join(names)}"

        hashes = remote.in_threads(lambda name: sha256_file(path / name), names)
        for name, sha256 in zip(names, hashes, strict=True):
            if sha256 != sums[name]:
                return f"{name} has changed since it was written"

        torch.load(path / TRAINER_STATE, map_location="meta", weights_only=True)
    except pickle.UnpicklingError:  # torch's message tells how to run the code in it
        return f"{TRAINER_STATE} holds more than plain values"
    except (ValueError, OSError, RuntimeError, EOFError) as error:
        return first_line(error)

    return None


def checkpoints_in(folder: Path) -> list[Path]:
    """A member's checkpoints by step; other files and folders, such as copies, are ignored."""
    return sorted((path for path in folder.glob("step-*.ckpt") if _NAME.fullmatch(path.name)), key=step_of)


def step_of(path: Path) -> int:
    """Optimizer steps taken before the checkpoint ``path``."""
    return int(path.stem.removeprefix("step-"))


def newest_checkpoint(folder: Path) -> Path | None:
    """A member's newest checkpoint, which may be damaged; None if there is none."""
    return next(reversed(checkpoints_in(folder)), None)


def find_resumable(folder: Path) -> tuple[Path | None, dict[Path, str]]:
    """Find the newest readable checkpoint in ``folder``, and the problems of newer ones; changes nothing.

    Raises:
        UserError: all checkpoints are damaged.
    """
    problems: dict[Path, str] = {}
    for path in reversed(checkpoints_in(folder)):
        problem = damage_of(path)
        if problem is None:
            return path, problems

        problems[path] = problem

    if problems:
        newest, problem = next(iter(problems.items()))
        raise UserError(
            f"{newest}: damaged checkpoint ({problem}), and none before it is whole; "
            f"restore one, or remove {folder} to start afresh"
        )

    return None, problems
