"""The filter against exact posteriors: Gaussian clusters in closed form, and finite sets."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from finite_set import FiniteSetOracle
from scipy.stats import multivariate_normal

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.ensemble.routing import Batch
from ddm_lightning.ensemble.strategies.bayes import MIN_WEIGHT, Bayes
from ddm_lightning.flow.path import expand_rows, guided
from ddm_lightning.flow.solvers import unchanged
from ddm_lightning.flow.solvers.built_in import Ancestral
from ddm_lightning.flow.timesteps import sampling_times

PRIORS = torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
MEANS = torch.tensor([[2.0, 2.0], [-2.0, 2.0], [-2.0, -2.0], [2.0, -2.0]], dtype=torch.float64)
STDS = torch.tensor([0.3, 0.5, 0.2, 0.4], dtype=torch.float64)
SHIFTS = torch.tensor([[0.5, 0.0], [0.0, 0.5], [-0.5, 0.0], [0.0, -0.3]], dtype=torch.float64)
"""The condition moves the mean of each cluster and halves its std."""
OWN = torch.tensor([0.4, 0.1, 0.3, 0.2], dtype=torch.float64)
"""p(k | c)."""


def gaussian_expert(mean, std):
    """E[noise - x_0 | x_t] for x_0 ~ N(mean, std²I): a linear regression on x_t."""

    def velocity(x_t, t):
        time = expand_rows(t, x_t)
        gain = 1 / ((1 - time) ** 2 * std**2 + time**2)
        return (time - (1 - time) * std**2) * gain * (x_t - (1 - time) * mean) - mean

    return velocity


PLAIN = list(map(gaussian_expert, MEANS, STDS))
CONDITIONAL = list(map(gaussian_expert, MEANS + SHIFTS, STDS / 2))


def gaussian_posterior(x_t, t, priors=PRIORS, means=MEANS, stds=STDS):
    joint = []
    for prior, mean, std in zip(priors, means.numpy(), stds.numpy(), strict=True):
        joint.append(prior.numpy() * multivariate_normal((1 - t) * mean, ((1 - t) * std) ** 2 + t**2).pdf(x_t))

    return torch.from_numpy(np.stack(joint, 1) / np.sum(joint, 0)[:, None])


def conditional_posterior(x_t, t):
    return gaussian_posterior(x_t, t, OWN, MEANS + SHIFTS, STDS / 2)


def of_active(experts, x_t, t, active):
    """Velocities of the experts on their active rows, [r, K, …]; an expert without any is not evaluated."""
    found = torch.zeros(*active.shape, *x_t.shape[1:], dtype=x_t.dtype)
    for k, expert in enumerate(experts):
        own = active[:, k]
        if own.any():
            found[own, k] = expert(x_t[own], t[own])

    return found


class Chain(Batch):
    """A batch of given experts (of both branches, if the mixture is guided), noise and initial weights.

    It keeps what the filter asks of it.
    """

    def __init__(
        self,
        branches,
        x_1,
        initial,
        noise,
        uniform,
        **settings,
    ):
        self.experts = branches
        self.x_1 = x_1
        self.initial = initial
        self.num_branches = len(branches)
        self.noise = noise
        self.uniform = uniform
        self.on_step = unchanged
        self.settings = SampleConfig(**settings)
        self.trace = self
        self.states = []
        self.rows = []
        self.kept = []
        self.times = []

    def initial_weights(self, **_):
        return self.initial

    def expert_velocities(self, x_t, t, active):
        self.states.append(x_t)
        self.rows.append(active)
        self.times.append(float(t[0]))
        parts = active.split(len(x_t))
        return torch.cat([of_active(own, x_t, t, part) for own, part in zip(self.experts, parts, strict=True)])

    def mixed(self, t, weights, found):
        self.kept.append(weights)
        return found

    def record(self, *_):
        pass

    def run(self, times):
        self.x_0 = Bayes().generate(self, times, Ancestral())
        self.weights = torch.stack(self.kept)
        """Weights before each step, [steps, r, K]."""
        return self


def run(experts, num, num_steps):
    """Run the filter from the priors."""
    generator = torch.Generator().manual_seed(0)

    def noise(_=0):
        return torch.randn(num, 1, 1, 2, generator=generator, dtype=torch.float64)

    def uniform(_):
        return torch.rand(num, generator=generator, dtype=torch.float64)

    chain = Chain([experts], noise(), PRIORS.expand(num, 4), noise, uniform)
    return chain.run(sampling_times(num_steps, dtype=torch.float64))


def total_variation(chain, posterior):
    """TV between the filter and the exact posterior at each step, averaged over the samples, [steps]."""
    exact = [posterior(x_t.flatten(1), t) for x_t, t in zip(chain.states, chain.times, strict=True)]
    return (chain.weights - torch.stack(exact)).abs().sum(2).mean(1) / 2


def nearest(x_0, means=MEANS):
    return torch.cdist(x_0.flatten(1), means).argmin(1)


def shares(x_0, means=MEANS):
    return nearest(x_0, means).bincount(minlength=4) / len(x_0)


def error_of(share, num):
    """Four standard errors."""
    return 4 * (share * (1 - share) / num).sqrt()


@pytest.fixture(scope="module")
def gaussians():
    """Four unequal clusters, exact experts, 20 steps."""
    return run(PLAIN, 8192, 20)


def test_weights_stay_with_the_exact_posterior_of_gaussian_clusters(gaussians):
    """The bar is on TV averaged over 8,192 samples, at the worst of the 20 steps; single samples may be further."""
    tv = total_variation(gaussians, gaussian_posterior)

    print(f"bayes, 4 Gaussian clusters, 20 steps: TV mean over steps {tv.mean():.4f}, max over steps {tv.max():.4f}")
    assert tv.max() < 0.01
    # The bar means something: at mid-chain the posterior is far from the priors and from certainty.
    middle = gaussians.weights[10]
    assert (middle - PRIORS).abs().sum(1).mean() / 2 > 0.3 and (1 - middle.max(1).values).mean() > 0.01


def test_weights_stay_with_the_exact_posterior_of_a_finite_set():
    labels = torch.repeat_interleave(torch.arange(4), torch.tensor([10, 20, 30, 40]))
    generator = torch.Generator().manual_seed(4)
    points = MEANS[labels] + STDS[labels][:, None] * torch.randn(100, 2, generator=generator, dtype=torch.float64)
    oracle = FiniteSetOracle(points[:, None, None], labels, 4)

    chain = run([lambda x_t, t, k=k: oracle.velocity(x_t, t, k) for k in range(4)], 4096, 20)

    def posterior(x_t, t):
        return oracle.cluster_posterior(x_t[:, None, None], torch.full((len(x_t),), t).double())

    assert total_variation(chain, posterior).max() < 0.01


def test_more_steps_come_closer():
    coarse, fine = (total_variation(run(PLAIN, 2048, n), gaussian_posterior).max() for n in (10, 80))
    assert fine < 0.4 * coarse


def test_clusters_come_out_in_the_priors_proportions(gaussians):
    x_0 = gaussians.x_0

    assert ((shares(x_0) - PRIORS).abs() < error_of(PRIORS, len(x_0))).all()
    for k in range(4):
        members = x_0.flatten(1)[nearest(x_0) == k]
        assert torch.allclose(members.mean(0), MEANS[k], atol=0.1)
        assert torch.allclose(members.std(0), STDS[k].expand(2), rtol=0.25)


def log_density_of_paths(k, path, times, scale):
    """log p(x_1 … x_t) of the chain of the guided expert k alone: one Gaussian, from its moments, [b].

    Each coordinate moves by x_s = gain·x_t + offset + noise, where gain and offset follow from E[x_0 | x_t] of two
    Gaussians and from the conditional of the joint Gaussian of x_s and x_t given x_0.
    """
    cov = np.eye(1)
    mean = np.zeros((1, path.shape[2]))
    branches = [((MEANS + SHIFTS)[k].numpy(), STDS[k].item() / 2), (MEANS[k].numpy(), STDS[k].item())]
    for t, s in pairwise(times):
        slopes = []
        offsets = []  # of E[x_0 | x_t], with and without the condition
        for centre, std in branches:
            slopes.append((1 - t) * std**2 / ((1 - t) ** 2 * std**2 + t**2))
            offsets.append((1 - slopes[-1] * (1 - t)) * centre)

        slope, offset = (null + scale * (own - null) for own, null in (slopes, offsets))
        a = (1 - t) / (1 - s)
        of_x_t = a * s**2 / t**2
        of_x_0 = (1 - s) - of_x_t * (1 - t)
        gain = of_x_t + of_x_0 * slope
        variance = s**2 - of_x_t * a * s**2
        cov = np.block([[cov, gain * cov[:, -1:]], [gain * cov[-1:], gain**2 * cov[-1:, -1:] + variance]])
        mean = np.concatenate([mean, gain * mean[-1:] + of_x_0 * offset])

    return sum(multivariate_normal(mean[:, d], cov).logpdf(path[:, :, d].T) for d in range(path.shape[2]))


def test_weights_are_the_posterior_of_the_chain_guided_inside_each_expert():
    """Each step's weights against p(k | x_1 … x_t) of four guided chains, chosen by the priors; and their shares."""
    scale = 2.5
    num = 2048
    experts = [lambda x_t, t, k=k: guided(CONDITIONAL[k](x_t, t), PLAIN[k](x_t, t), scale) for k in range(4)]

    chain = run(experts, num, 20)

    states = torch.stack(chain.states).flatten(2).numpy()
    for i in range(1, 20):
        logs = [log_density_of_paths(k, states[: i + 1], chain.times[: i + 1], scale) for k in range(4)]
        exact = (torch.from_numpy(np.stack(logs, axis=1)) + PRIORS.log()).softmax(1)
        assert (chain.weights[i] - exact).abs().sum(1).mean() / 2 < 0.01

    assert ((shares(chain.x_0, MEANS + scale * SHIFTS) - PRIORS).abs() < error_of(PRIORS, num)).all()


