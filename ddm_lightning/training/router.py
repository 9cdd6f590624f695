"""The router: a classifier of noisy samples by cluster."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from ddm_lightning.training.module import NUM_VALIDATION_TIMESTEPS, MemberModule, Noised


class RouterModule(MemberModule):
    """Cross-entropy on the cluster of the noised sample (arXiv 2501.05450, section 3.2).

    It trains on the natural mixture of clusters, so its probabilities contain the cluster priors.
    """

    loss_name = "cross_entropy"
    confusion: Tensor | None = None
    """Of the validation so far (``_add_confusion``)."""

    def measure(self, noised: Noised, batch: dict[str, Tensor]) -> dict[str, Float[Tensor, " b"]]:
        """Cross-entropy of each sample, in nats, and whether its cluster is the likeliest."""
        logits = self.network(noised.x_t, noised.t, noised.condition).float()
        hits = (logits.argmax(1) == batch["cluster"]).float()
        return {"loss": F.cross_entropy(logits, batch["cluster"], reduction="none"), "accuracy": hits}

    def on_validation_start(self) -> None:
        """Start a fresh confusion table."""
        super().on_validation_start()
        self.confusion = None

    @torch.no_grad()
    def validation_step(self, batch: dict[str, Tensor], batch_idx: int) -> None:
        """Held-out NLL and accuracy at 8 fixed timesteps: without the condition and, if it sees one, with it."""
        num = self.num_counted(batch, batch_idx)
        cluster = batch["cluster"][:num]
        for index in range(NUM_VALIDATION_TIMESTEPS):
            noised = self.validation_noised(batch, batch_idx, index)
            branches = {"": None} | ({"_conditional": noised.condition} if noised.condition is not None else {})
            for suffix, condition in branches.items():
                logits = self.network(noised.x_t, noised.t, condition).float()[:num]
                nll = F.cross_entropy(logits, cluster, reduction="sum")
                hits = (logits.argmax(1) == cluster).float().sum()
                at = f"t{(index + 0.5) / NUM_VALIDATION_TIMESTEPS:.3f}"
                self.accumulate(f"held_out/{self.loss_name}{suffix}", nll, num)
                self.accumulate(f"held_out/accuracy{suffix}", hits, num)
                self.accumulate(f"held_out/{self.loss_name}{suffix}_{at}", nll, num)
                self.accumulate(f"held_out/accuracy{suffix}_{at}", hits, num)
                if not suffix:
                    self._add_confusion(index, cluster, logits.softmax(1))

    def on_validation_epoch_end(self) -> None:
        """Average over the ranks, and sum their confusion."""
        super().on_validation_epoch_end()
        if self.confusion is not None and self.trainer.world_size > 1:
            torch.distributed.all_reduce(self.confusion)

    def _add_confusion(self, index: int, cluster: Tensor, probabilities: Tensor) -> None:
        """Sum the probabilities by true cluster: ``confusion[timestep, true, routed]``."""
        num_clusters = probabilities.shape[1]
        if self.confusion is None:
            self.confusion = probabilities.new_zeros(NUM_VALIDATION_TIMESTEPS, num_clusters, num_clusters)
        self.confusion[index].index_add_(0, cluster, probabilities)
