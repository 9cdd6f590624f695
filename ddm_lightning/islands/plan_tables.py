"""Tables and JSON of a plan."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from rich.table import Table

from ddm_lightning.core.formatting import format_bytes, format_duration, format_number, table
from ddm_lightning.islands.plan import Plan, Rates, merged
from ddm_lightning.islands.plan_data import Data


def as_json(plan: Plan) -> dict[str, Any]:
    """A plan as plain JSON."""
    return {
        "device": plan.device,
        "device_bytes": plan.device_bytes,
        "jobs": plan.jobs,
        "fits": plan.fits,
        **plan.totals,
        "members": [asdict(member) for member in plan.members],
    }


def sources_of(data: Data, rates: Rates, device_source: str, plans: Sequence[Plan]) -> dict[str, str]:
    """Where the figures come from."""
    sources = {
        "parameters, FLOPs, memory": "counted on tensors without data; temporary tensors of compiled blocks at most",
        "device": f"{device_source}; memory and peak from its data sheet, as given, or as found here",
        "data": str(data),
        "MFU": f"{rates.mfu:.3g}, {rates.mfu_source}",
        "prices": rates.price_source,
    }
    for plan in plans:
        if plan.jobs is not None:
            sources["speed"] = (
                f"measured by a few steps on {plan.device}, on random data; fit trains {plan.jobs} at a time; loading, "
                "validation and checkpoints come on top"
            )

    if all(plan.jobs is not None for plan in plans):
        del sources["MFU"]

    return sources


def tables(plan: Plan) -> list[Table]:
    """Size and traffic, memory, and time of each member; members with equal figures share a row."""
    sizes = []
    memory = []
    training = []
    for one in plan.members:
        sizes.append(
            (
                one.member,
                format_number(one.parameters / 1e6),
                format_number(one.flops_per_sample / 1e9),
                f"{one.flops:.2e}",
                format_bytes(one.checkpoint_bytes),
                format_number(one.checkpoints_out / 1e6),
                _or_dash(one.shard_bytes, format_bytes),
                _or_dash(one.shards_in and one.shards_in / 1e6, format_number),
            )
        )
        gigabytes = [f"{value / 1e9:.3f}" for value in asdict(one.memory).values()]
        memory.append((one.member, *gigabytes, _or_dash(one.fits, _FITS.__getitem__)))
        times = _times(one.hours, one.device_hours, one.dollars)
        training.append((one.member, str(one.devices), one.strategy, str(one.micro_batch_size), *times))

    together = f"all, {plan.jobs} at a time" if plan.jobs else "all at once"
    training.append((together, "", "", "", *_times(**plan.totals)))
    heads = ("M\nparams", "GFLOP\na sample", "FLOP", "check-\npoint", "out,\nMB/s", "shards", "in,\nMB/s")
    parts = ["weights", "grads", "opti-\nmizer", "EMA", "activ-\nations", "tem-\nporary", "peak", "host's\nEMA"]
    return [
        table(["", *heads], merged(sizes), "networks and traffic"),
        table(["", *parts, "fits"], merged(memory), f"memory of one device, GB: {plan.device}"),
        table(["", "devices", "strategy", "samples\nat once", *_TIMES], merged(training), "training"),
    ]


_TIMES = ("time", "device-\nhours", "price")
_FITS = {True: "yes", False: "NO"}


def comparison(plans: Sequence[Plan]) -> Table:
    """One row per device."""
    rows = []
    for plan in plans:
        rows.append((plan.device, _FITS[plan.fits], *_times(**plan.totals)))

    return table(["", "fits", *_TIMES], rows, "devices")


def _times(hours: float | None, device_hours: float | None, dollars: float | None) -> tuple[str, str, str]:
    return (
        _or_dash(hours, lambda hours: format_duration(3600 * hours)),
        _or_dash(device_hours, lambda hours: f"{hours:,.1f}" if hours >= 0.05 else "< 0.1"),
        _or_dash(dollars, lambda dollars: f"$ {dollars:,.2f}"),
    )


def _or_dash(value: Any, form: Callable[[Any], str]) -> str:
    if value is None:
        return "–"

    return form(value)
