"""What the metrics share: features of images, and nearest neighbours."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.utilities import dim_zero_cat

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import FEATURES, parameters_of
from ddm_lightning.core.scores import Score
from ddm_lightning.encoders.interfaces import Features

_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class FeatureParams:
    """Parameters of every ``FeatureMetric``."""

    features: str = "efficientnet-lite0"
    """Feature network, by name."""
    features_params: dict[str, Any] | None = None
    """Its parameters, such as ``path``."""


class FeatureMetric(Metric):
    """Base of the metrics that compare the features of generated and real images.

    Override ``compute`` and ``scores``.

    Args:
        keeps_features: whether to keep all features; false for metrics of sums.
        params: those of ``FeatureParams``.
    """

    params: ClassVar[type] = FeatureParams
    """Dataclass of the ``**params`` of a subclass's constructor, for ``Registry.check``."""
    full_state_update = False
    min_images = 4
    """Fewest images of each set."""
    remedy = "enlarge {few}"
    """What to do with fewer; ``few`` is the smaller set."""
    real: list[Tensor]
    generated: list[Tensor]

    def __init__(self, keeps_features: bool = True, **params: Any) -> None:
        super().__init__()
        given = FeatureParams(**params)
        self.features, self.features_params = given.features, given.features_params or {}
        self.keeps_features = keeps_features
        FEATURES.check(self.features, self.features_params)
        self.add_state("real", [], dist_reduce_fx="cat")
        self.add_state("generated", [], dist_reduce_fx="cat")

    @cached_property
    def network(self) -> Features:
        """The feature network, on the metric's device.

        Raises:
            UserError: its weights are missing.
        """
        has_device = "device" in parameters_of(FEATURES.get(self.features))
        own = {"device": str(self.device)} if has_device else {}
        return FEATURES.build(self.features, {**own, **self.features_params})

    @cached_property
    def provenance(self) -> dict[str, Any]:
        """Everything that shapes the features."""
        return {"name": self.features, "params": self.features_params, **self.network.provenance()}

    def update(self, images: UInt8[np.ndarray, "n h w 3"] | Float[Tensor, "n d"], *, real: bool) -> None:
        """Add images, or their features."""
        features = images if isinstance(images, Tensor) else torch.from_numpy(self.network.encode(images))
        self.add(features.to(self.device), real)

    def add(self, features: Float[Tensor, "n d"], real: bool) -> None:
        """Add features."""
        if self.keeps_features:
            (self.real if real else self.generated).append(features)

    def kept(self) -> tuple[Float[Tensor, "n d"], Float[Tensor, "m d"]]:
        """Return the features of all generated and of all real images."""
        return dim_zero_cat(self.generated), dim_zero_cat(self.real)

    def scores(self) -> dict[str, Score]:
        """Return the values by the names under which they are reported, which name the features."""
        raise NotImplementedError

    def check_nums(self, name: str, num_generated: int, num_real: int) -> None:
        """Check that there are enough images.

        Raises:
            UserError: naming the metric ``name`` and what to use instead.
        """
        if min(num_generated, num_real) < self.min_images:
            problem = f"needs {self.min_images:,} images of each kind, not {num_generated:,} samples, {num_real:,} real"
            is_generated = num_generated < self.min_images
            few = "evaluate.num_images" if is_generated else "the reference (evaluate.reference=train)"
            raise UserError(f"metric {name!r} {problem}; {self.remedy.format(few=few)}")


def nearest(
    rows: Float[Tensor, "n d"], others: Float[Tensor, "m d"], num: int
) -> tuple[Float[Tensor, "n num"], Int[Tensor, "n num"]]:
    """Return the distances to the ``num`` nearest of ``others``, if so many, ascending, and their indices; float64."""
    num = min(num, len(others))
    found = [torch.cdist(part, others.double()).topk(num, largest=False) for part in rows.double().split(_ROWS_AT_ONCE)]
    return torch.cat([values for values, _ in found]), torch.cat([indices for _, indices in found])


def covered(
    rows: Float[Tensor, "n d"], centres: Float[Tensor, "m d"], radii: Float[Tensor, " m"]
) -> Bool[Tensor, " n"]:
    """Whether each row lies within the ball of any centre."""
    parts = rows.double().split(_ROWS_AT_ONCE)
    return torch.cat([(torch.cdist(part, centres.double()) <= radii).any(1) for part in parts])
