"""The filter against exact posteriors: Gaussian clusters in closed form, and finite sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import multivariate_normal
from torch import Tensor

from ddm_lightning.ensemble.strategies.bayes import MIN_WEIGHT, BayesSamples, filter_chain
from ddm_lightning.flow.oracle import FiniteSetOracle
from ddm_lightning.flow.path import VelocityField
from ddm_lightning.flow.solvers.ancestral import Ancestral
from ddm_lightning.flow.timesteps import sampling_times

PRIORS = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
MEANS = torch.tensor([[2.0, 2.0], [-2.0, 2.0], [-2.0, -2.0], [2.0, -2.0]], dtype=torch.float64)
STDS = torch.tensor([0.3, 0.5, 0.2, 0.4], dtype=torch.float64)


def gaussian_expert(k: int) -> VelocityField:
    """E[noise - x_0 | x_t] for x_0 ~ N(MEANS[k], STDS[k]²I): a linear regression on x_t."""

    def velocity(x_t: Tensor, t: Tensor) -> Tensor:
        time = t[:, None]
        gain = 1 / ((1 - time) ** 2 * STDS[k] ** 2 + time**2)
        rest = x_t - (1 - time) * MEANS[k]
        return (time * gain - (1 - time) * STDS[k] ** 2 * gain) * rest - MEANS[k]

    return velocity


def gaussian_posterior(x_t: Tensor, t: float) -> Tensor:
    densities = [
        multivariate_normal((1 - t) * mean, ((1 - t) * std) ** 2 + t**2).pdf(x_t)
        for mean, std in zip(MEANS.numpy(), STDS.numpy(), strict=True)
    ]
    joint = np.stack(densities, axis=1) * PRIORS.numpy()
    return torch.from_numpy(joint / joint.sum(1, keepdims=True))


def sample_bayes(experts: list[VelocityField], x_1: Tensor, times: Tensor, **ways: Any) -> BayesSamples:
    """Run the filter with experts that ignore ``rows``."""
    return filter_chain(lambda k, x_t, t, _: experts[k](x_t, t), len(experts), x_1, times, **ways)


@dataclass
class Chain:
    samples: BayesSamples
    states: Tensor
    """x_t at the start of each step, [steps, b, d]."""
    rows: Tensor
    """Which experts were evaluated, [steps, b, K]."""
    times: list[float]


def run(experts: list[VelocityField], num: int, num_steps: int, initial: Tensor, dim: int = 2, seed: int = 0) -> Chain:
    """Run the filter and watch its states through what it asks of the experts."""
    generator = torch.Generator().manual_seed(seed)
    times = sampling_times(num_steps, dtype=torch.float64)
    states = torch.full((num_steps, num, dim), torch.nan, dtype=torch.float64)
    evaluated = torch.zeros(num_steps, num, len(experts), dtype=torch.bool)

    def velocity(k: int, x_t: Tensor, t: Tensor, rows: Tensor) -> Tensor:
        step = times.tolist().index(t[0].item())
        states[step, rows] = x_t
        evaluated[step, rows, k] = True
        return experts[k](x_t, t)

    samples = filter_chain(
        velocity,
        len(experts),
        torch.randn(num, dim, generator=generator, dtype=torch.float64),
        times,
        initial=initial,
        noise=lambda _: torch.randn(num, dim, generator=generator, dtype=torch.float64),
        uniform=lambda _: torch.rand(num, generator=generator, dtype=torch.float64),
    )
    return Chain(samples, states, evaluated, times[:-1].tolist())


def total_variation(chain: Chain, posterior: Callable[[Tensor, float], Tensor]) -> Tensor:
    """TV between the filter and the exact posterior at each step, averaged over the samples, [steps]."""
    exact = torch.stack([posterior(x_t, t) for x_t, t in zip(chain.states, chain.times, strict=True)])
    return (chain.samples.weights - exact).abs().sum(2).mean(1) / 2


@pytest.fixture(scope="module")
def gaussians() -> Chain:
    """Four unequal clusters, exact experts, 20 steps."""
    return run([gaussian_expert(k) for k in range(4)], 8192, 20, PRIORS)


def test_weights_stay_with_the_exact_posterior_of_gaussian_clusters(gaussians: Chain) -> None:
    """The bar is on TV averaged over 8,192 samples, at the worst of the 20 steps; single samples may be further."""
    tv = total_variation(gaussians, gaussian_posterior)
    print(f"bayes, 4 Gaussian clusters, 20 steps: TV mean over steps {tv.mean():.4f}, max over steps {tv.max():.4f}")
    assert tv.max() < 0.01
    # The bar means something: at mid-chain the posterior is far from the priors and from certainty.
    middle = gaussians.samples.weights[10]
    assert (middle - PRIORS).abs().sum(1).mean() / 2 > 0.3 and (1 - middle.max(1).values).mean() > 0.01


def test_weights_stay_with_the_exact_posterior_of_a_finite_set() -> None:
    """The same bar: averaged over 4,096 samples, at the worst step."""
    labels = torch.repeat_interleave(torch.arange(4), torch.tensor([10, 20, 30, 40]))
    generator = torch.Generator().manual_seed(4)
    points = MEANS[labels] + STDS[labels][:, None] * torch.randn(100, 2, generator=generator, dtype=torch.float64)
    oracle = FiniteSetOracle(points, labels, 4)
    experts: list[VelocityField] = [lambda x_t, t, k=k: oracle.cluster_velocity(k, x_t, t) for k in range(4)]  # type: ignore[misc]
    chain = run(experts, 4096, 20, PRIORS)
    tv = total_variation(chain, lambda x_t, t: oracle.cluster_posterior(x_t, torch.full((len(x_t),), t).double()))
    print(
        f"bayes, finite set of 4 clusters, 20 steps: TV mean over steps {tv.mean():.4f}, max over steps {tv.max():.4f}"
    )
    assert tv.max() < 0.01


def test_more_steps_come_closer() -> None:
    experts = [gaussian_expert(k) for k in range(4)]
    coarse, fine = (total_variation(run(experts, 2048, n, PRIORS), gaussian_posterior).max() for n in (10, 80))
    print(f"bayes: max TV {coarse:.4f} in 10 steps, {fine:.4f} in 80")
    assert fine < 0.4 * coarse


def test_clusters_come_out_in_the_priors_proportions(gaussians: Chain) -> None:
    x_0 = gaussians.samples.x_0
    shares = torch.cdist(x_0, MEANS).argmin(1).bincount(minlength=4) / len(x_0)
    print("bayes, shares of the clusters:", [round(share, 4) for share in shares.tolist()], "priors:", PRIORS.tolist())
    assert ((shares - PRIORS).abs() < 4 * (PRIORS * (1 - PRIORS) / len(x_0)).sqrt()).all()
    for k in range(4):
        members = x_0[torch.cdist(x_0, MEANS).argmin(1) == k]
        assert torch.allclose(members.mean(0), MEANS[k], atol=0.1)
        assert torch.allclose(members.std(0), STDS[k].expand(2), rtol=0.25)


def test_experts_are_evaluated_on_active_rows_only(gaussians: Chain) -> None:
    weights = gaussians.samples.weights
    assert torch.equal(gaussians.rows, weights > 0)
    assert not ((weights > 0) & (weights < MIN_WEIGHT)).any()
    assert torch.allclose(weights.sum(2), torch.ones(20, 8192, dtype=torch.float64))
    assert not ((weights[:-1] == 0) & (weights[1:] > 0)).any()  # dropped for good
    assert gaussians.samples.mean_active == pytest.approx(gaussians.rows.sum(2).double().mean().item())
    assert 1 < gaussians.samples.mean_active < 3


def test_the_last_step_is_an_active_experts_estimate(gaussians: Chain) -> None:
    x_t, t = gaussians.states[-1], torch.full((8192,), gaussians.times[-1], dtype=torch.float64)
    estimates = torch.stack([x_t - t[:, None] * gaussian_expert(k)(x_t, t) for k in range(4)], dim=1)
    distances = (estimates - gaussians.samples.x_0[:, None]).abs().amax(2)
    assert (distances.masked_fill(gaussians.samples.weights[-1] == 0, torch.inf).min(1).values < 1e-12).all()


def normal(step: int, seed: int = 1) -> Tensor:
    return torch.randn(64, 2, generator=torch.Generator().manual_seed(1000 * seed + step), dtype=torch.float64)


def half(_: int) -> Tensor:
    return torch.full((64,), 0.5, dtype=torch.float64)


def test_one_expert_is_plain_ancestral_sampling() -> None:
    times = sampling_times(12, shift=2.0, dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    got = sample_bayes([gaussian_expert(1)], normal(99), times, initial=one, noise=normal, uniform=half)
    assert torch.allclose(got.x_0, Ancestral().solve(gaussian_expert(1), normal(99), times, normal), atol=1e-12)
    assert got.mean_active == 1 and got.weights.shape == (12, 64, 1)


def test_initial_weights_may_differ_from_row_to_row() -> None:
    clusters = torch.arange(64) % 4
    initial = torch.nn.functional.one_hot(clusters, 4).double()
    experts = [gaussian_expert(k) for k in range(4)]
    times = sampling_times(20, dtype=torch.float64)
    got = sample_bayes(experts, normal(99), times, initial=initial, noise=normal, uniform=half)
    assert torch.equal(got.weights, initial.expand(20, 64, 4)) and got.mean_active == 1
    assert torch.equal(torch.cdist(got.x_0, MEANS).argmin(1), clusters)
    with pytest.raises(ValueError, match="4 initial weights for 3 experts"):
        sample_bayes(experts[:3], normal(99), times, initial=initial, noise=normal, uniform=half)


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-24])
def test_an_expert_without_weight_is_never_drawn(number: float) -> None:
    def trap(x_t: Tensor, t: Tensor) -> Tensor:
        raise AssertionError("evaluated")

    initial = torch.tensor([0.0, 0.3, 0.7, 0.0])
    experts = [trap, gaussian_expert(1), gaussian_expert(3), trap]
    times, drawn = sampling_times(5, dtype=torch.float64), torch.full((64,), number)
    got = sample_bayes(experts, normal(99), times, initial=initial, noise=normal, uniform=lambda _: drawn)
    nearest = torch.cdist(got.x_0, MEANS).argmin(1)
    assert set(nearest.tolist()) <= {1, 3} and got.x_0.isfinite().all()


def test_experts_that_disagree_over_many_pixels_stay_finite() -> None:
    # A log-likelihood ratio of about 10⁵, far beyond what exp takes in any float.
    experts: list[VelocityField] = [lambda x_t, t, c=c: (x_t - c) / t[0] for c in (-3.0, 0.0, 3.0)]  # type: ignore[misc]
    generator = torch.Generator().manual_seed(0)
    got = sample_bayes(
        experts,
        torch.randn(16, 3, 64, 64, generator=generator),
        sampling_times(8),
        initial=torch.full((3,), 1 / 3),
        noise=lambda _: torch.randn(16, 3, 64, 64, generator=generator),
        uniform=lambda _: torch.rand(16, generator=generator),
    )
    assert got.x_0.dtype == torch.float32 and got.weights.isfinite().all()
    ends = got.x_0.mean((1, 2, 3))
    assert torch.allclose(got.x_0, ends.round().reshape(-1, 1, 1, 1).expand_as(got.x_0), atol=1e-4)
    assert set(ends.round().tolist()) == {-3.0, 0.0, 3.0}


def test_float32_states_lose_no_weight() -> None:
    # Two experts that hardly differ over 2⁸ · 2⁸ latents: their likelihoods' ratio is a difference of large sums.
    generator = torch.Generator().manual_seed(0)
    x_1, noise, aim, step = (torch.randn(8, 4, 256, 256, generator=generator) for _ in range(4))
    aims = [aim, aim + 4e-3 * step]

    def run_in(dtype: torch.dtype) -> Tensor:
        experts: list[VelocityField] = [lambda x_t, t, a=a: (x_t - a.to(x_t)) / t[0] for a in aims]  # type: ignore[misc]
        start, drift = x_1.to(dtype), noise.to(dtype)
        ways = {"noise": lambda _: drift, "uniform": lambda _: torch.full((8,), 0.5)}
        priors = torch.tensor([0.5, 0.5])
        return sample_bayes(experts, start, torch.tensor([1.0, 0.5, 0.0]), initial=priors, **ways).weights[1]

    single, double = run_in(torch.float32), run_in(torch.float64)
    assert ((double > 0.2) & (double < 0.8)).any()
    assert torch.allclose(single, double, atol=2e-4)