def guided_mixture(num_steps, num=4096):
    """The filter's chain, and samples of one guided model of all data with the same noise."""
    times = sampling_times(num_steps, dtype=torch.float64)
    generator = torch.Generator().manual_seed(0)
    x_1, *drawn = torch.randn(num_steps + 1, num, 1, 1, 2, generator=generator, dtype=torch.float64)
    initial = torch.cat([OWN.expand(num, 4), PRIORS.expand(num, 4)])

    def uniform(_):
        return torch.rand(num, generator=generator, dtype=torch.float64)

    def one_model(x_t, t):
        everything = torch.ones(num, 4, dtype=torch.bool)
        mixed = []
        for experts, posterior in ((CONDITIONAL, conditional_posterior), (PLAIN, gaussian_posterior)):
            weights = posterior(x_t.flatten(1), t[0].item())
            mixed.append(torch.einsum("bk,bk...->b...", weights, of_active(experts, x_t, t, everything)))

        return mixed[1] + 2 * (mixed[0] - mixed[1])

    chain = Chain([CONDITIONAL, PLAIN], x_1, initial, drawn.__getitem__, uniform, guidance_scale=2.0).run(times)
    return chain, Ancestral().solve(one_model, x_1, times, drawn.__getitem__)


def test_both_posteriors_stay_exact_along_the_chain_of_the_guided_mixture():
    """p(k | x_t, c) and p(k | x_t) of the data, at states that guidance has moved."""
    chain, _ = guided_mixture(20)

    def posterior(x_t, t):
        return torch.cat([conditional_posterior(x_t, t), gaussian_posterior(x_t, t)])

    exact = [posterior(x_t.flatten(1), t) for x_t, t in zip(chain.states, chain.times, strict=True)]
    distances = (chain.weights - torch.stack(exact)).abs().sum(2).unflatten(1, (2, -1)).mean(2) / 2
    assert distances.shape == (20, 2) and distances.max() < 0.01


