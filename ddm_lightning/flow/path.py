"""Paths from data (t = 0) to noise (t = 1), and the velocity that a network's prediction implies (DDM, 2501.05450).

Sampling runs on the linear path. Here and nowhere else, a prediction of any kind on any path becomes the velocity of
the linear path.

The loss of a velocity network:

    >>> def network(x_t, t):
    ...     return torch.zeros_like(x_t)
    >>> x_0 = torch.randn(16, 4, 8, 8)
    >>> noise = torch.randn_like(x_0)
    >>> t = torch.rand(16)
    >>> predicted = network(interpolate(x_0, noise, t), t)
    >>> loss = (predicted - (noise - x_0)).square().mean()
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from ddm_lightning.flow.spec import PATH_NAMES, PREDICTIONS

MAX_DATA = 20.0
"""Largest absolute value of the x_0 that a noise prediction implies (as in Heterogeneous DDM, 2603.06741)."""
MIN_DATA_SCALE = 1e-2
"""Smallest 1 - t by which a noise prediction is divided (as in Heterogeneous DDM, 2603.06741)."""
MIN_LOSS_SCALE = 0.05
"""Smallest divisor of a training error."""
MIN_NOISE_SCALE = 1e-3
"""Smallest t by which a data prediction is divided; below the last step of any usual sampler."""

Samples: TypeAlias = Float[Tensor, "b *shape"]
"""Data, noise or velocities, one per row."""
Times: TypeAlias = Float[Tensor, " b"]
"""A time for each row."""
VelocityField: TypeAlias = Callable[[Samples, Times], Samples]
"""``velocity(x_t, t)``: the expected ``noise - x_0`` given ``x_t``, for each row."""


def expand_rows(values: Shaped[Tensor, " b"], x: Shaped[Tensor, "b *shape"]) -> Shaped[Tensor, "b *ones"]:
    """One value per row, with axes of length 1 appended, to broadcast against ``x``."""
    return values.reshape(-1, *[1] * (x.ndim - 1))


class Path:
    """The linear path, and base of the others: ``x_tau = alpha(tau)·x_0 + sigma(tau)·noise``.

    tau = 0 is data and tau = 1 is noise. Every path is the linear one in other units: with the same signal-to-noise
    ratio at ``t = sigma/(alpha + sigma)``, ``x_tau = (alpha + sigma)·x_t`` (HDDM, 2603.06741; SiT, 2401.08740).
    """

    def scales(self, tau: Times) -> tuple[Times, Times, Times, Times]:
        """``alpha``, ``sigma`` and their derivatives; the path's velocity is ``alpha'·x_0 + sigma'·noise``."""
        return 1 - tau, tau, -torch.ones_like(tau), torch.ones_like(tau)

    def tau(self, t: Times) -> Times:
        """Time of the linear path's signal-to-noise ratio ``((1-t)/t)²``, or the nearest that the path has."""
        return t

    def from_linear(self, x_t: Samples, t: Times) -> tuple[Samples, Times]:
        """``x_tau`` and ``tau`` with the signal-to-noise ratio of ``(x_t, t)``, or the nearest that the path has."""
        tau = self.tau(t)
        alpha, sigma, *_ = self.scales(tau)
        return x_t * expand_rows(alpha + sigma, x_t), tau

    def to_linear(self, x_tau: Samples, tau: Times) -> tuple[Samples, Times]:
        """Inverse of ``from_linear``."""
        alpha, sigma, *_ = self.scales(tau)
        return x_tau / expand_rows(alpha + sigma, x_tau), sigma / (alpha + sigma)

    def velocity_scale(self, tau: Times) -> Times:
        """Error in the linear path's velocity caused by an error of 1 in this path's velocity, at a given ``x_tau``."""
        alpha, sigma, d_alpha, d_sigma = self.scales(tau)
        return (alpha + sigma) / (alpha * d_sigma - sigma * d_alpha)


