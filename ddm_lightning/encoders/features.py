"""Feature networks: images to the vectors by which they are clustered, or by which generated ones are scored.

Scores on the features that made the clusters may favour the ensemble; those without weights made none. DINOv2 and CLIP
see the whole image, stretched to their input size (antialiased) and never cropped.
"""

from __future__ import annotations

from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.core.registry import FEATURES
from ddm_lightning.encoders.interfaces import Images, Provenance, TextVectors, Vectors
from ddm_lightning.encoders.pretrained import Pretrained, encode_in_batches
from ddm_lightning.flow.randomness import keyed_generator

INCEPTION_FILE = "inception-2015-12-05.pt"
INCEPTION_URL = f"https://nvlabs-fi-cdn.nvidia.com/stylegan2-ada-pytorch/pretrained/metrics/{INCEPTION_FILE}"
INCEPTION_SHA256 = "f58cb9b6ec323ed63459aa4fb441fe750cfe39fafad6da5cb504a16f19e958f4"


class _ImageModel(Pretrained):
    """Base of the image networks of the transformers library."""

    packages: tuple[str, ...] = ("transformers",)
    mean: ClassVar[tuple[float, ...]]
    """Mean of pixels from 0 to 1, by channel."""
    std: ClassVar[tuple[float, ...]]
    output: ClassVar[str]
    """Name of the library's output that holds the vectors."""
    first_size_of: ClassVar[str]
    """End of the name of a weight whose first size is that of a vector."""
    resolution: int | None = None
    """Side of the resized images in pixels; None for the model's own."""

    def __init__(self, path: str, **params: Any) -> None:
        super().__init__(path, **params)
        found = [shape for name, shape in self.shapes.items() if name.endswith(self.first_size_of)]
        if not found:
            raise UserError(
                f"{self.folder}: has no {self.first_size_of!r}, needed by {self.place}; "
                "give a whole model in its parameter 'path'"
            )

        self.weight_shape = found[0]
        self.size = found[0][0]

    @torch.inference_mode()
    def encode(self, images: Images) -> Vectors:
        """Encode images to features, float32.

        Raises:
            UserError: the weights do not load, or the device is missing.
        """
        device = self._found_device()
        network = self._network(device)
        dtype = self.dtype_on(device)
        size = (self.resolution or network.config.image_size,) * 2
        mean = torch.tensor(self.mean, device=device).view(3, 1, 1)
        std = torch.tensor(self.std, device=device).view(3, 1, 1)

        def encode(pixels: Tensor) -> Tensor:
            pixels = pixels / 255
            if pixels.shape[2:] != size:
                pixels = functional.interpolate(pixels, size, mode="bicubic", antialias=True, align_corners=False)

            normalised = (pixels.clamp(0, 1) - mean) / std
            return network(pixel_values=normalised.to(dtype))[self.output]

        return encode_in_batches(images, encode, (self.size,), device)


@FEATURES.register("dinov2")
class DinoV2(_ImageModel):
    """DINOv2's class token after the last norm (Oquab et al. 2023, arXiv 2304.07193), with or without registers.

    Args:
        path, params: see ``Pretrained``.
        resolution: side of the resized images in pixels, a multiple of the patch size (14 in the published models).

    Raises:
        UserError, RuntimeError: see ``Pretrained``.
        ValueError: ``resolution`` is no multiple of the patch size.
    """

    place = "feature network 'dinov2'"
    kinds = {"dinov2": "Dinov2Model", "dinov2_with_registers": "Dinov2WithRegistersModel"}  # noqa: RUF012  never changed
    # of ImageNet
    mean = (0.485, 0.456, 0.406)
    std = (0.229, 0.224, 0.225)
    output = "pooler_output"
    first_size_of = "embeddings.patch_embeddings.projection.weight"

    def __init__(self, path: str, resolution: int = 224, **params: Any) -> None:
        super().__init__(path, **params)
        patch = self.weight_shape[-1]
        if resolution < patch or resolution % patch:
            raise ValueError(f"resolution = {resolution} must be a multiple of the model's patch size, {patch}")

        self.resolution = resolution


