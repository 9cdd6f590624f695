"""SuperDiff's OR with exact experts of a finite set: its mixture comes to the exact one as steps shrink."""

from __future__ import annotations

import torch
from ensemble_networks import ExactExpert, finite_set
from torch import Tensor

from ddm_lightning.ensemble.routing import Batch
from ddm_lightning.ensemble.strategies.superdiff_or import SuperDiffOr
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.oracle import FiniteSetOracle
from ddm_lightning.flow.solvers.ancestral import Ancestral
from ddm_lightning.flow.timesteps import sampling_times

SIZES = [4, 8, 12, 16]
SHAPE, NUM = (1, 1, 2), 1000


def run(num_steps: int) -> tuple[float, Tensor]:
    """Mean error of the velocity along the chain for t of at least 0.2, over its spread, and the clusters' shares."""
    points, labels = finite_set(SIZES, 2, seed=5)
    points = points.float().reshape(-1, *SHAPE)
    oracle = FiniteSetOracle(points, labels, 4)
    ensemble = Ensemble([ExactExpert(oracle, k) for k in range(4)], None, [0.1, 0.2, 0.3, 0.4])
    times = sampling_times(num_steps)
    batch = Batch(ensemble, None, [(i,) for i in range(NUM)], times, SHAPE, 0)
    field, errors = SuperDiffOr().field(batch), []

    def velocity(x_t: Tensor, t: Tensor) -> Tensor:
        found, exact = field(x_t, t), oracle.velocity(x_t, t)
        if t[0] >= 0.2:
            errors.append((found - exact).square().mean().sqrt() / exact.std())
        return found

    x_0 = Ancestral().solve(velocity, batch.x_1, times, batch.noise)
    nearest = torch.cdist(x_0.flatten(1), points.flatten(1)).argmin(1)
    return float(torch.stack(errors).mean()), labels[nearest].bincount(minlength=4) / NUM


def test_the_mixture_becomes_exact_as_steps_shrink() -> None:
    (coarse, _), (fine, shares) = run(20), run(160)
    print(f"superdiff-or: error of the velocity {coarse:.4f} in 20 steps, {fine:.4f} in 160; shares {shares.tolist()}")
    assert fine < 0.5 * coarse and fine < 0.05
    priors = torch.tensor([0.1, 0.2, 0.3, 0.4])
    assert ((shares - priors).abs() < 4 * (priors * (1 - priors) / NUM).sqrt()).all()
