"""Every solver: its order on closed forms, the bits of fixed steps, its rows, and the velocities that it asks for."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.integrate import solve_ivp

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOLVERS
from ddm_lightning.flow.path import VelocityField
from ddm_lightning.flow.solvers import Solver
from ddm_lightning.flow.solvers.built_in import DormandPrince
from ddm_lightning.flow.timesteps import sampling_times
from ddm_lightning.testing import check_solver

START = torch.tensor([[0.3, -1.2], [2.0, 0.7], [-0.4, 0.1]], dtype=torch.float64)
MEAN = 1.5
STD = 0.4
ODES = ["euler", "heun", "midpoint", "dpm++2m", "dormand-prince"]


def solver(name: str) -> Solver:
    built: Solver = SOLVERS.build(name, {})
    return built


def gaussian_field(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    """The velocity of data N(MEAN, STD²): x_t has mean (1-t)·MEAN and variance (1-t)²STD² + t²."""
    t = t[:, None]
    variance = (1 - t) ** 2 * STD**2 + t**2
    return -MEAN + (t - (1 - t) * STD**2) / variance * (x_t - (1 - t) * MEAN)


def growing_field(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
    return x_t * torch.cos(3 * t)[:, None]


def gaussian_solution(t: float) -> torch.Tensor:
    """The flow of a Gaussian keeps each point's standard score, here ``START``."""
    return (1 - t) * MEAN + np.sqrt((1 - t) ** 2 * STD**2 + t**2) * START


def growing_solution(t: float) -> torch.Tensor:
    """dx/dt = x·cos(3t) is separable."""
    return START * np.exp((np.sin(3 * t) - np.sin(3.0)) / 3)


PROBLEMS = [(gaussian_field, gaussian_solution), (growing_field, growing_solution)]


def test_the_names_are_those_of_the_files() -> None:
    assert SOLVERS.names() == sorted([*ODES, "ancestral"])
    assert all(solver(name).is_stochastic == (name == "ancestral") for name in SOLVERS.names())


def errors_of(solver: Solver, counts: list[int], start: float, end: float, problem: int = 0) -> np.ndarray:
    """Largest error at ``end`` with each number of steps; they are as uneven as a shift makes them."""
    field, solution = PROBLEMS[problem]
    found = []
    for count in counts:
        times = end + (start - end) * sampling_times(count, 1.5, dtype=torch.float64)
        found.append((solver.solve(field, solution(start), times) - solution(end)).abs().max().item())

    return np.array(found)


@pytest.mark.parametrize(("name", "order"), [("euler", 1), ("heun", 2), ("midpoint", 2), ("dpm++2m", 2)])
def test_measured_order_of_convergence(name: str, order: int) -> None:
    """On the second problem, because a Gaussian's variance is quadratic in t, which gives midpoint order 3."""
    counts = [32, 64, 128]
    errors = errors_of(solver(name), counts, 0.9, 0.5, 1)
    assert -np.polyfit(np.log(counts), np.log(errors), 1)[0] == pytest.approx(order, abs=0.1)


@pytest.mark.parametrize(("name", "order"), [("euler", 0.9), ("heun", 1.9), ("midpoint", 1.9), ("dpm++2m", 1.6)])
def test_the_first_and_the_last_step_cost_no_order(name: str, order: float) -> None:
    """From noise to data lambda runs over all numbers: DPM-Solver++ has order 2 up to a logarithm."""
    errors = errors_of(solver(name), [128, 512], 1.0, 0.0)
    assert np.log(errors[0] / errors[1]) / np.log(4) > order