@FEATURES.register("clip")
class ClipImages(_ImageModel):
    """CLIP's image embedding (Radford et al. 2021, arXiv 2103.00020), at the model's own resolution.

    The CLIP-FID of clean-fid takes ``openai/clip-vit-base-patch32``; it rounds resized pixels, this does not.

    Args:
        path, params: see ``Pretrained``.

    Raises:
        UserError, RuntimeError: see ``Pretrained``.
    """

    place = "feature network 'clip'"
    kinds = dict.fromkeys(("clip", "clip_vision_model"), "CLIPVisionModelWithProjection")
    mean = (0.48145466, 0.4578275, 0.40821073)
    std = (0.26862954, 0.26130258, 0.27577711)
    output = "image_embeds"
    first_size_of = "visual_projection.weight"

    def _load(self, **settings: Any) -> Any:
        # Some published configurations state another size.
        return super()._load(projection_dim=self.size, **settings)


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
        self.device = torch.device(device)
        self.path = Path(path).expanduser()
        if self.path.is_dir():
            self.path = self.path / INCEPTION_FILE

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
    def encode(self, images: Images) -> Float[np.ndarray, "n 2048"]:
        """Resize each image by Pillow without rounding, then encode it; float32."""
        from cleanfid.resize import build_resizer

        resize = build_resizer("clean")

        def encode(pixels: Tensor) -> Tensor:
            whole = pixels.byte().permute(0, 2, 3, 1).cpu().numpy()
            resized = torch.from_numpy(np.stack([resize(image) for image in whole]))
            return self._network(resized.permute(0, 3, 1, 2).to(self.device))

        return encode_in_batches(images, encode, (self.size,), self.device)


@FEATURES.register("pooled-pixels")
class PooledPixels(Provenance):
    """Mean colours on a ``grid`` × ``grid`` grid, from 0 to 1; for tests and synthetic data.

    Raises:
        ValueError: a grid below 1.
    """

    def __init__(self, grid: int = 4) -> None:
        if grid < 1:
            raise ValueError(f"grid = {grid}: give at least 1")

        self.grid = grid
        self.size = 3 * grid * grid

    def encode(self, images: Images) -> Vectors:
        vectors = []
        for one in torch.from_numpy(np.array(images)).permute(0, 3, 1, 2).split(1):  # in the processor's cache
            vectors.append(functional.adaptive_avg_pool2d(one.float() / 255, self.grid).flatten(1))

        return torch.cat(vectors).numpy()


@FEATURES.register("pixels")
class PixelFeatures(PooledPixels):
    """Mean colours on a 16 × 16 grid, from 0 to 1: the pixels of an image of that size."""

    def __init__(self, grid: int = 16) -> None:
        super().__init__(grid)


@FEATURES.register("random-convolutions")
class RandomConvolutions(Provenance):
    """Channel means and standard deviations after each of three untrained convolutions; 448 entries.

    Each level convolves by fixed random 3 × 3 kernels, applies ReLU and halves the resolution. Kernels are equal on
    every machine; features agree to rounding.

    Args:
        resolution: side of the resized images in pixels.
    """

    _CHANNELS = (3, 32, 64, 128)
    size = 2 * sum(_CHANNELS[1:])

    def __init__(self, resolution: int = 32) -> None:
        self.resolution = resolution
        generator = keyed_generator(0, "random-convolutions")
        # Uniform numbers, because normal ones depend on the processor's logarithm; He's variance, 2 / fan-in.
        self._kernels = []
        for inputs, outputs in pairwise(self._CHANNELS):
            uniform = torch.rand(outputs, inputs, 3, 3, generator=generator) * 2 - 1
            self._kernels.append(uniform * (6 / (9 * inputs)) ** 0.5)

    @torch.inference_mode()
    def encode(self, images: Images) -> Vectors:
        return encode_in_batches(images, self._statistics, (self.size,), torch.device("cpu"))

    def _statistics(self, pixels: Float[Tensor, "n 3 h w"]) -> TextVectors:
        size = (self.resolution, self.resolution)
        x = functional.interpolate(pixels / 127.5 - 1, size, mode="bilinear", antialias=True)
        found = []
        for kernel in self._kernels:
            x = functional.relu(functional.conv2d(x, kernel, padding=1))
            found += [x.mean((2, 3)), x.std((2, 3))]
            x = functional.avg_pool2d(x, 2)

        return torch.cat(found, 1)
