"""SqueezeNet 1.1: features of an ImageNet network of another family than EfficientNet, for a second score.

Iandola et al., 2016, arXiv 1602.07360. The weights are those of keras-squeezenet, converted from its authors'; the
package ``ndf`` has them as a pickle of NumPy arrays.
"""

from __future__ import annotations

import pickle
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional
from torchvision.models.squeezenet import SqueezeNet, squeezenet1_1

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.core.registry import file_of, require
from ddm_lightning.encoders.interfaces import Images
from ddm_lightning.encoders.pretrained import encode_in_batches, on_device

_PACKAGE = "ndf"
_WEIGHTS = "ndf/example_models/weights/squeezenet_weights.pkl"
_WEIGHTS_SHA256 = "f286bbf493e6389979ed3036f960f4404e0079acdb92156500df0d4a43d085f1"
# Places in torchvision's network; fire modules follow the pooling layers.
_PLACES = {
    "conv1": "features.0",
    **{f"fire{number}": f"features.{place}" for number, place in enumerate((3, 4, 6, 7, 9, 10, 11, 12), 2)},
    "conv10": "classifier.1",
}
# Mean of ImageNet's pixels in Caffe's order: blue, green, red.
_MEAN = (104.0, 117.0, 123.0)


class _OnlyArrays(pickle.Unpickler):
    """Unpickler that builds NumPy arrays and nothing else."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in {("numpy", "ndarray"), ("numpy", "dtype"), ("numpy.core.multiarray", "_reconstruct")}:
            return super().find_class(module, name)

        raise pickle.UnpicklingError(f"{module}.{name}")


class SqueezeNetFeatures:
    """The mean over the last feature map, 512 entries, scaled to a mean square of 1 for each image.

    Without this, KID's cubic kernel shows little but the few images of highest contrast.

    Args:
        resolution: side of the resized images in pixels (bicubic, antialiased); the network was trained at 227.
        device: torch device to compute on.

    Raises:
        UserError: the package is not installed, or its weights are others.
    """

    packages = (_PACKAGE,)
    size = 512

    def __init__(self, resolution: int = 112, device: str = "cpu") -> None:
        if resolution < 32:
            raise ValueError("resolution must be at least 32")

        require("feature network 'squeezenet'", _PACKAGE, extra="mix")
        self.resolution = resolution
        self.device = torch.device(device)
        self.path = file_of(_PACKAGE, _WEIGHTS)

    def provenance(self) -> dict[str, str]:
        return {"weights_sha256": _WEIGHTS_SHA256}

    @cached_property
    def network(self) -> SqueezeNet:
        """The network with its classifier, for pixels from 0 to 255 less ``_MEAN``, blue first."""
        if not self.path.is_file() or sha256_file(self.path) != _WEIGHTS_SHA256:
            raise UserError(f"{self.path}: is missing, or differs from that of ndf 0.1.4; install it again")

        with self.path.open("rb") as stored:
            layers = _OnlyArrays(stored).load()

        state = {}
        for name, (kernel, bias) in layers.items():
            module, _, convolution = name.partition("/")
            place = f"{_PLACES[module]}.{convolution.replace('squeeze1x1', 'squeeze')}".removesuffix(".")
            # Keras has height, width, inputs, outputs.
            state[f"{place}.weight"] = torch.from_numpy(kernel).permute(3, 2, 0, 1)
            state[f"{place}.bias"] = torch.from_numpy(bias)

        network = squeezenet1_1()
        network.load_state_dict(state)
        return on_device(network.eval(), self.device)

    @torch.inference_mode()
    def encode(self, images: Images) -> Float[np.ndarray, "n 512"]:
        size = (self.resolution, self.resolution)
        network = self.network
        mean = torch.tensor(_MEAN, device=self.device).view(3, 1, 1)

        def encode(pixels: Tensor) -> Tensor:
            pixels = functional.interpolate(pixels, size, mode="bicubic", antialias=True, align_corners=False)
            found = network.features(pixels.clamp(0, 255).flip(1) - mean).mean((2, 3))
            return functional.normalize(found) * self.size**0.5

        return encode_in_batches(images, encode, (self.size,), self.device)
