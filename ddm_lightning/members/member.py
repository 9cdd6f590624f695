"""Members: networks that train alone, resolved from an experiment and the sizes of its data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ddm_lightning.config.experiment import (
    AlignmentConfig,
    Experiment,
    PluginConfig,
    TimestepsConfig,
    TrainConfig,
    expert_section,
)
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import EXPERTS, ROUTERS
from ddm_lightning.flow.condition import ConditionSpec
from ddm_lightning.flow.path import PATHS
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.shards.manifest import DataSizes, Manifest

ROUTER, MONOLITH, STUDENT = "router", "monolith", "student"


def expert_name(cluster: int) -> str:
    """Name of the expert that trains on ``cluster``."""
    return f"expert-{cluster}"


def ensemble_members(experiment: Experiment) -> list[str]:
    """Names of the ensemble's members: K experts, then the router unless K = 1."""
    num_clusters = experiment.prepare.partition.num_clusters
    return [expert_name(k) for k in range(num_clusters)] + ([ROUTER] if num_clusters > 1 else [])


def parse_members(text: str, experiment: Experiment, key: str = "member") -> list[str]:
    """Parse ``member=…`` of the command line, or the value of ``key``: names separated by commas, or ``all``.

    Raises:
        UserError: the experiment has no member of that name.
    """
    if text == "all":
        return ensemble_members(experiment)
    known = [*ensemble_members(experiment), MONOLITH, STUDENT]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise UserError(f"{key}={text}: unknown member {name!r}; known: {', '.join(known)}, all")
    return list(dict.fromkeys(names))


def train_config(name: str, experiment: Experiment) -> TrainConfig:
    """Training settings of a member; needs no data sizes, unlike ``Member.resolve``."""
    train = experiment.router.train if name == ROUTER else expert_section(name, experiment).train
    distill = experiment.distill
    if name != STUDENT:
        return train
    return replace(
        train,
        max_steps=distill.max_steps or train.max_steps,
        global_batch_size=distill.global_batch_size or train.global_batch_size,
    )


def batch_size(name: str, experiment: Experiment) -> int:
    """Samples per optimizer step; an expert takes 1/K of the monolith's (arXiv 2501.05450, section 4)."""
    total = train_config(name, experiment).global_batch_size
    return total // experiment.prepare.partition.num_clusters if name.startswith("expert-") else total


