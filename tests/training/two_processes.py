"""A task in two processes with a process group, the ranks of one training, within one test."""

import multiprocessing
import os
import tempfile
import traceback

import lightning as L
import torch.distributed as dist
from deadline import within
from lightning.fabric.utilities.warnings import disable_possible_user_warnings
from torch.distributed.distributed_c10d import _get_default_store
from training.short_fits import fit

from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.core.environment import Ranks
from ddm_lightning.members.cost import State
from ddm_lightning.training import ranks
from ddm_lightning.training.parallel import choose_strategy, environment

WORLD = 2


def _in_rank(rank, meeting, task, results):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(WORLD))
    disable_possible_user_warnings()
    try:
        dist.init_process_group("gloo", f"file://{meeting}/ranks", rank=rank, world_size=WORLD)
        results.put((rank, task(rank), None))
        dist.destroy_process_group()
    except BaseException:  # noqa: BLE001
        results.put((rank, None, traceback.format_exc()))


def in_two_processes(task):
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    with tempfile.TemporaryDirectory() as meeting:  # another process may take a port before they do
        ranks = [context.Process(target=_in_rank, args=(rank, meeting, task, results)) for rank in range(WORLD)]
        for process in ranks:
            process.start()
        try:
            with within(240):
                answers = [results.get() for _ in ranks]
        finally:
            for process in ranks:
                process.kill()
                process.join()

    for _, _, problem in answers:
        assert problem is None, problem

    return {rank: answer for rank, answer, _ in answers}


def fit_in_rank(run, settings, rank):
    """The exit code of a ``fit`` in one of the processes, which need not meet again."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="1")
    ranks._store = _get_default_store
    return fit(run, *settings)


def trainer_of(rank, strategy="ddp", num_ranks=WORLD, **settings):
    """What trains in one of the processes, or alone if ``rank`` is None, as ``fit`` has it."""
    island = IslandConfig(accelerator="cpu", devices=num_ranks, strategy=strategy)
    if rank is None:
        island = IslandConfig(accelerator="cpu")

    return L.Trainer(
        accelerator="cpu",
        devices=island.devices,
        strategy=choose_strategy(island, State(4, 4, 8, 4))[0],
        plugins=[environment(Ranks.read())],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        num_sanity_val_steps=0,
        **{"logger": False, **settings},
    )
