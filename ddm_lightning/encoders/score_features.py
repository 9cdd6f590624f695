"""Feature networks for scores: Inception and CLIP from local files, and two without weights.

Scores on the features that made the clusters may favour the ensemble; the two without weights made none.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.core.registry import FEATURES
from ddm_lightning.encoders.features import PooledPixels, _Features, batch_size_on
from ddm_lightning.encoders.interfaces import NoWeights
from ddm_lightning.encoders.pretrained import encode_in_batches, on_device
from ddm_lightning.flow.randomness import keyed_generator

INCEPTION_FILE = "inception-2015-12-05.pt"
INCEPTION_URL = f"https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/{INCEPTION_FILE}"
INCEPTION_SHA256 = "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4"
_CLIP = {
    "interpolation": "bicubic",
    "mean": (0.48145466, 0.4578275, 0.40821073),
    "std": (0.26862954, 0.26130258, 0.27577711),
}


@FEATURES.register("inception")
class Inception:
    """Inception-V3's 2,048 pooled features with clean-fid's weights and resizing (Parmar et al., arXiv 2104.11222).

    Args:
        path: the file ``inception-2015-12-05.pt``, or its folder; by default the current one.
        device: torch device to compute on.

    Raises:
        UserError: the file is missing or another one.
    """

    packages: tuple[str, ...] = ("clean-fid", "pillow")
    size = 2048

    def __init__(self, path: str = ".", device: str = "cpu") -> None:
        self.device, self.path = torch.device(device), Path(path).expanduser()
        self.path = self.path / INCEPTION_FILE if self.path.is_dir() else self.path
        if self.path.name != INCEPTION_FILE or not self.path.is_file():
            raise UserError(
                f"{self.path}: the weights of 'inception' ({INCEPTION_FILE}) are missing; "
                f"download them from {INCEPTION_URL} and set its parameter 'path'"
            )

    def provenance(self) -> dict[str, str]:
        return {"weights_sha256": sha256_file(self.path)}

    @cached_property
    def _network(self) -> Any:
        # TorchScript is code: run only the published file.
        if sha256_file(self.path) != INCEPTION_SHA256:
            raise UserError(f"{self.path}: is not the published file; download it again from {INCEPTION_URL}")
        from cleanfid.inception_torchscript import InceptionV3W

        return InceptionV3W(str(self.path.parent), download=False).eval().to(self.device)

    @torch.inference_mode()
    def encode(self, images: UInt8[np.ndarray, "n h w 3"]) -> Float[np.ndarray, "n 2048"]:
        """Resize each image by Pillow without rounding, then encode it; float32."""
        from cleanfid.resize import build_resizer

        resize, found = build_resizer("clean"), np.empty((len(images), self.size), np.float32)
        step = batch_size_on(self.device)
        for start in range(0, len(images), step):
            resized = np.stack([resize(image) for image in images[start : start + step]])
            pixels = torch.from_numpy(resized).permute(0, 3, 1, 2).to(self.device)
            found[start : start + step] = self._network(pixels).float().cpu().numpy()
        return found


@FEATURES.register("clip")
class ClipImages(_Features):
    """CLIP's image embedding (Radford et al. 2021, arXiv 2103.00020), at the model's own resolution.

    The CLIP-FID of clean-fid takes ``openai/clip-vit-base-patch32``; it rounds resized pixels, this does not.

    Args:
        path, params: see ``Pretrained``.

    Raises:
        UserError, ValueError: see ``Pretrained``.
    """

    packages: tuple[str, ...] = ("transformers",)
    place = "feature network 'clip'"
    kinds = {"model_type": ["clip", "clip_vision_model"]}  # noqa: RUF012  never changed

    def __init__(self, path: str, **params: Any) -> None:
        super().__init__(path, **params)
        if "visual_projection.weight" not in self.shapes:
            raise UserError(f"{self.folder}: has no image projection; give a whole CLIP in its parameter 'path'")
        self.size = self.shapes["visual_projection.weight"][0]

    @cached_property
    def _network(self) -> tuple[Callable[[Tensor], Tensor], Mapping[str, Any]]:  # type: ignore[override]
        from transformers import CLIPVisionConfig

        config = CLIPVisionConfig.from_pretrained(self.folder)
        config.projection_dim = self.size  # some published configurations state another size
        network = self._load(
            "transformers", "CLIPVisionModelWithProjection", config=config, dtype=self.dtype_on(self.device)
        )
        network = on_device(network, self.device)
        wanted = {**_CLIP, "input_size": (3, config.image_size, config.image_size)}
        return lambda pixels: network(pixel_values=pixels).image_embeds, wanted


@FEATURES.register("pixels")
class PixelFeatures(PooledPixels):
    """Mean colours on a 16 × 16 grid, from 0 to 1: the pixels of an image of that size."""

    def __init__(self, grid: int = 16) -> None:
        super().__init__(grid)


@FEATURES.register("random-convolutions")
class RandomConvolutions(NoWeights):
    """Channel means and standard deviations after each of three untrained convolutions; 448 entries.

    Each level convolves by fixed random 3 × 3 kernels, applies ReLU and halves the resolution. Kernels are equal on
    every machine; features agree to rounding.

    Args:
        resolution: side of the resized images in pixels.
    """

    _CHANNELS = (3, 32, 64, 128)
    size = 2 * sum(_CHANNELS[1:])

    def __init__(self, resolution: int = 32) -> None:
        if resolution < 8:
            raise ValueError("resolution must be at least 8")
        self.resolution = resolution
        generator = keyed_generator(0, "random-convolutions")
        self._kernels = []
        for inputs, outputs in zip(self._CHANNELS, self._CHANNELS[1:], strict=False):
            # Uniform numbers, because normal ones depend on the processor's logarithm; He's variance, 2 / fan-in.
            uniform = torch.rand(outputs, inputs, 3, 3, generator=generator) * 2 - 1
            self._kernels.append(uniform * (6 / (9 * inputs)) ** 0.5)

    @torch.inference_mode()
    def encode(self, images: UInt8[np.ndarray, "n h w 3"]) -> Float[np.ndarray, "n size"]:
        device = torch.device("cpu")
        return encode_in_batches(images, self._statistics, (self.size,), batch_size_on(device), device)

    def _statistics(self, pixels: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n size"]:
        size = (self.resolution, self.resolution)
        x, found = functional.interpolate(pixels / 127.5 - 1, size, mode="bilinear", antialias=True), []
        for kernel in self._kernels:
            x = functional.relu(functional.conv2d(x, kernel, padding=1))
            found += [x.mean((2, 3)), x.std((2, 3))]
            x = functional.avg_pool2d(x, 2)
        return torch.cat(found, 1)
