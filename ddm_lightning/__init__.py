"""Decentralized Diffusion Models: experts trained on islands that share no network.

A data set is split into K clusters. K flow-matching experts train on one cluster each, on machines
that never communicate, and a small router learns which cluster a noisy sample came from. For
sampling, the experts' velocities, weighted by the router, form the velocity of one model trained on
everything (McAllister, Tancik, Song, Kanazawa; CVPR 2025; arXiv 2501.05450).

    from ddm_lightning import DecentralizedEnsemble, Run

    Run("experiments/emoji_4x.yaml").fit()
    ensemble = DecentralizedEnsemble.from_pretrained("runs/emoji_4x")
    images = ensemble.sample(["red apple", "cat"], strategy="bayes", num=4, seed=0)

Importing this package imports neither torch nor Lightning. It lets a CPU torch import a torchvision built for
CUDA, so import it before Lightning, Streaming, torchmetrics or diffusers.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ddm_lightning.core import environment
from ddm_lightning.core.compat import ensure_torchvision_importable, hush_xformers
from ddm_lightning.core.errors import UserError

if TYPE_CHECKING:
    from ddm_lightning.api import Run
    from ddm_lightning.use.ensemble import DecentralizedEnsemble

__all__ = ["DecentralizedEnsemble", "Run", "UserError"]
__version__ = "0.3.0"
ensure_torchvision_importable()
hush_xformers()


_MODULES = {"DecentralizedEnsemble": "ddm_lightning.use.ensemble", "Run": "ddm_lightning.api"}


def __getattr__(name: str) -> Any:
    """Import a class, and with it torch, on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    if name == "Run":
        environment.import_matplotlib()  # before Lightning

    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    """The module's names, with those that are imported on first use."""
    return sorted({*globals(), *__all__})
