"""Who works on the parts: this process, several processes here, or Ray Data on many machines.

A job and what it gives must be picklable, and a job must give the same whoever works on it and in whatever order.
"""

from __future__ import annotations

import logging
import multiprocessing
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.processes import num_cores, on_orphaned

Job = TypeVar("Job")
Result = TypeVar("Result")

# Fewer samples are done before other processes have started.
WORTH_PROCESSES = 4096


def num_processes_for(wanted: int, num_jobs: int, num_samples: int | None) -> int:
    """Processes that are worth starting.

    Args:
        wanted: the setting; 0 is one a core.
        num_jobs: jobs that there are.
        num_samples: samples in all of them; None when nobody knows.
    """
    if num_samples is not None and num_samples < WORTH_PROCESSES:
        return 1
    return max(1, min(wanted or num_cores(), num_jobs))


def run_local(work: Callable[[Job], Result], jobs: Sequence[Job], num_processes: int) -> Iterator[tuple[int, Result]]:
    """Each job's number and result, as they become ready, from ``num_processes`` processes.

    Raises:
        UserError: a process was killed; what ``work`` raises comes out as it is.
    """
    pool = ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn"), initializer=_begin)
    try:
        numbers = {pool.submit(work, job): number for number, job in enumerate(jobs)}
        for future in as_completed(numbers):
            yield numbers[future], future.result()
    except BrokenProcessPool:
        raise UserError(
            "a process of prepare was killed, perhaps for want of memory; lower prepare.num_processes, "
            "then the same command goes on"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def run_ray(work: Callable[[Job], Result], jobs: Sequence[Job]) -> Iterator[tuple[int, Result]]:
    """As ``run_local``, on the Ray cluster that ``RAY_ADDRESS`` names, or on one started here.

    What jobs read and write has to lie where every machine of the cluster sees it under the same path.
    """
    import ray
    from ray.data import DataContext, from_items

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
    DataContext.get_current().enable_progress_bars = False

    def one(row: dict[str, Any]) -> dict[str, Any]:
        _one_thread()
        outcome: tuple[Result | None, Exception | None]
        try:
            outcome = (work(pickle.loads(row["job"])), None)  # noqa: S301  our own
        except (UserError, OSError) as error:
            outcome = (None, error)  # Ray would wrap it, with its traceback, in an error of its own
        return {"number": row["number"], "outcome": pickle.dumps(outcome)}

    # As bytes, because Ray would make columns of what it knows.
    rows = [{"number": number, "job": pickle.dumps(job)} for number, job in enumerate(jobs)]
    for row in from_items(rows, override_num_blocks=len(rows)).map(one).iter_rows():
        result, error = pickle.loads(row["outcome"])  # noqa: S301  our own
        if error is not None:
            raise error
        yield int(row["number"]), result


def _begin() -> None:
    """First thing in a process of ``run_local``."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches all: die quietly, the parent speaks
    _one_thread()
    _own_gpu()
    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    on_orphaned(parent.pid)


def _one_thread() -> None:
    import torch

    torch.set_num_threads(1)


def _own_gpu() -> None:
    """Processes take the GPUs in turn: ``cuda`` then means another one in each."""
    import torch

    if torch.cuda.is_available():
        number = multiprocessing.current_process()._identity[0] - 1
        torch.cuda.set_device(number % torch.cuda.device_count())
