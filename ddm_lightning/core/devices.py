"""Devices of an island. Imports no Lightning, so that planning and launching start quickly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from ddm_lightning.core.environment import Ranks
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.gpus import find_gpu

DTYPES = {"32-true": torch.float32, "bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
"""Dtype in which networks compute, by ``island.precision`` or ``sample.precision``."""


def resolve_accelerator(accelerator: str) -> str:
    """Resolve ``auto`` to ``gpu`` or ``cpu``; return other names unchanged."""
    if accelerator == "auto":
        return "gpu" if torch.cuda.is_available() else "cpu"

    return accelerator


def device_of(accelerator: str) -> torch.device:
    """Device for work that needs only one: a rank's own, or the current one where no launcher numbers ranks."""
    if resolve_accelerator(accelerator) != "gpu":
        return torch.device("cpu")

    mine = Ranks.read()
    count = torch.cuda.device_count()
    if mine.launched and count:
        return torch.device("cuda", mine.local_rank % count)

    return torch.device("cuda")


def configure_torch(accelerator: str, num_threads: int) -> None:
    """Set ``num_threads``; on a GPU also call ``configure_cuda``, and make a rank's own device the current one."""
    torch.set_num_threads(num_threads)
    if resolve_accelerator(accelerator) == "gpu":
        configure_cuda()
        device = device_of(accelerator)
        if device.index is not None:
            torch.cuda.set_device(device)  # encoders with ``device: cuda`` take it, too


def configure_cuda() -> None:
    """Allow TensorFloat-32 products; exclude cuDNN's attention, unless ``island.attention`` names it.

    torch prefers cuDNN's on H100s, but its backward pass is reported to return NaN (kyutai-labs/pocket-tts#264), and it
    plans anew for each batch size. Without it torch takes the first of flash, efficient and math that can run.
    """
    torch.set_float32_matmul_precision("high")
    torch.backends.cuda.enable_cudnn_sdp(False)


def resolve_precision(precision: str, device: torch.device) -> str:
    """Name the precision of a forward pass: ``bf16-true`` stores other weights, and computes as ``bf16-mixed``.

    ``auto`` is ``bf16-mixed`` on a GPU with bfloat16 units, else ``32-true``.
    """
    if precision == "bf16-true":
        return "bf16-mixed"

    if precision != "auto":
        return precision

    if device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False):
        return "bf16-mixed"

    return "32-true"


@contextmanager
def tf32() -> Iterator[None]:
    """Allow TensorFloat-32 products within the block, on a machine with a GPU."""
    before = torch.get_float32_matmul_precision()
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")

    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def own_defaults() -> Iterator[None]:
    """Compute as in a fresh process, whatever the caller has made torch's defaults, and leave its random numbers."""
    dtype = torch.get_default_dtype()
    place = torch.get_default_device()
    torch.set_default_dtype(torch.float32)
    try:
        with torch.random.fork_rng(devices=[]), nullcontext() if place.type == "cpu" else torch.device("cpu"):
            yield
    finally:
        torch.set_default_dtype(dtype)


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """Autocast for ``island.precision`` or ``sample.precision`` in a forward pass, whatever autocast is around it."""
    dtype = DTYPES[resolve_precision(precision, device)]
    return torch.autocast(device.type, dtype, enabled=dtype != torch.float32)


def check_devices(accelerator: str, devices: int) -> None:
    """Check that the island has the GPUs it is set to train on.

    Raises:
        UserError: torch can use no GPU, or fewer than ``devices``.
    """
    count = torch.cuda.device_count()
    if resolve_accelerator(accelerator) == "gpu" and count < devices:
        raise UserError(
            f"key 'island.devices' = {devices} with 'island.accelerator' = {accelerator!r}, "
            f"but torch sees {count} usable CUDA devices; change one, or check CUDA_VISIBLE_DEVICES"
        )


def check_precision(precision: str, device: torch.device) -> None:
    """Check that a device has what ``island.precision`` needs.

    Raises:
        UserError: it has no bfloat16 units.
    """
    if precision == "bf16-true" and device.type == "cuda" and resolve_precision("auto", device) == "32-true":
        raise UserError(
            "key 'island.precision' = 'bf16-true': this GPU has no bfloat16 units; set it to 16-mixed or 32-true"
        )


def device_bytes(accelerator: str) -> int:
    """Memory of one device in bytes."""
    if resolve_accelerator(accelerator) == "gpu":
        return int(torch.cuda.get_device_properties(0).total_memory)

    return 16 * 1024**3  # a CPU is for tests; its memory is shared by the ranks


def devices_named(accelerator: str, devices: int) -> str:
    """Name of a member's devices, such as ``8 x NVIDIA H100 80GB HBM3``."""
    name = torch.cuda.get_device_name() if resolve_accelerator(accelerator) == "gpu" else "CPU"
    if devices > 1:
        return f"{devices} x {name}"

    return name


def peak_of_this_device(accelerator: str, precision: str) -> tuple[str, float | None]:
    """Name of this process's device, and its peak in TFLOP/s; None for a CPU or an unknown GPU."""
    if resolve_accelerator(accelerator) != "gpu":
        return "this CPU", None

    name = torch.cuda.get_device_name()
    gpu = find_gpu(name)
    if gpu is None:
        return name, None

    return name, gpu.peak(precision, tf32=torch.get_float32_matmul_precision() != "highest")
