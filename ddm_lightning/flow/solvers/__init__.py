"""Solvers from noise to data, found by name; ``Solver`` is their interface.

>>> import torch
>>> from ddm_lightning.core.registry import SOLVERS
>>> from ddm_lightning.flow.timesteps import sampling_times
>>> towards_zero = lambda x_t, t: x_t / t[:, None]  # the velocity of a data set with the single point 0
>>> x_0 = SOLVERS.build("heun", {}).solve(towards_zero, torch.randn(16, 2), sampling_times(num_steps=40))
>>> bool(x_0.abs().max() < 1e-5)
True
"""

from __future__ import annotations

from collections.abc import Callable
from typing import ClassVar, TypeAlias

from jaxtyping import Float
from torch import Tensor

from ddm_lightning.flow.path import Samples, VelocityField
from ddm_lightning.flow.timesteps import intervals

TimeGrid: TypeAlias = Float[Tensor, " num_times"]
"""Decreasing times, as from ``timesteps.sampling_times``."""
Noise: TypeAlias = Callable[[int], Samples]
"""``noise(i)``: the standard normal noise of step i."""
OnStep: TypeAlias = Callable[[int, float, Samples], Samples]
"""``on_step(i, s, x_s)``: called after step i has reached time s; returns the x_s to go on with."""
Advance: TypeAlias = Callable[[int, float, float, Samples], Samples]
"""``advance(i, t, s, x_t)``: x_s after step i from t to s; called for each step in turn."""


def no_noise(step: int) -> Samples:
    """Noise source of ODE solvers, which must not ask for noise: raises ``ValueError``."""
    raise ValueError(f"a stochastic solver needs noise for step {step}")


def unchanged(_step: int, _s: float, x_s: Samples) -> Samples:
    """Return ``x_s``: what ``on_step`` is by default."""
    return x_s


class Solver:
    """Base class: integrates dx/dt = velocity(x, t) step by step.

    Override ``step`` for a method with fixed steps, ``stepper`` if a step needs noise or remembers earlier ones, and
    ``solve`` for a method that chooses its own steps. Arguments of the constructor are the user's
    ``sample.solver_params``; raise ``ValueError`` to refuse them. A row's result must not depend on other rows.
    Do not evaluate the velocity at t = 0: networks are not trained there, and for a finite data set it does not exist.
    Check a plug-in with ``ddm_lightning.testing.check_solver``.
    """

    is_stochastic: ClassVar[bool] = False
    """Whether its steps add noise: a Markov chain instead of the ODE."""

    def step(self, velocity: VelocityField, x_t: Samples, t: float, s: float) -> Samples:
        """Step from time ``t`` to ``s`` < ``t``."""
        raise NotImplementedError

    def stepper(self, velocity: VelocityField, noise: Noise) -> Advance:
        """Begin an integration: the function that takes its steps, and remembers what later steps need.

        Args:
            velocity: the field.
            noise: as in ``solve``.
        """
        return lambda _, t, s, x_t: self.step(velocity, x_t, t, s)

    def solve(
        self,
        velocity: VelocityField,
        x_1: Samples,
        times: TimeGrid,
        noise: Noise = no_noise,
        on_step: OnStep = unchanged,
    ) -> Samples:
        """Go from ``times[0]`` to ``times[-1]``.

        Args:
            velocity: the field; takes a time for each row.
            x_1: the value at ``times[0]``; standard normal if that is 1.
            times: at least two, strictly decreasing within [0, 1], as from ``timesteps.sampling_times``.
            noise: only stochastic solvers call it; a step to 0 needs none.
            on_step: called after each step, numbered from 0, the last one included. A solver that chooses its own steps
                calls it once, at the end, with the number of the last interval. The next step starts from its result;
                a solver with memory keeps what it remembers of earlier steps.

        Returns:
            The value at ``times[-1]``: x_0.
        """
        advance = self.stepper(velocity, noise)
        x_t = x_1
        for step, (t, s) in enumerate(intervals(times)):
            x_t = on_step(step, s, advance(step, t, s, x_t))

        return x_t