class Cosine(Path):
    """``alpha = cos(π·tau/2)``, ``sigma = sin(π·tau/2)`` (Salimans and Ho, 2202.00512)."""

    def scales(self, tau: Times) -> tuple[Times, Times, Times, Times]:
        angle = math.pi / 2 * tau
        return angle.cos(), angle.sin(), -math.pi / 2 * angle.sin(), math.pi / 2 * angle.cos()

    def tau(self, t: Times) -> Times:
        """Solve ``tan(π·tau/2) = t/(1-t)``."""
        return (2 / math.pi * torch.atan2(t, 1 - t)).clamp(max=1)


class VariancePreserving(Path):
    """DDPM's path (2006.11239) in continuous time, with alpha² + sigma² = 1 (Song et al., 2011.13456, appendix C).

    ``-log alpha = (BETA_MAX - BETA_MIN)·tau²/4 + BETA_MIN·tau/2``. At tau = 1 alpha is 0.0066, so this path ends at
    t = 0.9935 of the linear one; beyond, the network is evaluated at tau = 1.
    """

    BETA_MIN = 0.1
    BETA_MAX = 20.0

    def scales(self, tau: Times) -> tuple[Times, Times, Times, Times]:
        """``alpha``, ``sigma`` and their derivatives; that of ``sigma`` is infinite at 0."""
        decay = (self.BETA_MAX - self.BETA_MIN) / 4 * tau.square() + self.BETA_MIN / 2 * tau
        half_beta = (self.BETA_MIN + (self.BETA_MAX - self.BETA_MIN) * tau) / 2
        alpha = (-decay).exp()
        sigma = (-torch.expm1(-2 * decay)).sqrt()
        return alpha, sigma, -half_beta * alpha, half_beta * alpha.square() / sigma

    def tau(self, t: Times) -> Times:
        """Solve the quadratic equation of ``-log alpha``, without cancellation near 0."""
        span = self.BETA_MAX - self.BETA_MIN
        decay = torch.log1p((t / (1 - t)).square()) / 2
        decay = decay.clamp(max=span / 4 + self.BETA_MIN / 2)
        return 4 * decay / (self.BETA_MIN + (self.BETA_MIN**2 + 4 * span * decay).sqrt())


PATHS: dict[str, Path] = dict(zip(PATH_NAMES, (Path(), Cosine(), VariancePreserving()), strict=True))


def times_on_path(t: Sequence[float], path: str) -> tuple[float, ...]:
    """Times of ``path`` with the signal-to-noise ratios of the linear path at ``t``."""
    times = torch.tensor(t, dtype=torch.float64)
    own = PATHS[path].tau(times)
    return tuple(torch.where(times % 1 == 0, times, own).tolist())  # ``own`` may round 0 and 1


def interpolate(x_0: Samples, noise: Samples, t: Times, path: str = "linear") -> Samples:
    """``x_t = alpha·x_0 + sigma·noise``, in the widest dtype of the three; ``(1-t)·x_0 + t·noise`` by default."""
    alpha, sigma, *_ = PATHS[path].scales(t)
    return expand_rows(alpha, x_0) * x_0 + expand_rows(sigma, x_0) * noise


def x_0_from_velocity(x_t: Samples, velocity: Samples, t: Times) -> Samples:
    """The data end of the line through ``x_t``: ``x_t - t·velocity``."""
    return x_t - expand_rows(t, x_t) * velocity


def time_rows(t: float, x_t: Samples) -> Times:
    """``t`` repeated for each row of ``x_t``, in float64 if ``x_t`` is float64, else in float32.

    Never narrower: bfloat16 has 3 digits and would change t.
    """
    return torch.full((len(x_t),), t, dtype=torch.promote_types(x_t.dtype, torch.float32), device=x_t.device)