def test_the_guided_mixture_has_the_shares_of_one_guided_model():
    """Those differ from p(k | c), because guidance moves samples between clusters; within sampling error."""
    chain, of_one_model = guided_mixture(80)

    found = shares(chain.x_0)
    expected = shares(of_one_model)
    assert ((found - expected).abs() < 2**0.5 * error_of(expected, len(chain.x_0))).all()
    assert (found - OWN).abs().sum() / 2 > 0.1


def normal(step):
    return torch.randn(64, 1, 1, 2, generator=torch.Generator().manual_seed(1000 + step), dtype=torch.float64)


def half(_):
    return torch.full((64,), 0.5, dtype=torch.float64)


@pytest.mark.parametrize(
    ("interval", "same"),
    [
        ([0.75, 0.75], [0.6, 0.8]),
        ([0.75, 1.0], [0.6, 1.0]),
        ([0.5, 0.75], [0.4, 0.8]),
        ([np.nextafter(0.5, 1), np.nextafter(0.75, 0)], None),
        ([np.nextafter(0.75, 1), np.nextafter(1, 0)], None),
    ],
)
def test_guidance_of_the_mixture_acts_in_steps_that_start_in_its_interval(interval, same):
    """Steps start at 1, 0.75 and 0.5; both ends of an interval belong to it."""

    def states(scale, interval):
        settings = {"guidance_scale": scale, "guidance_interval": interval}
        chain = Chain([CONDITIONAL, PLAIN], normal(99), PRIORS.expand(128, 4), normal, half, **settings)
        chain.run(torch.tensor([1.0, 0.75, 0.5, 0.0], dtype=torch.float64))
        return torch.stack([*chain.states, chain.x_0])

    expected = states(1.0, interval) if same is None else states(3.0, same)
    assert torch.equal(states(3.0, interval), expected)


