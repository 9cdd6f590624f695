"""Ranks of one member: processes as torchrun sets them, and the agent of torchrun that starts them on this machine.

``fit`` on several devices is the agent's process: it starts the same command once per device, waits, hands on requests
to stop, and says why the training failed. Ranks print nothing about a failure: ``recorded`` leaves it to the agent. A
user's own torchrun may start the ranks, too.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.elastic.agent.server.api import RunResult, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure, get_error_handler
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from ddm_lightning.core.errors import UserError, line_of
from ddm_lightning.core.processes import handling, on_orphaned
from ddm_lightning.members.run import Run
from ddm_lightning.members.status import MemberStatus

_OWN = "ddm-lightning-fit-"
_POLL_SECONDS = 0.1
POLL_STEPS = 10
"""Steps after which ranks ask one another whether one was told to stop."""


def _number(name: str, default: int) -> int:
    """Value of an environment variable."""
    return int(os.environ.get(name, default))


def is_rank() -> bool:
    """Whether torchrun, or another launcher that sets its variables, started this process."""
    return "LOCAL_RANK" in os.environ


def is_own_rank() -> bool:
    """Whether ``fit_on_ranks`` of another ``fit`` started this process."""
    return os.environ.get("TORCHELASTIC_RUN_ID", "").startswith(_OWN)


def is_rank_zero() -> bool:
    """Whether this process is the first of all ranks, on all nodes."""
    return _number("RANK", 0) == 0


def has_agent() -> bool:
    """Whether an agent of torchrun started this process and takes an exit code other than 0 for a failure."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def check_ranks(devices: int) -> None:
    """Check that a launcher such as torchrun has started one rank per device.

    Raises:
        UserError: it started more or fewer, or ranks on several nodes.
    """
    if not is_rank():
        return
    number = max(_number("WORLD_SIZE", 1), _number("LOCAL_RANK", 0) + 1)
    several_nodes = number > _number("LOCAL_WORLD_SIZE", number)
    if several_nodes or (number != devices and (number > 1 or has_agent())):
        raise UserError(
            f"{number} processes of fit were started, as by torchrun, but island.devices = {devices} on one node; "
            "start fit only once, on the member's island, and it starts one process per device"
        )


def fit_on_ranks(name: str, run: Run) -> MemberStatus:
    """Run this process's command once per device to train the member ``name``, and wait for all of them.

    Ctrl-C, SIGTERM and SIGUSR1 go to rank zero, which stops all ranks with a checkpoint, however long that takes.
    Before the training's first step there is nothing to save, so all ranks are killed.

    Raises:
        KeyboardInterrupt: a request came before the first step.
        UserError: a rank failed with an error the user can fix, or a signal ended it.
        RuntimeError: a rank failed.
    """
    island = run.experiment.island
    os.environ.setdefault("OMP_NUM_THREADS", str(island.num_threads))
    requests: list[int] = []
    results: list[RunResult] = []
    with tempfile.TemporaryDirectory(prefix="ddm-lightning-ranks-") as folder, contextlib.ExitStack() as after:
        # Keep the agent from logging: what went wrong is said once, in our words.
        after.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)
        agent = _agent(island.devices, folder)
        # Not in the main thread, in which it would take signals for itself and kill ranks that save for too long.
        thread = threading.Thread(target=lambda: results.append(agent.run()), name="agent", daemon=True)
        with handling(lambda number, _frame: requests.append(number)):
            thread.start()
            was_killed = False
            while thread.is_alive():
                thread.join(_POLL_SECONDS)
                pids = [worker.id for worker in agent.get_worker_group().workers if worker.id]
                if requests and len(pids) == island.devices:
                    number, status = requests.pop(0), run.status(name)
                    was_killed = (status.state, status.pid) != ("training", pids[0])
                    for pid in pids if was_killed else pids[:1]:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL if was_killed else number)
        if was_killed:
            raise KeyboardInterrupt
        if results[0].is_failed():
            raise _cause(results[0].failures, island.devices, Path(folder))
    return run.status(name)


def _agent(devices: int, folder: str) -> LocalElasticAgent:
    """Build torchrun's agent for one node, which starts this process's command as ranks."""
    parameters = RendezvousParameters("c10d", "localhost:0", f"{_OWN}{os.getpid()}", 1, 1, local_addr="localhost")
    spec = WorkerSpec(
        role="fit",
        local_world_size=devices,
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
    for rank, failure in failures.items():
        is_recorded = isinstance(failure.message, dict)
        if failure.exitcode < 0 and failure.exitcode != -signal.SIGTERM and not is_recorded:
            text = f"rank {rank} of {num_ranks} was ended by {failure.signal_name()}"
            return UserError(f"{text}; the same command resumes at the newest checkpoint")
    rank, failure = min(failures.items(), key=lambda item: (item[1].exitcode < 0, item[1].timestamp))
    message: Any = failure.message  # text, or a record of the exception
    if isinstance(message, dict):
        return RuntimeError(f"rank {rank}: {message['extraInfo']['py_callstack']}")
    return RuntimeError(f"rank {rank} ended with exit code {failure.exitcode}")


@contextlib.contextmanager
def recorded() -> Iterator[None]:
    """Within the block, leave an error of this rank to torchrun's agent, and end when the agent is gone.

    As torch's ``@record`` does, but without a traceback on stderr.
    """
    if "TORCHELASTIC_ERROR_FILE" not in os.environ:
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
