"""Sample images by every method from the same noise, in parallel processes; finished ones are kept on disk."""

from __future__ import annotations

import hashlib
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from common import all_of
from flop_training import ENSEMBLE
from jaxtyping import Float, Int, UInt8
from split import encoder_of, read_split
from torch import Tensor

from ddm_lightning.config.experiment import PluginConfig, SampleConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write, sha256_file, sha256_json
from ddm_lightning.core.registry import FEATURES
from ddm_lightning.ensemble.load import load_ensemble
from ddm_lightning.ensemble.manifest import read_ensemble, single
from ddm_lightning.ensemble.sampler import sample
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.members.meta import ArtifactMeta
from ddm_lightning.members.roles import MONOLITH
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.shards.manifest import HELD_OUT

BATCH_SIZE = 125
COSTS = ("experts_per_step", "gflop_per_image", "seconds_per_image")


@dataclass(frozen=True)
class Method:
    """A way to sample from an ensemble or a monolith."""

    name: str
    """Suffix of its figures, as in ``kid_<name>``."""
    strategy: str
    """Routing strategy; any gives the same for a single network."""
    solver: str
    model: str = ENSEMBLE
    """``ensemble`` or ``monolith``."""
    params: dict[str, Any] = field(default_factory=dict)
    """Parameters of the strategy."""
    steps_factor: int = 1
    """Multiplies the number of sampling steps."""
    curve: bool = False
    """Whether to sample at every budget; others sample at the largest one."""


METHODS = (
    Method("monolith", "full", "euler", model=MONOLITH, curve=True),
    Method("monolith_ancestral", "full", "ancestral", model=MONOLITH, curve=True),
    Method("bayes", "bayes", "ancestral", curve=True),
    Method("top1", "top-1", "euler", curve=True),
    Method("full", "full", "euler"),
    Method("bayes_from_priors", "bayes", "ancestral", params={"router_prior": False}),
    Method("top1_ancestral", "top-1", "ancestral"),
    Method("full_ancestral", "full", "ancestral"),
    Method("top2", "top-k", "euler", params={"top_k": 2}),
    Method("oracle", "oracle", "euler"),
    Method("oracle_ancestral", "oracle", "ancestral"),
    Method("sample1", "sample-1", "euler", curve=True),
    Method("sample_each_step", "sample-each-step", "euler"),
    Method("monolith_ancestral_twice", "full", "ancestral", model=MONOLITH, steps_factor=2),
)


@dataclass(frozen=True)
class Settings:
    """Settings that all methods share."""

    num: int
    """Images."""
    num_steps: int
    guidance_scale: float
    seed: int


@dataclass(frozen=True)
class Task:
    """Images of one method from one set of weights."""

    method: Method
    weights: Path
    """Run folder of an ensemble or a monolith at one budget."""
    data: Run
    """Run whose held-out samples give the conditions."""
    settings: Settings
    out: Path
    """Folder of the results."""

    @property
    def path(self) -> Path:
        """Its result; the name holds a hash of all inputs."""
        member = None if self.method.model == ENSEMBLE else self.method.model
        weights = RunFolder(self.weights).sampled_from(member)
        described = {
            "weights": sha256_file(weights),
            "method": asdict(self.method),
            "settings": asdict(self.settings),
            "condition": self.data.experiment.condition.kind,
        }
        name = sha256_json(described)[:12]
        return self.out / f"{self.method.name}-{name}.npz"

    def load(self) -> tuple[Ensemble, ArtifactMeta]:
        """Load the weights, and the metadata that their experts share."""
        run = RunFolder(self.weights)
        if self.method.model == ENSEMBLE:
            manifest = read_ensemble(run.ensemble)
        else:
            manifest = single(run.artifact(self.method.model))

        return load_ensemble(manifest), manifest.meta


@dataclass(frozen=True, eq=False)
class Images:
    """Images of one method."""

    images: UInt8[np.ndarray, "n h w 3"]
    cost: dict[str, float]
    """Of an image: active experts per step, GFLOP over all steps with the router's, CPU seconds of one thread."""

    @classmethod
    def read(cls, path: Path) -> Images:
        """Read the result of ``sample_task``."""
        with np.load(path, allow_pickle=False) as stored:
            cost = zip(COSTS, stored["cost"].tolist(), strict=True)
            return cls(stored["images"], dict(cost))


def sample_all(tasks: Sequence[Task], num_jobs: int) -> list[Images]:
    """Sample whatever is missing, each task in a process of one thread; return the images of all tasks.

    Two threads of one process compute fewer images per second on two cores than two processes of one thread.
    """
    missing = [task for task in tasks if not task.path.exists()]
    processes = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_jobs, processes, torch.set_num_threads, (1,)) as pool:
        all_of([pool.submit(sample_task, task) for task in missing], "methods")

    return [Images.read(task.path) for task in tasks]


def sample_task(task: Task) -> None:
    """Sample the images of one task and write them."""
    ensemble, meta = task.load()
    settings = task.settings
    method = task.method
    condition, clusters = held_out_conditions(task.data, settings)
    start = time.process_time()
    sampling = SampleConfig(
        strategy=method.strategy,
        strategy_params=method.params,
        solver=method.solver,
        num_steps=settings.num_steps * method.steps_factor,
        guidance_scale=settings.guidance_scale,
    )
    x_0 = sample(
        ensemble,
        condition,
        settings.num,
        meta.x_shape,
        sampling,
        shift=meta.timestep_shift,
        seed=settings.seed,
        batch_size=BATCH_SIZE,
        clusters=clusters,
    )
    images = encoder_of(task.data).decode(x_0)
    seconds = (time.process_time() - start) / settings.num
    cost = ensemble.cost(meta.condition)
    figures = np.array([cost.experts, cost.gflop, seconds])
    atomic_write(task.path, lambda temporary: np.savez(temporary, images=images, cost=figures))


def condition_rows(num_held_out: int, settings: Settings) -> Tensor:
    """Held-out samples whose conditions are used: all of them, again and again, in a random order."""
    order = torch.randperm(num_held_out, generator=keyed_generator(settings.seed, "conditions"))
    return order.repeat(-(-settings.num // num_held_out))[: settings.num]


def held_out_conditions(data: Run, settings: Settings) -> tuple[Condition | None, Int[Tensor, " num"] | None]:
    """Conditions of held-out samples, and these samples' clusters; None for both without conditions.

    Raises:
        UserError: the conditions are text tokens.
    """
    kind = data.experiment.condition.kind
    if kind == "none":
        return None, None
    if kind not in ("class", "text"):
        raise UserError(f"key 'condition.kind' = {kind!r}: benchmarks read pooled vectors only; set text")

    held_out = read_split(data, HELD_OUT)
    values = held_out.labels if kind == "class" else held_out.texts
    assert values is not None, "check_experiment asks for a caption encoder"
    rows = condition_rows(len(held_out), settings)
    return Condition.of(values[rows]), held_out.clusters[rows]


def features_of(images: UInt8[np.ndarray, "n h w 3"], network: PluginConfig, stored: Path) -> Float[Tensor, "n d"]:
    """Features of images, kept in the folder ``stored`` under a hash of images and network."""
    of_images = hashlib.sha256(images.tobytes()).hexdigest()
    name = sha256_json([of_images, network.name, network.params])[:16]
    path = stored / f"{network.name}-{name}.npz"
    if not path.exists():
        features = FEATURES.build(network.name, network.params).encode(images)
        atomic_write(path, lambda temporary: np.savez(temporary, features=features))

    with np.load(path, allow_pickle=False) as found:
        return torch.from_numpy(found["features"])