def test_experts_are_evaluated_on_active_rows_only(gaussians):
    weights = gaussians.weights
    rows = torch.stack(gaussians.rows)

    assert torch.equal(rows, weights > 0)
    assert not ((weights > 0) & (weights < MIN_WEIGHT)).any()
    assert torch.allclose(weights.sum(2), torch.ones(20, 8192, dtype=torch.float64))
    assert not ((weights[:-1] == 0) & (weights[1:] > 0)).any()  # dropped for good
    assert 1 < rows.sum(2).double().mean() < 3


def test_the_last_step_is_an_active_experts_estimate(gaussians):
    x_t = gaussians.states[-1]
    t = torch.full((8192,), gaussians.times[-1], dtype=torch.float64)

    estimates = torch.stack([x_t - expand_rows(t, x_t) * expert(x_t, t) for expert in PLAIN], dim=1)

    distances = (estimates - gaussians.x_0[:, None]).abs().flatten(2).amax(2)
    assert (distances.masked_fill(gaussians.weights[-1] == 0, torch.inf).min(1).values < 1e-12).all()


def test_one_expert_is_plain_ancestral_sampling():
    times = sampling_times(12, shift=2.0, dtype=torch.float64)

    got = Chain([PLAIN[1:2]], normal(99), torch.ones(64, 1), normal, half).run(times)

    assert torch.allclose(got.x_0, Ancestral().solve(PLAIN[1], normal(99), times, normal), atol=1e-12)
    assert got.weights.shape == (12, 64, 1)


def test_initial_weights_may_differ_from_row_to_row():
    clusters = torch.arange(64) % 4
    initial = torch.nn.functional.one_hot(clusters, 4).double()

    got = Chain([PLAIN], normal(99), initial, normal, half).run(sampling_times(20, dtype=torch.float64))

    assert torch.equal(got.weights, initial.expand(20, 64, 4))
    assert torch.equal(nearest(got.x_0), clusters)


@pytest.mark.parametrize("number", [0.0, 0.5, 1 - 2**-24])
def test_an_expert_without_weight_is_never_drawn(number):
    def trap(x_t, t):
        raise AssertionError("evaluated")

    initial = torch.tensor([0.0, 0.3, 0.7, 0.0]).expand(64, 4)
    experts = [trap, PLAIN[1], PLAIN[3], trap]

    chain = Chain([experts], normal(99), initial, normal, lambda _: torch.full((64,), number))

    found = chain.run(sampling_times(5, dtype=torch.float64)).x_0
    assert set(nearest(found).tolist()) <= {1, 3} and found.isfinite().all()


def test_experts_that_disagree_over_many_pixels_stay_finite():
    # A log-likelihood ratio of about 10⁵, far beyond what exp takes in any float.
    experts = [lambda x_t, t, c=c: (x_t - c) / t[0] for c in (-3.0, 0.0, 3.0)]
    generator = torch.Generator().manual_seed(0)

    def noise(_=0):
        return torch.randn(16, 3, 64, 64, generator=generator)

    chain = Chain([experts], noise(), torch.full((16, 3), 1 / 3), noise, lambda _: torch.rand(16, generator=generator))
    chain.run(sampling_times(8))

    assert chain.x_0.dtype == torch.float32 and chain.weights.isfinite().all()
    ends = chain.x_0.mean((1, 2, 3)).round()
    assert torch.allclose(chain.x_0, expand_rows(ends, chain.x_0).expand_as(chain.x_0), atol=1e-4)
    assert set(ends.tolist()) == {-3.0, 0.0, 3.0}


def test_float32_states_lose_no_weight():
    # Two experts that hardly differ over 2⁸ · 2⁸ latents: their likelihoods' ratio is a difference of large sums.
    generator = torch.Generator().manual_seed(0)
    x_1, noise, aim, step = (torch.randn(8, 4, 256, 256, generator=generator) for _ in range(4))
    aims = [aim, aim + 4e-3 * step]

    def run_in(dtype):
        experts = [lambda x_t, t, a=a: (x_t - a.to(x_t)) / t[0] for a in aims]
        initial = torch.full((8, 2), 0.5)
        uniform = torch.full((8,), 0.5)
        chain = Chain([experts], x_1.to(dtype), initial, lambda _: noise.to(dtype), lambda _: uniform)
        return chain.run(torch.tensor([1.0, 0.5, 0.0])).weights[1]

    single = run_in(torch.float32)
    double = run_in(torch.float64)
    assert ((double > 0.2) & (double < 0.8)).any()
    assert torch.allclose(single, double, atol=2e-4)
