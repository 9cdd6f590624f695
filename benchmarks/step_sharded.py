"""A training step of two processes on this machine: FSDP2, sharded as on an island, against DDP."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from step_clock import Seconds
from step_networks import Sizes, Step, in_turn, our_side
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from ddm_lightning.core.errors import UserError
from ddm_lightning.training.parallel.strategy import shard_blocks

WORLD = 2
_SECONDS = 900.0


def measure(sizes: Sizes, num_rounds: int, steps_per_turn: int) -> dict[str, list[Seconds]]:
    """Measure seconds per step of ``ddp`` and ``fsdp2`` on rank 0, one value per round.

    Raises:
        UserError: a process failed; it has printed the reason.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    with tempfile.TemporaryDirectory(prefix="step-sharded-") as folder:
        arguments = (Path(folder) / "store", sizes, num_rounds, steps_per_turn)
        processes = [
            context.Process(target=_rank, args=(rank, theirs if rank == 0 else None, *arguments))
            for rank in range(WORLD)
        ]
        for process in processes:
            process.start()
        theirs.close()
        try:
            found: dict[str, list[Seconds]] | None = ours.recv() if ours.poll(_SECONDS) else None
        except EOFError:
            found = None
        finally:
            for process in processes:
                process.join(10 if found is not None else 0)
                process.kill()
                process.join()
    if found is None:
        raise UserError("FSDP2 against DDP: a process failed or did not answer; see above")
    return found


def _rank(
    rank: int, answer: Connection | None, store: Path, sizes: Sizes, num_rounds: int, steps_per_turn: int
) -> None:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (WORLD,))
    cpu = torch.device("cpu")

    def sharded(network: nn.Module) -> nn.Module:
        shard_blocks(network, mesh)
        return network

    sides = {"ddp": our_side(sizes, wrap=DistributedDataParallel), "fsdp2": our_side(sizes, wrap=sharded)}
    steps = {name: Step(side, sizes, cpu, half=False, compiled=False) for name, side in sides.items()}
    found = in_turn(steps, num_rounds, steps_per_turn)
    if answer is not None:
        answer.send(found)
    dist.destroy_process_group()
