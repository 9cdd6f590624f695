"""The network of each member, untrained; no Lightning, so that what only plans or launches starts quickly."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ddm_lightning.config import Experiment
from ddm_lightning.errors import UserError
from ddm_lightning.flow.condition import ConditionSpec
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.members import ROUTER, batch_size_of, config_of
from ddm_lightning.networks.flops import flops_per_sample
from ddm_lightning.networks.registry import EXPERTS, ROUTERS
from ddm_lightning.prepare.manifest import DataSizes, Manifest


def condition_spec(experiment: Experiment, manifest: Manifest | DataSizes) -> ConditionSpec:
    """What the experts see besides ``x_t`` and t.

    Raises:
        UserError: tokens are asked for and the shards hold none.
    """
    kind = experiment.condition.kind
    if kind == "tokens":
        if manifest.token_shape is None:
            raise UserError("key 'condition.kind' = 'tokens': the shards hold no tokens; prepare them with some")
        length, size = manifest.token_shape
        return ConditionSpec(kind, size, length)
    return ConditionSpec(kind, {"text": manifest.text_size, "class": manifest.num_classes, "none": 0}[kind])


def member_condition(member: str, experiment: Experiment, manifest: Manifest | DataSizes) -> ConditionSpec:
    """``condition_spec`` for one member; an unconditional router sees none."""
    if member == ROUTER and not experiment.router.conditional:
        return ConditionSpec("none", 0)
    return condition_spec(experiment, manifest)


def build_member_network(member: str, experiment: Experiment, manifest: Manifest | DataSizes) -> nn.Module:
    """The member's network with initial weights drawn from the experiment's seed and the member's role.

    All experts start from the same weights, as the monolith does.

    Raises:
        UserError: unknown network name, or params that it does not take.
    """
    plugin = config_of(member, experiment).network
    context: dict[str, Any] = {
        "x_shape": tuple(manifest.x_shape),
        "condition": member_condition(member, experiment, manifest),
    }
    registry = EXPERTS
    if member == ROUTER:
        registry = ROUTERS
        context["num_clusters"] = experiment.prepare.partition.num_clusters
    role = "router" if member == ROUTER else "expert"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(keyed_generator(experiment.seed, "initial weights", role).initial_seed())
        network: nn.Module = registry.build(plugin.name, plugin.params, **context)
    return network


def planned_network(member: str, experiment: Experiment, manifest: Manifest | DataSizes) -> nn.Module:
    """The member's network without numbers, for whoever only plans: billions of parameters then take no memory.

    A plug-in that cannot be built so is built as it is.

    Raises:
        UserError: as ``build_member_network``.
    """
    try:
        with torch.device("meta"):
            return build_member_network(member, experiment, manifest)
    except (RuntimeError, ArithmeticError):
        return build_member_network(member, experiment, manifest)


def member_training_flops(member: str, experiment: Experiment, manifest: Manifest) -> float:
    """Measured FLOPs of a member's whole training: forward and backward of every sample it sees."""
    per_sample = flops_per_sample(
        planned_network(member, experiment, manifest),
        (manifest.x_shape[0], manifest.x_shape[1], manifest.x_shape[2]),
        member_condition(member, experiment, manifest),
        backward=True,
    )
    return per_sample * batch_size_of(member, experiment) * config_of(member, experiment).train.max_steps
