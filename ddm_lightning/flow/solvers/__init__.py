"""Ways from noise to data: ODE solvers by name, one small file each, and the ancestral chain beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from jaxtyping import Float
from torch import Tensor

from ddm_lightning.flow.path import VelocityField
from ddm_lightning.flow.solvers.ancestral import integrate_ancestral, reverse_kernel
from ddm_lightning.flow.solvers.euler import euler
from ddm_lightning.flow.solvers.heun import heun
from ddm_lightning.flow.timesteps import intervals

__all__ = ["SOLVERS", "Step", "euler", "heun", "integrate", "integrate_ancestral", "reverse_kernel"]

Step: TypeAlias = Callable[[VelocityField, Float[Tensor, "b *shape"], float, float], Float[Tensor, "b *shape"]]
"""``step(velocity, x_t, t, s) -> x_s``."""

SOLVERS: dict[str, Step] = {"euler": euler, "heun": heun}
"""The solvers of dx/dt = velocity(x, t); ``integrate_ancestral`` is apart because it needs noise."""


def integrate(
    velocity: VelocityField,
    x_1: Float[Tensor, "b *shape"],
    times: Float[Tensor, " num_times"],
    solver: str = "euler",
) -> Float[Tensor, "b *shape"]:
    """Solve dx/dt = velocity(x, t) along falling ``times`` (see ``timesteps.sampling_times``).

    Args:
        velocity: the field.
        x_1: the value at ``times[0]``.
        times: at least two, strictly falling within [0, 1].
        solver: a name in ``SOLVERS``.

    Returns:
        The value at ``times[-1]``: x_0.

    Raises:
        ValueError: unknown ``solver`` or bad ``times``.
    """
    if solver not in SOLVERS:
        raise ValueError(f"ODE solver {solver!r} is none of {', '.join(SOLVERS)}")
    x_t = x_1
    for t, s in intervals(times):
        x_t = SOLVERS[solver](velocity, x_t, t, s)
    return x_t
