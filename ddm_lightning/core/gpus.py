"""GPUs by name: their memory and peak throughput, from ``gpus.csv`` or as a user describes them.

``gpus.csv`` holds, with the source of each row, memory in GB (the smallest, if there are several) and dense peak
TFLOP/s, without sparsity; a multiply-add is two operations. Half-precision figures are those with float32 sums, which
are half the others on GeForce cards. ``bf16`` is empty for a GPU without bfloat16 units. ``tf32`` is the peak of
float32 products where torch may round them to TensorFloat-32: that of ``fp32`` on GPUs without it, and on AMD's, where
torch uses it only on request.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, TypeAlias

from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError

_MAKERS = r"((NVIDIA|AMD|Tesla|GeForce|Instinct)[ _-])*"
# What may follow a model's name without changing the model. Other words do: "Laptop GPU", "D", "Ti", "MIG 1g.10gb".
_FORMS = (
    r"([ _-](SXM\d?|PCI-?E|OAM|HBM\d\w?|\d+ ?GB?|AC|Generation|Blackwell|(Server|Workstation) Edition)|( / MI250))*"
)
_Positive: TypeAlias = Annotated[str, checks.matching(r"(?=.*[1-9])\d{1,9}(\.\d{1,9})?", "a positive number")]
_EXAMPLE = "write it as name=MyGPU,tflops=120,memory_gb=24, with its dense peak in bfloat16"


@dataclass(frozen=True)
class Device:
    """A kind of GPU, or a CPU."""

    name: str
    """Such as ``A100 80GB``."""
    num_bytes: int | None
    """Its memory; None if unknown."""
    peaks: Mapping[str, float]
    """Dense peak TFLOP/s by column of ``gpus.csv``."""

    def peak(self, precision: str, *, tf32: bool = True) -> float | None:
        """Dense peak in TFLOP/s; None if it is not known.

        Args:
            precision: ``island.precision``, such as ``bf16-mixed``.
            tf32: whether float32 products may use TensorFloat-32.
        """
        full = "tf32" if tf32 else "fp32"
        return self.peaks.get({"bf16-mixed": "bf16", "bf16-true": "bf16", "16-mixed": "fp16"}.get(precision, full))


@cache
def _table() -> list[dict[str, str]]:
    with Path(__file__).with_name("gpus.csv").open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def find_gpu(name: str) -> Device | None:
    """Look a GPU up by torch's name of it, or a shorter one; its memory may be in it, as in ``A100 80GB``.

    Returns:
        None for an unknown one, and for a MIG slice.
    """
    for row in _table():
        model = row["name"].replace("RTX ", "(RTX )?").replace(" ", "[ _-]?")
        if not re.fullmatch(_MAKERS + model + _FORMS, name.strip(), re.IGNORECASE):
            continue

        gigabytes = int(row["memory_gb"])
        size = re.search(r"(\d+) ?GB", name, re.IGNORECASE)
        if size and row["name"] != "GH200":  # whose name has the host's memory
            gigabytes = int(size[1])

        peaks = {kind: float(row[kind]) for kind in ("bf16", "fp16", "tf32", "fp32") if row[kind]}
        return Device(f"{row['name']} {gigabytes}GB", gigabytes * 10**9, peaks)

    return None


@dataclass(frozen=True)
class _Described:
    """A GPU in a user's words."""

    name: checks.Text
    tflops: _Positive
    memory_gb: _Positive


def parse_gpu(text: str) -> Device:
    """Find a GPU by name, or read a description such as ``name=MyGPU,tflops=120,memory_gb=24``.

    ``tflops`` is its dense peak in bfloat16. That of float16 is taken to be the same, that of float32 products half of
    it, as TensorFloat-32 has on NVIDIA's data-centre GPUs.

    Raises:
        UserError: an unknown name, or an unknown, missing or bad key.
    """
    if "=" not in text:
        gpu = find_gpu(text)
        if gpu is None:
            known = ", ".join(row["name"] for row in _table())
            raise UserError(f"unknown device {text!r}; known: {known}; or {_EXAMPLE}")

        return gpu

    given = {}
    for pair in text.split(","):
        key, _, value = pair.partition("=")
        given[key.strip()] = value.strip()

    own = checks.record(given, _Described, f"device {text!r}", _EXAMPLE)
    tflops = float(own.tflops)
    return Device(own.name, round(float(own.memory_gb) * 1e9), {"bf16": tflops, "fp16": tflops, "tf32": tflops / 2})
