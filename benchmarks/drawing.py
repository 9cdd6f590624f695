"""Images by every method from the same noise for the same conditions, kept on disk once they are drawn."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from ddm_lightning.core.files import atomic_write, sha256_json
from ddm_lightning.core.registry import STRATEGIES
from ddm_lightning.encoders.interfaces import ImageEncoder
from ddm_lightning.ensemble.load import LoadedEnsemble
from ddm_lightning.ensemble.routing import sample
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.evaluation.metrics.kid import FEATURE_NETWORK, RESOLUTION, image_features
from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.networks.flops import flops_per_sample

BATCH_SIZE = 125


@dataclass(frozen=True)
class Method:
    """A way of drawing."""

    name: str
    """In figures: ``kid_<name>``."""
    strategy: str
    """Of the ensemble; a monolith is an ensemble of one, for which all are the same."""
    solver: str
    monolith: bool = False
    params: dict[str, Any] = field(default_factory=dict)
    """Of the strategy."""
    control: bool = False
    """Left out by ``--quick``."""


METHODS = (
    Method("top1", "top-1", "euler"),
    Method("full", "full", "euler"),
    Method("bayes", "bayes", "ancestral"),
    Method("monolith", "full", "euler", monolith=True),
    Method("monolith_ancestral", "full", "ancestral", monolith=True),
    Method("top1_ancestral", "top-1", "ancestral", control=True),
    Method("full_ancestral", "full", "ancestral", control=True),
    Method("bayes_from_priors", "bayes", "ancestral", params={"router_prior": False}, control=True),
)


@dataclass(frozen=True)
class Settings:
    """What all methods share."""

    num: int
    num_steps: int
    guidance_scale: float
    seed: int


@dataclass(frozen=True, eq=False)
class Drawn:
    """What one method drew."""

    images: UInt8[np.ndarray, "n h w 3"]
    features: Float[Tensor, "n d"]
    experts_a_step: float
    """Expert evaluations an image and step; guidance needs two for each expert."""
    gflop_a_step: float
    """Measured forward GFLOP an image and step, the router's included."""


class Cache:
    """Named arrays in ``.npz`` files, found again by what they were made from."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def get(
        self, name: str, made_from: dict[str, Any], make: Callable[[], dict[str, np.ndarray]]
    ) -> dict[str, np.ndarray]:
        """The arrays called ``name`` that were made from ``made_from``, made now if they are not there."""
        path = self.folder / f"{name}-{sha256_json(made_from)[:12]}.npz"
        if not path.exists():
            arrays = make()
            atomic_write(path, lambda temporary: np.savez(temporary, **arrays))
        with np.load(path, allow_pickle=False) as stored:
            return {key: stored[key] for key in stored.files}


def real_features(
    cache: Cache, name: str, x_0: Float[Tensor, "n c h w"], encoder: ImageEncoder
) -> Float[Tensor, "n d"]:
    """Features of a split's images, as the image encoder gives them back."""
    made_from = {"x_0": _digest(x_0), "features": [FEATURE_NETWORK, RESOLUTION]}
    arrays = cache.get(name, made_from, lambda: {"features": image_features(encoder.decode(x_0)).numpy()})
    return torch.from_numpy(arrays["features"])


def draw(
    method: Method,
    loaded: LoadedEnsemble,
    weights_sha256: str,
    condition: Condition | None,
    settings: Settings,
    encoder: ImageEncoder,
    cache: Cache,
    progress: Callable[[float], object],
) -> Drawn:
    """Draw images, or find those that an earlier call drew from the same weights with the same settings.

    Args:
        method: how.
        loaded: the ensemble, or the monolith as an ensemble of one.
        weights_sha256: stands for the weights of all its networks.
        condition: one an image.
        settings: how many, in how many steps.
        encoder: turns x_0 into images.
        cache: where they are kept.
        progress: called with the number of images that are done.
    """
    made_from = {
        "weights": weights_sha256,
        "method": asdict(method),
        "settings": asdict(settings),
        "condition": None if condition is None else _digest(condition.values),
        "features": [FEATURE_NETWORK, RESOLUTION],
    }
    ensemble = loaded.ensemble

    def make() -> dict[str, np.ndarray]:
        before = ensemble.expert_rows
        with _RowCounter(ensemble.router) as routed:
            x_0 = sample(
                ensemble,
                condition,
                settings.num,
                loaded.meta.x_shape,
                strategy=STRATEGIES.build(method.strategy, method.params),
                solver=method.solver,
                num_steps=settings.num_steps,
                shift=loaded.meta.timestep_shift,
                guidance_scale=settings.guidance_scale,
                seed=settings.seed,
                batch_size=BATCH_SIZE,
                progress=progress,
            )
        images = encoder.decode(x_0)
        rows = np.array([ensemble.expert_rows - before, routed.rows])
        return {"images": images, "features": image_features(images).numpy(), "rows": rows}

    arrays = cache.get(method.name, made_from, make)
    progress(settings.num)
    expert_rows, router_rows = (int(rows) for rows in arrays["rows"])
    steps = settings.num * settings.num_steps
    of_expert, of_router = _forward_flops(loaded)
    return Drawn(
        arrays["images"],
        torch.from_numpy(arrays["features"]),
        expert_rows / steps,
        (expert_rows * of_expert + router_rows * of_router) / steps / 1e9,
    )


class _RowCounter:
    """Counts the rows that a network is evaluated on."""

    def __init__(self, network: nn.Module | None) -> None:
        self.rows = 0
        self._network = network

    def __enter__(self) -> _RowCounter:
        if self._network is not None:
            self._hook = self._network.register_forward_hook(self._count)
        return self

    def __exit__(self, *_: object) -> None:
        if self._network is not None:
            self._hook.remove()

    def _count(self, _network: nn.Module, _inputs: Any, output: Tensor) -> None:
        self.rows += len(output)


def _forward_flops(loaded: LoadedEnsemble) -> tuple[float, float]:
    """Measured FLOPs of one row of an expert and of the router."""
    ensemble: Ensemble = loaded.ensemble
    spec = ConditionSpec.from_dict(loaded.meta.condition)
    of_expert = flops_per_sample(ensemble.experts[0], loaded.meta.x_shape, spec, backward=False)
    if ensemble.router is None:
        return of_expert, 0.0
    router_spec = spec if ensemble.router_conditional else ConditionSpec("none", 0)
    return of_expert, flops_per_sample(ensemble.router, loaded.meta.x_shape, router_spec, backward=False)


def _digest(values: Tensor) -> str:
    return hashlib.sha256(values.contiguous().numpy().tobytes()).hexdigest()
