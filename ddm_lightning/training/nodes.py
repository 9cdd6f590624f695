"""Nodes that train one member together: which one this is, and why another one has failed.

Each runs ``fit``, which starts the ranks of its node. The first node also holds the member's lease and publishes.
"""

from __future__ import annotations

import os
import re
import time
from contextlib import suppress
from typing import Any, NamedTuple

from torch.distributed import DistError

from ddm_lightning.core.errors import UserError

MEETING_SECONDS = 1800
"""Time for all nodes to start ``fit``; node 0 first fetches the newest checkpoint."""
RESUMES = "the same command resumes at the newest checkpoint"
_OTHERS_TELL_SECONDS = 5.0
_POLL_SECONDS = 0.1
_FAILURE = "failure"
# Ends of the messages of gloo and NCCL.
_LOST = ("closed by peer", "reset by peer", "Remote Error", "remote process exited")


class Place(NamedTuple):
    """Where a node is among those of a member."""

    node: int
    """Its number, from 0."""
    endpoint: str
    """Name and port of the first node."""


def place_of(nodes: int) -> Place:
    """Find this node's place: among the tasks of ``srun``, one per node, or from ``NODE_RANK`` and ``MASTER_ADDR``.

    Args:
        nodes: ``island.nodes``.

    Raises:
        UserError: neither is there, or there are more or fewer tasks than nodes.
    """
    if nodes == 1:
        return Place(0, "")
    node, address, port = (os.environ.get(name) for name in ("NODE_RANK", "MASTER_ADDR", "MASTER_PORT"))
    if (tasks := os.environ.get("SLURM_STEP_NUM_TASKS")) is not None:
        if int(tasks) != nodes:
            raise UserError(
                f"key 'island.nodes' = {nodes}: srun started {tasks} tasks; start one per node: --ntasks-per-node=1"
            )
        node = node or os.environ["SLURM_PROCID"]
        first = re.sub(r"\[(\w+)[^]]*\]", r"\1", os.environ["SLURM_STEP_NODELIST"]).partition(",")[0]
        address = address or first
        port = port or f"{15000 + int(os.environ['SLURM_JOB_ID'][-4:])}"
    node = node or os.environ.get("GROUP_RANK")  # of the user's torchrun
    if not (node and address and node.isdigit() and int(node) < nodes):
        raise UserError(
            f"key 'island.nodes' = {nodes}: which node is this? Start fit on each with srun --ntasks-per-node=1, or "
            f"with the variables MASTER_ADDR, the name of the first node, and NODE_RANK, from 0 to {nodes - 1}"
        )
    return Place(int(node), f"{address}:{port or 29500}")


def failure(store: Any) -> str | None:
    """Why a node has failed, if one has; ``store`` is shared by torchrun's agents."""
    try:
        return str(store.get(_FAILURE).decode()) if store.check([_FAILURE]) else None
    except DistError:
        return f"node 0 is gone; {RESUMES}"


def tell(store: Any, place: Place, reason: str) -> None:
    """Tell the other nodes that this one has failed, so that they end."""
    with suppress(DistError):
        store.set(_FAILURE, f"node {place.node}: {reason}")
    if place.endpoint and place.node == 0:
        time.sleep(1.0)  # with this process, the store ends


def first_cause(own: Exception, store: Any, place: Place) -> Exception:
    """Choose between this node's error and that of another, which may have failed before and been the cause."""
    end = time.monotonic() + (_OTHERS_TELL_SECONDS if place.endpoint and not isinstance(own, UserError) else 0.0)
    while (reason := failure(store)) is None and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)
    if reason:
        return UserError(reason)
    if place.endpoint and any(words in str(own) for words in _LOST):
        own = UserError(f"another node is gone; {RESUMES}")
    tell(store, place, str(own).strip().splitlines()[-1])
    return own
