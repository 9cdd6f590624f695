"""DiT-XL/2 on one GPU: samples per second, attention back ends, planned and measured memory."""

from __future__ import annotations

import gc

import torch
from common import Report
from step_clock import median
from step_memory import peak_bytes, planned_bytes
from step_networks import Sizes, Step, in_turn, our_side

from ddm_lightning.core.errors import UserError
from ddm_lightning.training.ema import track_ema

XL2 = Sizes(width=1152, depth=28, num_heads=16, patch_size=2, channels=4, edge=32, batch_size=32)
ATTENTION = ("sdpa", "xformers")


def measure(report: Report, sizes: Sizes, device: torch.device, num_rounds: int, steps_per_turn: int) -> None:
    """Add a row and figures for each back end that runs here, under bfloat16 autocast with compiled blocks.

    Each runs on an otherwise empty device, so that its peak is its own.
    """
    for attention in ATTENTION:
        gc.collect()  # remove the remains of earlier measurements
        if device.type == "cuda":
            torch.cuda.empty_cache()
        try:
            side = our_side(sizes, attention)
            step = Step(side, sizes, device, half=True, compiled=device.type == "cuda")
            track_ema(step.optimizer, 0.9999)
            seconds = in_turn({attention: step}, num_rounds, steps_per_turn)[attention]
        except (UserError, RuntimeError) as error:
            report.note(f"Attention back end {attention} did not run on {device}: {str(error).splitlines()[0]}")
            continue
        middle = median(seconds)
        report.figures[f"seconds_xl2_{attention}"] = middle
        report.row(f"DiT-XL/2, {attention}: {sizes}", f"{1000 * middle:.1f}", "", f"{sizes.batch_size / middle:,.1f}/s")
        planned, peak = planned_bytes(step), peak_bytes(step)
        if attention == ATTENTION[0]:
            report.figures |= {
                "samples_per_second_xl2": sizes.batch_size / middle,
                "parameters_xl2": side.num_parameters,
            }
        report.figures |= {
            f"planned_gb_xl2_{attention}": planned / 1e9,
            f"peak_gb_xl2_{attention}": peak / 1e9,
            f"peak_over_planned_{attention}": peak / planned,
        }
        report.note(f"Memory of DiT-XL/2 with {attention}: {peak / 1e9:.1f} GB of {planned / 1e9:.1f} planned.")
        del side, step
