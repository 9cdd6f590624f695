"""Feature networks: images to the vectors by which they are clustered.

All networks see the whole image, stretched to their input size (antialiased) and never cropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional

from ddm_lightning.core.checks import is_int
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import FEATURES
from ddm_lightning.encoders.interfaces import NoWeights
from ddm_lightning.encoders.pretrained import Pretrained, encode_in_batches, loading, on_device

# On a CPU, 16 images per batch are a third faster than 64: the activations stay in its caches.
_BATCH_SIZE = {"cpu": 16, "cuda": 256}
# Normalisation of pixels from 0 to 1, by ImageNet's statistics.
_IMAGENET = {"interpolation": "bicubic", "mean": (0.485, 0.456, 0.406), "std": (0.229, 0.224, 0.225)}


def batch_size_on(device: torch.device) -> int:
    """Number of images to encode at once."""
    return _BATCH_SIZE.get(device.type, _BATCH_SIZE["cuda"])


class _Features(Pretrained):
    size: int
    _network: tuple[Callable[[Tensor], Tensor], Mapping[str, Any]]
    """The network, and timm's data configuration of its images."""

    @torch.inference_mode()
    def encode(self, images: UInt8[np.ndarray, "n h w 3"]) -> Float[np.ndarray, "n size"]:
        """Encode images to features, float32.

        Raises:
            UserError: the weights do not load, or the device is missing.
        """
        self._require_device()
        network, wanted = self._network
        size = tuple(wanted["input_size"][1:])
        mode = "bilinear" if wanted["interpolation"] == "bilinear" else "bicubic"
        mean, std = (torch.tensor(wanted[key], device=self.device).view(1, 3, 1, 1) for key in ("mean", "std"))
        dtype = self.dtype_on(self.device)

        def encode(pixels: Tensor) -> Tensor:
            pixels = pixels / 255
            if pixels.shape[2:] != size:
                pixels = functional.interpolate(pixels, size, mode=mode, antialias=True, align_corners=False)
            return network(((pixels.clamp(0, 1) - mean) / std).to(dtype))

        return encode_in_batches(images, encode, (self.size,), batch_size_on(self.device), self.device)


@FEATURES.register("dinov2")
class DinoV2(_Features):
    """DINOv2's class token after the last norm (Oquab et al. 2023, arXiv 2304.07193), with or without registers.

    Args:
        path, params: see ``Pretrained``.
        resolution: side of the resized images in pixels, a multiple of the patch size (14 in the published models).

    Raises:
        UserError, ValueError: see ``Pretrained``.
    """

    packages: tuple[str, ...] = ("transformers",)
    place = "feature network 'dinov2'"
    kinds = {"model_type": ["dinov2", "dinov2_with_registers"]}  # noqa: RUF012  never changed

    def __init__(self, path: str, resolution: int = 224, **params: Any) -> None:
        super().__init__(path, **params)
        patch, self.size = (self.config.get(key, 0) for key in ("patch_size", "hidden_size"))
        if not is_int(patch, 1) or not is_int(self.size, 1):
            raise UserError(
                f"{self.folder / 'config.json'}: patch_size and hidden_size must be integers of at least 1; "
                "copy or download the model again"
            )
        if resolution < patch or resolution % patch:
            raise ValueError(f"resolution = {resolution} must be a multiple of the model's patch size, {patch}")
        self.resolution = resolution

    @cached_property
    def _network(self) -> tuple[Callable[[Tensor], Tensor], Mapping[str, Any]]:  # type: ignore[override]
        kind = "Dinov2Model" if self.config["model_type"] == "dinov2" else "Dinov2WithRegistersModel"
        network = on_device(self._load("transformers", kind, dtype=self.dtype_on(self.device)), self.device)
        wanted = {**_IMAGENET, "input_size": (3, self.resolution, self.resolution)}
        return lambda pixels: network(pixel_values=pixels).last_hidden_state[:, 0], wanted


@FEATURES.register("timm")
class TimmFeatures(_Features):
    """Pooled features of any network of the timm library for colour images.

    ``config.json`` gives the size, mean and standard deviation of its images.

    Args:
        path: folder as on the hub (``config.json`` with ``architecture``, and ``model.safetensors``), or the name
            there, such as ``timm/resnet50.a1_in1k``.
        params: see ``Pretrained``.

    Raises:
        UserError: see ``Pretrained``; or timm does not know the network.
        ValueError: see ``Pretrained``.
    """

    packages: tuple[str, ...] = ("timm",)
    place = "feature network 'timm'"

    def __init__(self, path: str, **params: Any) -> None:
        super().__init__(path, **params)
        with loading(self.folder, self.place):
            import timm

            if not timm.is_model(self.config["architecture"]):
                raise ValueError(f"timm {timm.__version__} knows no {self.config['architecture']!r}")

    @cached_property
    def _network(self) -> tuple[Any, dict[str, Any]]:  # type: ignore[override]
        with loading(self.folder, self.place):
            import timm

            # Without num_classes: only then does timm check that no weight is missing.
            network = timm.create_model(f"local-dir:{self.folder}", pretrained=True)
            network.reset_classifier(0)
            wanted = timm.data.resolve_model_data_config(network)
            if wanted["input_size"][0] != 3:
                raise ValueError(f"it takes images of {wanted['input_size'][0]} channels, not 3")
        network = network.eval().requires_grad_(False).to(self.dtype_on(self.device))
        return on_device(network, self.device), wanted

    @cached_property
    def size(self) -> int:  # type: ignore[override]  # computed once, then an attribute
        """Entries of a vector; loads the weights."""
        return int(self._network[0].head_hidden_size)


@FEATURES.register("pooled-pixels")
class PooledPixels(NoWeights):
    """Mean colours on a ``grid`` × ``grid`` grid, from 0 to 1; for tests and synthetic data."""

    def __init__(self, grid: int = 4) -> None:
        if grid < 1:
            raise ValueError("grid must be at least 1")
        self.grid, self.size = grid, 3 * grid * grid

    def encode(self, images: UInt8[np.ndarray, "n h w 3"]) -> Float[np.ndarray, "n size"]:
        pixels = torch.from_numpy(np.array(images)).permute(0, 3, 1, 2).float() / 255
        return functional.adaptive_avg_pool2d(pixels, self.grid).flatten(1).numpy()
