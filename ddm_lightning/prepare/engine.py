"""Run jobs in several processes on this machine, or with Ray Data on many machines; report progress.

Jobs and results must be picklable. A result must not depend on the process or the order of the jobs.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import lru_cache, partial
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import TaskID

from ddm_lightning.config.experiment import PrepareConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.formatting import Bars
from ddm_lightning.core.processes import num_cores, on_orphaned
from ddm_lightning.prepare.reading import Plugins

Job = TypeVar("Job")
Result = TypeVar("Result")

# One process encodes fewer samples before others have even started.
WORTH_PROCESSES = 4096
# One process cannot read and decode images as fast as a GPU encodes them; each has its own copy of the networks.
PROCESSES_PER_GPU = 4


def num_processes_for(config: PrepareConfig, num_jobs: int, num_samples: int | None) -> int:
    """Return the number of processes worth starting.

    Args:
        config: its ``num_processes``, or for 0 a number that suits the machine.
        num_jobs: number of jobs.
        num_samples: samples in all jobs; None if unknown.
    """
    if num_samples is not None and num_samples < WORTH_PROCESSES:
        return 1
    num_gpus = num_gpus_for(config)
    default = max(num_gpus, min(num_cores(), PROCESSES_PER_GPU * num_gpus)) if num_gpus else num_cores()
    return max(1, min(config.num_processes or default, num_jobs))


def num_gpus_for(config: PrepareConfig) -> int:
    """Return the number of GPUs on which the encoders compute: all for ``device: cuda``, else those they name."""
    plugins = (config.image_encoder, config.caption_encoder, config.features)
    devices = {str(plugin.params.get("device")) for plugin in plugins if plugin is not None}
    return torch.cuda.device_count() if "cuda" in devices else sum(name.startswith("cuda:") for name in devices)


def gpu_of(identity: tuple[int, ...], num_gpus: int) -> int:
    """Assign GPUs in turn to the processes that a parent started, by their number."""
    return (identity[-1] - 1) % num_gpus


def run_jobs(
    work: Callable[[Job, Plugins, Callable[[int], None]], Result],
    jobs: Sequence[Job],
    plugins: Plugins,
    num_samples: int | None,
    on_progress: Callable[[int], None],
    engine: str = "local",
) -> Iterator[tuple[int, Result]]:
    """Yield each job's number and result as it finishes; in this process if starting others is not worth it.

    Args:
        work: called with a job, the plug-ins, and a function to call with the number of its samples done so far.
        jobs: the jobs.
        plugins: those of this process; another process builds its own and keeps them from job to job.
        num_samples: samples in all jobs; None if unknown.
        on_progress: receives the samples done so far of the job running in this process.
        engine: ``local`` or ``ray``.
    """
    work_in_process = partial(_work_in_process, work, pickle.dumps(plugins.config))
    num_processes = num_processes_for(plugins.config, len(jobs), num_samples)
    if engine == "ray":
        yield from run_ray(work_in_process, jobs)
    elif num_processes > 1:
        yield from run_local(work_in_process, jobs, num_processes)
    else:
        yield from ((number, work(job, plugins, on_progress)) for number, job in enumerate(jobs))


def _work_in_process(work: Callable[[Any, Plugins, Callable[[int], None]], Result], config: bytes, job: Any) -> Result:
    return work(job, _plugins_of(config), lambda _: None)


@lru_cache(maxsize=1)
def _plugins_of(config: bytes) -> Plugins:
    """Return the plug-ins of a pickled configuration; a process keeps them from job to job."""
    return Plugins(pickle.loads(config))  # noqa: S301  our own


def run_local(work: Callable[[Job], Result], jobs: Sequence[Job], num_processes: int) -> Iterator[tuple[int, Result]]:
    """Yield each job's number and result as it finishes, from ``num_processes`` processes.

    Raises:
        UserError: a process was killed. Errors of ``work`` pass through.
    """
    pool = ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn"), initializer=_begin)
    try:
        numbers = {pool.submit(work, job): number for number, job in enumerate(jobs)}
        for future in as_completed(numbers):
            yield numbers[future], future.result()
    except BrokenProcessPool:
        raise UserError(
            "a process of prepare was killed, perhaps out of memory; "
            "lower prepare.num_processes and run the same command again"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def run_ray(work: Callable[[Job], Result], jobs: Sequence[Job]) -> Iterator[tuple[int, Result]]:
    """Run jobs as ``run_local`` does, on the Ray cluster at ``RAY_ADDRESS`` or on a new local one.

    Every machine of the cluster must see the files of the jobs under the same path.
    """
    import ray
    from ray.data import DataContext, from_items

    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
    DataContext.get_current().enable_progress_bars = False

    def one(row: dict[str, Any]) -> dict[str, Any]:
        import torch

        torch.set_num_threads(1)
        try:
            result: Any = work(pickle.loads(row["job"]))  # noqa: S301  our own
        except (UserError, OSError) as error:
            result = error  # Ray would wrap it in an error of its own
        return {"number": row["number"], "result": pickle.dumps(result)}

    # Pickled, because Ray would turn known types into columns.
    rows = [{"number": number, "job": pickle.dumps(job)} for number, job in enumerate(jobs)]
    for row in from_items(rows, override_num_blocks=len(rows)).map(one).iter_rows():
        result = pickle.loads(row["result"])  # noqa: S301  our own
        if isinstance(result, Exception):
            raise result
        yield int(row["number"]), result


def _begin() -> None:
    """Set up a process of ``run_local``."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches all: end silently, the parent reports it
    torch.set_num_threads(1)
    if num_gpus := torch.cuda.device_count():
        torch.cuda.set_device(gpu_of(multiprocessing.current_process()._identity, num_gpus))
    on_orphaned(os.getppid())


class Reporter:
    """Shows the progress of ``prepare``: a bar per stage with elapsed and remaining time.

    Args:
        progress: the bars; None shows nothing.
    """

    def __init__(self, progress: Bars | None = None) -> None:
        self._progress = progress or Bars(Console(quiet=True), show=False)
        self._bars: dict[str, TaskID] = {}

    def advance(self, stage: str, done: int, total: int) -> None:
        """Move the bar of ``stage`` to ``done`` of ``total`` samples; create it at the first call."""
        if stage not in self._bars:
            self._bars[stage] = self._progress.add_task(stage, total=total)
        self._progress.update(self._bars[stage], completed=done, total=total)

    def say(self, line: str) -> None:
        """Print a line above the bars."""
        self._progress.console.print(line, markup=False, highlight=False, soft_wrap=True)
