"""A pipeline of diffusers over a saved ensemble; needs the extra ``latents``, which brings diffusers."""

from __future__ import annotations

from functools import cached_property, wraps
from pathlib import Path
from typing import Any, NoReturn

import torch
from diffusers import DiffusionPipeline, ModelMixin

from ddm_lightning.core.errors import UserError
from ddm_lightning.use.call import device_and_dtype
from ddm_lightning.use.ensemble import DecentralizedEnsemble
from ddm_lightning.use.export import export_diffusers


class Place(ModelMixin):  # type: ignore[misc]
    """A component without weights, because diffusers hands ``device_map`` and ``torch_dtype`` to components alone."""

    @classmethod
    def from_pretrained(cls, _: str, device_map: Any = None, torch_dtype: Any = None, **__: Any) -> tuple[Any, Any]:
        """Return device and dtype, None if not given.

        Raises:
            UserError: torch cannot use them.
        """
        return device_and_dtype(device_map, torch_dtype)

    @classmethod
    def load_config(cls, *_: Any, **__: Any) -> NoReturn:
        """Refuse to be spread over several devices."""
        raise UserError("device_map: give a device such as 'cuda', and use .ensemble for experts that take turns on it")


class DecentralizedPipeline(DiffusionPipeline):  # type: ignore[misc]  # diffusers is not checked
    """Text- or class-to-image with a decentralized ensemble, called like other pipelines of diffusers."""

    _optional_components = ["place"]  # noqa: RUF012  diffusers reads a list

    def __init__(self, allow_paths: bool = False, place: Any = None) -> None:
        super().__init__()
        self._allow_paths = allow_paths
        device, dtype = place or (None, None)
        self._device = device or torch.device("cpu")
        self._dtype: torch.dtype | None = dtype

    @cached_property
    def ensemble(self) -> DecentralizedEnsemble:
        """The ensemble of the folder; loaded at first use, because diffusers sets the folder after construction."""
        return DecentralizedEnsemble.from_pretrained(
            self.config["_name_or_path"], self._device, dtype=self._dtype, allow_paths=self._allow_paths
        )

    @property
    def device(self) -> torch.device:
        """Where it samples."""
        return self._device

    @property
    def dtype(self) -> torch.dtype:
        """As of the ensemble."""
        return self.ensemble.dtype

    def to(self, *places: torch.device | str | torch.dtype, **named: Any) -> DecentralizedPipeline:
        """Choose the device, onto which the next call loads the ensemble, and the dtype of later calls.

        Args:
            places, named: as in ``DecentralizedEnsemble.to``.

        Raises:
            UserError: torch cannot use them.
        """
        device, dtype = device_and_dtype(*places, **named)
        if "ensemble" in vars(self):
            self.ensemble.to(device, dtype)

        self._device = device or self._device
        self._dtype = dtype or self._dtype
        return self

    def save_pretrained(self, save_directory: str | Path, **_: Any) -> None:
        """Export the ensemble to a new folder."""
        export_diffusers(self.ensemble.manifest, Path(save_directory))

    @wraps(DecentralizedEnsemble.__call__)
    def __call__(self, *given: Any, **named: Any) -> Any:
        self.ensemble.set_progress_bar_config(**getattr(self, "_progress_bar_config", {}))
        return self.ensemble(*given, **named)
