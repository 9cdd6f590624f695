"""The contract checks of routers, strategies, sources and encoders: built-ins pass, broken examples are named."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from ddm_lightning.core.registry import ROUTERS, STRATEGIES
from ddm_lightning.encoders.images import Pixels
from ddm_lightning.ensemble.routing import Strategy
from ddm_lightning.networks.dit import RouterDiT
from ddm_lightning.prepare.sources.toys import Blobs
from ddm_lightning.testing import check_encoder, check_router, check_source, check_strategy

SIZES = {"patch_size": 4, "width": 16, "depth": 1, "num_heads": 2}
SMALL = {"num_samples": 6, "image_size": 8}


@pytest.mark.parametrize("name", STRATEGIES.names())
def test_strategies_keep_the_contract(name):
    check_strategy(STRATEGIES.get(name))


def test_other_plug_ins_keep_theirs():
    check_router(partial(ROUTERS.get("router-dit"), **SIZES))
    check_source(partial(Blobs, **SMALL))
    check_encoder(Pixels)


class Unnormalised(Strategy):
    def weights(self, probabilities):
        return probabilities.clamp_min(0.2)


class OfTheBatch(Strategy):
    def weights(self, probabilities):
        return probabilities.mean(0, keepdim=True).expand_as(probabilities)


class FirstExpert(Strategy):
    def weights(self, probabilities):
        return torch.eye(probabilities.shape[1])[0].expand_as(probabilities)


class NeedsTwo(Strategy):
    def weights(self, probabilities):
        return torch.zeros_like(probabilities).scatter_(1, probabilities.topk(2, dim=1).indices, 0.5)


class NoSolver(Strategy):
    solvers = ("magic",)


class Deaf(RouterDiT):
    def forward(self, x_t, t, condition):
        return super().forward(x_t, t, None)


class OneLogit(RouterDiT):
    def forward(self, x_t, t, condition):
        return super().forward(x_t, t, condition)[:, :1]


class Draws(Blobs):
    """Draws another caption at each reading, as an augmentation does."""

    def read(self, part):
        return (replace(record, caption=str(np.random.default_rng().random())) for record in super().read(part))


def of_all(**changes):
    """A source whose samples have this in common."""

    class Changed(Blobs):
        def read(self, part):
            return (replace(record, **changes) for record in super().read(part))

    return Changed


class Random(Pixels):
    def encode(self, images):
        return np.random.default_rng().permuted(super().encode(images), axis=0)


class OfItsBatch(Pixels):
    def encode(self, images):
        return super().encode(images - images.min(axis=(0, 1, 2)) // 2 + len(images))


@pytest.mark.parametrize(
    ("check", "factory", "problem"),
    [
        (check_strategy, Unnormalised, "do not sum to 1"),
        (check_strategy, OfTheBatch, "depend on the other rows"),
        (check_strategy, FirstExpert, "order of the experts"),
        (check_strategy, NeedsTwo, "strategy: raises RuntimeError"),
        (check_strategy, NoSolver, "solvers must be some of ancestral, dormand-prince"),
        (check_strategy, dict, "no Strategy"),
        (partial(check_router, kinds=["text"]), partial(Deaf, **SIZES), r"'text'.* (no gradient|does not change)"),
        (check_router, partial(OneLogit, **SIZES), r"returns shape \(4, 1\)"),
        (check_source, partial(of_all(key="one"), **SMALL), "key 'one' comes twice"),
        (check_source, partial(of_all(caption=None), **SMALL), "caption of .* is no text"),
        (check_source, partial(Draws, **SMALL), "two reads of"),
        (check_encoder, Random, "different bytes for the same images"),
        (check_encoder, OfItsBatch, "depends on the other images"),
    ],
)
def test_what_breaks_a_contract_is_named(check, factory, problem):
    with pytest.raises(AssertionError, match=problem):
        check(factory)
