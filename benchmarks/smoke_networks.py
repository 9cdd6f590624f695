"""Steps of ``smoke_gpu.py`` in its own process: attention kernels, DiT-XL/2 in the Trainer, its checkpoint."""

from __future__ import annotations

import gc
import platform
import re
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from typing import Any

import lightning as L
import torch
from common import TINY
from smoke_commands import Check, Place, Watched, at_most, near, same, shown
from step import LOOPS, Loop
from step_loops import our_trainer
from step_networks import XL2, Sizes, Step, our_side
from torch import Tensor
from torch.backends import cudnn
from torch.nn.attention import SDPBackend

from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.devices import device_bytes
from ddm_lightning.members.cost import step_cost
from ddm_lightning.networks.attention import attention
from ddm_lightning.training.callbacks import RollingCheckpoints
from ddm_lightning.training.checkpoint import CheckpointWriter, read_tensors, tensors_of
from ddm_lightning.training.ema import track_ema

KERNELS = {"cpu": {"sdpa": 0.02}, "cuda": {"flash": 0.02, "cudnn": float("inf"), "efficient": 0.02}}
"""Limits of the relative error of attention in bfloat16; none for what is off by default. On a CPU it is 0.004."""
NUM_STEPS = 30
LOG_EVERY = 10
SMALL = Loop(width=64, depth=2, num_heads=2, patch_size=4, edge=16, text_size=16, batch_size=16)
SMALL_DIT = Sizes(width=128, depth=4, num_heads=4, edge=16, batch_size=4)
_TIMED = re.compile("H100 80GB|H100 SXM|H200|GH200")
"""Names of the GPUs whose time per step is expected."""


def environment(place: Place) -> Iterator[Check]:
    """Show what runs here, and the kernel that attention takes at the size of DiT-XL/2."""
    yield shown("Python, torch, CUDA", f"{platform.python_version()}, {torch.__version__}, {torch.version.cuda}")
    if place.on_gpu:
        yield shown("GPU, cuDNN", f"{torch.cuda.get_device_name()}, {cudnn.version()}")

    q = torch.randn(16, 16, 256, 72, device=place.device, dtype=torch.bfloat16, requires_grad=True)
    chosen = SDPBackend(torch._fused_sdp_choice(q, q, q)).name
    yield Check("attention kernel", "not MATH", chosen, chosen != "MATH")


def kernels(place: Place) -> Iterator[Check]:
    """Compare each attention kernel with plain float64, forward and backward, also with logits near -120."""
    heads = 2
    size = 8
    batches = [6]
    if place.on_gpu:
        heads = 16
        size = 72
        batches = [16, 128]

    cases = product(KERNELS[place.device.type].items(), batches, (256, 77), (0, -120))
    for (name, limit), batch, num_keys, lowest in cases:
        generator = torch.Generator().manual_seed(0)
        q, upstream = torch.randn(2, batch, 256, heads, size, generator=generator)
        k, v = torch.randn(2, batch, num_keys, heads, size, generator=generator)
        if lowest:  # half of the keys get no weight
            level = (-lowest / size**0.5) ** 0.5
            q += level
            k[:, ::2] = k[:, ::2] / 10 - level

        inputs = [x.to(place.device, torch.bfloat16) for x in (q, k, v, upstream)]
        found = _with_gradients(partial(attention, backend=name), *inputs)
        wanted = _with_gradients(_plain, *(x[:4].double() for x in inputs))  # rows do not depend on each other
        error = 0.0
        for x, exact in zip(found, wanted, strict=True):
            difference = x[:4] - exact
            error = max(error, (difference.norm() / exact.norm()).item())
            if not x.isfinite().all():
                error = float("inf")

        what = f"{name}, batch {batch}, {num_keys} keys, logits from {lowest}"
        yield at_most(f"{what}: relative error", error, limit)


def _with_gradients(function: Callable[..., Tensor], *inputs: Tensor) -> list[Tensor]:
    *leaves, upstream = (x.detach().requires_grad_() for x in inputs)
    out = function(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, upstream)]


def _plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    logits = torch.einsum("bnhd,bmhd->bhnm", q, k)
    weights = (logits / q.shape[-1] ** 0.5).softmax(-1)
    return torch.einsum("bhnm,bmhd->bnhd", weights, v)


