"""Ranks of one node as forked processes, each with a data module of its own."""

import atexit
import multiprocessing
import traceback
from types import SimpleNamespace

import torch
from deadline import within

from ddm_lightning.shards.datamodule import ClusterDataModule


def data_module(rank, num_ranks, settings):
    data = ClusterDataModule(**settings)
    strategy = SimpleNamespace(broadcast=_broadcast)
    data.trainer = SimpleNamespace(world_size=num_ranks, global_rank=rank, local_rank=rank, strategy=strategy)
    if rank == 0:
        data.prepare_data()
    if num_ranks > 1:
        torch.distributed.barrier()
    data.setup("fit")
    return data


def _broadcast(value):
    values = [value]
    if torch.distributed.is_initialized():
        torch.distributed.broadcast_object_list(values)
    return values[0]


def _run(function, rank, num_ranks, rendezvous, results, arguments):
    try:
        torch.set_num_threads(1)
        if num_ranks > 1:
            torch.distributed.init_process_group(
                "gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=num_ranks
            )
        answer = function(rank, num_ranks, *arguments)
    except BaseException:  # noqa: BLE001  # it is the test's
        answer = AssertionError(traceback.format_exc())
    results.put((rank, answer))
    results.close()
    results.join_thread()
    if num_ranks > 1 and not isinstance(answer, AssertionError):
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    atexit._run_exitfuncs()  # forked processes skip them; Streaming's remove its shared memory


def on_ranks(num_ranks, folder, function, *arguments, seconds=60):
    """``[function(rank, num_ranks, *arguments) for rank in ...]``, each in a process of its own, joined by gloo."""
    context = multiprocessing.get_context("fork")
    results = context.Queue()
    rendezvous = folder / f"gloo-{len(list(folder.glob('gloo-*')))}"
    rendezvous.touch()
    processes = [
        context.Process(target=_run, args=(function, rank, num_ranks, rendezvous, results, arguments))
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    try:
        with within(seconds):
            answers = {}
            while len(answers) < num_ranks:
                rank, answer = results.get()
                if isinstance(answer, AssertionError):
                    raise answer
                answers[rank] = answer
            for process in processes:
                process.join()
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    return [answers[rank] for rank in range(num_ranks)]
