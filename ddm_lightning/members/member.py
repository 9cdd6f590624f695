"""Members: networks that train alone, resolved from an experiment and the sizes of its data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ddm_lightning.config.experiment import (
    Experiment,
    ExpertConfig,
    InitConfig,
    LoraConfig,
    PluginConfig,
    TimestepsConfig,
    TrainConfig,
)
from ddm_lightning.config.merge import init_of
from ddm_lightning.core.errors import UserError
from ddm_lightning.flow.condition import ConditionSpec
from ddm_lightning.flow.path import PATHS
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.members.roles import Role, role_of
from ddm_lightning.networks.lora import adapt
from ddm_lightning.shards.manifest import DataSizes, Manifest


@dataclass(frozen=True)
class Member:
    """One member, with all settings that the experiment and its data determine."""

    name: str
    """``expert-0`` …, ``router``, ``monolith`` or ``student``; keys the noise of its training."""
    role: Role
    """Its kind: what it builds, trains on and hands over."""
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
    """Squared error in the loss: of the ``prediction`` or of the ``velocity``."""
    image_encoder: PluginConfig
    caption_encoder: PluginConfig | None
    init_from: InitConfig | None = None
    """Weights that it starts from; None for random ones."""
    lora: LoraConfig | None = None
    """Adapters that it trains instead of all weights."""
    interval: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest t that it trains on, in times of the linear path; only experts may have less than [0, 1]."""

    @classmethod
    def resolve(cls, name: str, experiment: Experiment, sizes: Manifest | DataSizes) -> Member:
        """Resolve the member called ``name``.

        Raises:
            UserError: the manifest has another number of clusters, or lacks the tokens of the condition.
        """
        num_clusters = experiment.prepare.partition.num_clusters
        if isinstance(sizes, Manifest) and sizes.num_clusters != num_clusters:
            raise UserError(
                f"key 'prepare.partition.num_clusters' = {num_clusters}: the manifest has {sizes.num_clusters}; "
                f"copy this run's prepared/manifest.json, or set it to {sizes.num_clusters}"
            )
        role = role_of(name)
        config = role.config(name, experiment)
        expert = config if isinstance(config, ExpertConfig) else None
        condition, condition_dropout = role.condition(experiment, sizes)
        return cls(
            name=name,
            role=role,
            clusters=role.clusters(name, experiment),
            num_clusters=num_clusters,
            seed=experiment.seed,
            network=config.network,
            init_from=init_of(config),
            lora=expert.network.lora if expert else None,
            train=role.train(name, experiment),
            timesteps=config.timesteps,
            batch_size=role.batch_size(name, experiment),
            x_shape=sizes.x_shape,
            condition=condition,
            condition_dropout=condition_dropout,
            path=expert.path if expert else "linear",
            loss=expert.loss if expert else "prediction",
            image_encoder=experiment.prepare.image_encoder,
            caption_encoder=experiment.prepare.caption_encoder,
            interval=(expert.interval[0], expert.interval[1]) if expert else (0.0, 1.0),
        )

    def build_network(self) -> nn.Module:
        """Build the network with initial weights that depend on the seed and the section.

        All experts, the monolith and the student start from the same weights.

        Raises:
            UserError: the network is unknown, refuses its parameters or declares another path.
        """
        with self._seeded("initial weights"):
            network = self.role.build(self.network, self.x_shape, self.condition, self.num_clusters)
        if (path := declared_path(network)) not in (None, self.path):
            raise UserError(
                f"expert {self.network.name!r} works on the path {path!r}, not {self.path!r}; set expert.path={path}"
            )
        return network

    def adapted(self, network: nn.Module, base: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Freeze a network's weights and add the member's adapters, in place; nothing if it trains all weights.

        Args:
            network: the built network.
            base: weights to freeze, by their names in the network; None for its own, all of them.

        Raises:
            UserError: as ``lora.adapt``.
        """
        if self.lora is not None:
            with self._seeded("adapters"):
                adapt(network, self.lora, network.state_dict() if base is None else base)
        return network

    @contextmanager
    def _seeded(self, purpose: str) -> Iterator[None]:
        """Seed torch's generator within the block, alike for all members of a section."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(keyed_generator(self.seed, purpose, self.role.section).initial_seed())
            yield

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


def declared_path(network: nn.Module) -> str | None:
    """The only path that ``network`` works on, if it declares one."""
    path = getattr(network, "path", None)
    return path if isinstance(path, str) and path in PATHS else None
