"""Feature networks of the transformers and timm libraries.

Both see the whole picture, stretched to the size that the network takes (antialiased); nothing is cropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor
from torch.nn import functional

from ddm_lightning.core.checks import is_int
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import FEATURES, require
from ddm_lightning.encoders.pretrained import (
    EXTRA,
    compute_type,
    find_model,
    loading,
    parse_device,
    refuse_absent,
    refuse_missing,
)

_PICTURES_AT_ONCE = {"cpu": 16, "cuda": 256}
# Of ImageNet's pixels from 0 to 1, as everybody rounds them.
_MEAN, _STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@FEATURES.register("dinov2")
class DinoV2:
    """DINOv2's class token after the last norm (Oquab et al. 2023, arXiv 2304.07193), with or without registers.

    Args:
        path: folder of the model, or ``owner/name`` on the Hugging Face hub.
        subfolder: where in it.
        revision: commit, tag or branch on the hub.
        resolution: pictures are resized to this many pixels, a multiple of the patch size, which is 14 as published.
        device: torch device that computes.
        compute_dtype: type in which it computes.

    Raises:
        UserError: a package, a folder or a file is missing, cut short, or of another kind.
        ValueError: a value outside its choices.
    """

    packages: tuple[str, ...] = ("transformers",)

    def __init__(
        self,
        path: str,
        subfolder: str | None = None,
        revision: str | None = None,
        resolution: int = 224,
        device: str = "cpu",
        compute_dtype: str = "float32",
    ) -> None:
        self.device, self.compute_dtype = parse_device(device), compute_type(compute_dtype)
        self._place = "feature network 'dinov2'"
        require(self._place, *self.packages, extra=EXTRA)
        kinds = {"model_type": ["dinov2", "dinov2_with_registers"]}
        self.model = find_model(self._place, path, subfolder, revision, "model", kinds)
        patch, self.size = (self.model.config.get(key, 0) for key in ("patch_size", "hidden_size"))
        if not is_int(patch, 1) or not is_int(self.size, 1):
            raise UserError(
                f"{self.model.folder / 'config.json'}: patch_size and hidden_size must be integers of at least 1; "
                f"copy or download the model again"
            )
        if resolution < patch or resolution % patch:
            raise ValueError(f"resolution = {resolution} must be a multiple of the model's patch size, {patch}")
        self.resolution = resolution

    def provenance(self) -> dict[str, str]:
        """Hashes of weights and configuration, and the hub's commit."""
        return self.model.provenance()

    @cached_property
    def _network(self) -> Any:
        with loading(self.model.folder, "a Dinov2Model"):
            from transformers import Dinov2Model, Dinov2WithRegistersModel

            kind = Dinov2Model if self.model.config["model_type"] == "dinov2" else Dinov2WithRegistersModel
            network, info = kind.from_pretrained(
                self.model.folder,
                dtype=self.compute_dtype,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
            )
            refuse_missing(info["missing_keys"])
        return network.eval().requires_grad_(False).to(self.device)

    @torch.inference_mode()
    def encode(self, images: UInt8[np.ndarray, "n h w 3"]) -> Float[np.ndarray, "n size"]:
        """Pictures to features, float32.

        Raises:
            UserError: the weights do not load, or no such device.
        """
        refuse_absent(self.device, self._place)
        out = np.empty((len(images), self.size), np.float32)
        for rows, pixels in _batches(images, (self.resolution, self.resolution), "bicubic", _MEAN, _STD, self.device):
            tokens = self._network(pixel_values=pixels.to(self.compute_dtype)).last_hidden_state
            out[rows] = tokens[:, 0].float().cpu().numpy()
        return out


@FEATURES.register("timm")
class TimmFeatures:
    """Pooled features of any network of the timm library that takes colour pictures.

    The size of its pictures, their mean and standard deviation are those of its ``config.json``.

    Args:
        path: folder as on the hub (``config.json`` with ``architecture``, and ``model.safetensors``), or the name
            there, such as ``timm/resnet50.a1_in1k``.
        revision: commit, tag or branch on the hub.
        device: torch device that computes.
        compute_dtype: type in which it computes.

    Raises:
        UserError: a package, a folder or a file is missing, cut short, or names a network that timm does not know.
        ValueError: a value outside its choices.
    """

    packages: tuple[str, ...] = ("timm",)

    def __init__(
        self, path: str, revision: str | None = None, device: str = "cpu", compute_dtype: str = "float32"
    ) -> None:
        self.device, self.compute_dtype = parse_device(device), compute_type(compute_dtype)
        self._place = "feature network 'timm'"
        require(self._place, *self.packages, extra=EXTRA)
        self.model = find_model(self._place, path, None, revision, "model", {})
        with loading(self.model.folder, "a network of timm"):
            import timm

            if not timm.is_model(self.model.config["architecture"]):
                raise ValueError(f"timm {timm.__version__} knows no {self.model.config['architecture']!r}")

    def provenance(self) -> dict[str, str]:
        """Hashes of weights and configuration, and the hub's commit."""
        return self.model.provenance()

    @cached_property
    def _network(self) -> tuple[Any, dict[str, Any]]:
        """The network and how it wants its pictures."""
        with loading(self.model.folder, "a network of timm"):
            import timm

            # With the classes that the file has, because timm checks that no weight is missing only then.
            network = timm.create_model(f"local-dir:{self.model.folder}", pretrained=True)
            network.reset_classifier(0)
            wanted = timm.data.resolve_model_data_config(network)
            if wanted["input_size"][0] != 3:
                raise ValueError(f"it takes pictures of {wanted['input_size'][0]} channels, not 3")
        network = network.eval().requires_grad_(False)
        return network.to(self.device, self.compute_dtype), wanted

    @cached_property
    def size(self) -> int:
        """Entries of a vector; loads the weights."""
        return int(self._network[0].head_hidden_size)

    @torch.inference_mode()
    def encode(self, images: UInt8[np.ndarray, "n h w 3"]) -> Float[np.ndarray, "n size"]:
        """Pictures to features, float32.

        Raises:
            UserError: the weights do not load, or no such device.
        """
        refuse_absent(self.device, self._place)
        network, wanted = self._network
        out = np.empty((len(images), self.size), np.float32)
        mode = "bilinear" if wanted["interpolation"] == "bilinear" else "bicubic"
        for rows, pixels in _batches(
            images, wanted["input_size"][1:], mode, wanted["mean"], wanted["std"], self.device
        ):
            out[rows] = network(pixels.to(self.compute_dtype)).float().cpu().numpy()
        return out


def _batches(
    images: UInt8[np.ndarray, "n h w 3"],
    size: Sequence[int],
    mode: str,
    mean: Sequence[float],
    std: Sequence[float],
    device: torch.device,
) -> Any:
    """Rows of each batch and its pictures [m 3 height width], resized, from 0 to 1, then normalised."""
    at_once = _PICTURES_AT_ONCE.get(device.type, _PICTURES_AT_ONCE["cuda"])
    shift, scale = (torch.tensor(values, device=device).view(1, 3, 1, 1) for values in (mean, std))
    for start in range(0, len(images), at_once):
        rows = slice(start, min(start + at_once, len(images)))
        # Channels last in memory already, as the pixels lie in the array.
        pixels: Tensor = torch.from_numpy(np.array(images[rows])).permute(0, 3, 1, 2).to(device).float() / 255
        if pixels.shape[2:] != tuple(size):
            pixels = functional.interpolate(pixels, tuple(size), mode=mode, antialias=True, align_corners=False)
        yield rows, (pixels.clamp(0, 1) - shift) / scale
