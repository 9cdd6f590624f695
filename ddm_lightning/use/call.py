"""Between ``DecentralizedEnsemble.__call__``, whose arguments are those of diffusers, and ``sampler.sample``.

Arguments are checked and converted on the way in, samples on the way out.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from ddm_lightning.core import checks
from ddm_lightning.core.devices import DTYPES
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.rgb import rgb


@dataclass
class _Options:
    output_type: str = checks.choice("pil", "np", "pt", "latent")
    strength: float = 1.0
    batch_size: int = checks.option(1, low=1)
    seed: list[checks.Count] = field(default_factory=list)


class Output(NamedTuple):
    """Result of a call: a tuple and an object with ``.images``, as diffusers returns one or the other."""

    images: list[Image.Image] | Float[np.ndarray, "n h w 3"] | Float[Tensor, "n c h w"]
    """As ``output_type`` says."""


def arguments_of(function: Callable[..., Any]) -> list[str]:
    """Names of the arguments of a ``function`` whose last one, left out here, takes all others."""
    return [*inspect.signature(function).parameters][:-1]


def set_once(settings: dict[str, Any], name: str, other: str, value: Any) -> None:
    """Set ``name`` to what was given under its ``other`` name.

    Raises:
        UserError: both are given.
    """
    if value is None:
        return
    if settings.get(name) is not None:
        raise UserError(f"{name} and {other}: give one of them")

    settings[name] = value


def usable_device(device: torch.device | str) -> torch.device:
    """Check that torch can use a device.

    Raises:
        UserError: it cannot, or there is no device of this name.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise UserError(
            f"device {device!s}: torch cannot use it ({first_line(error)}); give cpu, or check CUDA_VISIBLE_DEVICES"
        ) from None


def device_and_dtype(*places: Any, device: Any = None, dtype: Any = None) -> tuple[torch.device | None, Any]:
    """Tell the device and the dtype among the arguments of ``to``, which may stand in any order; None if not given.

    Raises:
        UserError: torch cannot use the device, or the networks cannot compute in the dtype.
    """
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype, dtype)

    found = None
    for place in (*places, device):
        if isinstance(place, torch.dtype):
            dtype = place
        elif place is not None:
            found = usable_device(place)

    if dtype not in (None, *DTYPES.values()):
        raise UserError(f"dtype {dtype}: must be one of {', '.join(map(str, DTYPES.values()))}")

    return found, dtype


def checked(**given: Any) -> dict[str, Any]:
    """Check arguments of ``_Options``; those that are None are left out.

    Raises:
        UserError: one is of another type or out of range.
    """
    found = {name: value for name, value in given.items() if value is not None}
    checks.check(found, _Options, "", "sample", references=False)
    return found


def seed_of(seed: Any, generator: Any) -> Any:
    """Seed of the noise, or one per image: ``seed``, or drawn from a generator or each of several, or from torch's own.

    Raises:
        UserError: both are given, or what is given is no generator.
    """
    if seed is not None:
        if generator is not None:
            raise UserError("seed and generator: give one of them")

        return seed

    if isinstance(generator, (list, tuple)):
        return list(map(_drawn, generator))

    return _drawn(torch.default_generator if generator is None else generator)


def _drawn(generator: Any) -> int:
    """Draw a seed, on the generator's own device."""
    if not isinstance(generator, torch.Generator):
        raise UserError(f"generator = {generator!r:.60}: give a torch.Generator or one per image, or numbers as seed")

    return int(torch.randint(2**63 - 1, (), generator=generator, device=generator.device))


