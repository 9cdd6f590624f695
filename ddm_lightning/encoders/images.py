"""Image encoders: pixels as they are, and latents of a variational autoencoder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from PIL import Image
from torch import Tensor

from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import IMAGE_ENCODERS
from ddm_lightning.encoders.interfaces import Images, Provenance, shape_of
from ddm_lightning.encoders.pretrained import Pretrained, encode_in_batches

_SCALE = 1 / 127.5
_SHIFT = 127.5
# Pixels per batch: on a CPU, SD's activations take 0.5 GB.
_PIXELS_AT_ONCE = {"cpu": 4 * 256 * 256, "cuda": 32 * 256 * 256}


@dataclass
class _Config:
    """Keys of ``config.json`` that are read here, with the defaults of diffusers; there are others."""

    in_channels: Annotated[int, (lambda number: number == 3, "3, as images have")]
    latent_channels: checks.Size
    block_out_channels: list[checks.Size]
    scaling_factor: checks.Positive = 0.18215
    shift_factor: float | None = None
    latents_mean: list[float] | None = None
    latents_std: list[checks.Positive] | None = None


@IMAGE_ENCODERS.register("pixels")
class Pixels(Provenance):
    """Stores uint8 pixels, channels first; ``x_0`` runs from -1 to 1.

    Args:
        image_size: height and width to which images are scaled (Lanczos); None or 0 keeps theirs. The feature network
            always sees the full-size images, so small samples do not harm the clustering.
    """

    dtype = "uint8"
    stores = "x_0"

    def __init__(self, image_size: int | None = None) -> None:
        self.image_size = image_size
        self.normalisation: dict[str, float | list[float]] = {"scale": _SCALE, "shift": _SHIFT}

    def x_shape(self, image_size: int) -> tuple[int, int, int]:
        size = self.image_size or image_size
        return (3, size, size)

    def encode(self, images: Images) -> UInt8[np.ndarray, "n 3 h w"]:
        """Scale images and move the channels first."""
        side = self.image_size
        if side and images.shape[1:3] != (side, side):
            scaled = [Image.fromarray(image).resize((side, side), Image.Resampling.LANCZOS) for image in images]
            images = np.stack([np.asarray(image) for image in scaled])

        return np.ascontiguousarray(images.transpose(0, 3, 1, 2))

    def decode(self, x_0: Float[Tensor, "n 3 h w"]) -> Images:
        """Decode to images, rounded to the nearest pixel value; values outside -1 to 1 are clamped."""
        return _as_images(x_0.detach().float().cpu() / _SCALE + _SHIFT)


@IMAGE_ENCODERS.register("diffusers-vae")
class DiffusersVAE(Pretrained):
    """An ``AutoencoderKL`` of the diffusers library with the normalisation of its pipelines.

    Covers the autoencoders of Stable Diffusion 1 and 2, SDXL (4 channels), SD3 and FLUX.1 (16 channels). Their
    pipelines bring latents to unit variance in one of three ways, chosen in ``config.json``:

    - ``scaling_factor`` alone: x_0 = latent · scaling_factor (Rombach et al. 2022, arXiv 2112.10752, appendix G);
    - with ``shift_factor``: x_0 = (latent - shift_factor) · scaling_factor (SD3 and later);
    - with ``latents_mean`` and ``latents_std``, one per channel: x_0 = (latent - mean) · scaling_factor / std.

    Args:
        path: see ``Pretrained``.
        stores: ``posterior``, the mean and the standard deviation of each latent, from which training samples anew at
            each step (as DiT does), or ``x_0``, the mean alone, half the bytes.
        dtype: type of the stored numbers, ``float16`` or ``float32``.
        params: see ``Pretrained``. In a pipeline, ``subfolder`` is ``vae``; SDXL's autoencoder overflows with a
            ``compute_dtype`` of ``float16``. Without one, GPUs encode in bfloat16 and decode in float32, because
            bfloat16 has fewer levels than a pixel.

    Raises:
        UserError, RuntimeError: see ``Pretrained``.
        ValueError: a wrong ``stores`` or ``dtype``, or a ``compute_dtype`` that overflows.
    """

    packages: tuple[str, ...] = ("diffusers",)
    place = "image encoder 'diffusers-vae'"
    stem = "diffusion_pytorch_model"
    kind_key = "_class_name"
    kinds = {"AutoencoderKL": "AutoencoderKL"}  # noqa: RUF012  never changed
    is_safe_in_bfloat16 = True

    def __init__(self, path: str, stores: str = "posterior", dtype: str = "float16", **params: Any) -> None:
        if stores not in ("posterior", "x_0") or dtype not in ("float16", "float32"):
            raise ValueError(f"stores = {stores!r} must be posterior or x_0, and dtype = {dtype!r} float16 or float32")

        self.stores = stores
        self.dtype = dtype
        super().__init__(path, **params)
        read_here = checks.kept(self.config, _Config)
        remedy = "use an image autoencoder with its pipeline's config.json"
        config = checks.record(read_here, _Config, str(self.folder / "config.json"), remedy)
        if self.compute_dtype == torch.float16 and self.config.get("force_upcast"):
            raise ValueError("compute_dtype = 'float16' overflows: the model's config.json says force_upcast")

        self.num_channels = config.latent_channels
        self.factor = 2 ** (len(config.block_out_channels) - 1)
        scale = config.scaling_factor
        self.normalisation: dict[str, float | list[float]] = {"scale": scale, "shift": config.shift_factor or 0.0}
        if config.latents_mean and config.latents_std:
            self.normalisation["scale"] = [scale / std for std in config.latents_std]
            self.normalisation["shift"] = config.latents_mean

    def x_shape(self, image_size: int) -> tuple[int, int, int]:
        """Return channels, height and width of ``x_0`` for square images of ``image_size`` pixels.

        Raises:
            UserError: ``image_size`` is not a multiple of ``factor``.
        """
        if image_size % self.factor:
            raise UserError(
                f"{self.place}: {image_size} pixels are not a multiple of {self.factor}; "
                f"set prepare.images.size to {max(1, round(image_size / self.factor)) * self.factor}"
            )

        return (self.num_channels, image_size // self.factor, image_size // self.factor)

    def _load(self, **settings: Any) -> Any:
        return super()._load(torch_dtype=settings["dtype"], low_cpu_mem_usage=False)

    @torch.inference_mode()
    def encode(self, images: Images) -> Float[np.ndarray, "n c height width"]:
        """Encode images to the mean of their latents, or to mean and standard deviation, stacked in channels.

        Raises:
            UserError: a side of the images is not a multiple of ``factor``, or the device is missing.
        """
        device = self._found_device()
        height, width = images.shape[1:3]
        channels, *sides = shape_of(self, height, width)
        if self.stores == "posterior":
            channels *= 2

        network = self._network(device)
        dtype = self.dtype_on(device)

        def encode(pixels: Tensor) -> Tensor:
            rounded = network.encode((pixels / 127.5 - 1).to(dtype)).latent_dist
            posterior = type(rounded)(rounded.parameters.float())
            if self.stores == "x_0":
                return posterior.mean

            # Diffusers clamps the standard deviation to 3e-7 … 2.2e4, which float16 holds.
            return torch.cat([posterior.mean, posterior.std], dim=1)

        batch_size = _batch_size(height * width, device)
        return encode_in_batches(images, encode, (channels, *sides), device, batch_size, self.dtype)

    @torch.inference_mode()
    def decode(self, x_0: Float[Tensor, "n c height width"]) -> Images:
        """Decode to images, rounded to the nearest pixel value; on the CPU if the machine lacks the device."""
        device = self._found_device(or_cpu=True)
        dtype = self.compute_dtype or torch.float32
        network = self._network(device, dtype)
        scale = torch.tensor(self.normalisation["scale"], device=device).view(-1, 1, 1)
        shift = torch.tensor(self.normalisation["shift"], device=device).view(-1, 1, 1)
        latents = (x_0.detach().to(device).float() / scale + shift).to(dtype)
        images = []
        for batch in latents.split(_batch_size(x_0.shape[2] * x_0.shape[3] * self.factor**2, device)):
            pixels = network.decode(batch).sample.float()
            images.append(_as_images((pixels + 1) * 127.5))

        return np.concatenate(images)


def _as_images(pixels: Float[Tensor, "n 3 h w"]) -> Images:
    return np.ascontiguousarray(pixels.round().clamp(0, 255).byte().permute(0, 2, 3, 1).cpu().numpy())


def _batch_size(num_pixels: int, device: torch.device) -> int:
    return max(1, _PIXELS_AT_ONCE.get(device.type, _PIXELS_AT_ONCE["cuda"]) // num_pixels)
