"""Members, the networks that train alone, resolved from an experiment and the sizes of its data."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

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
from ddm_lightning.config.merge import expert_clusters, init_of
from ddm_lightning.core.buckets import Bucket
from ddm_lightning.core.errors import UserError
from ddm_lightning.flow.path import PATHS
from ddm_lightning.flow.randomness import keyed_seed
from ddm_lightning.flow.spec import ConditionSpec, shift_for
from ddm_lightning.members.roles import EXPERT, Role, batch_size_of, expert_number, role_of, section_of
from ddm_lightning.networks.lora import adapt
from ddm_lightning.shards.manifest import DataSizes, Manifest

if TYPE_CHECKING:
    from ddm_lightning.members.initial import Initial


def condition_spec(experiment: Experiment, sizes: Manifest | DataSizes) -> ConditionSpec:
    """Kind and size of the experts' condition.

    Raises:
        UserError: the condition is tokens and the shards hold none.
    """
    kind = experiment.condition.kind
    if "tokens" in kind:
        if sizes.token_shape is None:
            raise UserError(
                f"key 'condition.kind' = {kind!r}: the caption encoder makes no tokens; set its param 'store' or "
                "'max_tokens', or take one that has such a param (docs/data.md)"
            )

        length, size = sizes.token_shape
        return ConditionSpec(kind, size, length, sizes.text_size if "text" in kind else 0)

    return ConditionSpec(kind, {"text": sizes.text_size, "class": sizes.num_classes, "none": 0}[kind])


@dataclass(frozen=True)
class Member:
    """One member, with all settings that the experiment and its data determine."""

    name: str
    """``expert-0`` …, ``router``, ``monolith`` or ``student``; keys the noise of its training."""
    role: Role
    """What it builds, and its objective."""
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
    """Channels, height and width of ``x_0``; with buckets, of a square image of the same area."""
    condition: ConditionSpec
    """Kind and size of its network's condition."""
    condition_dropout: float
    """Probability of dropping a sample's condition."""
    path: str
    """Path between data and noise; ``linear`` for a router."""
    loss: str
    """Whether the loss is the squared error of the ``prediction`` or of the implied ``velocity``."""
    image_encoder: PluginConfig
    caption_encoder: PluginConfig | None
    init_from: InitConfig | None = None
    """Weights that it starts from; None for random ones."""
    lora: LoraConfig | None = None
    """Adapters that it trains instead of all weights."""
    buckets: tuple[Bucket, ...] = ()
    """Shapes of its images; none if all have ``x_shape``."""
    bucket_shares: tuple[float, ...] = ()
    """Shares of its training samples that have the shape of each bucket; equal before the data is prepared."""
    interval: tuple[float, float] = (0.0, 1.0)
    """Lowest and highest t that it trains on, in times of the linear path; only experts may have less than [0, 1]."""
    initial: Initial | None = field(default=None, compare=False, repr=False)
    """The weights that it starts from, set by ``Run.resolve``; None for random ones."""

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
        config = section_of(name, experiment)
        clusters = tuple(range(num_clusters))
        if role.name == EXPERT:
            clusters = (expert_clusters(experiment)[expert_number(name)],)

        if isinstance(config, ExpertConfig):
            expert = config
            condition = condition_spec(experiment, sizes)
            condition_dropout = experiment.condition.dropout
        else:
            expert = ExpertConfig()  # a router has defaults: the linear path, all times, no adapters
            condition = condition_spec(experiment, sizes) if config.conditional else ConditionSpec("none", 0)
            condition_dropout = config.condition_dropout

        return cls(
            name=name,
            role=role,
            clusters=clusters,
            num_clusters=num_clusters,
            seed=experiment.seed,
            network=config.network,
            init_from=init_of(config),
            lora=expert.network.lora,
            train=config.train,
            timesteps=config.timesteps,
            batch_size=batch_size_of(name, experiment),
            x_shape=sizes.x_shape,
            condition=condition,
            condition_dropout=condition_dropout,
            path=expert.path,
            loss=expert.loss,
            image_encoder=experiment.prepare.image_encoder,
            caption_encoder=experiment.prepare.caption_encoder,
            buckets=sizes.buckets,
            bucket_shares=_bucket_shares(sizes, clusters),
            interval=(expert.interval[0], expert.interval[1]),
        )

    @property
    def largest_shape(self) -> tuple[int, int, int]:
        """Shape of its samples of most cells, whose batch needs most memory."""
        return max((bucket.x_shape for bucket in self.buckets), key=math.prod, default=self.x_shape)

    def shift_for(self, shape: Sequence[int]) -> float:
        """Shift of the times of samples whose shape ends with height and width."""
        return shift_for(shape, self.x_shape, self.timesteps.shift, self.timesteps.shift_by_tokens)

    def build_network(self) -> nn.Module:
        """Build the network with initial weights that depend on the seed and the section.

        All experts, the monolith and the student start from the same weights.

        Raises:
            UserError: the network is unknown, refuses its parameters or declares another path.
        """
        with self._seeded("initial weights"):
            network = self.role.build(self.network, self.x_shape, self.condition, self.num_clusters)

        path = declared_path(network)
        if path not in (None, self.path):
            raise UserError(
                f"expert {self.network.name!r} works on the path {path!r}, not {self.path!r}; set expert.path={path}"
            )

        return network

    def add_adapters(self, network: nn.Module, base: Mapping[str, Tensor] | None = None) -> nn.Module:
        """Freeze a network's weights and add the member's adapters, in place; do nothing if it trains all weights.

        Args:
            network: the built network.
            base: weights to load and freeze, by their names in the network; None to freeze all of its own.

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
            torch.manual_seed(keyed_seed(self.seed, purpose, self.role.section))
            yield

    def plan_network(self) -> nn.Module:
        """Build the network on the meta device, without memory for weights; on the CPU for plug-ins that fail there.

        Raises:
            UserError: as ``build_network``.
        """
        try:
            with torch.device("meta"):
                return self.build_network()
        except UserError:
            return self.build_network()


def _bucket_shares(sizes: Manifest | DataSizes, clusters: Sequence[int]) -> tuple[float, ...]:
    nums = [1] * len(sizes.buckets)
    if isinstance(sizes, Manifest):
        for number, of_clusters in enumerate(sizes.bucket_samples):
            nums[number] = sum(of_clusters[cluster].train for cluster in clusters)

    total = max(1, sum(nums))  # too few samples are refused elsewhere
    return tuple(num / total for num in nums)


def declared_path(network: nn.Module) -> str | None:
    """The only path that ``network`` works on, if it declares one."""
    path = getattr(network, "path", None)
    if isinstance(path, str) and path in PATHS:
        return path

    return None
