"""Images to latents and back, by a variational autoencoder of the diffusers library.

``AutoencoderKL`` covers the autoencoders of Stable Diffusion 1 and 2, SDXL (4 channels), SD3 and FLUX.1 (16 channels).
Their pipelines bring latents to unit variance in one of three ways, chosen in ``config.json``:

- ``scaling_factor`` alone: x_0 = latent · scaling_factor (Rombach et al. 2022, arXiv 2112.10752, appendix G);
- with ``shift_factor``: x_0 = (latent - shift_factor) · scaling_factor (SD3 and later);
- with ``latents_mean`` and ``latents_std``, one per channel: x_0 = (latent - mean) · scaling_factor / std.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor

from ddm_lightning.core.checks import LIST, POSITIVE, Check, integer, is_int, is_number, optional, problem_with
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import IMAGE_ENCODERS
from ddm_lightning.encoders.pretrained import Pretrained, image_batches

# Pixels per batch: on a CPU, SD's activations take 0.5 GB.
_PIXELS_AT_ONCE = {"cpu": 4 * 256 * 256, "cuda": 32 * 256 * 256}
_NUMBERS: Check = (
    lambda value: isinstance(value, list) and len(value) > 0 and all(map(is_number, value)),
    "a list of numbers",
)
_STAGES: Check = (
    lambda value: LIST[0](value) and len(value) > 0 and all(is_int(channels, 1) for channels in value),
    "a list of channels",
)
_CONFIG: dict[str, Check] = {
    "in_channels": integer(1),
    "latent_channels": integer(1),
    "block_out_channels": _STAGES,
    "scaling_factor": POSITIVE,
    "shift_factor": optional((is_number, "a number")),
    "latents_mean": optional(_NUMBERS),
    "latents_std": optional(_NUMBERS),
}
# Diffusers' defaults for keys that old files lack.
_DEFAULTS = {"scaling_factor": 0.18215, "shift_factor": None, "latents_mean": None, "latents_std": None}


@IMAGE_ENCODERS.register("diffusers-vae")
class DiffusersVAE(Pretrained):
    """An ``AutoencoderKL`` with the normalisation of its pipelines.

    Args:
        path, revision, device: see ``Pretrained``.
        subfolder: folder of the model in a pipeline: ``vae``.
        stores: ``posterior``, the mean and the standard deviation of each latent, from which training samples anew at
            each step (as DiT does), or ``x_0``, the mean alone, half the bytes.
        dtype: of the stored numbers, ``float16`` or ``float32``.
        compute_dtype: see ``Pretrained``; SDXL's autoencoder overflows in ``float16``.

    Raises:
        UserError, ValueError: see ``Pretrained``.
    """

    packages: tuple[str, ...] = ("diffusers",)
    place, loaded_as = "image encoder 'diffusers-vae'", "an AutoencoderKL"
    stem = "diffusion_pytorch_model"
    kinds = {"_class_name": ["AutoencoderKL"]}  # noqa: RUF012  never changed

    def __init__(
        self,
        path: str,
        subfolder: str | None = None,
        revision: str | None = None,
        stores: str = "posterior",
        dtype: str = "float16",
        device: str = "cpu",
        compute_dtype: str = "float32",
    ) -> None:
        if stores not in ("posterior", "x_0"):
            raise ValueError(f"stores = {stores!r} must be posterior or x_0")
        if dtype not in ("float16", "float32"):
            raise ValueError(f"dtype = {dtype!r} must be float16 or float32")
        self.stores, self.dtype = stores, dtype
        super().__init__(path, subfolder, revision, device, compute_dtype)
        config = {**_DEFAULTS, **{key: value for key, value in self.model.config.items() if key in _CONFIG}}
        self.num_channels, self.factor, self.normalisation = self._read(config)
        if self.compute_dtype == torch.float16 and self.model.config.get("force_upcast"):
            raise ValueError("compute_dtype = 'float16' overflows: the model's config.json says force_upcast")

    def _read(self, config: dict[str, Any]) -> tuple[int, int, dict[str, float | list[float]]]:
        """Return the channels of a latent, the image pixels per latent pixel, and scale and shift."""
        path = self.model.folder / "config.json"
        problem = problem_with(config, _CONFIG)
        mean, std, channels = config["latents_mean"], config["latents_std"], config.get("latent_channels")
        if problem is None and config["in_channels"] != 3:
            problem = f"in_channels is {config['in_channels']}, and images have 3"
        elif problem is None and (mean is None) != (std is None):
            problem = "needs both latents_mean and latents_std, or neither"
        elif problem is None and mean is not None and config["shift_factor"]:
            problem = "has both shift_factor and latents_mean"
        elif problem is None and mean is not None and not (len(mean) == len(std) == channels and min(std) > 0):
            problem = f"latents_mean and latents_std must have {channels} numbers, those of latents_std above 0"
        if problem is not None:
            raise UserError(f"{path}: {problem}; use an image autoencoder with its pipeline's config.json")
        scale = config["scaling_factor"]
        normalisation: dict[str, float | list[float]] = {"scale": float(scale), "shift": config["shift_factor"] or 0.0}
        if mean is not None:
            normalisation = {"scale": [scale / value for value in std], "shift": [float(value) for value in mean]}
        return config["latent_channels"], 2 ** (len(config["block_out_channels"]) - 1), normalisation

    def x_shape(self, image_size: int) -> tuple[int, int, int]:
        """Return channels, height and width of ``x_0`` for square images of ``image_size`` pixels.

        Raises:
            UserError: ``image_size`` is no multiple of ``factor``.
        """
        if image_size % self.factor:
            raise UserError(
                f"{self.place}: {image_size} pixels are no multiple of {self.factor}; set prepare.pictures.size to "
                f"{max(1, round(image_size / self.factor)) * self.factor}"
            )
        return (self.num_channels, image_size // self.factor, image_size // self.factor)

    @cached_property
    def _network(self) -> Any:
        return self._load("diffusers", "AutoencoderKL", torch_dtype=self.compute_dtype, low_cpu_mem_usage=False)

    @torch.inference_mode()
    def encode(self, images: UInt8[np.ndarray, "n h w 3"]) -> Float[np.ndarray, "n c height width"]:
        """Encode images to the mean of their latents, or to mean and standard deviation, stacked in channels.

        Raises:
            UserError: height or width is no multiple of ``factor``, or the device is missing.
        """
        self._require_device()
        height, width = (self.x_shape(extent)[1] for extent in images.shape[1:3])
        stacked = 2 if self.stores == "posterior" else 1
        out = np.empty((len(images), stacked * self.num_channels, height, width), self.dtype)
        network = self._network.to(self.device)
        batch_size = _batch_size(images.shape[1] * images.shape[2], self.device)
        for rows, pixels in image_batches(images, batch_size, self.device):
            posterior = network.encode((pixels / 127.5 - 1).to(self.compute_dtype)).latent_dist
            # Diffusers clamps the standard deviation to 3e-7 … 2.2e4, which float16 holds.
            parts = [posterior.mean, posterior.std][:stacked]
            with np.errstate(over="ignore"):  # prepare refuses infinite numbers
                out[rows] = torch.cat(parts, dim=1).float().cpu().numpy()
        return out

    @torch.inference_mode()
    def decode(self, x_0: Float[Tensor, "n c height width"]) -> UInt8[np.ndarray, "n h w 3"]:
        """Decode to images, rounded to the nearest pixel value; on the CPU if the machine lacks the device."""
        device = self._device_or_cpu()
        network = self._network.to(device)
        n, _, height, width = x_0.shape
        out = np.empty((n, height * self.factor, width * self.factor, 3), np.uint8)
        scale, shift = (
            torch.as_tensor(self.normalisation[key], dtype=torch.float32, device=device).view(1, -1, 1, 1)
            for key in ("scale", "shift")
        )
        batch_size = _batch_size(height * width * self.factor**2, device)
        for start in range(0, n, batch_size):
            latents = x_0[start : start + batch_size].detach().to(device).float() / scale + shift
            pixels = network.decode(latents.to(self.compute_dtype)).sample.float()
            pixels = ((pixels + 1) * 127.5).round().clamp(0, 255).byte()
            out[start : start + batch_size] = pixels.permute(0, 2, 3, 1).cpu().numpy()
        return out


def _batch_size(num_pixels: int, device: torch.device) -> int:
    return max(1, _PIXELS_AT_ONCE.get(device.type, _PIXELS_AT_ONCE["cuda"]) // num_pixels)
