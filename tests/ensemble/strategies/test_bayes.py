"""The filter against exact posteriors: Gaussian clusters in closed form, and finite sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from finite_set import FiniteSetOracle
from scipy.stats import multivariate_normal
from torch import Tensor

from ddm_lightning.ensemble.strategies.bayes import MIN_WEIGHT, filter_chain
from ddm_lightning.flow.path import VelocityField, guided
from ddm_lightning.flow.solvers.built_in import Ancestral
from ddm_lightning.flow.timesteps import sampling_times

PRIORS = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
MEANS = torch.tensor([[2.0, 2.0], [-2.0, 2.0], [-2.0, -2.0], [2.0, -2.0]], dtype=torch.float64)
STDS = torch.tensor([0.3, 0.5, 0.2, 0.4], dtype=torch.float64)


def gaussian_expert(k: int, mean: Tensor | None = None, std: Tensor | None = None) -> VelocityField:
    """E[noise - x_0 | x_t] for x_0 ~ N(mean, std²I), by default cluster k's: a linear regression on x_t."""
    mean, std = MEANS[k] if mean is None else mean, STDS[k] if std is None else std

    def velocity(x_t: Tensor, t: Tensor) -> Tensor:
        time = t[:, None]
        gain = 1 / ((1 - time) ** 2 * std**2 + time**2)
        rest = x_t - (1 - time) * mean
        return (time * gain - (1 - time) * std**2 * gain) * rest - mean

    return velocity


def gaussian_posterior(
    x_t: Tensor, t: float, priors: Tensor = PRIORS, means: Tensor = MEANS, stds: Tensor = STDS
) -> Tensor:
    densities = [
        multivariate_normal((1 - t) * mean, ((1 - t) * std) ** 2 + t**2).pdf(x_t)
        for mean, std in zip(means.numpy(), stds.numpy(), strict=True)
    ]
    joint = np.stack(densities, axis=1) * priors.numpy()
    return torch.from_numpy(joint / joint.sum(1, keepdims=True))


def of_active(experts: Sequence[VelocityField], x_t: Tensor, t: Tensor, active: Tensor) -> Tensor:
    """Velocities of the experts on their active rows, [r, K, …]; an expert without any is not evaluated."""
    found = torch.zeros(*active.shape, *x_t.shape[1:], dtype=x_t.dtype)
    for k, expert in enumerate(experts):
        if (own := active[:, k]).any():
            found[own, k] = expert(x_t[own], t[own])
    return found


class Samples(NamedTuple):
    x_0: Tensor
    weights: Tensor
    """Weights before each step, [steps, r, K]."""


def filtered(*arguments: Any, **ways: Any) -> Samples:
    """Run the filter and keep its weights."""
    weights: list[Tensor] = []
    x_0 = filter_chain(*arguments, on_step=lambda *step: weights.append(step[2]), **ways)
    return Samples(x_0, torch.stack(weights))


def sample_bayes(experts: list[VelocityField], x_1: Tensor, times: Tensor, *, initial: Tensor, **ways: Any) -> Samples:
    """Run the filter; ``initial`` may be one row for all."""
    return filtered(partial(of_active, experts), x_1, times, initial=initial.expand(len(x_1), -1), **ways)


