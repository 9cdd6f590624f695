"""Between ``DecentralizedEnsemble.__call__``, whose arguments are those of diffusers, and ``sampler.sample``.

Arguments are checked and converted on the way in, samples on the way out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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
from ddm_lightning.flow.solvers import OnStep, unchanged
from ddm_lightning.use.rows import listed

STRENGTH = 0.8
"""Default strength of the noise that is added to an image to start from; that of diffusers."""


@dataclass
class Options:
    """Arguments of a call that are no settings."""

    seed: list[checks.Count]
    output_type: str = checks.choice("pil", "np", "pt", "latent")
    strength: float = STRENGTH
    batch_size: int | None = checks.option(None, low=1)


class Output(NamedTuple):
    """Result of a call: a tuple and an object with ``.images``, as diffusers returns one or the other."""

    images: Any
    """A list of images of Pillow, an array [n h w 3] or a tensor [n c h w], as ``output_type`` says."""


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


def device_and_dtype(device: Any = None, dtype: Any = None) -> tuple[torch.device | None, torch.dtype | None]:
    """Tell the device and the dtype of ``to``, which may stand in any order; None if not given.

    Raises:
        UserError: torch cannot use the device, or the networks cannot compute in the dtype.
    """
    if isinstance(device, torch.dtype):
        return device_and_dtype(dtype, device)
    if dtype not in (None, *DTYPES.values()):
        raise UserError(f"dtype {dtype}: must be one of {', '.join(map(str, DTYPES.values()))}")
    if device is not None:
        device = usable_device(device)

    return device, dtype


def seeds_of(seed: Any, generator: Any) -> list[Any]:
    """Seeds of the noise: those given, or one drawn from each generator, or one from torch's own.

    Raises:
        UserError: what is given is no generator.
    """
    if seed is not None:
        return listed(seed)

    seeds = []
    for one in listed(generator) or [torch.default_generator]:
        if not isinstance(one, torch.Generator):
            raise UserError(f"generator = {one!r:.60}: give a torch.Generator or one per image, or numbers as seed")

        seeds.append(int(torch.randint(2**63 - 1, (), generator=one, device=one.device)))

    return seeds


def images_of(image: Any) -> list[Image.Image]:
    """Turn images as ``img2img`` pipelines of diffusers take them into images of Pillow.

    Args:
        image: one or several; of Pillow, arrays [h w 3] or [n h w 3], or tensors [3 h w] or [n 3 h w], of uint8 or of
            numbers from 0 to 1.

    Raises:
        UserError: another type, shape or range.
    """
    images = [image]
    if getattr(image, "ndim", 3) == 4 or (isinstance(image, (list, tuple)) and image):
        images = [*image]

    return [Image.fromarray(_rgb_of(one)) for one in images]


def _rgb_of(image: Any) -> UInt8[np.ndarray, "h w 3"]:
    if isinstance(image, Image.Image):
        return rgb(image.copy())
    if isinstance(image, Tensor):
        image = image.detach().cpu().movedim(0, -1)
        image = (image.float() if image.is_floating_point() else image).numpy()

    if isinstance(image, np.ndarray) and image.shape[2:] == (3,):
        if image.dtype == np.uint8:
            return image
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
    if not isinstance(latents, (np.ndarray, Tensor)):
        raise UserError(f"latents = {latents!r:.60}: give a tensor [images c h w] of noise")

    return torch.as_tensor(latents, dtype=torch.float32, device="cpu")


def step_callback(callback: Any, names: Any, owner: Any) -> OnStep:
    """A callback of diffusers as one of ``sampler.sample``, which may be None.

    Args:
        callback: called with ``owner``, step, t and ``{"latents": x}``; may return a mapping with other latents.
        names: tensors that it asks for.
        owner: what was called.

    Raises:
        UserError: it cannot be called or asks for other tensors; later, if it returns another shape.
    """
    if callback is None:
        return unchanged
    if not callable(callback) or {*names} - {"latents"}:
        raise UserError("callback_on_step_end: give a function; its only tensor inputs are ['latents']")

    def on_step_end(step: int, t: float, x: Tensor) -> Tensor:
        changed = callback(owner, step, t, {"latents": x}) or {}
        latents: Tensor = changed.get("latents", x)
        if latents.shape != x.shape:
            raise UserError(f"callback_on_step_end: return nothing, or {{'latents': a tensor of shape {[*x.shape]}}}")

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
