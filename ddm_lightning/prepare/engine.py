"""Run jobs in several processes on this machine, or in Ray's actors on many machines; report progress.

Jobs and results must be picklable. A result must not depend on the process or the order of the jobs. Jobs of a process
or machine that dies are run again.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import pickle
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import suppress
from functools import lru_cache, partial
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from rich.console import Console
from rich.progress import TaskID

from ddm_lightning.config.experiment import PrepareConfig
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.core.formatting import Bars
from ddm_lightning.core.processes import num_cores, on_orphaned
from ddm_lightning.prepare import ledger
from ddm_lightning.prepare.ledger import Entries, OnProgress
from ddm_lightning.prepare.plugins import Plugins

Job = TypeVar("Job")
Result = TypeVar("Result")
_LedgerJob = TypeVar("_LedgerJob", bound=ledger.Job)

# One process encodes fewer samples before others have even started.
WORTH_PROCESSES = 4096
# One process cannot read and decode images as fast as a GPU encodes them; each has its own copy of the networks.
PROCESSES_PER_GPU = 4
# Deaths after which a job is tried no more: of local processes with no job finished in between, of Ray's during a job.
_MOST_DEATHS = 3


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
    if num_gpus:
        default = max(num_gpus, min(num_cores(), PROCESSES_PER_GPU * num_gpus))
    else:
        default = num_cores()

    return max(1, min(config.num_processes or default, num_jobs))


def devices_of(config: PrepareConfig) -> set[str]:
    """Return the devices that the encoders name."""
    devices = set()
    for plugin in (config.image_encoder, config.caption_encoder, config.features):
        if plugin is None:
            continue

        devices.add(str(plugin.params.get("device")))
        for inner in plugin.params.values():
            if isinstance(inner, dict):
                devices.add(str(inner.get("params", {}).get("device")))

    return devices


def num_gpus_for(config: PrepareConfig) -> int:
    """Return the number of GPUs on which the encoders compute: all for ``device: cuda``, else those they name."""
    devices = devices_of(config)
    if "cuda" in devices:
        return torch.cuda.device_count()

    return sum(name.startswith("cuda:") for name in devices)


def gpu_of(identity: tuple[int, ...], num_gpus: int) -> int:
    """Assign GPUs in turn to the processes that a parent started, by their number."""
    return (identity[-1] - 1) % num_gpus


def run_jobs(
    stage: str,
    work: Callable[[_LedgerJob, Plugins, OnProgress], Entries],
    jobs: Sequence[_LedgerJob],
    plugins: Plugins,
    num_samples: int | None,
    reporter: Reporter,
) -> Iterator[_LedgerJob]:
    """Yield each job as it is finished and its ledger is up to date.

    Args:
        stage: name of the stage.
        work: returns the entries of the ledger; called with a job, the plug-ins, and a function to call with the number
            of its samples done so far.
        jobs: the jobs.
        plugins: those of this process, in which jobs run if starting others is not worth it; another process builds
            its own and keeps them from job to job.
        num_samples: samples in all jobs; None if unknown.
        reporter: receives progress.
    """
    config = plugins.config
    done = 0

    def advance(here: int) -> None:
        reporter.advance(stage, done + here, max(num_samples or 0, done + here))

    work_in_process = partial(_work_in_process, work, pickle.dumps(config))
    num_processes = num_processes_for(config, len(jobs), num_samples)
    if config.engine == "ray":
        # The GPUs are those of the cluster, not of this machine.
        on_gpus = any(name.startswith("cuda") for name in devices_of(config))
        finished = run_ray(work_in_process, jobs, config.num_processes, on_gpus)
    elif num_processes > 1:
        finished = run_local(work_in_process, jobs, num_processes)
    else:
        finished = ((number, work(job, plugins, advance)) for number, job in enumerate(jobs))

    for number, entries in finished:
        job = jobs[number]
        job.ledger.entries = entries
        job.ledger.is_stored = job.store is not None
        done += job.num_samples
        advance(0)
        yield job


def _work_in_process(work: Callable[[Any, Plugins, OnProgress], Result], config: bytes, job: Any) -> Result:
    return work(job, _plugins_of(config), lambda _: None)


@lru_cache(maxsize=1)
def _plugins_of(config: bytes) -> Plugins:
    """Return the plug-ins of a pickled configuration; a process keeps them from job to job."""
    return Plugins(pickle.loads(config))  # noqa: S301  our own


def run_local(work: Callable[[Job], Result], jobs: Sequence[Job], num_processes: int) -> Iterator[tuple[int, Result]]:
    """Yield each job's number and result as it finishes, from ``num_processes`` processes.

    Raises:
        UserError: processes were killed again and again, with no job finished. Errors of ``work`` pass through.
    """
    unfinished = dict(enumerate(jobs))
    num_deaths = 0
    main = sys.modules["__main__"]
    while unfinished:
        pool = ProcessPoolExecutor(num_processes, multiprocessing.get_context("spawn"), initializer=_begin)
        try:
            # Without the caller's script, which would run again in each process, down to its ``prepare``.
            sys.modules["__main__"] = ModuleType("__main__")
            numbers = {pool.submit(work, job): number for number, job in unfinished.items()}
            sys.modules["__main__"] = main
            for future in as_completed(numbers):
                result = future.result()
                del unfinished[numbers[future]]
                num_deaths = 0
                yield numbers[future], result
        except BrokenProcessPool:
            num_deaths += 1
            if num_deaths > _MOST_DEATHS:
                raise UserError(
                    f"a process of prepare was killed {num_deaths} times, perhaps out of memory; "
                    "lower prepare.num_processes and run the same command again"
                ) from None
        finally:
            sys.modules["__main__"] = main
            pool.shutdown(wait=True, cancel_futures=True)


class _Actor:
    """A process of ``run_ray``; loads the plug-ins at its first job and keeps them."""

    def __init__(self, work: Callable[[Any], Any], folder: Path) -> None:
        torch.set_num_threads(1)
        with suppress(OSError):  # a machine without it can do jobs whose paths are absolute
            os.chdir(folder)

        self.work = work

    def run(self, number: int, job: Any) -> tuple[int, Any]:
        """Return the number of the job with its result."""
        return number, self.work(job)


def run_ray(
    work: Callable[[Job], Result], jobs: Sequence[Job], num_actors: int = 0, on_gpus: bool = False
) -> Iterator[tuple[int, Result]]:
    """Run jobs as ``run_local`` does, on the Ray cluster at ``RAY_ADDRESS`` or on a new local one.

    Ray starts dead actors again, on another machine if need be, and repeats their jobs. Every machine of the cluster
    must see the files of the jobs under the same path.

    Args:
        work: called with a job.
        jobs: the jobs.
        num_actors: most actors; 0 for as many as the cluster has CPUs and GPUs for.
        on_gpus: whether an actor needs a share of a GPU, the only one that it sees.

    Raises:
        UserError: the cluster has no GPU, or failed. Errors of ``work`` pass through.
    """
    import ray
    from ray.util import ActorPool

    ray.init(ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
    resources = ray.cluster_resources()  # type: ignore[no-untyped-call]
    if on_gpus and not resources.get("GPU"):
        raise UserError("the Ray cluster has no GPU for the encoders; add one, or set their device to cpu")

    room = resources["CPU"]
    gpus = 0.0
    if on_gpus:
        room = min(room, PROCESSES_PER_GPU * resources["GPU"])
        gpus = 1 / PROCESSES_PER_GPU

    num_actors = min(num_actors or len(jobs), len(jobs), max(1, int(room)))
    actor = ray.remote(num_cpus=1, num_gpus=gpus, max_restarts=-1, max_task_retries=_MOST_DEATHS)(_Actor)
    pool = ActorPool([actor.remote(work, Path.cwd()) for _ in range(num_actors)])
    try:
        yield from pool.map_unordered(lambda actor, job: actor.run.remote(*job), list(enumerate(jobs)))
    except ray.exceptions.RayTaskError as error:
        raise error.cause from error
    except ray.exceptions.RayError as error:
        raise UserError(
            f"Ray: {first_line(error).rstrip('.')}; repair the cluster and run the same command again"
        ) from None


def _begin() -> None:
    """Set up a process of ``run_local``."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # Ctrl-C reaches all: end silently, the parent reports it
    torch.set_num_threads(1)
    if num_gpus := torch.cuda.device_count():
        torch.cuda.set_device(gpu_of(multiprocessing.current_process()._identity, num_gpus))

    parent = multiprocessing.parent_process()
    assert parent is not None and parent.pid is not None
    on_orphaned(parent.pid)  # not os.getppid(): the parent may have died while this process started


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