def test_dpm_solver_is_the_papers_where_the_estimate_of_the_data_is_linear_in_lambda() -> None:
    """Order 2 in lambda = log((1-t)/t): x_0(lambda) = a + b·lambda, in one step once two estimates are known."""
    t = torch.tensor([0.7, 0.6, 0.25], dtype=torch.float64)
    log_snr = ((1 - t) / t).log().tolist()

    def field(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return (x_t - 0.3 - 0.5 * ((1 - t) / t).log()[:, None]) / t[:, None]

    start = torch.ones(1, 1, dtype=torch.float64)
    middle = solver("dpm++2m").solve(field, start, t[:2]).item()
    end = solver("dpm++2m").solve(field, start, t).item()

    # The paper's formula, in its own terms: (sigma_i/sigma_i-1)·x - alpha_i·(exp(-h_i) - 1)·D.
    h = log_snr[2] - log_snr[1]
    before = log_snr[1] - log_snr[0]
    x_0_before, x_0 = (0.3 + 0.5 * one for one in log_snr[:2])
    slope = (1 + h / (2 * before)) * x_0 - h / (2 * before) * x_0_before
    assert end == pytest.approx(0.25 / 0.6 * middle - 0.75 * (np.exp(-h) - 1) * slope, abs=1e-12)


def test_dormand_prince_has_order_5() -> None:
    """Steps of a fixed length: each in a solve of its own, with a tolerance that accepts it."""
    errors = []
    counts = [8, 16, 32]
    loose = DormandPrince(rtol=0.0, atol=1e9)
    for count in counts:
        x_t = growing_solution(0.9)
        for pair in torch.linspace(0.9, 0.1, count + 1, dtype=torch.float64).unfold(0, 2, 1):
            x_t = loose.solve(growing_field, x_t, pair)

        errors.append((x_t - growing_solution(0.1)).abs().max().item())

    assert -np.polyfit(np.log(counts), np.log(errors), 1)[0] == pytest.approx(5, abs=0.2)


@pytest.mark.parametrize("problem", [0, 1])
@pytest.mark.parametrize("end", [0.1, 0.0])
def test_the_error_follows_the_tolerance(problem: int, end: float) -> None:
    found = []
    for tolerance in (1e-3, 1e-5, 1e-7):
        found.append(errors_of(DormandPrince(tolerance, tolerance), [10], 1.0, end, problem)[0])
        # The Euler step from t = 1e-3 to 0 adds half a second derivative times 1e-6.
        assert found[-1] < 20 * tolerance + (0 if end else 3e-6)

    assert found[0] > found[1] > found[2]


@pytest.mark.parametrize(("start", "rtol", "atol"), [((2.0, 0.7), 1e-6, 1e-6), ((-1.0, -2.5), 1e-4, 1e-12)])
def test_the_same_number_of_steps_as_scipy(start: tuple[float, float], rtol: float, atol: float) -> None:
    """scipy's RK45 is the same pair, with another controller."""
    point = torch.tensor(start, dtype=torch.float64)
    asked: list[float] = []

    def field(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        asked.append(t.item())
        return gaussian_field(x_t, t)

    def of_numbers(t: float, x: np.ndarray) -> np.ndarray:
        return gaussian_field(torch.tensor(x)[None], torch.tensor([t], dtype=torch.float64))[0].numpy()

    peer = solve_ivp(of_numbers, (1, 1e-3), point.numpy(), rtol=rtol, atol=atol)
    DormandPrince(rtol, atol).solve(field, point[None], sampling_times(10, dtype=torch.float64))
    assert len(asked) == pytest.approx(peer.nfev, rel=0.3)


def test_jumps_and_numbers_that_are_not_finite_come_to_an_end() -> None:
    count = 0

    def field(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        nonlocal count
        count += 1
        return torch.where(x_t > 0, 5.0, -5.0) + torch.tensor([[0.0], [torch.nan]])

    ended = DormandPrince().solve(field, torch.tensor([[0.2], [0.2]]), torch.tensor([0.3, 0.2, 0.0]))
    assert ended[0].abs() < 0.02 and ended[1].isnan() and count < 6 * 300


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_fixed_steps_keep_their_bits(shift: float) -> None:
    """Samples of one seed stay what they were, float32: the formulas as they were first released."""
    generator = torch.Generator().manual_seed(0)
    x_1 = torch.randn(5, 3, generator=generator)
    drawn = torch.randn(12, 5, 3, generator=generator)
    times = sampling_times(12, shift)
    pairs = list(zip(times.tolist()[:-1], times.tolist()[1:], strict=True))

    def field(x_t: torch.Tensor, t: float) -> torch.Tensor:
        return gaussian_field(x_t, torch.full((5,), t))

    euler = heun = chain = x_1
    for step, (t, s) in enumerate(pairs):
        euler = euler + (s - t) * field(euler, t)
        first = field(heun, t)
        x_s = heun + (s - t) * first
        heun = x_s if s == 0 else heun + (s - t) * 0.5 * (first + field(x_s, s))
        x_0 = chain - torch.full((5, 1), t) * field(chain, t)
        a = (1 - t) / (1 - s)
        of_data = (t + a * s) * (t - s) / t**2
        mean = (a * s**2 / t**2) * chain + of_data * x_0
        variance = torch.tensor(s**2 * of_data / (1 - s), dtype=torch.float64)
        chain = mean if s == 0 else mean + variance.sqrt() * drawn[step]

    for name, expected in {"euler": euler, "heun": heun, "ancestral": chain}.items():
        assert torch.equal(solver(name).solve(gaussian_field, x_1, times, lambda i: drawn[i]), expected), name


@pytest.mark.parametrize(
    ("name", "evaluations"), [("euler", 5), ("heun", 9), ("midpoint", 10), ("dpm++2m", 5), ("dormand-prince", 13)]
)
def test_the_field_is_asked_the_stated_number_of_times_and_never_at_the_data(name: str, evaluations: int) -> None:
    asked: list[torch.Tensor] = []

    def field(x_t: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        asked.append(t)
        return torch.zeros_like(x_t)

    ended = solver(name).solve(field, START, sampling_times(5))
    torch.testing.assert_close(ended, START, rtol=0, atol=1e-15)
    assert len(asked) == evaluations
    assert all(t.shape == (3,) and (t > 0).all() for t in asked)


@pytest.mark.parametrize("name", SOLVERS.names())
def test_it_keeps_the_contract(name: str) -> None:
    check_solver(SOLVERS.get(name))


class OfTheBatch(Solver):
    def step(self, velocity: VelocityField, x_t: torch.Tensor, t: float, s: float) -> torch.Tensor:
        return x_t + (s - t) * velocity(x_t, torch.full((len(x_t),), t)) + 0.01 * (t - s) * x_t[:1]


class AtTheData(Solver):
    def step(self, velocity: VelocityField, x_t: torch.Tensor, t: float, s: float) -> torch.Tensor:
        return x_t + (s - t) * velocity(x_t, torch.full((len(x_t),), s))


class Backwards(Solver):
    def step(self, velocity: VelocityField, x_t: torch.Tensor, t: float, s: float) -> torch.Tensor:
        return x_t - (s - t) * velocity(x_t, torch.full((len(x_t),), t))


@pytest.mark.parametrize(
    ("broken", "problem"),
    [
        (OfTheBatch, "depends on the other rows"),
        (AtTheData, "asks for a velocity at t ="),
        (Backwards, "mean and std of the samples are wrong"),
        (type("Silent", (SOLVERS.get("euler"),), {"is_stochastic": True}), "draws noise for 0 steps, not 63"),
        (dict, "no Solver"),
    ],
)
def test_broken_solvers_are_named(broken: type, problem: str) -> None:
    with pytest.raises(AssertionError, match=problem):
        check_solver(broken)


def test_refusals() -> None:
    with pytest.raises(
        UserError, match=r"unknown solver 'rk4'; known: ancestral, dormand-prince, dpm\+\+2m, euler, heun"
    ):
        SOLVERS.build("rk4", {})
    with pytest.raises(UserError, match="'euler' has no parameter 'rtol'"):
        SOLVERS.build("euler", {"rtol": 1e-3})
    with pytest.raises(UserError, match=r"atol = 0\.0 above 0"):
        SOLVERS.build("dormand-prince", {"atol": 0.0})
    with pytest.raises(ValueError, match="a stochastic solver needs noise"):
        solver("ancestral").solve(gaussian_field, START, sampling_times(3))
