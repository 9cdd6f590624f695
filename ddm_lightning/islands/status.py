"""Status of a run's members on all islands, read from its URL."""

from __future__ import annotations

from ddm_lightning.core import checks
from ddm_lightning.islands.lease import newest_generation, read_lease
from ddm_lightning.islands.shared import reaching
from ddm_lightning.members.roles import all_members
from ddm_lightning.members.run import Run
from ddm_lightning.members.status import MemberStatus


def statuses(run: Run) -> list[MemberStatus]:
    """Newest status of the ensemble's members, and of others that have started: from the run's URL if it has one.

    Raises:
        UserError: the URL cannot be read, or a status is damaged.
    """
    if run.url is None:
        return [run.status(name) for name in run.started]
    found = []
    with reaching():
        for name in all_members(run.experiment):
            url = f"{run.url}/members/{name}/lease"
            generation = newest_generation(url)
            fields = read_lease(url, generation).get("status") if generation else None
            if fields and checks.problem_with(fields, checks.field_checks(MemberStatus)) is None:
                found.append(MemberStatus(**fields))
            elif name in run.names:
                found.append(MemberStatus(name, run.max_steps(name), state="starting" if generation else "waiting"))
    return found