def to_velocity(prediction: Samples, x_t: Samples, t: Times, kind: str, path: str = "linear") -> Samples:
    """The linear path's velocity ``noise - x_0`` implied by a ``prediction`` of ``kind`` at ``(x_t, t)`` of ``path``.

    In units of the linear path, from ``epsilon``: ``epsilon - (x_t - t·epsilon)/(1-t)``; from ``x_0``:
    ``(x_t - x_0)/t``. Exact for t in [``MIN_NOISE_SCALE``, 1 - ``MIN_DATA_SCALE``]. Outside, the denominators are
    clamped, which bounds the amplification of a network's error; at t = 1 an exact epsilon then implies data with mean
    0. The x_0 that an epsilon implies is clamped to ±``MAX_DATA``.

    Raises:
        ValueError: ``kind`` is none of ``PREDICTIONS``.
    """
    if kind == "velocity" and path == "linear":
        return prediction

    own = PATHS[path]
    tau = t
    x_t, t = own.to_linear(x_t, tau)
    time = expand_rows(t, x_t)
    if kind == "velocity":
        _, _, d_alpha, d_sigma = own.scales(tau)
        # The derivative of ``x_tau = (alpha + sigma)·x_t``, solved for the velocity of x_t.
        along_x_t = prediction - expand_rows(d_alpha + d_sigma, x_t) * x_t
        return along_x_t * expand_rows(own.velocity_scale(tau), x_t)

    if kind == "epsilon":
        x_0 = (x_t - time * prediction) / (1 - time).clamp(min=MIN_DATA_SCALE)
        return prediction - x_0.clamp(-MAX_DATA, MAX_DATA)

    if kind == "x_0":
        return (x_t - prediction) / time.clamp(min=MIN_NOISE_SCALE)

    raise ValueError(f"prediction {kind!r} is none of {', '.join(PREDICTIONS)}")


def velocity_of(
    network: Callable[..., Samples], x_t: Samples, t: Times, condition: Any, kind: str, path: str = "linear"
) -> Samples:
    """Evaluate a ``network`` that predicts ``kind`` on ``path``; return the linear path's velocity at ``(x_t, t)``.

    Raises:
        ValueError: ``kind`` is none of ``PREDICTIONS``.
    """
    tau = t
    if path != "linear":
        x_t, tau = PATHS[path].from_linear(x_t, t)

    return to_velocity(network(x_t, tau, condition), x_t, tau, kind, path)


def training_target(x_0: Samples, noise: Samples, t: Times, kind: str, path: str = "linear") -> Samples:
    """The regression target of a network that predicts ``kind`` on ``path``; for ``velocity`` it is ``dx_t/dt``.

    Raises:
        ValueError: ``kind`` is none of ``PREDICTIONS``.
    """
    if kind == "velocity":
        _, _, d_alpha, d_sigma = PATHS[path].scales(t)
        return expand_rows(d_alpha, x_0) * x_0 + expand_rows(d_sigma, x_0) * noise

    if kind == "epsilon":
        return noise
    if kind == "x_0":
        return x_0

    raise ValueError(f"prediction {kind!r} is none of {', '.join(PREDICTIONS)}")


def velocity_loss_weights(t: Times, kind: str, path: str = "linear") -> Times:
    """Loss weights that turn a squared error of ``kind`` into that of the implied velocity of the linear path.

    An error in x_0 is divided by t in the velocity, an error in the noise by 1 - t. Here t is the linear path's time of
    equal signal-to-noise ratio. Divisors are at least ``MIN_LOSS_SCALE``, as in JiT (Li and He, 2511.13720), which
    trains x_0 predictions with this loss.
    """
    scale = PATHS[path].velocity_scale(t)
    _, t = PATHS[path].to_linear(t, t)  # only the time counts
    divisor = {"velocity": 1 / scale, "epsilon": 1 - t, "x_0": t}[kind]
    return divisor.clamp(min=MIN_LOSS_SCALE) ** -2


def guided(conditional: Samples, unconditional: Samples, scale: float | Times) -> Samples:
    """Classifier-free guidance (Ho and Salimans, 2207.12598): ``unconditional + scale·(conditional - unconditional)``.

    ``scale``, one number or one per row: 0 returns exactly ``unconditional`` and 1 exactly ``conditional``; the paper's
    w is ``scale - 1``. Velocity, noise and x_0 at one ``(x_t, t)`` are affine in each other, so guiding any of them
    gives the same result.
    """
    if isinstance(scale, Tensor):
        scale = expand_rows(scale, conditional).to(conditional)

    return torch.lerp(unconditional, conditional, scale)
