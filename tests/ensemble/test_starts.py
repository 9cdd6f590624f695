"""Negative conditions, images to start from, callbacks and seeds of samples, against closed forms and plain loops."""

from __future__ import annotations

import pytest
import torch
from finite_set import FiniteSetOracle
from toy_ensemble import SHAPE as TOY_SHAPE
from toy_ensemble import WAYS, ByBrightness, Linear, draw, sample, two
from two_classes import SHAPE, SIZES, K, exact, mean_velocity, points_of_two_classes

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.ensemble.routing import Batch, Trace
from ddm_lightning.ensemble.strategies.bayes import Bayes
from ddm_lightning.ensemble.strategies.routed import Full
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import interpolate
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.flow.solvers.built_in import Ancestral
from ddm_lightning.flow.timesteps import sampling_times

NUM = 8
CLASSES = torch.arange(NUM) % 2


@pytest.fixture
def data():
    return points_of_two_classes()


def noise_of(seed, shape, num=NUM, *key):
    return torch.stack([torch.randn(shape, generator=keyed_generator(seed, *(key or ("x_1",)), i)) for i in range(num)])


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("guidance", ["mixture", "expert"])
def test_a_negative_condition_is_the_closed_form(data, guidance, scale):
    """u(n) + w·(u(c) - u(n)) of the points of class n and c: of all clusters, or within each under c's weights."""
    points, clusters, classes = data
    negative = Condition(1 - CLASSES, torch.arange(NUM) != 5)
    settings = SampleConfig(guidance_scale=scale, guidance=guidance)
    batch = Batch(exact(data), Condition.of(CLASSES), [(i,) for i in range(NUM)], SHAPE, 0, settings, negative=negative)
    generator = torch.Generator().manual_seed(2)
    x_t = torch.randn(NUM, *SHAPE, generator=generator, dtype=torch.float64)
    t = torch.linspace(0.2, 1, NUM, dtype=torch.float64)

    got = Full().field(batch)(x_t, t)

    for row in range(NUM):
        one = x_t[row : row + 1]
        time = t[row : row + 1]
        own = (classes == CLASSES[row]).double()
        other = 1 - own if negative.keep[row] else torch.ones_like(own)
        groups = [torch.ones_like(own)]
        if guidance == "expert":
            groups = [(clusters == k).double() for k in range(K)]

        found = []
        evidence = []
        for group in groups:
            of_own, log_density = mean_velocity(points, own * group, one, time)
            of_other, _ = mean_velocity(points, other * group, one, time)
            found.append(of_other + scale * (of_own - of_other))
            evidence.append(log_density)

        share = torch.stack(evidence).softmax(0)[:, :, None, None, None]
        assert (got[row] - (share * torch.stack(found)).sum(0)[0]).abs().max() < 1e-5


@pytest.mark.parametrize("guidance", ["mixture", "expert"])
def test_a_plain_loop_gives_the_same_bits(data, guidance):
    """Euler from a noisy image with a negative condition and a callback, written with ``Ensemble.velocity``."""
    ensemble = exact(data)
    condition = Condition.of(CLASSES)
    negative = Condition.of(1 - CLASSES)
    generator = torch.Generator().manual_seed(3)
    image = torch.randn(NUM, *SHAPE, generator=generator)
    seeds = [5, 5, 6, 7, 8, 9, 10, 11]

    def halve(step, t, x_t):
        return 0.5 * x_t if step == 1 else x_t

    settings = SampleConfig(strategy="full", solver="euler", num_steps=5, guidance_scale=2.0, guidance=guidance)
    got = sample(
        ensemble,
        condition,
        NUM,
        SHAPE,
        settings,
        seed=seeds,
        batch_size=3,
        negative=negative,
        image=image,
        strength=0.7,
        on_step_end=halve,
    )

    times = sampling_times(5).tolist()
    noise = torch.cat([noise_of(seed, SHAPE)[i : i + 1] for i, seed in enumerate(seeds)])
    x_t = interpolate(image, noise, torch.full((NUM,), times[2]))
    for step in range(3):  # int(5 * 0.7)
        t, s = times[step + 2 : step + 4]
        rows = torch.full((NUM,), t)
        null_weights = ensemble.probabilities(x_t, rows, negative) if guidance == "mixture" else None
        velocity = ensemble.velocity(
            x_t, rows, condition, null_weights=null_weights, guidance_scale=2 * torch.ones(NUM), negative=negative
        )
        x_t = x_t + (s - t) * velocity
        if step == 1:
            x_t = 0.5 * x_t

    assert torch.equal(got, x_t)


