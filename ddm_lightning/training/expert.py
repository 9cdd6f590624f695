"""The flow-matching expert (and the monolith: the same module on all clusters)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from ddm_lightning.flow.path import min_snr_weights, training_target
from ddm_lightning.training.module import NUM_VALIDATION_TIMESTEPS, MemberModule, Noised


class ExpertModule(MemberModule):
    """Regresses the velocity ``ε − x_0`` (or what its network declares to predict) at ``x_t``.

    Source: McAllister et al., arXiv 2501.05450, section 3; the loss is the mean squared error in fp32.
    """

    def measure(self, noised: Noised, batch: dict[str, Tensor]) -> dict[str, Float[Tensor, " b"]]:
        """Mean squared error of each sample."""
        prediction = self.network(noised.x_t, noised.t, noised.condition)
        target = training_target(noised.x_0, noised.noise, self.prediction)
        return {"loss": F.mse_loss(prediction.float(), target, reduction="none").flatten(1).mean(1)}

    @property
    def prediction(self) -> str:
        """What the network declares to predict."""
        return getattr(self.network, "prediction", "velocity")

    def weighted(self, losses: Float[Tensor, " b"], t: Float[Tensor, " b"]) -> Float[Tensor, " b"]:
        """By Min-SNR, where that is asked for."""
        gamma = self.member.min_snr_gamma
        return losses if gamma is None else losses * min_snr_weights(t, gamma, self.prediction)

    @torch.no_grad()
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Held-out loss at 8 fixed stratified timesteps, so that curves of any two runs compare."""
        num = self.num_counted(batch, batch_idx)
        for index in range(NUM_VALIDATION_TIMESTEPS):
            noised = self.validation_noised(batch, batch_idx, index)
            loss = self.measure(noised, batch)["loss"][:num].sum()
            self.accumulate("held_out/loss", loss, num)
            self.accumulate(f"held_out/loss_t{(index + 0.5) / NUM_VALIDATION_TIMESTEPS:.3f}", loss, num)
