"""Tables and JSON of a plan."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from rich.table import Table

from ddm_lightning.core.formatting import format_bytes, format_duration, format_number, table
from ddm_lightning.islands.plan import Data, Plan, Rates


def as_json(plan: Plan) -> dict[str, Any]:
    """A plan as plain JSON."""
    return {
        "device": plan.device,
        "device_bytes": plan.device_bytes,
        "fits": plan.fits,
        **plan.totals,
        "members": [asdict(member) for member in plan.members],
    }


def sources_of(data: Data, rates: Rates, device_source: str) -> dict[str, str]:
    """Where the figures come from."""
    return {
        "parameters, FLOPs, memory": "counted on tensors without data; temporary tensors of compiled blocks at most",
        "device": f"{device_source}; memory and peak from its data sheet",
        "data": data.source,
        "MFU": f"{rates.mfu:.3g}, {rates.mfu_source}",
        "prices": rates.price_source,
    }


def tables(plan: Plan) -> list[Table]:
    """Size and traffic, memory, and time of each member; members with equal figures share a row."""
    sizes = []
    for one in plan.members:
        sizes.append(
            (
                one.member,
                format_number(one.parameters / 1e6),
                format_number(one.flops_per_sample / 1e9),
                f"{one.flops:.2e}",
                format_bytes(one.checkpoint_bytes),
                format_number(one.checkpoints_out / 1e6),
                "–" if one.shard_bytes is None else format_bytes(one.shard_bytes),
                "–" if one.shards_in is None else format_number(one.shards_in / 1e6),
            )
        )

    fits = {True: "yes", False: "NO", None: "–"}
    memory = []
    for one in plan.members:
        memory.append((one.member, *(f"{value / 1e9:.3f}" for value in asdict(one.memory).values()), fits[one.fits]))

    training = []
    for one in plan.members:
        training.append(
            (
                one.member,
                str(one.devices),
                one.strategy,
                str(one.micro_batch_size),
                *_times(one.hours, one.device_hours, one.dollars),
            )
        )

    training.append(("all at once", "", "", "", *_times(*plan.totals.values())))
    heads = ("M\nparams", "GFLOP\na sample", "FLOP", "check-\npoint", "out,\nMB/s", "shards", "in,\nMB/s")
    parts = ["weights", "grads", "opti-\nmizer", "EMA", "activ-\nations", "tem-\nporary", "peak", "fits"]
    return [
        table(["", *heads], _merged(sizes), "networks and traffic"),
        table(["", *parts], _merged(memory), f"memory of one device, GB: {plan.device or 'CPU'}"),
        table(["", "devices", "strategy", "samples\nat once", *_TIMES], _merged(training), "training"),
    ]


_TIMES = ("time", "device-\nhours", "price")


def comparison(plans: Sequence[Plan]) -> Table:
    """One row per device."""
    rows = []
    for plan in plans:
        rows.append((plan.device or "CPU", "yes" if plan.fits else "NO", *_times(*plan.totals.values())))

    return table(["", "fits", *_TIMES], rows, "devices")


def suggestions(plan: Plan) -> list[str]:
    """The fewest devices for each member, in words; equal ones share a line."""
    named = []
    for one in plan.members:
        if one.suggestion:
            named.append((one.member, str(one.suggestion)))

    return [f"{row[0]}: {row[1]}" for row in _merged(named)]


def _times(hours: float | None, device_hours: float | None, dollars: float | None) -> tuple[str, str, str]:
    if device_hours is None:
        device_time = "–"
    else:
        device_time = f"{device_hours:,.1f}"

    return (
        "–" if hours is None else format_duration(3600 * hours),
        "< 0.1" if device_time == "0.0" else device_time,
        "–" if dollars is None else f"$ {dollars:,.2f}",
    )


def _merged(rows: Sequence[tuple[str, ...]]) -> Iterator[tuple[str, ...]]:
    """Join neighbouring rows that differ in their first cell only."""
    for rest, group in groupby(rows, key=lambda row: row[1:]):
        names = [row[0] for row in group]
        yield ("…".join([names[0], *(name.rpartition("-")[2] for name in names[1:][-1:])]), *rest)
