"""Exact experts and an exact router of a data set of wide and tall images, of which clusters have unequal shares."""

import pytest
import torch
from ensemble_networks import ExactExpert, ExactRouter, finite_set
from finite_set import FiniteSetOracle
from torch import nn
from toy_ensemble import WAYS, sample

from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.spec import PREDICTIONS

SIZES = {(2, 1, 4): [30, 10, 8], (2, 4, 1): [4, 16, 20], (2, 2, 2): [5, 5, 5]}
"""Images of each shape in each cluster. The first two have as many numbers, so only the shape tells them apart."""


class ByShape(nn.Module):
    """A network that knows each shape's images."""

    def __init__(self, parts, prediction=None):
        super().__init__()
        self.parts, self.prediction = parts, prediction

    def forward(self, x_t, t, _):
        told = self.parts[tuple(x_t.shape[1:])](x_t.flatten(1), t, None)
        return told.reshape(x_t.shape) if self.prediction else told


def whole():
    """The ensemble and the points [n d] of each shape."""
    sets = {shape: finite_set(sizes, 8, seed) for seed, (shape, sizes) in enumerate(SIZES.items())}
    oracles = {shape: FiniteSetOracle(*points, 3) for shape, points in sets.items()}
    experts = []
    for k, kind in enumerate(PREDICTIONS):
        experts.append(ByShape({shape: ExactExpert(oracle, k, kind) for shape, oracle in oracles.items()}, kind))

    router = ByShape({shape: ExactRouter(oracle) for shape, oracle in oracles.items()})
    counts = torch.tensor([*SIZES.values()]).sum(0)
    return Ensemble(experts, router, (counts / counts.sum()).tolist()), {shape: set_[0] for shape, set_ in sets.items()}


@pytest.mark.parametrize("shape", SIZES)
def test_the_mixture_is_the_velocity_of_all_images_of_the_shape(shape):
    ensemble, points = whole()
    of_shape = points[shape]
    generator = torch.Generator().manual_seed(1)
    t = 0.05 + 0.9 * torch.rand(100, generator=generator, dtype=torch.float64)
    noise = torch.randn(100, 8, generator=generator, dtype=torch.float64)
    x_t = (1 - t[:, None]) * of_shape[torch.randint(len(of_shape), (100,), generator=generator)] + t[:, None] * noise

    squares = (x_t[:, None] - (1 - t)[:, None, None] * of_shape).square().sum(2)
    mean = torch.softmax(-squares / (2 * t[:, None] ** 2), dim=1) @ of_shape
    found = ensemble.velocity(x_t.reshape(-1, *shape), t)
    assert (found.flatten(1) - (x_t - mean) / t[:, None]).abs().max() < 1e-9


@pytest.mark.parametrize(("strategy", "solver"), [("full", "dpm++2m"), ("bayes", "ancestral")])
@pytest.mark.parametrize("shape", SIZES)
def test_samples_are_images_of_the_shape_in_its_own_shares(strategy, solver, shape):
    ensemble, points = whole()
    made = sample(ensemble, None, 200, shape, strategy=strategy, solver=solver, num_steps=60, batch_size=200)

    distances, nearest = torch.cdist(made.flatten(1).double(), points[shape]).min(1)
    assert distances.quantile(0.9) < 0.1
    clusters = torch.repeat_interleave(torch.arange(3), torch.tensor(SIZES[shape]))
    found = torch.bincount(clusters[nearest], minlength=3) / 200
    expected = torch.tensor(SIZES[shape]) / sum(SIZES[shape])
    assert ((found - expected).abs() < 4 * (expected * (1 - expected) / 200).sqrt()).all()


@pytest.mark.parametrize(("strategy", "solver"), [way for way in WAYS if "dormand-prince" not in way])
def test_a_sample_of_a_shape_belongs_to_its_key_whatever_its_neighbours(strategy, solver):
    ensemble, _ = whole()
    way = {"strategy": strategy, "solver": solver, "num_steps": 6, "shift": 1.5}
    keys = [("red", 0), ("red", 1), ("blue", 0)]
    wide, tall, square = (sample(ensemble, None, 3, shape, **way, keys=keys, batch_size=2) for shape in SIZES)

    assert wide.shape == (3, 2, 1, 4) and tall.shape == (3, 2, 4, 1) and square.isfinite().all()
    (alone,) = sample(ensemble, None, 1, (2, 4, 1), **way, keys=keys[2:], batch_size=2)
    assert torch.allclose(alone, tall[2], atol=1e-4)
