"""Decentralized Diffusion Models: experts trained on islands that share no network.

A data set is split into K clusters. K flow-matching experts train on one cluster each, on machines
that never communicate, and a small router learns which cluster a noisy sample came from. For
sampling, the experts' velocities, weighted by the router, form the velocity of one model trained on
everything (McAllister, Tancik, Song, Kanazawa; CVPR 2025; arXiv 2501.05450).

    from ddm_lightning import load_ensemble

    ensemble = load_ensemble("runs/emoji_4x")
    images = ensemble.sample(["red apple", "cat"], strategy="bayes", num=4, seed=0)

Importing this package imports neither torch nor Lightning. Code that imports Lightning or Streaming
must first call ``ddm_lightning.core.compat.ensure_torchvision_importable()``.
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ddm_lightning.evaluation.samples import DecentralizedEnsemble

__all__ = ["DecentralizedEnsemble", "load_ensemble"]
__version__ = "0.1.0"


def load_ensemble(run_folder: str | Path, device: str | None = None) -> DecentralizedEnsemble:
    """Load the finished ensemble of a run, ready to sample.

    Args:
        run_folder: the experiment's ``run_dir``, or a copy.
        device: where to sample, such as ``"cuda"``; None follows the experiment's ``island.accelerator``.

    Raises:
        UserError: a file is missing, damaged or of other data.
    """
    return __getattr__("DecentralizedEnsemble")(run_folder, device)


def __getattr__(name: str) -> Any:
    """Import ``DecentralizedEnsemble``, and with it torch, on first use."""
    if name != "DecentralizedEnsemble":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module("ddm_lightning.evaluation.samples").DecentralizedEnsemble