class Between(L.Callback):
    """Makes operations that wait for the GPU raise between two points of the curves; keeps the losses of these."""

    def __init__(self, on_gpu: bool) -> None:
        self.on_gpu = on_gpu
        self.losses: list[float] = []

    def on_train_batch_start(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        """Allow waiting in steps that log, and before the first one that does."""
        step = trainer.global_step
        waits = step < LOG_EVERY or (step + 1) % LOG_EVERY == 0
        if self.on_gpu:
            torch.cuda.set_sync_debug_mode(("error", "default")[waits])

    def on_train_batch_end(self, trainer: L.Trainer, module: Any, *_: Any) -> None:
        """Keep a loss that was logged."""
        if trainer.global_step % LOG_EVERY == 0:
            self.losses.append(module.averages["train/loss"])


def training(place: Place) -> Iterator[Check]:
    """Train DiT-XL/2 at three batch sizes in the Trainer: no waiting, one graph, loss, memory, time, MFU."""
    loop = SMALL
    sizes = [16]
    if place.on_gpu:
        loop = LOOPS["cuda"]

    if place.is_large:
        sizes += [32, 128]

    settings = loop.overrides(place.folder / "large", 1, place.device.type, 80 * sizes[-1])
    settings += [f"expert.train.max_steps={NUM_STEPS}", f"island.log_every_n_steps={LOG_EVERY}"]
    settings += ["expert.train.learning_rate=1e-4", "island.compile=true"]
    Watched("ddm_lightning", "prepare", "-c", str(TINY), *settings).ended()
    for batch in sizes:
        planned = 14.8 + 0.298 * batch  # weights and state, then the tensors kept for the backward pass
        what = f"batch {batch}:"
        if place.on_gpu and planned > 0.9e-9 * device_bytes("gpu"):
            yield shown(what, f"not run: it takes {planned:.0f} GB")
            continue

        own = f"expert.train.global_batch_size={2 * batch}"
        losses, figures = _train([*settings, own], place)
        # One serves all blocks; another is that of ``check_compiler``.
        yield same(f"{what} compiled graphs", torch._dynamo.utils.counters["stats"]["unique_graphs"], 2)
        yield at_most(f"{what} last loss over the first", losses[-1] / losses[0], 0.99)
        if place.on_gpu:
            yield shown(f"{what} operations that wait between two points of the curves", "none")  # they raise
            yield near(f"{what} peak memory, GB", torch.cuda.max_memory_allocated() / 1e9, planned, 0.15)

        limit = float("inf")
        if place.on_gpu and _TIMED.search(torch.cuda.get_device_name()):
            limit = 1.15 * (1.9 * batch + 18)

        yield at_most(f"{what} ms a step", 1000 * batch / figures["train/samples_per_second"], limit)
        yield shown(f"{what} MFU", figures.get("train/mfu", "unknown"), figures.get("train/mfu"))


def _train(settings: list[str], place: Place) -> tuple[list[float], dict[str, float]]:
    """Train as ``fit`` does, without validation and checkpoints; return the losses and the last figures."""
    gc.collect()
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    if place.on_gpu:
        torch.cuda.reset_peak_memory_stats()

    experiment = load_experiment(TINY, settings)
    between = Between(place.on_gpu)
    trainer, module, data = our_trainer(experiment)
    module.speed.cost = step_cost(module.member, experiment.island, module.network)
    kept = [one for one in trainer.callbacks if not isinstance(one, RollingCheckpoints)]  # type: ignore[attr-defined]
    trainer.callbacks = [*kept, between]  # type: ignore[attr-defined]  # Lightning's list
    trainer.limit_val_batches = 0
    trainer.fit(module, datamodule=data)
    figures = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return between.losses, figures


def checkpoint(place: Place) -> Iterator[Check]:
    """Save DiT-XL/2 twice and read it back."""
    gc.collect()
    sizes = SMALL_DIT
    if place.is_large and device_bytes("gpu") > 40e9:
        sizes = XL2

    step = Step(our_side(sizes), sizes, place.device, "bf16-mixed", compiled=False)
    track_ema(step.optimizer, 0.9999)
    step.take()
    path = place.folder / "large.ckpt"
    tensors = tensors_of(step.network, step.optimizer)
    num_bytes = sum(tensor.nbytes for tensor in tensors.values())
    writer = CheckpointWriter(None, is_rank_zero=True, from_device=place.on_gpu)
    for name, limit in (("first", 60.0), ("second", 1.0)):  # the first one allocates the memory on the host
        start = time.perf_counter()
        writer.start(path, tensors, {}, lambda: None)
        yield at_most(f"{name} pause, s", time.perf_counter() - start, limit)
        writer.wait()
        seconds = time.perf_counter() - start
        yield shown(f"{name} of {num_bytes / 1e9:.2f} GB on disk after, s", f"{seconds:.2f}", seconds)

    writer.close()
    into = {name: torch.full_like(value, -1) for name, value in tensors.items()}
    read_tensors(path, into)
    are_equal = map(torch.equal, into.values(), tensors.values())
    yield same("tensors read back to the bit", all(are_equal))
    shutil.rmtree(path)
