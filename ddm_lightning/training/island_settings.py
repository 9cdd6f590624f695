"""What of an island shapes a training's numbers, kept in checkpoints so that a resume can tell what has changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddm_lightning._compat import ensure_torchvision_importable

ensure_torchvision_importable()

import lightning as L  # noqa: E402  # after torchvision has been made importable

from ddm_lightning.config import IslandConfig  # noqa: E402
from ddm_lightning.errors import UserError  # noqa: E402
from ddm_lightning.training.checkpoint_files import read_rest  # noqa: E402
from ddm_lightning.training.strategy import bytes_per_number  # noqa: E402

_KEY = "island"
_NUMERICS = (
    "devices",
    "strategy",
    "precision",
    "micro_batch_size",
    "attention",
    "compile",
    "activation_checkpointing",
)


def _settings(island: IslandConfig) -> dict[str, Any]:
    return {name: getattr(island, name) for name in _NUMERICS}


class KeptSettings(L.Callback):
    """Writes the island's settings into each checkpoint."""

    def __init__(self, island: IslandConfig) -> None:
        self.island = island

    def on_save_checkpoint(self, trainer: L.Trainer, module: L.LightningModule, checkpoint: dict[str, Any]) -> None:
        """Plain values, which are read as weights alone."""
        checkpoint[_KEY] = _settings(self.island)


def changed_settings(path: Path, island: IslandConfig) -> str | None:
    """A line of what ``island`` does otherwise than the training that left the checkpoint at ``path``.

    None where nothing is, or the checkpoint does not say.

    Raises:
        UserError: weights of another width, which would be read as what they are and not as what is asked for.
    """
    before, now = read_rest(path).get(_KEY, {}), _settings(island)
    if bytes_per_number(before.get("precision", now["precision"])) != bytes_per_number(now["precision"]):
        raise UserError(
            f"{path}: was trained with island.precision={before['precision']}, and {now['precision']} keeps other "
            "weights; set it back, or use another folder with run_dir=…"
        )
    changed = [name for name in _NUMERICS if before.get(name, now[name]) != now[name]]
    if not changed:
        return None
    words = ", ".join(f"island.{name}={now[name]} (was {before[name]})" for name in changed)
    return f"from here on with {words}: the same samples, other {'noise and ' * ('devices' in changed)}rounding"
