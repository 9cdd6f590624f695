"""Shares of two clusters on a line, 20 % or 1 % at -2 and the others at 2, from exact experts and an exact router.

On a line a flow keeps the order of its points, so the share is that of the noise below the point that ends at 0: no
random numbers. The exact flow keeps the shares. The tables of docs/routing.md are computed here.
"""

import re
from pathlib import Path

import pytest
import torch
from scipy.integrate import solve_ivp
from scipy.stats import norm
from torch import nn
from toy_ensemble import Linear

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.core.registry import SOLVERS, STRATEGIES
from ddm_lightning.ensemble.routing import Strategy
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.timesteps import sampling_times

ROUTING = (Path(__file__).parents[2] / "docs" / "routing.md").read_text(encoding="utf-8")
DEFAULT = SampleConfig()
STD = 0.3


class Exact(nn.Module):
    """The exact router, or one that answers its priors at t above ``blind_above``."""

    def __init__(self, share: float, blind_above: float = 1.0) -> None:
        super().__init__()
        self.share = share
        self.blind_above = blind_above

    def forward(self, x_t, t, _):
        x = x_t.flatten()
        variance = (1 - t) ** 2 * STD**2 + t**2
        told = 4 * (1 - t) * x / variance * (t <= self.blind_above)
        prior = torch.tensor((1 - self.share) / self.share).log()
        return torch.stack([torch.zeros_like(told), prior + told], 1)


def share(of, solver=DEFAULT.solver, steps=DEFAULT.num_steps, strategy="full", temperature=1.0, blind_above=1.0):
    """Share of the noise that ends below 0."""
    ensemble = Ensemble([Linear(-2.0, STD), Linear(2.0, STD)], Exact(of, blind_above), [of, 1 - of])
    route: Strategy = STRATEGIES.build(strategy, {})

    def velocity(x_t, t):
        weights = route.weights(ensemble.probabilities(x_t, t, None, temperature))
        return ensemble.velocity(x_t, t, None, weights=weights)

    x_1 = torch.linspace(-3.2, -0.2, 12_001)
    x_0 = SOLVERS.build(solver, {}).solve(velocity, x_1.reshape(-1, 1, 1, 1), sampling_times(steps)).flatten()
    last = int((x_0 < 0).sum()) - 1
    assert (x_0[: last + 1] < 0).all(), "the map is monotone"
    part = x_0[last] / (x_0[last] - x_0[last + 1])
    return norm.cdf(float(torch.lerp(x_1[last], x_1[last + 1], part)))


def by_scipy(of, temperature=1.0, blind_above=1.0):
    """The same share of a flow without steps: find the noise that ends between the clusters."""

    def velocity(t, x):
        variance = (1 - t) ** 2 * STD**2 + t**2
        logit = 4 * (1 - t) * x[0] / variance * (t <= blind_above)
        right = norm_share((logit - torch.tensor(of / (1 - of)).log().item()) / temperature)
        gain = (t - (1 - t) * STD**2) / variance
        return [gain * (x[0] - (1 - t) * (4 * right - 2)) - (4 * right - 2)]

    def norm_share(logit):
        return 1 / (1 + torch.tensor(-logit).double().exp().item())

    low = -4.0
    high = 4.0
    for _ in range(16):
        middle = (low + high) / 2
        parts = [(1.0, blind_above), (blind_above, 1e-3)] if blind_above < 1 else [(1.0, 1e-3)]
        x = middle
        for start, end in parts:
            x = solve_ivp(velocity, (start, end), [x], rtol=1e-7, atol=1e-9).y[0, -1]

        low, high = (middle, high) if x < 0 else (low, middle)

    return norm.cdf(low)


def rows_of(columns):
    """Rows of the page's table of numbers with so many columns."""
    lines = [line.strip("| ").split(" | ") for line in ROUTING.splitlines() if re.match(r"\| [\d.]+ \|", line)]
    return [[float(cell) for cell in line] for line in lines if len(line) == columns]


def test_the_table_of_steps_is_that_of_the_documentation():
    rows = rows_of(5)
    assert [steps for steps, *_ in rows] == [5, 10, 20, 30, DEFAULT.num_steps]
    for steps, *common, rare_euler, rare in rows:
        found = [share(of, solver, int(steps)) for of in (0.2, 0.01) for solver in ("euler", DEFAULT.solver)]
        assert common == pytest.approx(found[:2], abs=6e-4)
        assert [rare_euler, rare] == pytest.approx(found[2:], abs=6e-5)


def test_the_table_of_temperatures_is_that_of_the_documentation():
    rows = rows_of(3)
    assert [temperature for temperature, *_ in rows] == [0.25, 0.5, 1, 2]
    for temperature, common, rare in rows:
        found = share(0.2, temperature=temperature)
        assert found == pytest.approx(common, abs=6e-4)
        assert found == pytest.approx(by_scipy(0.2, temperature), abs=2e-3)
        assert share(0.01, temperature=temperature) == pytest.approx(rare, abs=6e-5)


def test_a_router_that_answers_its_priors_at_high_noise_loses_shares_for_good():
    found = {above: share(0.2, blind_above=above) for above in (0.8, 0.7, 0.5)}
    assert ", ".join(f"{value:.3f}" for value in found.values()) in ROUTING, found
    for above, value in found.items():
        assert value == pytest.approx(by_scipy(0.2, blind_above=above), rel=0.06)


@pytest.mark.parametrize("steps", [10, 50])
def test_top_1_loses_shares_at_any_number_of_steps(steps):
    """It keeps what starts where expert 0 is the more probable: beyond 2·sqrt(ln 2) standard deviations."""
    expected = norm.cdf(-2 * torch.tensor(2.0).log().sqrt().item())
    for solver in ("euler", DEFAULT.solver):
        assert share(0.2, solver, steps, "top-1") == pytest.approx(expected, abs=1e-3)

    assert f"{expected:.3f}" in ROUTING
