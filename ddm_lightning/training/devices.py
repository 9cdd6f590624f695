"""What an island computes on; no Lightning, so that what only plans or launches starts quickly."""

from __future__ import annotations

import torch


def resolve_accelerator(accelerator: str) -> str:
    """``gpu`` or ``cpu`` for ``auto``; other names as they are."""
    return ("gpu" if torch.cuda.is_available() else "cpu") if accelerator == "auto" else accelerator


def device_bytes(accelerator: str) -> int:
    """Memory of one device."""
    if resolve_accelerator(accelerator) == "gpu":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return 16 * 1024**3  # a CPU is for tests; its memory is shared by the ranks
