"""Early stopping, a callback that ships: ``island.callbacks: [{name: early-stopping, params: {patience: 3}}]``."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import lightning as L

from ddm_lightning.core.checks import option
from ddm_lightning.core.errors import UserError, say
from ddm_lightning.core.registry import CALLBACKS


@CALLBACKS.register("early-stopping")
@dataclass(eq=False)
class EarlyStopping(L.Callback):
    """Finishes a member whose held-out loss has stopped falling.

    The member hands over its artifact as after its last step. All ranks find the same loss, so they stop together.
    The count is part of each checkpoint. A resumed training repeats a validation that its checkpoint does not count.
    """

    patience: int = option(3, low=1)
    """Validations in a row without a lower loss."""
    min_delta: float = option(0.0, low=0)
    """Decrease below the lowest loss that counts."""

    def __post_init__(self) -> None:
        self.seen: dict[str, Any] = {"validated_step": 0, "lowest": math.inf, "num_without": 0}

    def state_dict(self) -> dict[str, Any]:
        """Return the step of the newest validation, the lowest loss, and the validations since."""
        return self.seen

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take it back."""
        self.seen = state_dict

    def setup(self, trainer: L.Trainer, module: Any, stage: str) -> None:
        """Refuse a member without held-out samples.

        Raises:
            UserError: it has none.
        """
        if not module.objective.num_held_out:
            raise UserError(
                f"key 'island.callbacks': early-stopping: {module.member.name} has no held-out samples; leave it out, "
                "or prepare anew with held_out_fraction"
            )

    def on_validation_end(self, trainer: L.Trainer, module: Any) -> None:
        """Count the validation, unless it was cut short, and make its step the last one when patience ends."""
        if trainer.should_stop:
            return

        step = trainer.global_step
        loss = float(trainer.callback_metrics.get(f"held_out/{module.objective.loss_name}", math.inf))
        num_without = self.seen["num_without"] + 1
        if loss < self.seen["lowest"] - self.min_delta:
            self.seen["lowest"] = loss
            num_without = 0

        self.seen |= {"validated_step": step, "num_without": num_without}
        if num_without >= self.patience and step < trainer.max_steps:
            trainer.fit_loop.epoch_loop.max_steps = step
            if trainer.is_global_zero:
                say(
                    f"{module.member.name}: finished early at step {step}: its held-out loss has not fallen for "
                    f"{num_without} validations"
                )