def pixels_of(image: Any, height: int, width: int) -> UInt8[np.ndarray, "n {height} {width} 3"]:
    """Turn images as ``img2img`` pipelines of diffusers take them into pixels; other sizes are stretched (Lanczos).

    Args:
        image: one or several; of Pillow, arrays [h w 3] or [n h w 3], or tensors [3 h w] or [n 3 h w], of uint8 or of
            numbers from 0 to 1.
        height, width: of the result.

    Raises:
        UserError: another type, shape or range.
    """
    images = [image]
    if isinstance(image, (list, tuple)) or getattr(image, "ndim", 3) == 4:
        images = [*image]

    found = []
    for one in images:
        pixels = Image.fromarray(_rgb_of(one))
        if pixels.size != (width, height):
            pixels = pixels.resize((width, height), Image.Resampling.LANCZOS)

        found.append(np.asarray(pixels))

    if not found:
        raise UserError("image: is an empty list; give one or more")

    return np.stack(found)


def _rgb_of(image: Any) -> UInt8[np.ndarray, "h w 3"]:
    if isinstance(image, Image.Image) and min(image.size):
        return rgb(image.copy())
    if isinstance(image, Tensor) and image.ndim == 3:
        image = image.detach().cpu().movedim(0, -1)
        image = (image.float() if image.is_floating_point() else image).numpy()

    if isinstance(image, np.ndarray) and image.ndim == 3 and image.shape[2] == 3 and image.size:
        if image.dtype == np.uint8:
            return np.ascontiguousarray(image)
        if image.dtype.kind == "f" and image.min() >= 0 and image.max() <= 1:
            return (image * 255).round().astype(np.uint8)

    raise UserError("image: give images of Pillow, arrays [h w 3] or tensors [3 h w], of uint8 or numbers from 0 to 1")


def noise_of(latents: Any) -> Tensor | None:
    """Noise to start from, float32, on the CPU; its shape is checked by ``sampler.sample``.

    Raises:
        UserError: it is neither a tensor nor an array.
    """
    if latents is None:
        return None
    is_real = isinstance(latents, np.ndarray) and latents.dtype.kind == "f"
    if not is_real and not (isinstance(latents, Tensor) and latents.is_floating_point()):
        raise UserError(f"latents = {latents!r:.60}: give a tensor [images c h w] of noise")

    return torch.as_tensor(latents, dtype=torch.float32, device="cpu")


def step_callback(callback: Any, names: Any, owner: Any) -> Callable[[int, float, Tensor], Tensor] | None:
    """A callback of diffusers as one of ``sampler.sample``; None if None is given.

    Args:
        callback: called with ``owner``, step, t and ``{"latents": x}``; may return a mapping with other latents.
        names: tensors that it asks for.
        owner: what was called.

    Raises:
        UserError: it cannot be called or asks for other tensors; later, if it returns anything else.
    """
    if callback is None:
        return None
    if not callable(callback) or {*(names or ())} - {"latents"}:
        raise UserError("callback_on_step_end: give a function; its only tensor inputs are ['latents']")

    def on_step_end(step: int, t: float, x: Tensor) -> Tensor:
        changed = callback(owner, step, t, {"latents": x})
        latents: Any = x
        if changed is not None:
            latents = changed.get("latents", x) if isinstance(changed, Mapping) else None
        if not isinstance(latents, Tensor) or latents.shape != x.shape:
            raise UserError(f"callback_on_step_end: return nothing, or {{'latents': a tensor of shape {[*x.shape]}}}")
        if latents is not x and not latents.isfinite().all():
            raise UserError("callback_on_step_end: returned latents that are not finite; return finite ones")

        return latents.to(x)

    return on_step_end


def converted(x_0: Float[Tensor, "n c h w"], decode: Callable[[Tensor], Any], output_type: str) -> Any:
    """Turn samples into images of Pillow, or numbers from 0 to 1, [n h w 3] or [n 3 h w]; ``latent`` leaves them."""
    if output_type == "latent":
        return x_0

    images = decode(x_0)
    if output_type == "pil":
        return [Image.fromarray(image) for image in images]

    numbers = images.astype(np.float32) / 255
    if output_type == "np":
        return numbers

    return torch.from_numpy(numbers).permute(0, 3, 1, 2)
