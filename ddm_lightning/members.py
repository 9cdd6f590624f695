"""Members: the things that are trained alone, by name."""

from __future__ import annotations

from ddm_lightning.config import Experiment, ExpertConfig, RouterConfig
from ddm_lightning.errors import UserError

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
