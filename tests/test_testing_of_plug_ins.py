"""The contract checks of routers, strategies, sources and encoders: built-ins pass, broken examples are named."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor

from ddm_lightning.core.registry import ROUTERS, STRATEGIES
from ddm_lightning.encoders.images import Pixels
from ddm_lightning.ensemble.routing import Strategy
from ddm_lightning.flow.condition import Condition
from ddm_lightning.networks.dit import RouterDiT
from ddm_lightning.prepare.records import Part, Record
from ddm_lightning.prepare.sources.toys import Blobs
from ddm_lightning.testing import check_encoder, check_router, check_source, check_strategy

SIZES = {"patch_size": 4, "width": 16, "depth": 1, "num_heads": 2}


@pytest.mark.parametrize("name", STRATEGIES.names())
def test_strategies_keep_the_contract(name: str) -> None:
    check_strategy(STRATEGIES.get(name))


class Unnormalised(Strategy):
    def weights(self, probabilities: Tensor) -> Tensor:
        return probabilities.clamp_min(0.2)


class OfTheBatch(Strategy):
    def weights(self, probabilities: Tensor) -> Tensor:
        return probabilities.mean(0, keepdim=True).expand_as(probabilities)


class FirstExpert(Strategy):
    def weights(self, probabilities: Tensor) -> Tensor:
        return torch.eye(probabilities.shape[1])[0].expand_as(probabilities)


class NeedsTwo(Strategy):
    def weights(self, probabilities: Tensor) -> Tensor:
        return torch.zeros_like(probabilities).scatter_(1, probabilities.topk(2, dim=1).indices, 0.5)


@pytest.mark.parametrize(
    ("strategy", "problem"),
    [
        (Unnormalised, "do not sum to 1"),
        (OfTheBatch, "depend on the other rows"),
        (FirstExpert, "order of the experts"),
        (NeedsTwo, "strategy: raises RuntimeError"),
        (type("NoSolver", (Strategy,), {"solvers": ("magic",)}), "solvers must be some of ancestral, dormand-prince"),
        (dict, "no Strategy"),
    ],
)
def test_broken_strategies_are_named(strategy: type, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        check_strategy(strategy)


class Deaf(RouterDiT):
    def forward(self, x_t: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        return super().forward(x_t, t, None)


class OneLogit(RouterDiT):
    def forward(self, x_t: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        return super().forward(x_t, t, condition)[:, :1]


def test_routers() -> None:
    check_router(partial(ROUTERS.get("router-dit"), **SIZES))
    with pytest.raises(AssertionError, match=r"condition 'text'.* (no gradient|does not change)"):
        check_router(partial(Deaf, **SIZES), kinds=["text"])
    with pytest.raises(AssertionError, match=r"returns shape \(4, 1\)"):
        check_router(partial(OneLogit, **SIZES), kinds=["none"])


class SameKey(Blobs):
    def read(self, part: Part) -> Iterator[Record]:
        return (replace(record, key="one") for record in super().read(part))


class Draws(Blobs):
    """Draws another caption at each reading, as an augmentation does."""

    def read(self, part: Part) -> Iterator[Record]:
        return (replace(record, caption=str(np.random.default_rng().random())) for record in super().read(part))


class NoText(Blobs):
    def read(self, part: Part) -> Iterator[Record]:
        return (replace(record, caption=None) for record in super().read(part))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "problem"),
    [(SameKey, "key 'one' comes twice"), (Draws, "two reads of"), (NoText, "caption of .* is no text")],
)
def test_broken_sources_are_named(source: type, problem: str) -> None:
    check_source(partial(Blobs, num_samples=6, image_size=8))
    with pytest.raises(AssertionError, match=problem):
        check_source(partial(source, num_samples=6, image_size=8))


class Random(Pixels):
    def encode(self, images: np.ndarray) -> np.ndarray:
        return np.random.default_rng().permuted(super().encode(images), axis=0)


class OfItsBatch(Pixels):
    def encode(self, images: np.ndarray) -> np.ndarray:
        return super().encode(images - images.min(axis=(0, 1, 2)) // 2 + len(images))


@pytest.mark.parametrize(
    ("encoder", "problem"),
    [(Random, "different bytes for the same images"), (OfItsBatch, "depends on the other images")],
)
def test_broken_encoders_are_named(encoder: type, problem: str) -> None:
    check_encoder(Pixels)
    with pytest.raises(AssertionError, match=problem):
        check_encoder(encoder)
