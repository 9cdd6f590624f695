"""Names and roles of members: what an expert, the router, the monolith and a student are; without torch.

A new role needs an entry in ``ROLES``, a name in ``all_members``, and what differs in ``section_of`` and
``Member.resolve``; if its loss is new, an objective of training, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ddm_lightning.config.experiment import ROLE_NAMES, Experiment, ExpertConfig, PluginConfig, RouterConfig
from ddm_lightning.config.merge import expert_section
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import EXPERTS, ROUTERS
from ddm_lightning.flow.spec import ConditionSpec

if TYPE_CHECKING:
    from torch import nn

EXPERT, ROUTER, MONOLITH, STUDENT = ROLE_NAMES


@dataclass(frozen=True)
class Role:
    """What the members of a role build, and how they are trained."""

    name: str
    section: str = "expert"
    """Section of the experiment; members of one section start from the same weights."""
    objective: str = "regression"
    """Name of its objective in ``training``."""
    classifies: bool = False
    """Whether its network gives a logit per cluster, instead of a prediction of data or noise."""

    def build(
        self, network: PluginConfig, x_shape: tuple[int, int, int], condition: ConditionSpec, num_clusters: int
    ) -> nn.Module:
        """Build a network.

        Raises:
            UserError: the network is unknown or refuses its parameters.
        """
        context: dict[str, Any] = {"x_shape": tuple(x_shape), "condition": condition}
        if self.classifies:
            return ROUTERS.build(network.name, network.params, **context, num_clusters=num_clusters)

        return EXPERTS.build(network.name, network.params, **context)


ROLES = {
    EXPERT: Role(EXPERT),
    ROUTER: Role(ROUTER, section="router", objective="classification", classifies=True),
    MONOLITH: Role(MONOLITH),
    STUDENT: Role(STUDENT, objective="distillation"),
}
"""An expert trains on one cluster; the router classifies noisy samples by cluster; the monolith, with which the
ensemble is compared, trains on all clusters; the student learns the ensemble's velocity instead of the data's."""


def role_of(name: str) -> Role:
    """Role of the member ``name``, which must exist."""
    return ROLES[name.partition("-")[0]]


def expert_name(number: int) -> str:
    """Name of an expert; by default it trains on the cluster of the same number."""
    return f"{EXPERT}-{number}"


def expert_number(name: str) -> int:
    """Number of the expert ``name``."""
    return int(name.removeprefix(f"{EXPERT}-"))


def ensemble_members(experiment: Experiment) -> list[str]:
    """Names of the ensemble's members: M experts, then the router unless K = 1."""
    names = [expert_name(number) for number in range(experiment.num_experts)]
    if experiment.prepare.partition.num_clusters > 1:
        names.append(ROUTER)

    return names


def all_members(experiment: Experiment) -> list[str]:
    """Names of all members that can be trained, those of the ensemble first."""
    return [*ensemble_members(experiment), MONOLITH, STUDENT]


def parse_members(text: str, experiment: Experiment, key: str = "member") -> list[str]:
    """Parse ``member=…`` of the command line, or the value of ``key``: names separated by commas, or ``all``.

    Raises:
        UserError: the experiment has no member of that name.
    """
    if text == "all":
        return ensemble_members(experiment)

    known = all_members(experiment)
    names = [name.strip() for name in text.split(",")]
    for name in names:
        if name not in known:
            raise UserError(f"{key}={text}: unknown member {name!r}; known: {', '.join(known)}, all")

    return list(dict.fromkeys(names))


def one_member(text: str, experiment: Experiment, source: str) -> str:
    """Parse the name of one member.

    Raises:
        UserError: as ``parse_members``, or several; ``source`` begins the line.
    """
    members = parse_members(text, experiment)
    if len(members) != 1:
        raise UserError(f"{source}: name the member, such as member=expert-0")

    return members[0]


def section_of(name: str, experiment: Experiment) -> ExpertConfig | RouterConfig:
    """The member's section of the experiment, with its overrides; a student's has steps and batch of ``distill``."""
    if name == ROUTER:
        return experiment.router

    section = expert_section(name, experiment)
    if name == STUDENT:
        train = replace(
            section.train,
            max_steps=experiment.distill.max_steps or section.train.max_steps,
            global_batch_size=experiment.distill.global_batch_size or section.train.global_batch_size,
        )
        return replace(section, train=train)

    return section


def batch_size_of(name: str, experiment: Experiment) -> int:
    """Samples per optimizer step; each of M experts has 1/M of the monolith's (arXiv 2501.05450, section 4).

    So all experts together cost as much as the monolith, even if several share the noise levels of one cluster.
    """
    size = section_of(name, experiment).train.global_batch_size
    if role_of(name).name == EXPERT:
        return size // experiment.num_experts

    return size