@dataclass(frozen=True)
class Member:
    """One member, with all settings that the experiment and its data determine."""

    name: str
    """``expert-0`` …, ``router``, ``monolith`` or ``student``; keys the noise of its training."""
    role: str
    """``expert``, ``router``, ``monolith`` or ``student``."""
    section: str
    """Section of the experiment that describes it: ``expert`` or ``router``."""
    clusters: tuple[int, ...]
    """Clusters of its training data."""
    num_clusters: int
    """K of the partition."""
    seed: int
    """Seed of the experiment."""
    network: PluginConfig
    train: TrainConfig
    timesteps: TimestepsConfig
    batch_size: int
    """Samples per optimizer step, over all ranks."""
    x_shape: tuple[int, int, int]
    """Channels, height and width of ``x_0``."""
    condition: ConditionSpec
    """Kind and size of its network's condition."""
    condition_dropout: float
    """Probability of dropping a sample's condition."""
    path: str
    """Path between data and noise; ``linear`` for a router."""
    loss: str
    """Error that the loss squares: of the ``prediction`` or of the ``velocity``."""
    min_snr_gamma: float | None
    """Cap of the loss weight over timesteps; None for equal weights."""
    alignment: AlignmentConfig | None
    """Alignment with the clustering features; None for a router, and without it."""
    image_encoder: PluginConfig
    caption_encoder: PluginConfig | None

    @classmethod
    def resolve(cls, name: str, experiment: Experiment, sizes: Manifest | DataSizes) -> Member:
        """Resolve the member called ``name``.

        Raises:
            UserError: the manifest has another number of clusters, or lacks the tokens of the condition or the features
                of the alignment.
        """
        role = name.partition("-")[0]
        is_router, num_clusters = role == ROUTER, experiment.prepare.partition.num_clusters
        if isinstance(sizes, Manifest) and sizes.num_clusters != num_clusters:
            problem = f"key 'prepare.partition.num_clusters' = {num_clusters}: the manifest has {sizes.num_clusters}"
            raise UserError(f"{problem}; copy this run's prepared/manifest.json, or set it to {sizes.num_clusters}")
        expert = expert_section(name, experiment)
        alignment = None if is_router or not expert.alignment.weight else expert.alignment
        if alignment is not None and not sizes.num_features:
            problem = "the shards hold no features; prepare with prepare.shards.features=true, or set it to 0"
            raise UserError(f"key 'expert.alignment.weight' = {alignment.weight:g}: {problem}")
        config = experiment.router if is_router else expert
        unconditional = is_router and not experiment.router.conditional
        return cls(
            name=name,
            role=role,
            section="router" if is_router else "expert",
            clusters=(int(name.partition("-")[2]),) if role == "expert" else tuple(range(num_clusters)),
            num_clusters=num_clusters,
            seed=experiment.seed,
            network=config.network,
            train=train_config(name, experiment),
            timesteps=config.timesteps,
            batch_size=batch_size(name, experiment),
            x_shape=sizes.x_shape,
            condition=ConditionSpec("none", 0) if unconditional else condition_spec(experiment, sizes),
            condition_dropout=experiment.router.condition_dropout if is_router else experiment.condition.dropout,
            path="linear" if is_router else expert.path,
            loss="prediction" if is_router else expert.loss,
            min_snr_gamma=None if is_router else expert.min_snr_gamma,
            alignment=alignment,
            image_encoder=experiment.prepare.image_encoder,
            caption_encoder=experiment.prepare.caption_encoder,
        )

    def build_network(self) -> nn.Module:
        """Build the network with initial weights that depend on the seed and the section.

        All experts, the monolith and the student start from the same weights.

        Raises:
            UserError: the network is unknown, refuses its parameters or declares another path.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(keyed_generator(self.seed, "initial weights", self.section).initial_seed())
            network = make_network(self.role, self.network, self.x_shape, self.condition, self.num_clusters)
        if (path := declared_path(network)) not in (None, self.path):
            problem = f"{self.network.name!r} works on the path {path!r}, not {self.path!r}"
            raise UserError(f"expert {problem}; set expert.path={path}")
        return network

    def plan_network(self) -> nn.Module:
        """Build the network on the meta device, without memory for weights; on the CPU for plug-ins that fail there.

        Raises:
            UserError: as ``build_network``.
        """
        try:
            with torch.device("meta"):
                return self.build_network()
        except (RuntimeError, ArithmeticError):
            return self.build_network()

    def training_cost(self) -> int:
        """Parameters times training samples: roughly proportional to the FLOPs of the whole training."""
        num_parameters = sum(parameter.numel() for parameter in self.plan_network().parameters())
        return num_parameters * self.batch_size * self.train.max_steps


def make_network(
    role: str, network: PluginConfig, x_shape: tuple[int, int, int], condition: ConditionSpec, num_clusters: int
) -> nn.Module:
    """Build the network of a member of ``role``.

    Raises:
        UserError: the network is unknown or refuses its parameters.
    """
    context: dict[str, Any] = {"x_shape": tuple(x_shape), "condition": condition}
    if role == ROUTER:
        return ROUTERS.build(network.name, network.params, **context, num_clusters=num_clusters)
    return EXPERTS.build(network.name, network.params, **context)


def declared_path(network: nn.Module) -> str | None:
    """The only path that ``network`` works on, if it declares one."""
    path = getattr(network, "path", None)
    return path if isinstance(path, str) and path in PATHS else None


def portable_params(role: str, network: PluginConfig) -> dict[str, Any]:
    """Params for an artifact, in which a network may replace those that name files of this machine.

    Raises:
        UserError: the network is unknown, or such a file is missing or damaged.
    """
    factory = (ROUTERS if role == ROUTER else EXPERTS).get(network.name)
    return getattr(factory, "portable", dict)(network.params)


def condition_spec(experiment: Experiment, sizes: Manifest | DataSizes) -> ConditionSpec:
    """Kind and size of the experts' condition.

    Raises:
        UserError: the condition is tokens and the shards hold none.
    """
    kind = experiment.condition.kind
    if kind == "tokens":
        if sizes.token_shape is None:
            raise UserError("key 'condition.kind' = 'tokens': the caption encoder makes none; use clip-text or t5-text")
        length, size = sizes.token_shape
        return ConditionSpec(kind, size, length)
    return ConditionSpec(kind, {"text": sizes.text_size, "class": sizes.num_classes, "none": 0}[kind])
