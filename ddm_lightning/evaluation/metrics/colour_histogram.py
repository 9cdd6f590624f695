"""``colour-histogram``: how much the colours of generated and real images differ, without any network."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import UInt8
from torch import Tensor
from torchmetrics import Metric

from ddm_lightning.core.registry import METRICS


@METRICS.register("colour-histogram")
class ColourHistogram(Metric):
    """Total variation between the histograms of generated and real pixels, from 0 to 1; mean of the three channels.

    Args:
        num_bins: equal bins of the 256 values, at most as many.
    """

    full_state_update = False
    counts: Tensor

    def __init__(self, num_bins: int = 16) -> None:
        super().__init__()
        if not 1 <= num_bins <= 256:
            raise ValueError(f"num_bins = {num_bins} must be from 1 to 256")
        self.num_bins = num_bins
        self.add_state("counts", torch.zeros(2, 3, num_bins, dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, images: UInt8[np.ndarray, "n h w 3"], *, real: bool) -> None:
        """Count the pixels of some images."""
        bins = images.astype(np.int64) * self.num_bins // 256
        for channel in range(3):
            found = np.bincount(bins[..., channel].ravel(), minlength=self.num_bins)
            self.counts[int(real), channel] += torch.from_numpy(found).to(self.counts)

    def compute(self) -> Tensor:
        """Return the distance."""
        shares = self.counts / self.counts.sum(-1, keepdim=True)
        return (shares[0] - shares[1]).abs().sum(-1).mean() / 2
