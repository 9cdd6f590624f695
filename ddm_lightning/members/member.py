"""Members: the things that are trained alone, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ddm_lightning.config import Experiment, ExpertConfig, RouterConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import EXPERTS, ROUTERS
from ddm_lightning.flow.condition import ConditionSpec
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.networks.flops import flops_per_sample
from ddm_lightning.shards.manifest import DataSizes, Manifest

ROUTER, MONOLITH = "router", "monolith"


def expert_name(cluster: int) -> str:
    """The member that trains on ``cluster``."""
    return f"expert-{cluster}"


def ensemble_members(experiment: Experiment) -> list[str]:
    """The members of the ensemble: K experts, then the router; one expert needs none."""
    num_clusters = experiment.prepare.partition.num_clusters
    return [expert_name(k) for k in range(num_clusters)] + ([ROUTER] if num_clusters > 1 else [])


def parse_members(text: str, experiment: Experiment) -> list[str]:
    """Members named by ``member=…`` on the command line: names separated by commas, or ``all``.

    Raises:
        UserError: a name that this experiment has no member for.
    """
    if text == "all":
        return ensemble_members(experiment)
    known = [*ensemble_members(experiment), MONOLITH]
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise UserError(f"member={text}: unknown member {name!r}; known: {', '.join(known)}, all")
    return list(dict.fromkeys(names))


def role_of(member: str) -> str:
    """``expert``, ``router`` or ``monolith``."""
    return member.partition("-")[0]


def config_of(member: str, experiment: Experiment) -> ExpertConfig | RouterConfig:
    """The section of the experiment that describes this member."""
    return experiment.router if member == ROUTER else experiment.expert


def clusters_of(member: str, experiment: Experiment) -> list[int]:
    """The clusters that this member trains on."""
    if role_of(member) == "expert":
        return [int(member.partition("-")[2])]
    return list(range(experiment.prepare.partition.num_clusters))


def batch_size_of(member: str, experiment: Experiment) -> int:
    """Samples per optimizer step of this member: an expert takes 1/K of the monolith's (paper, section 4)."""
    total = config_of(member, experiment).train.global_batch_size
    return total // experiment.prepare.partition.num_clusters if role_of(member) == "expert" else total


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
