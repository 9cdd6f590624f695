"""Scores of an expert's samples during training."""

from __future__ import annotations

from typing import Any

import lightning as L
import torch
from torch import Tensor

from ddm_lightning.config.experiment import EvaluateConfig
from ddm_lightning.core.errors import first_line
from ddm_lightning.core.registry import METRICS
from ddm_lightning.core.scores import scores_of
from ddm_lightning.training.loggers import CutShortError, SampleLogger
from ddm_lightning.training.module import MemberModule

MAX_IMAGES = 512
"""Maximum number of samples per score, as training waits for them."""


class ScoreLogger(L.Callback):
    """Logs ``evaluate.metrics`` at every N-th step, as part of a validation.

    Samples under the conditions of held-out samples, with the averaged weights and noise of their own, are compared
    with these samples: at most ``evaluate.num_images`` and ``MAX_IMAGES``. Metrics that need captions are skipped.
    Every rank scores its own samples, and the metrics reduce over ranks.

    Args:
        sampler: generates the samples.
        evaluate: metrics and number of images.
        every_n_steps: steps between scores.

    Raises:
        UserError: a metric refuses its params.
    """

    def __init__(self, sampler: SampleLogger, evaluate: EvaluateConfig, every_n_steps: int) -> None:
        built = [(plugin.name, METRICS.build(plugin.name, plugin.params)) for plugin in evaluate.metrics]
        self.metrics = [(name, metric) for name, metric in built if not hasattr(metric, "captioned")]
        self.sampler, self.every_n_steps = sampler, every_n_steps
        self.num_images = min(evaluate.num_images, MAX_IMAGES)
        self._batches: list[tuple[dict[str, Tensor], int]] = []

    def setup(self, trainer: L.Trainer, module: L.LightningModule, stage: str) -> None:
        """Find the weights of the feature networks before the first step."""
        for _, metric in self.metrics:
            getattr(metric.to(trainer.strategy.root_device), "network", None)

    def on_validation_batch_start(
        self, trainer: L.Trainer, module: L.LightningModule, batch: Any, batch_idx: int, dataloader_idx: int = 0
    ) -> None:
        """Keep held-out batches of a validation that is scored."""
        assert isinstance(module, MemberModule)
        self._batches = self._batches if batch_idx else []
        first = batch_idx * module.member.batch_size  # counts all ranks, which must sample alike
        if trainer.global_step % self.every_n_steps == 0 and first < self.num_images:
            num = -(-(self.num_images - first) // trainer.world_size)
            self._batches.append((batch, min(num, module.num_counted(batch, batch_idx))))

    @torch.no_grad()
    def on_validation_epoch_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        """Sample and log the scores."""
        batches, self._batches = self._batches, []
        if trainer.should_stop or not batches:
            return
        assert isinstance(module, MemberModule)
        try:
            encoder = self.sampler.encoder()
            for number, (batch, num) in enumerate(batches):
                sampled = self.sampler.sampled(module, batch, ("scores", number))
                for real, x_0 in ((True, module.normalised(batch)), (False, sampled)):
                    images = encoder.decode(x_0.float().cpu())[:num]
                    for _, metric in self.metrics:
                        metric.update(images, real=real)
            found = [scores_of(name, metric) for name, metric in self.metrics]
            module.log_figures({f"score/{key}": score.value for one in found for key, score in one.items()})
        except CutShortError:
            return
        except Exception as error:  # noqa: BLE001  # no score is worth a training
            self.sampler.print(f"step {trainer.global_step}: no scores: {first_line(error)}")
        finally:
            for _, metric in self.metrics:
                metric.reset()
