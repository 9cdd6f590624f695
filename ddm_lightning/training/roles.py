"""LightningModules of experts, students and routers: their losses and validations."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from ddm_lightning.ensemble.routing import Strategy
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.path import PATHS, training_target, x_0_from_velocity
from ddm_lightning.members.status import CONDITIONAL, TEMPERATURE
from ddm_lightning.networks.calibration import Calibration
from ddm_lightning.training.module import NUM_VALIDATION_TIMESTEPS, MemberModule, NoisyBatch, time_suffix

ECE = "held_out/calibration_error"


class ExpertModule(MemberModule):
    """Flow-matching expert or monolith: regresses ``ε − x_0``, or the target that its network declares, at ``x_t``.

    The loss is the mean squared error in fp32 (McAllister et al., arXiv 2501.05450, section 3).
    """

    def compute_losses(self, noisy: NoisyBatch, batch: dict[str, Tensor]) -> dict[str, Float[Tensor, " b"]]:
        """Return the mean squared error of each sample."""
        prediction = self.network(noisy.x_t, noisy.t, noisy.condition)
        target = training_target(*self.ends(noisy, batch), noisy.t, self.prediction, self.member.path)
        return {"loss": F.mse_loss(prediction.float(), target, reduction="none").flatten(1).mean(1)}

    def ends(self, noisy: NoisyBatch, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return data and noise of each sample, the ends of its path."""
        return noisy.x_0, noisy.noise

    @torch.no_grad()
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Average the held-out loss at 8 fixed stratified timesteps, which makes the curves of runs comparable."""
        num = self.num_counted(batch, batch_idx)
        for index in range(NUM_VALIDATION_TIMESTEPS):
            noisy = self.noisy_validation_batch(batch, batch_idx, index)
            loss = self.compute_losses(noisy, batch)["loss"][:num].sum()
            for suffix in ("", time_suffix(index)):
                self.accumulate(f"held_out/loss{suffix}", loss, num)


class StudentModule(ExpertModule):
    """Student: regresses the ensemble's velocity instead of ``ε − x_0`` (arXiv 2501.05450, section 4).

    The held-out loss is an expert's, so that it compares with the monolith's.
    """

    teacher: Ensemble
    """All experts, and the router if ``strategy`` needs one."""
    strategy: Strategy | None
    """Weights the experts; None evaluates the expert of each sample's cluster."""

    def ends(self, noisy: NoisyBatch, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Return the teacher's estimates of data and noise; in validation, the true ones."""
        if not self.training:
            return super().ends(noisy, batch)
        x_t, t = PATHS[self.member.path].to_linear(noisy.x_t, noisy.t)
        weighting: dict[str, Any] = {"weights": F.one_hot(batch["cluster"], self.member.num_clusters).to(x_t)}
        if self.strategy is not None:
            weighting = {"route": self.strategy.weights}
        velocity = self.teacher.velocity(x_t, t, noisy.condition, **weighting)
        x_0 = x_0_from_velocity(x_t, velocity, t)
        return x_0, x_0 + velocity


class RouterModule(MemberModule):
    """Router: classifies noisy samples by cluster with a cross-entropy (arXiv 2501.05450, section 3.2).

    It trains on the natural mixture of clusters, so its probabilities contain the cluster priors.
    """

    loss_name = "cross_entropy"
    confusion: Float[Tensor, "t k k"] | None = None
    """Probabilities of this rank's part of a validation, summed by timestep and true cluster."""
    calibrations: dict[str, Calibration]
    """Calibration without (``""``) and with (``CONDITIONAL``) the condition, of this rank's part of a validation."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.calibrations = {}

    def compute_losses(self, noisy: NoisyBatch, batch: dict[str, Tensor]) -> dict[str, Float[Tensor, " b"]]:
        """Return the cross-entropy of each sample, in nats, and whether its cluster is the likeliest."""
        logits = self.network(noisy.x_t, noisy.t, noisy.condition).float()
        hits = (logits.argmax(1) == batch["cluster"]).float()
        return {"loss": F.cross_entropy(logits, batch["cluster"], reduction="none"), "accuracy": hits}

    def on_validation_start(self) -> None:
        """Start with empty tables."""
        super().on_validation_start()
        self.confusion = None
        self.calibrations = {}

    @torch.no_grad()
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Average held-out cross-entropy and accuracy at 8 fixed timesteps, without and with the condition."""
        num = self.num_counted(batch, batch_idx)
        cluster, sample_ids = batch["cluster"][:num], batch["sample_id"][:num]
        on_host = cluster.cpu(), sample_ids.cpu()
        for index in range(NUM_VALIDATION_TIMESTEPS):
            noisy = self.noisy_validation_batch(batch, batch_idx, index)
            branches = {"": None} | ({CONDITIONAL: noisy.condition} if noisy.condition is not None else {})
            for branch, condition in branches.items():
                logits = self.network(noisy.x_t, noisy.t, condition).float()[:num]
                nll = F.cross_entropy(logits, cluster, reduction="sum")
                hits = (logits.argmax(1) == cluster).float().sum()
                for suffix in (branch, f"{branch}{time_suffix(index)}"):
                    self.accumulate(f"held_out/{self.loss_name}{suffix}", nll, num)
                    self.accumulate(f"held_out/accuracy{suffix}", hits, num)
                calibration = self.calibrations.setdefault(branch, Calibration(NUM_VALIDATION_TIMESTEPS))
                calibration.add(index, logits.cpu(), *on_host)
                if not branch:
                    if self.confusion is None:
                        num_clusters = logits.shape[1]
                        self.confusion = logits.new_zeros(NUM_VALIDATION_TIMESTEPS, num_clusters, num_clusters)
                    self.confusion[index].index_add_(0, cluster, logits.softmax(1))

    def drain(self, prefix: str) -> dict[str, float]:
        """Add the temperatures of a validation, and the calibration error before and after, to its averages."""
        figures = super().drain(prefix)
        for branch, calibration in self.calibrations.items() if prefix == "held_out/" else ():
            if self._num_ranks() > 1:
                for sums in (calibration.loss, calibration.reliability):
                    on_device = sums.to(self.device)
                    torch.distributed.all_reduce(on_device)
                    sums.copy_(on_device)
            before, after = calibration.errors()
            for name, values in (
                (TEMPERATURE, calibration.temperatures()),
                (ECE, before),
                (f"{ECE}_calibrated", after),
            ):
                figures |= {f"{name}{branch}{time_suffix(index)}": value for index, value in enumerate(values)}
        self.calibrations = {} if prefix == "held_out/" else self.calibrations
        return figures

    def sum_confusion(self) -> Float[Tensor, "t k k"] | None:
        """Return the confusion of all ranks; a collective, once per validation. None without held-out samples."""
        if self.confusion is not None and self.trainer.world_size > 1:
            torch.distributed.all_reduce(self.confusion)
        return self.confusion


OBJECTIVES = {"regression": ExpertModule, "classification": RouterModule, "distillation": StudentModule}
"""What computes the losses of a role, by the name of its objective."""
