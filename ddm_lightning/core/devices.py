"""What an island computes on; no Lightning, so that what only plans or launches starts quickly."""

from __future__ import annotations

import re
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from ddm_lightning.core.errors import UserError

# Dense products a second in 10^12 FLOP (a multiply-add is two), by the makers' data sheets, without sparsity.
# The first pattern that the device's name matches counts: (bfloat16 and float16, TF32, float32).
_PEAKS: tuple[tuple[str, tuple[float, float, float]], ...] = (
    (r"GB200", (2500.0, 1250.0, 80.0)),
    (r"B200", (2250.0, 1125.0, 80.0)),
    (r"H200 NVL", (835.5, 417.8, 60.0)),
    (r"H200|H100 80GB HBM3|H100 SXM|GH200", (989.4, 494.7, 66.9)),
    (r"H100 NVL", (835.5, 417.8, 60.0)),
    (r"H100 PCIe", (756.0, 378.0, 51.2)),
    (r"A100", (312.0, 156.0, 19.5)),
    (r"L40S", (362.0, 183.0, 91.6)),
    (r"A40\b", (149.7, 74.8, 37.4)),
    (r"L4\b", (121.0, 60.0, 30.3)),
    (r"RTX 4090", (165.2, 82.6, 82.6)),
    (r"RTX 3090\b", (71.0, 35.6, 35.6)),
)


def resolve_accelerator(accelerator: str) -> str:
    """``gpu`` or ``cpu`` for ``auto``; other names as they are."""
    return ("gpu" if torch.cuda.is_available() else "cpu") if accelerator == "auto" else accelerator


def device_of(accelerator: str) -> torch.device:
    """The device on which an island computes what one device can."""
    return torch.device("cuda" if resolve_accelerator(accelerator) == "gpu" else "cpu")


def configure_torch(accelerator: str, num_threads: int) -> None:
    """``num_threads`` on a CPU; on a GPU products of float32 in TensorFloat-32."""
    if resolve_accelerator(accelerator) == "cpu":
        torch.set_num_threads(num_threads)
    else:
        torch.set_float32_matmul_precision("high")


def autocast(precision: str, device: torch.device) -> AbstractContextManager[Any]:
    """What the island's ``precision`` means to a forward pass outside the Trainer."""
    dtype = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}.get(precision)
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype)


def check_devices(accelerator: str, devices: int) -> None:
    """Whether the island has what it is told to train on.

    Raises:
        UserError: no GPU that torch can use, or fewer than ``devices``.
    """
    if resolve_accelerator(accelerator) != "gpu":
        return
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count < devices:
        raise UserError(
            f"key 'island.devices' = {devices} with 'island.accelerator' = {accelerator!r}, but torch sees {count} "
            "usable CUDA devices here; set island.devices or island.accelerator, or look at the driver and "
            "CUDA_VISIBLE_DEVICES"
        )


def device_bytes(accelerator: str) -> int:
    """Memory of one device."""
    if resolve_accelerator(accelerator) == "gpu":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return 16 * 1024**3  # a CPU is for tests; its memory is shared by the ranks


def peak_tflops(name: str, precision: str, *, tf32: bool = False) -> float | None:
    """What a device reaches at most in dense matrix products, in 10^12 FLOP a second.

    None for a device that is unknown, and for a part of one.

    Args:
        name: as ``torch.cuda.get_device_name`` gives it.
        precision: of the island, such as ``bf16-mixed``; ``64-true`` has no peak here.
        tf32: whether float32 products may use TensorFloat-32.
    """
    kinds = {"bf16-mixed": 0, "16-mixed": 0, "32-true": 1 if tf32 else 2}
    found = next((peaks for pattern, peaks in _PEAKS if re.search(pattern, name)), None)
    if "MIG" in name:  # a part of the device
        return None
    return None if found is None or precision not in kinds else found[kinds[precision]]


def peak_of_this_device(accelerator: str, precision: str) -> tuple[str, float | None]:
    """Name and ``peak_tflops`` of this process's device; a CPU's is unknown."""
    if resolve_accelerator(accelerator) != "gpu":
        return "this CPU", None
    name = torch.cuda.get_device_name()
    return name, peak_tflops(name, precision, tf32=torch.get_float32_matmul_precision() != "highest")


def local(tensor: Tensor) -> Tensor:
    """This rank's part, sharing memory with ``tensor``; a tensor that is not sharded is itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
