"""The caller's environment, read here for everybody: ranks and nodes, matplotlib's backend, a terminal's width.

Operators of clusters, notebooks and shells set variables that are not meant for this program, but that it or one of its
libraries would follow. ``enter`` removes those, so that libraries and child processes do not see them either.
"""

from __future__ import annotations

import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddm_lightning.core.errors import UserError

_NUMBERS = ("RANK", "LOCAL_RANK", "WORLD_SIZE")
"""A launcher of ranks, such as torchrun, sets all of them; operators of clusters set some, to number their pods."""
OWN_AGENT = "ddm-lightning-fit-"
"""Begins the run ids of agents that ``fit`` makes."""
_OF_RANKS = (*_NUMBERS, "LOCAL_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE")


@dataclass(frozen=True)
class Ranks:
    """This process among those that train one member; by default the only one."""

    rank: int = 0
    """Its number among all, from 0."""
    local_rank: int = 0
    """Its number on this node."""
    world_size: int = 1
    """Number of all."""
    local_world_size: int | None = None
    """Number of those on this node; None if the launcher does not say."""
    node: int = 0
    """Number of this node."""
    launched: bool = False
    """Whether a launcher such as torchrun started this process."""
    agent: str = ""
    """Run id of the agent of torchrun that started it; an agent takes an exit code other than 0 for a failure."""
    endpoint: str = ""
    """Name and port of the first of several nodes."""

    @property
    def is_first(self) -> bool:
        """Whether this process is the first of all, on all nodes."""
        return self.rank == 0 and self.node == 0

    @property
    def is_own(self) -> bool:
        """Whether another ``fit`` started this process."""
        return self.agent.startswith(OWN_AGENT)

    @classmethod
    def read(cls) -> Ranks:
        """Read the variables of a launcher; unless they are whole and fit together, this process is alone."""
        rank, local_rank, world_size = map(_number, _NUMBERS)
        if rank is None or local_rank is None or world_size is None or not local_rank <= rank < world_size:
            return ALONE

        return cls(
            rank,
            local_rank,
            world_size,
            local_world_size=_number("LOCAL_WORLD_SIZE"),
            node=_number("GROUP_RANK") or 0,
            launched=True,
            agent=os.environ.get("TORCHELASTIC_RUN_ID", ""),
        )


ALONE = Ranks()
"""A process that no launcher started."""


def _number(name: str) -> int | None:
    """Value of a variable; None if it is no whole number of at least 0."""
    text = os.environ.get(name, "")
    if re.fullmatch(r"[0-9]{1,9}", text):
        return int(text)

    return None


def enter() -> None:
    """Remove variables of the caller that would mislead this process, its libraries and its children.

    Raises:
        UserError: the current folder is gone, where importing torch would end the process in words about a library.
    """
    try:
        Path.cwd()
    except FileNotFoundError:
        raise UserError("the current folder has been removed; change to another") from None

    os.environ["MPLBACKEND"] = "agg"  # a notebook's may not be installed here; nothing is drawn on a screen
    if not _number("COLUMNS"):
        os.environ.pop("COLUMNS", None)  # rich would print tables of no width

    if not Ranks.read().launched:
        pod = _number("RANK")
        if pod is not None:
            os.environ.setdefault("NODE_RANK", str(pod))  # for island.nodes

        leave_ranks()


def check_meeting() -> None:
    """Check that several ranks know where they meet.

    Raises:
        UserError: they do not.
    """
    if Ranks.read().world_size > 1 and not (os.environ.get("MASTER_ADDR") and _number("MASTER_PORT")):
        raise UserError(
            "RANK, LOCAL_RANK and WORLD_SIZE are set, but not MASTER_ADDR and MASTER_PORT; use torchrun, or unset them"
        )


def leave_ranks() -> None:
    """Make this process and its children no ranks of a launcher."""
    for name in _OF_RANKS:
        os.environ.pop(name, None)


def place_of(nodes: int) -> tuple[int, str]:
    """Find this node's number, and name and port of the first one.

    They are in ``NODE_RANK`` and ``MASTER_ADDR``, or follow from the tasks of ``srun``, one per node.

    Args:
        nodes: ``island.nodes``.

    Raises:
        UserError: neither is there, or there are more or fewer tasks than nodes.
    """
    if nodes == 1:
        return 0, ""

    node = _number("NODE_RANK")
    if node is None:
        node = _number("GROUP_RANK")  # of a user's torchrun

    address = os.environ.get("MASTER_ADDR")
    port = os.environ.get("MASTER_PORT")
    tasks = _number("SLURM_STEP_NUM_TASKS")
    if tasks is not None and (node is None or not address):
        if tasks != nodes:
            raise UserError(
                f"key 'island.nodes' = {nodes}: srun started {tasks} tasks; start one per node: --ntasks-per-node=1"
            )

        if node is None:
            node = _number("SLURM_PROCID")

        first = re.sub(r"\[(\w+)[^]]*\]", r"\1", os.environ["SLURM_STEP_NODELIST"]).partition(",")[0]
        address = address or first
        port = port or f"{15000 + int(os.environ['SLURM_JOB_ID'][-4:])}"

    if node is None or node >= nodes or not address:
        raise UserError(
            f"key 'island.nodes' = {nodes}: which node is this? Start fit on each with srun --ntasks-per-node=1, or "
            f"with the variables MASTER_ADDR, the name of the first node, and NODE_RANK, from 0 to {nodes - 1}"
        )

    return node, f"{address}:{port or 29500}"


def import_matplotlib() -> None:
    """Import matplotlib whatever ``MPLBACKEND`` names; a backend that is installed here stays the caller's."""
    if "matplotlib" in sys.modules:
        return

    backend = os.environ.pop("MPLBACKEND", "")
    import matplotlib

    if backend:
        os.environ["MPLBACKEND"] = backend
        with suppress(ValueError):
            matplotlib.rcParams["backend"] = backend
