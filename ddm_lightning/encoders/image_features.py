"""Feature networks of the transformers and timm libraries.

Both see the whole image, stretched to the network's input size (antialiased) and never cropped.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from ddm_lightning.encoders.pretrained import Pretrained, image_batches, loading

_BATCH_SIZE = {"cpu": 16, "cuda": 256}
# ImageNet's pixels from 0 to 1.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


class _Features(Pretrained):
    def _features(
        self,
        images: UInt8[np.ndarray, "n h w 3"],
        network: Callable[[Tensor], Tensor],
        num_entries: int,
        size: Sequence[int],
        mode: str,
        mean: Sequence[float],
        std: Sequence[float],
    ) -> Float[np.ndarray, "n size"]:
        """Resize and normalise the images, then run ``network`` on them batch by batch."""
        out = np.empty((len(images), num_entries), np.float32)
        shift, scale = (torch.tensor(values, device=self.device).view(1, 3, 1, 1) for values in (mean, std))
        for rows, pixels in image_batches(images, _BATCH_SIZE.get(self.device.type, 256), self.device):
            pixels = pixels / 255
            if pixels.shape[2:] != tuple(size):
                pixels = functional.interpolate(pixels, tuple(size), mode=mode, antialias=True, align_corners=False)
            pixels = (pixels.clamp(0, 1) - shift) / scale
            out[rows] = network(pixels.to(self.compute_dtype)).float().cpu().numpy()
        return out


@FEATURES.register("dinov2")
class DinoV2(_Features):
    """DINOv2's class token after the last norm (Oquab et al. 2023, arXiv 2304.07193), with or without registers.

    Args:
        path, subfolder, revision, device, compute_dtype: see ``Pretrained``.
        resolution: side of the resized images in pixels, a multiple of the patch size (14 in the published models).

    Raises:
        UserError, ValueError: see ``Pretrained``.
    """

    packages: tuple[str, ...] = ("transformers",)
    place, loaded_as = "feature network 'dinov2'", "a Dinov2Model"
    kinds = {"model_type": ["dinov2", "dinov2_with_registers"]}  # noqa: RUF012  never changed

    def __init__(
        self,
        path: str,
        subfolder: str | None = None,
        revision: str | None = None,
        resolution: int = 224,
        device: str = "cpu",
        compute_dtype: str = "float32",
    ) -> None:
        super().__init__(path, subfolder, revision, device, compute_dtype)
        patch, self.size = (self.model.config.get(key, 0) for key in ("patch_size", "hidden_size"))
        if not is_int(patch, 1) or not is_int(self.size, 1):
            raise UserError(
                f"{self.model.folder / 'config.json'}: patch_size and hidden_size must be integers of at least 1; "
                f"copy or download the model again"
            )
        if resolution < patch or resolution % patch:
            raise ValueError(f"resolution = {resolution} must be a multiple of the model's patch size, {patch}")
        self.resolution = resolution

    @cached_property
    def _network(self) -> Any:
        kind = "Dinov2Model" if self.model.config["model_type"] == "dinov2" else "Dinov2WithRegistersModel"
        return self._load("transformers", kind, dtype=self.compute_dtype).to(self.device)

    @torch.inference_mode()
    def encode(self, images: UInt8[np.ndarray, "n h w 3"]) -> Float[np.ndarray, "n size"]:
        """Encode images to features, float32.

        Raises:
            UserError: the weights do not load, or the device is missing.
        """
        self._require_device()
        size = (self.resolution, self.resolution)
        return self._features(images, self._class_token, self.size, size, "bicubic", _MEAN, _STD)

    def _class_token(self, pixels: Tensor) -> Tensor:
        states: Tensor = self._network(pixel_values=pixels).last_hidden_state
        return states[:, 0]


@FEATURES.register("timm")
class TimmFeatures(_Features):
    """Pooled features of any network of the timm library for colour images.

    ``config.json`` gives the size, mean and standard deviation of its images.

    Args:
        path: folder as on the hub (``config.json`` with ``architecture``, and ``model.safetensors``), or the name
            there, such as ``timm/resnet50.a1_in1k``.
        revision, device, compute_dtype: see ``Pretrained``.

    Raises:
        UserError: see ``Pretrained``; or timm does not know the network.
        ValueError: see ``Pretrained``.
    """

    packages: tuple[str, ...] = ("timm",)
    place, loaded_as = "feature network 'timm'", "a network of timm"

    def __init__(
        self, path: str, revision: str | None = None, device: str = "cpu", compute_dtype: str = "float32"
    ) -> None:
        super().__init__(path, None, revision, device, compute_dtype)
        with loading(self.model.folder, self.loaded_as):
            import timm

            if not timm.is_model(self.model.config["architecture"]):
                raise ValueError(f"timm {timm.__version__} knows no {self.model.config['architecture']!r}")

    @cached_property
    def _network(self) -> tuple[Any, dict[str, Any]]:
        """The network and its data configuration."""
        with loading(self.model.folder, self.loaded_as):
            import timm

            # Without num_classes: only then does timm check that no weight is missing.
            network = timm.create_model(f"local-dir:{self.model.folder}", pretrained=True)
            network.reset_classifier(0)
            wanted = timm.data.resolve_model_data_config(network)
            if wanted["input_size"][0] != 3:
                raise ValueError(f"it takes images of {wanted['input_size'][0]} channels, not 3")
        network = network.eval().requires_grad_(False)
        return network.to(self.device, self.compute_dtype), wanted

    @cached_property
    def size(self) -> int:
        """Entries of a vector; loads the weights."""
        return int(self._network[0].head_hidden_size)

    @torch.inference_mode()
    def encode(self, images: UInt8[np.ndarray, "n h w 3"]) -> Float[np.ndarray, "n size"]:
        """Encode images to features, float32.

        Raises:
            UserError: the weights do not load, or the device is missing.
        """
        self._require_device()
        network, wanted = self._network
        mode = "bilinear" if wanted["interpolation"] == "bilinear" else "bicubic"
        size, mean, std = wanted["input_size"][1:], wanted["mean"], wanted["std"]
        return self._features(images, network, self.size, size, mode, mean, std)
