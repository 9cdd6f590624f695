"""Devices of an island. Imports no Lightning, so that planning and launching start quickly."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ddm_lightning.core.environment import Ranks
from ddm_lightning.core.errors import UserError

# By the vendors' data sheets: memory in GB (the smallest, if there are several), and dense peak TFLOP/s in bfloat16 and
# float16, TF32, float32; without sparsity, a multiply-add is two FLOPs. The first pattern in a device's name counts.
_DEVICES: tuple[tuple[str, str, int, tuple[float, float, float]], ...] = (
    ("GB200", r"GB200", 186, (2500.0, 1250.0, 80.0)),
    ("B200", r"B200", 180, (2250.0, 1125.0, 80.0)),
    ("H200 NVL", r"H200 NVL", 141, (835.5, 417.8, 60.0)),
    ("H100 NVL", r"H100 NVL", 94, (835.5, 417.8, 60.0)),
    ("GH200", r"GH200", 96, (989.4, 494.7, 66.9)),
    ("H200", r"H200", 141, (989.4, 494.7, 66.9)),
    ("H100", r"H100 80GB|H100 SXM|H100$", 80, (989.4, 494.7, 66.9)),
    ("H100 PCIe", r"H100 PCIe", 80, (756.0, 378.0, 51.2)),
    ("A100", r"A100", 40, (312.0, 156.0, 19.5)),
    ("L40S", r"L40S", 48, (362.0, 183.0, 91.6)),
    ("A40", r"A40\b", 48, (149.7, 74.8, 37.4)),
    ("L4", r"L4\b", 24, (121.0, 60.0, 30.3)),
    ("RTX 4090", r"RTX 4090(?! (D|Laptop))", 24, (165.2, 82.6, 82.6)),
    ("RTX 3090", r"RTX 3090(?! (Ti|Laptop))", 24, (71.0, 35.6, 35.6)),
)


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
    """Resolve ``auto`` to ``bf16-mixed`` on a GPU with bfloat16 units, else to ``32-true``; return others unchanged."""
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
    dtypes = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
    dtype = dtypes.get(resolve_precision(precision, device))
    return torch.autocast(device.type, dtype, enabled=dtype is not None)


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


def device_bytes(accelerator: str) -> int:
    """Memory of one device in bytes."""
    if resolve_accelerator(accelerator) == "gpu":
        return int(torch.cuda.get_device_properties(0).total_memory)

    return 16 * 1024**3  # a CPU is for tests; its memory is shared by the ranks


def peak_tflops(name: str, precision: str, *, tf32: bool = False) -> float | None:
    """Peak dense matrix throughput of a device in TFLOP/s; None for an unknown device or a MIG slice.

    Args:
        name: from ``torch.cuda.get_device_name``.
        precision: ``island.precision``, such as ``bf16-mixed``.
        tf32: whether float32 products may use TensorFloat-32.
    """
    if "MIG" in name:  # a slice of the device
        return None

    for _, pattern, _, (half, with_tf32, single) in _DEVICES:
        if re.search(pattern, name):
            full = with_tf32 if tf32 else single
            return {"bf16-mixed": half, "16-mixed": half, "32-true": full}.get(precision)

    return None


def devices_named(accelerator: str, devices: int) -> str:
    """Name of a member's devices, such as ``8 x NVIDIA H100 80GB HBM3``."""
    name = torch.cuda.get_device_name() if resolve_accelerator(accelerator) == "gpu" else "CPU"
    if devices > 1:
        return f"{devices} x {name}"

    return name


def known_device(name: str) -> tuple[str, int]:
    """Name and bytes of memory of a device, by its data sheet or by a size in ``name``, such as ``A100 80GB``.

    Raises:
        UserError: an unknown device.
    """
    for known, pattern, gigabytes, _ in _DEVICES:
        if re.search(pattern, name):
            size = re.search(r"(\d+) ?GB", name)
            if size and known != "GH200":  # whose name has the host's memory
                gigabytes = int(size[1])

            return f"{known} {gigabytes}GB", gigabytes * 10**9

    raise UserError(f"unknown device {name!r}; known: {', '.join(known for known, *_ in _DEVICES)}")


def peak_of_this_device(accelerator: str, precision: str) -> tuple[str, float | None]:
    """Name and ``peak_tflops`` of this process's device; None for a CPU."""
    if resolve_accelerator(accelerator) != "gpu":
        return "this CPU", None

    name = torch.cuda.get_device_name()
    return name, peak_tflops(name, precision, tf32=torch.get_float32_matmul_precision() != "highest")


def local(tensor: Tensor) -> Tensor:
    """This rank's shard of a DTensor, sharing its memory; other tensors unchanged."""
    if isinstance(tensor, DTensor):
        return tensor.to_local()

    return tensor