def test_a_negative_condition_needs_no_condition(data):
    options = {"strategy": "full", "num_steps": 3, "batch_size": NUM, "guidance_scale": 2.0}
    null = Condition(CLASSES, torch.zeros(NUM, dtype=torch.bool))
    negative = Condition.of(CLASSES)
    got = sample(exact(data), None, NUM, SHAPE, negative=negative, **options)
    assert torch.equal(got, sample(exact(data), null, NUM, SHAPE, negative=negative, **options))
    assert (got - sample(exact(data), null, NUM, SHAPE, **options)).abs().max() > 0.1


@pytest.mark.parametrize(("strategy", "solver"), WAYS)
def test_a_callback_that_watches_changes_nothing_and_one_that_replaces_decides(strategy, solver):
    way = {"strategy": strategy, "solver": solver, "num_steps": 4}
    seen = []

    def watch(step, t, x_t):
        seen.append((step, t, x_t))
        return x_t

    got = draw(two(), 3, **way, on_step_end=watch)
    assert torch.equal(got, draw(two(), 3, **way)) and torch.equal(got, seen[-1][2])
    expected = list(enumerate(sampling_times(4, 1.5).tolist()[1:]))
    if solver == "dormand-prince":
        expected = expected[-1:]

    assert [call[:2] for call in seen] == expected
    replaced = draw(two(), 3, **way, on_step_end=lambda _, t, x_t: x_t if t else torch.full_like(x_t, 7.0))
    assert (replaced == 7).all()
    if solver != "dormand-prince":
        early = draw(two(), 3, **way, on_step_end=lambda step, _, x_t: x_t if step else torch.zeros_like(x_t))
        assert not torch.equal(early, got)


def test_a_redrawing_strategy_numbers_its_steps():
    seen = []

    def watch(step, t, x_t):
        seen.append(step)
        return x_t

    draw(two(), 3, strategy="sample-1", strategy_params={"threshold": 0.9}, num_steps=4, on_step_end=watch)
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize(("strategy", "solver"), WAYS)
def test_given_noise_and_an_image_of_full_strength_are_as_without(strategy, solver):
    way = {"strategy": strategy, "solver": solver, "num_steps": 3}
    got = draw(two(), 3, **way)
    noise = noise_of(0, TOY_SHAPE, 3)
    assert torch.equal(draw(two(), 3, **way, x_1=noise), got)
    assert torch.equal(draw(two(), 3, **way, image=torch.ones(3, *TOY_SHAPE)), got)
    assert not torch.equal(draw(two(), 3, **way, x_1=noise.flip(0)), got)


def test_each_sample_has_its_seed():
    one, other = (draw(two(), 4, strategy="bayes", solver="ancestral", seed=seed) for seed in (1, 2))
    mixed = draw(two(), 4, strategy="bayes", solver="ancestral", seed=[1, 2, 2, 1], batch_size=3)
    assert torch.equal(mixed, torch.stack([one[0], other[1], other[2], one[3]]))


class Start(Batch):
    """A batch of ``bayes`` that keeps the state and the weights with which the free chain starts."""

    kept = None

    def mixed(self, t, weights, found):
        if t[0] <= self.start and self.kept is None:
            self.kept = weights

        return found

    def record(self, x_t, t, *_):
        if t[0] <= self.start and not hasattr(self, "x_start"):
            self.x_start = x_t