@dataclass
class Chain:
    samples: Samples
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

    def velocities(x_t: Tensor, t: Tensor, active: Tensor) -> Tensor:
        step = times.tolist().index(t[0].item())
        states[step], evaluated[step] = x_t, active
        return of_active(experts, x_t, t, active)

    samples = filtered(
        velocities,
        torch.randn(num, dim, generator=generator, dtype=torch.float64),
        times,
        initial=initial.expand(num, -1),
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
    experts: list[VelocityField] = [lambda x_t, t, k=k: oracle.velocity(x_t, t, k) for k in range(4)]  # type: ignore[misc]
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


SHIFTS = torch.tensor([[0.5, 0.0], [0.0, 0.5], [-0.5, 0.0], [0.0, -0.3]], dtype=torch.float64)
"""The condition moves the mean of each cluster and halves its std."""


def conditional_expert(k: int) -> VelocityField:
    return gaussian_expert(k, MEANS[k] + SHIFTS[k], STDS[k] / 2)


def log_density_of_paths(k: int, path: np.ndarray, times: list[float], scale: float) -> np.ndarray:
    """log p(x_1 … x_t) of the chain of the guided expert k alone: one Gaussian, from its moments, [b].

    Each coordinate moves by x_s = gain·x_t + offset + noise, where gain and offset follow from E[x_0 | x_t] of two
    Gaussians and from the conditional of the joint Gaussian of x_s and x_t given x_0.
    """
    num, dim = len(times), path.shape[2]
    cov, mean = np.eye(1), np.zeros((1, dim))
    for t, s in pairwise(times):
        estimate = np.zeros(2), np.zeros((2, dim))  # slope and offset of E[x_0 | x_t], with and without the condition
        for branch, (centre, std) in enumerate(
            [((MEANS + SHIFTS)[k].numpy(), STDS[k].item() / 2), (MEANS[k].numpy(), STDS[k].item())]
        ):
            estimate[0][branch] = (1 - t) * std**2 / ((1 - t) ** 2 * std**2 + t**2)
            estimate[1][branch] = (1 - estimate[0][branch] * (1 - t)) * centre
        slope, offset = (one[1] + scale * (one[0] - one[1]) for one in estimate)
        a = (1 - t) / (1 - s)
        of_x_t = a * s**2 / t**2
        of_x_0 = (1 - s) - of_x_t * (1 - t)
        gain, variance = of_x_t + of_x_0 * slope, s**2 - of_x_t * a * s**2
        cov = np.block([[cov, gain * cov[:, -1:]], [gain * cov[-1:], gain**2 * cov[-1:, -1:] + variance]])
        mean = np.concatenate([mean, gain * mean[-1:] + of_x_0 * offset])
    assert len(mean) == num
    return sum(multivariate_normal(mean[:, d], cov).logpdf(path[:, :, d].T) for d in range(dim))


def test_weights_are_the_posterior_of_the_chain_guided_inside_each_expert() -> None:
    """Each step's weights against p(k | x_1 … x_t) of four guided chains, chosen by the priors; and their shares."""
    scale, num = 2.5, 2048
    experts: list[VelocityField] = [
        lambda x_t, t, k=k: guided(conditional_expert(k)(x_t, t), gaussian_expert(k)(x_t, t), scale)  # type: ignore[misc]
        for k in range(4)
    ]
    chain = run(experts, num, 20, PRIORS)
    distances = []
    for i in range(1, 20):
        path = chain.states[: i + 1].numpy()
        logs = [log_density_of_paths(k, path, chain.times[: i + 1], scale) for k in range(4)]
        exact = (torch.from_numpy(np.stack(logs, axis=1)) + PRIORS.log()).softmax(1)
        distances.append(((chain.samples.weights[i] - exact).abs().sum(1).mean() / 2).item())
    shares = torch.cdist(chain.samples.x_0, MEANS + scale * SHIFTS).argmin(1).bincount(minlength=4) / num
    print(f"bayes, guided experts, 20 steps: largest TV {max(distances):.4f}, shares {shares.tolist()}")
    assert max(distances) < 0.01
    assert ((shares - PRIORS).abs() < 4 * (PRIORS * (1 - PRIORS) / num).sqrt()).all()


OWN = torch.tensor([0.4, 0.1, 0.3, 0.2], dtype=torch.float64)
"""p(k | c)."""
SCALE = 2.0


def conditional_posterior(x_t: Tensor, t: float) -> Tensor:
    return gaussian_posterior(x_t, t, OWN, MEANS + SHIFTS, STDS / 2)


def guided_mixture(num_steps: int, num: int = 8192) -> tuple[Samples, list[Tensor], Tensor]:
    """Samples of the filter, its states, and samples of one guided model of all data with the same noise."""
    times, generator = sampling_times(num_steps, dtype=torch.float64), torch.Generator().manual_seed(0)
    x_1 = torch.randn(num, 2, generator=generator, dtype=torch.float64)
    drawn = torch.randn(num_steps, num, 2, generator=generator, dtype=torch.float64)
    states: list[Tensor] = []
    conditional, null = ([expert(k) for k in range(4)] for expert in (conditional_expert, gaussian_expert))

    def velocities(x_t: Tensor, t: Tensor, active: Tensor) -> Tensor:
        states.append(x_t)
        return torch.cat([of_active(conditional, x_t, t, active[:num]), of_active(null, x_t, t, active[num:])])

    def one_model(x_t: Tensor, t: Tensor) -> Tensor:
        weights = conditional_posterior(x_t, t[0].item()), gaussian_posterior(x_t, t[0].item())
        everything = torch.ones(num, 4, dtype=torch.bool)
        found = of_active(conditional, x_t, t, everything), of_active(null, x_t, t, everything)
        mixed = [(w[:, :, None] * v).sum(1) for w, v in zip(weights, found, strict=True)]
        return mixed[1] + SCALE * (mixed[0] - mixed[1])

    samples = filtered(
        velocities,
        x_1,
        times,
        initial=torch.cat([OWN.expand(num, 4), PRIORS.expand(num, 4)]),
        noise=lambda i: drawn[i],
        uniform=lambda _: torch.rand(num, generator=generator, dtype=torch.float64),
        guidance_scale=SCALE,
    )
    return samples, states, Ancestral().solve(one_model, x_1, times, lambda i: drawn[i])


def test_both_posteriors_stay_exact_along_the_chain_of_the_guided_mixture() -> None:
    """p(k | x_t, c) and p(k | x_t) of the data, at states that guidance has moved."""
    samples, states, _ = guided_mixture(20)
    distances = []
    for i, (x_t, t) in enumerate(zip(states, sampling_times(20, dtype=torch.float64).tolist(), strict=False)):
        exact = torch.cat([conditional_posterior(x_t, t), gaussian_posterior(x_t, t)])
        distances.append((samples.weights[i] - exact).abs().sum(1).view(2, -1).mean(1) / 2)
    largest = torch.stack(distances).amax(0)
    print(f"bayes, guided mixture, 20 steps: largest TV {largest.tolist()}")
    assert len(distances) == 20 and largest.max() < 0.01


def test_the_guided_mixture_has_the_shares_of_one_guided_model() -> None:
    """Those differ from p(k | c), because guidance moves samples between clusters; within sampling error."""
    samples, _, of_one_model = guided_mixture(80)
    found, expected = (
        torch.cdist(end, MEANS).argmin(1).bincount(minlength=4) / 8192 for end in (samples.x_0, of_one_model)
    )
    print(f"bayes, guided mixture, 80 steps: shares {found.tolist()}, of one guided model {expected.tolist()}")
    assert ((found - expected).abs() < 4 * (2 * expected * (1 - expected) / 8192).sqrt()).all()
    assert (found - OWN).abs().sum() / 2 > 0.1


@pytest.mark.parametrize(
    ("interval", "same"),
    [
        ((0.75, 0.75), (0.6, 0.8)),
        ((0.75, 1.0), (0.6, 1.0)),
        ((0.5, 0.75), (0.4, 0.8)),
        ((np.nextafter(0.5, 1), np.nextafter(0.75, 0)), None),
        ((np.nextafter(0.75, 1), np.nextafter(1, 0)), None),
    ],
)
def test_guidance_of_the_mixture_acts_in_steps_that_start_in_its_interval(
    interval: tuple[float, float], same: tuple[float, float] | None
) -> None:
    """Steps start at 1, 0.75 and 0.5; both ends of an interval belong to it."""

    def states(scale: float, interval: tuple[float, float]) -> list[Tensor]:
        seen: list[Tensor] = []

        def velocities(x_t: Tensor, t: Tensor, active: Tensor) -> Tensor:
            seen.append(x_t)
            fields = [[expert(k) for k in range(4)] for expert in (conditional_expert, gaussian_expert)]
            return torch.cat([of_active(one, x_t, t, own) for one, own in zip(fields, active.split(64), strict=True)])

        ways: dict[str, Any] = {"noise": normal, "uniform": half, "guidance_interval": interval}
        times, initial = torch.tensor([1.0, 0.75, 0.5, 0.0], dtype=torch.float64), PRIORS.expand(128, 4)
        found = filter_chain(velocities, normal(99), times, initial=initial, guidance_scale=scale, **ways)
        return [*seen, found]

    expected = states(1.0, interval) if same is None else states(3.0, same)
    for one, other in zip(states(3.0, interval), expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


def test_experts_are_evaluated_on_active_rows_only(gaussians: Chain) -> None:
    weights = gaussians.samples.weights
    assert torch.equal(gaussians.rows, weights > 0)
    assert not ((weights > 0) & (weights < MIN_WEIGHT)).any()
    assert torch.allclose(weights.sum(2), torch.ones(20, 8192, dtype=torch.float64))
    assert not ((weights[:-1] == 0) & (weights[1:] > 0)).any()  # dropped for good
    assert 1 < gaussians.rows.sum(2).double().mean() < 3


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
    assert got.weights.shape == (12, 64, 1)


def test_initial_weights_may_differ_from_row_to_row() -> None:
    clusters = torch.arange(64) % 4
    initial = torch.nn.functional.one_hot(clusters, 4).double()
    experts = [gaussian_expert(k) for k in range(4)]
    times = sampling_times(20, dtype=torch.float64)
    got = sample_bayes(experts, normal(99), times, initial=initial, noise=normal, uniform=half)
    assert torch.equal(got.weights, initial.expand(20, 64, 4))
    assert torch.equal(torch.cdist(got.x_0, MEANS).argmin(1), clusters)


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
