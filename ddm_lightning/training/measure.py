"""Speed of a member's training on this machine, by a few steps on random data; for ``plan --device here``."""

from __future__ import annotations

import time
from collections.abc import Iterator

import lightning as L
import torch
from torch import Tensor

from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.core.devices import configure_torch, device_of, resolve_accelerator, resolve_precision
from ddm_lightning.core.environment import ALONE
from ddm_lightning.core.errors import UserError
from ddm_lightning.encoders.interfaces import StoredForm
from ddm_lightning.members.member import Member
from ddm_lightning.training.fit import check_machine, quieten
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.objective import OBJECTIVES
from ddm_lightning.training.parallel import environment

_WARM_UP = 3
"""Steps that do not count: they make moments and averages, and compile."""
_SECONDS = 3.0
"""Least time to measure, in at least two steps."""


def samples_per_second(member: Member, island: IslandConfig) -> float:
    """Train a member on one device for a few seconds, on random data, and return its speed; nothing is written.

    The steps are whole ones: noise, network, clipping, optimizer, averages. Loading, validation and checkpoints are
    left out, and so are captions that are encoded during training.

    Args:
        member: the member, with the batch size to measure.
        island: its settings.

    Raises:
        UserError: a student, whose teacher is needed, or as ``build_network``.
    """
    if member.role.objective == "distillation":
        raise UserError(f"{member.name}: cannot be measured, as its teacher is not trained yet; name a GPU")

    check_machine(member, island)
    configure_torch(island.accelerator, island.num_threads)
    network = member.add_adapters(member.build_network())
    form = StoredForm("x_0", {"scale": 1.0, "shift": 0.0})
    module = MemberModule(OBJECTIVES[member.role.objective](network, member, form), island)
    found: list[float] = []
    quieten(keep_notes=False)
    trainer = L.Trainer(
        accelerator=resolve_accelerator(island.accelerator),
        devices=1,
        precision=resolve_precision(island.precision, device_of(island.accelerator)),  # type: ignore[arg-type]
        max_epochs=1,
        logger=False,
        plugins=[environment(ALONE)],
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, _batches(member, device_of(island.accelerator), found))
    return found[0]


def _batches(member: Member, device: torch.device, found: list[float]) -> Iterator[dict[str, Tensor]]:
    """Yield a random batch for some seconds, with every column that a condition may need; add the speed to ``found``.

    The time from one request for a batch to the next is that of a step.
    """
    num = member.batch_size
    spec = member.condition
    with device:
        batch = {
            "x_0": torch.randn(num, *member.x_shape),
            "label": torch.randint(max(1, spec.size), (num,)),
            "text": torch.randn(num, spec.vector_size or spec.size),
            "text_tokens": torch.randn(num, *spec.row_shape),
            "cluster": torch.randint(member.num_clusters, (num,)),
            "sample_id": torch.arange(num),
        }

    for _ in range(_WARM_UP):
        yield batch

    began = _now()
    num_steps = 0
    while num_steps < 2 or time.perf_counter() < began + _SECONDS:
        yield batch
        num_steps += 1

    found.append(num_steps * num / (_now() - began))


def _now() -> float:
    """The time, once the GPU has done its work."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()

    return time.perf_counter()
