"""Ranks of one member: processes as torchrun sets them, the agent that starts those of a node, and the other nodes.

``fit`` on several devices is the agent's process: it starts the same command once per device, waits, hands on requests
to stop, and says why the training failed. Ranks print nothing about a failure: ``recorded`` leaves it to the agent. A
user's own torchrun may start the ranks, too. On several nodes, ``fit`` runs on each; the first one also holds the
member's lease and publishes. A node that fails tells the others why.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.distributed import DistError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, get_error_handler
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.rendezvous import rendezvous

from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.core.environment import OWN_AGENT, Ranks, leave_ranks, place_of
from ddm_lightning.core.errors import UserError, first_line, line_of, say
from ddm_lightning.core.processes import on_orphaned, on_stop_signal
from ddm_lightning.members.run import Run

RENDEZVOUS_SECONDS = 1800
"""Time for all nodes to start ``fit``; node 0 first fetches the newest checkpoint."""
RESUMES = "the same command resumes at the newest checkpoint"
_OTHERS_TELL_SECONDS = 5.0
_FAILURE = "failure"
# Ends of the messages of gloo and NCCL.
_LOST = ("closed by peer", "reset by peer", "Remote Error", "remote process exited")
_POLL_SECONDS = 0.1
POLL_STEPS = 10
"""Steps after which ranks ask one another whether one was told to stop."""
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
"""Variable of a rank that an agent of torchrun started: where it expects the rank's error."""
_STATE = "state"
"""File beside that of an error; see ``report_state``."""


def own_place(island: IslandConfig) -> Ranks:
    """Return this process's place among the ranks and nodes of a member; ask once and pass it on.

    Raises:
        UserError: a launcher such as torchrun did not start one rank per device, in all or on this node, or nothing
            says which node this is.
    """
    mine = Ranks.read()
    of_node = mine.local_world_size or mine.world_size // island.nodes
    fits = (mine.world_size, of_node) == (island.num_ranks, island.devices)
    if mine.launched and not fits:
        if mine.world_size == 1 and not mine.agent:
            leave_ranks()
            return own_place(island)

        raise UserError(
            f"{mine.world_size} processes of fit were started, as by torchrun, but island.devices = {island.devices} "
            f"and island.nodes = {island.nodes}; start fit only once on each node, and it starts one process per "
            "device; if each trains a member of its own, unset LOCAL_RANK"
        )

    node, endpoint = place_of(island.nodes)
    return replace(mine, node=node, endpoint=endpoint)


@functools.cache
def _store() -> Any:
    return next(iter(rendezvous("env://")))[0]


def broadcast_from_rank_zero(mine: Ranks, key: str, value: str | bool | None) -> Any:
    """Return rank zero's ``value`` on every rank, also before there is a process group.

    Args:
        mine: this process's place.
        key: a new one for each call.
        value: that of other ranks is ignored.
    """
    if mine.world_size == 1:
        return value
    if mine.rank == 0:
        _store().set(key, json.dumps(value))

    return json.loads(_store().get(key))


def report_state(mine: Ranks, state: str) -> None:
    """Tell the process that started the ranks of this node how far they are: ``training``, ``stopped`` or ``done``."""
    if _ERROR_FILE in os.environ and mine.local_rank == 0:
        Path(os.environ[_ERROR_FILE]).with_name(_STATE).write_text(state, encoding="utf-8")


def fit_on_ranks(run: Run, mine: Ranks) -> str:
    """Run this process's command once per device of the node ``mine`` to train a member, and wait for all of them.

    Ctrl-C, SIGTERM and SIGUSR1 go to this node's first rank, which stops all ranks with a checkpoint, however long that
    takes. Before the training's first step there is nothing to save, so all ranks are killed.

    Returns:
        ``done`` or ``stopped``.

    Raises:
        KeyboardInterrupt: a request came before the first step.
        UserError: a rank failed with an error the user can fix, a signal ended it, or another node failed.
        RuntimeError: a rank failed.
    """
    island = run.experiment.island
    os.environ.setdefault("OMP_NUM_THREADS", str(island.num_threads))
    if mine.endpoint:
        say(f"node {mine.node} of {island.nodes}: meets the others at {mine.endpoint}")

    requests: list[int] = []
    results: list[RunResult | Exception] = []
    with tempfile.TemporaryDirectory(prefix="ddm-lightning-ranks-") as folder, contextlib.ExitStack() as after:
        # Keep the agent from logging: what went wrong is said once, in our words.
        after.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        agent = _agent(island, mine, folder)
        group = agent.get_worker_group()

        def run_agent() -> None:
            try:
                results.append(agent.run())
            except Exception as error:  # noqa: BLE001
                results.append(error)

        # Not in the main thread, in which it would take signals for itself and kill ranks that save for too long.
        thread = threading.Thread(target=run_agent, name="agent", daemon=True)
        with on_stop_signal(lambda number, _frame: requests.append(number)):
            thread.start()
            was_killed = False
            reason: str | None = None
            while thread.is_alive():
                thread.join(_POLL_SECONDS)
                if requests and group.group_rank is None:
                    raise KeyboardInterrupt  # while it waits for other nodes
                if group.state is not WorkerState.HEALTHY:
                    continue

                pids = [worker.id for worker in group.workers]
                reason = reason or failure(group.store)
                if reason:
                    _signal(pids, signal.SIGKILL)
                elif requests:
                    number = requests.pop(0)
                    was_killed = not _states(folder)
                    _signal(pids if was_killed else pids[:1], signal.SIGKILL if was_killed else number)

        if was_killed:
            report_failure(group.store, mine, "was interrupted before the first step")
            raise KeyboardInterrupt

        result = results[0]
        if isinstance(result, Exception):
            raise UserError(f"{island.nodes} nodes do not meet at {mine.endpoint}: {first_line(result)}") from result
        if reason and result.is_failed():
            raise UserError(reason)
        if result.is_failed():
            raise first_cause(_cause(result.failures, island.num_ranks, Path(folder)), group.store, mine)

        return _states(folder)[0]


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _states(folder: str) -> list[str]:
    """What this node's first rank has told by ``report_state``, if it has."""
    return [path.read_text(encoding="utf-8") for path in Path(folder).rglob(_STATE)]