@pytest.mark.parametrize(("guidance", "num_skipped"), [("mixture", 14), ("expert", 8)])
def test_without_a_router_the_filter_ends_at_the_noisy_images_posterior(data, guidance, num_skipped):
    """Along a known chain it comes to p(k | x_t, class) of the points, whatever the guidance, and to p(k | x_t)."""
    points, clusters, classes = data
    num = 2000
    generator = torch.Generator().manual_seed(4)
    chosen = torch.randint(len(points), (num,), generator=generator)
    drawn = torch.randn(20, num, *SHAPE, generator=generator, dtype=torch.float64)
    counts = [[int(((clusters == k) & (classes == c)).sum()) for c in range(2)] for k in range(K)]
    ensemble = Ensemble(exact(data).experts, None, [n / 80 for n in SIZES], class_counts=counts)
    grid = sampling_times(20, dtype=torch.float64)
    batch = Start(
        ensemble,
        Condition.of(classes[chosen]),
        [(i,) for i in range(num)],
        SHAPE,
        0,
        SampleConfig(guidance_scale=3.0, guidance=guidance),
        image=points[chosen],
        skipped_times=grid[: num_skipped + 1].tolist(),
        trace=Trace(),
    )
    batch.image = points[chosen]  # in float64
    batch.noise_1 = drawn[0]
    batch.noise = lambda step: drawn[step + 1]

    Bayes().generate(batch, grid[num_skipped : num_skipped + 2], Ancestral())

    x_t = batch.x_start
    t = grid[num_skipped].expand(num)
    kept = [classes == 0, classes == 1, classes >= 0]
    oracles = [FiniteSetOracle(points[own], clusters[own], K) for own in kept]
    posteriors = torch.stack([oracle.cluster_posterior(x_t, t) for oracle in oracles])
    expected = [posteriors[classes[chosen], torch.arange(num)], posteriors[2]]
    for weights, posterior in zip(batch.kept.split(num), expected, strict=False):
        error = (weights - posterior).abs().sum(1).mean() / 2
        print(f"bayes at a noisy image, guidance of the {guidance}, t = {t[0]:.2f}: TV to the posterior {error:.4f}")
        assert error < 0.01 and (posterior - ensemble.priors).abs().sum(1).mean() / 2 > 0.2

    # The known chain ends where noise added to the image does: mean (1-t)·image and std t.
    rest = (x_t - (1 - t[0]) * batch.image) / t[0]
    assert rest.mean().abs() < 0.05 and rest.std().item() == pytest.approx(1, abs=0.03)


class Timed(ByBrightness):
    """Keeps the times at which it is asked."""

    def __init__(self):
        super().__init__()
        self.times = []

    def forward(self, x_t, t, condition):
        self.times.append(t[0].item())
        return super().forward(x_t, t, condition)


@pytest.mark.parametrize("strategy", ["sample-1", "oracle", "bayes"])
def test_experts_chosen_once_are_chosen_at_the_noisy_image(strategy):
    """Bright images stay with the bright expert, whose images are all 1; the router is 95 % sure."""
    image = torch.where(torch.arange(40) < 20, 0.9, -0.9).reshape(-1, 1, 1, 1).expand(-1, *TOY_SHAPE)
    solver = "ancestral" if strategy == "bayes" else "euler"
    for router_prior in (True, False) if strategy == "bayes" else (None,):
        params = {} if router_prior is None else {"router_prior": router_prior}
        options = {"strategy": strategy, "solver": solver, "strategy_params": params, "num_steps": 10}
        ensemble = two()
        ensemble.router = Timed()
        steps = []

        def watch(step, t, x_t, steps=steps):
            steps.append(step)
            return x_t

        got = draw(ensemble, 40, image=image, strength=0.5, on_step_end=watch, **options)
        assert steps == [0, 1, 2, 3, 4]
        expected = [] if router_prior is False else [pytest.approx(0.6)]
        assert ensemble.router.times == expected
        kept = (got.mean((1, 2, 3)) > 0) == (image.mean((1, 2, 3)) > 0)
        assert kept[:20].sum() >= 17 and kept[20:].sum() >= 17


def test_strength_keeps_at_least_one_step():
    image = torch.ones(2, *TOY_SHAPE)
    seen = []

    def watch(step, t, x_t):
        seen.append((step, t))
        return x_t

    got = draw(two(), 2, num_steps=4, image=image, strength=0.01, on_step_end=watch)
    assert seen == [(0, 0.0)] and (got - 1).abs().max() < 0.6


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"strength": 0.0}, r"strength = 0\.0: give a number above 0 and at most 1"),
        ({"strength": 1.5}, r"strength = 1\.5"),
        ({"seed": [1, 2]}, "2 seeds for 3 images"),
        ({"x_1": torch.ones(3, 2, 3, 4)}, r"latents has shape \[3, 2, 3, 4\]; give \[3, 2, 3, 3\]"),
        ({"x_1": torch.full((3, *TOY_SHAPE), torch.nan)}, "latents has numbers that are not finite"),
    ],
)
def test_refusals(options, problem):
    with pytest.raises(UserError, match=problem):
        draw(two(), 3, **options)


@pytest.mark.parametrize("strategy", ["sample-1", "oracle"])
def test_an_image_needs_a_router_or_bayes(strategy):
    ensemble = Ensemble([Linear(1.0, 0.3), Linear(-1.0, 0.2)], None, [0.25, 0.75])
    with pytest.raises(UserError, match=r"no router in this ensemble; .* sample.strategy=bayes"):
        draw(ensemble, 2, strategy=strategy, image=torch.ones(2, *TOY_SHAPE), strength=0.5)
