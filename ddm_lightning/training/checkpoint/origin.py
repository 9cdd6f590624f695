"""What training a checkpoint is of, kept in it: it may have been copied, and the experiment changed since."""

from __future__ import annotations

import json
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import lightning as L  # after torchvision has been made importable

from ddm_lightning.config import Experiment, to_dict, with_defaults
from ddm_lightning.core.compat import ensure_torchvision_importable
from ddm_lightning.core.devices import resolve_accelerator
from ddm_lightning.core.errors import UserError
from ddm_lightning.members.run_folder import changes
from ddm_lightning.training.checkpoint.files import read_rest
from ddm_lightning.training.parallel.strategy import bytes_per_number

ensure_torchvision_importable()


_MEMBER, _EXPERIMENT, _ACCELERATOR = "member", "experiment", "accelerator"
# Each draws from generators of its own.
_NOISE = {"accelerator", "devices"}
_NUMERICS = (
    "accelerator",
    "devices",
    "strategy",
    "precision",
    "micro_batch_size",
    "attention",
    "compile",
    "activation_checkpointing",
)


class KeptOrigin(L.Callback):
    """Writes the member's name and the experiment into each checkpoint."""

    def __init__(self, member: str, experiment: Experiment) -> None:
        self.origin = {
            _MEMBER: member,
            _EXPERIMENT: to_dict(experiment),
            _ACCELERATOR: resolve_accelerator(experiment.island.accelerator),
        }

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Plain values, which are read as weights alone."""
        checkpoint |= self.origin


def was_milestone(path: Path, step: int) -> bool:
    """Whether the checkpoint at ``path``, of ``step``, was to be kept for good when it was written.

    The island that goes on may keep others, or none. No for one that does not say, or cannot be read.
    """
    try:
        every = read_rest(path)[_EXPERIMENT]["island"]["milestone_every_n_steps"]
    except (OSError, EOFError, RuntimeError, UnpicklingError, LookupError, TypeError):
        return False
    return isinstance(every, int) and every > 0 and step % every == 0


def check_origin(path: Path, member: str, experiment: Experiment) -> str | None:
    """A line of what the island does otherwise than the training that left the checkpoint at ``path``.

    None where nothing is, or where an earlier version wrote the checkpoint.

    Raises:
        UserError: it is another member's, of another experiment, or of weights of another width, which would be read
            as what they are and not as what is asked for.
    """
    rest = read_rest(path)
    if _MEMBER not in rest:
        return None
    if rest[_MEMBER] != member:
        raise UserError(
            f"{path}: is a checkpoint of {rest[_MEMBER]}, not of {member}; move it to where that one lies, or remove it"
        )
    before, now = with_defaults(rest[_EXPERIMENT]), to_dict(experiment)
    if changed := changes(before, now):
        raise UserError(
            f"{path}: the experiment changed since this checkpoint was written: {changed}; set those keys "
            "back, or use another folder with run_dir=…"
        )
    # Of ``auto`` what it was and is; a checkpoint of an earlier version does not say.
    used = resolve_accelerator(experiment.island.accelerator)
    old = before["island"] | {"accelerator": rest.get(_ACCELERATOR, used)}
    new = now["island"] | {"accelerator": used}
    if bytes_per_number(old["precision"]) != bytes_per_number(new["precision"]):
        raise UserError(
            f"{path}: was trained with island.precision={old['precision']}, and {new['precision']} keeps other "
            "weights; set it back, or use another folder with run_dir=…"
        )
    differing = [name for name in _NUMERICS if old.get(name) != new[name]]
    if not differing:
        return None
    words = ", ".join(f"island.{name}={_in_yaml(new[name])} (was {_in_yaml(old.get(name))})" for name in differing)
    return f"from here on with {words}: the same samples, other {'noise and ' * bool(_NOISE & {*differing})}rounding"


def _in_yaml(value: str | float | None) -> str:
    """As it is typed behind ``key=``."""
    return value if isinstance(value, str) else json.dumps(value)