def _agent(island: IslandConfig, mine: Ranks, folder: str) -> LocalElasticAgent:
    """Build torchrun's agent of this node, which starts this process's command as ranks."""
    if island.nodes == 1:
        own = f"{OWN_AGENT}{os.getpid()}"
        parameters = RendezvousParameters("c10d", "localhost:0", own, 1, 1, local_addr="localhost")
    else:
        settings: dict[str, Any] = {"rank": mine.node, "timeout": RENDEZVOUS_SECONDS}
        parameters = RendezvousParameters("static", mine.endpoint, OWN_AGENT, island.nodes, island.nodes, **settings)

    spec = WorkerSpec(
        role="fit",
        local_world_size=island.devices,
        rdzv_handler=get_rendezvous_handler(parameters),
        entrypoint=sys.executable,
        args=tuple(sys.orig_argv[1:]),
        max_restarts=0,
        monitor_interval=_POLL_SECONDS,
        local_addr="localhost",
    )
    return LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=folder))


def _cause(failures: dict[int, ProcessFailure], num_ranks: int, folder: Path) -> Exception:
    """Choose the error to raise: one the user can fix, else a signal, because the loss of a rank makes others fail."""
    for path in sorted(folder.rglob("error.json")):  # also of a rank that the agent ended while it was exiting
        text = json.loads(path.read_text(encoding="utf-8"))["message"]["message"]
        if text.startswith(f"{UserError.__name__}: "):
            return UserError(text.partition(": ")[2])

    for rank, failed in failures.items():
        is_recorded = isinstance(failed.message, dict)
        if failed.exitcode < 0 and failed.exitcode != -signal.SIGTERM and not is_recorded:
            text = f"rank {rank} of {num_ranks} was ended by {failed.signal_name()}"
            return UserError(f"{text}; {RESUMES}")

    rank, failed = min(failures.items(), key=lambda item: (item[1].exitcode < 0, item[1].timestamp))
    message: Any = failed.message  # text, or a record of the exception
    if isinstance(message, dict):
        return RuntimeError(f"rank {rank}: {message['extraInfo']['py_callstack']}")

    return RuntimeError(f"rank {rank} ended with exit code {failed.exitcode}")


def failure(store: Any) -> str | None:
    """Why a node has failed, if one has; ``store`` is shared by torchrun's agents."""
    try:
        if store.check([_FAILURE]):
            return str(store.get(_FAILURE).decode())

        return None
    except DistError:
        return f"node 0 is gone; {RESUMES}"


def report_failure(store: Any, mine: Ranks, reason: str) -> None:
    """Tell the other nodes that this one has failed, so that they end."""
    with contextlib.suppress(DistError):
        store.set(_FAILURE, f"node {mine.node}: {reason}")

    if mine.endpoint and mine.node == 0:
        time.sleep(1.0)  # with this process, the store ends


def first_cause(own: Exception, store: Any, mine: Ranks) -> Exception:
    """Choose between this node's error and that of another, which may have failed before and been the cause."""
    end = time.monotonic() + (_OTHERS_TELL_SECONDS if mine.endpoint and not isinstance(own, UserError) else 0.0)
    while (reason := failure(store)) is None and time.monotonic() < end:
        time.sleep(_POLL_SECONDS)

    if reason:
        return UserError(reason)
    if mine.endpoint and any(words in str(own) for words in _LOST):
        own = UserError(f"another node is gone; {RESUMES}")

    report_failure(store, mine, str(own).strip().splitlines()[-1])
    return own


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Within the block, leave an error of this rank to torchrun's agent, and end when the agent is gone.

    As torch's ``@record`` does, but without a traceback on stderr.
    """
    if _ERROR_FILE not in os.environ:
        yield
        return

    on_orphaned(os.getppid())  # otherwise it would wait in a collective forever
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # the agent ends ranks by it when another one has failed
    try:
        yield
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()  # its threads would abort the process at its end
    except (Exception, CheckpointException) as error:  # noqa: BLE001  # the agent prints it
        line = line_of(error)
        get_error_handler().record_exception(error if line is None else UserError(line))
        raise SystemExit(1 if line is None else 2) from None
