"""What ``prepare`` would do: which stages, how many samples, bytes and hours; nothing is written."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich import box
from rich.table import Table

from ddm_lightning.config import Experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.formatting import amount, duration
from ddm_lightning.prepare.encode import latent_rows
from ddm_lightning.prepare.progress import SilentReporter
from ddm_lightning.prepare.reading import Reading
from ddm_lightning.prepare.stages import Preparation

_TRIED = 64
Result = TypeVar("Result")


@dataclass(frozen=True)
class Estimate:
    """One line of a dry run."""

    name: str
    """A group of columns."""
    bytes_per_sample: int
    seconds_per_sample: float
    """In one process, measured here on the first samples."""


@dataclass(frozen=True)
class DryRun:
    """What there is to do."""

    stages: tuple[str, ...]
    """Stages that would run; empty when all is up to date."""
    num_parts: int
    num_unfinished_parts: int
    num_samples: int | None
    """None where only reading tells."""
    estimates: tuple[Estimate, ...]


def dry_run(experiment: Experiment, run_dir: Path) -> DryRun:
    """Look at the source and try its first samples; writes nothing.

    Raises:
        UserError: as ``prepare`` before it writes, or when no sample can be read.
    """
    preparation = Preparation(experiment, run_dir, SilentReporter())
    stages = preparation.pending()
    plugins, parts = preparation.plugins, preparation.parts
    preparation.check_before_writing()
    sizes = [part.num_samples for part in parts]
    num_samples = None if None in sizes else sum(size or 0 for size in sizes)

    start = time.monotonic()
    readings = [Reading(part, plugins, lambda _: None, at_once=_TRIED) for part in parts]
    first = next((chunk for reading in readings for chunk in reading.chunks()), None)
    seconds = time.monotonic() - start
    if first is None:
        broken = next((one for reading in readings for one in reading.broken), None)
        said = [broken.cause, *([broken.detail] if broken.detail else [])] if broken else []
        example = f" (for example {broken.key!r}: {'; '.join(said)})" if broken else ""
        raise UserError(f"source {plugins.config.source.name!r}: no sample can be read{example}; mend prepare.source")
    records, images = first
    num = len(records)
    texts = sum(len(f"{record.key}{record.caption}".encode()) for record in records)
    estimates = [Estimate("keys and captions", texts // num, seconds / num)]
    latents, spent = _timed(lambda: latent_rows(plugins, images))
    estimates.append(Estimate("encoded pictures", sum(map(_row_bytes, latents.values())), spent / num))
    encoder = plugins.caption_encoder
    if encoder is not None:
        captions = [str(record.caption) for record in records]
        columns, spent = _timed(lambda: encoder.encode(captions))
        estimates.append(Estimate("encoded captions", sum(map(_row_bytes, columns.values())), spent / num))
    features, spent = _timed(lambda: plugins.features.encode(images))
    estimates.append(Estimate("features", _row_bytes(features), spent / num))
    in_shards = texts // num + sum(one.bytes_per_sample for one in estimates[1:-1])
    estimates.append(Estimate("shards", in_shards, 0.0))
    unfinished = len(preparation.unfinished_parts())
    return DryRun(tuple(stages), len(parts), unfinished, num_samples, tuple(estimates))


def _timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """What ``work`` gives, and its time without that of loading weights."""
    work()
    start = time.monotonic()
    return work(), time.monotonic() - start


def _row_bytes(rows: np.ndarray) -> int:
    return rows[0].nbytes


def dry_run_table(plan: DryRun, num_processes: int) -> Table:
    """What a dry run found, a line a group of columns.

    Args:
        plan: the dry run.
        num_processes: over how many processes the time is spread.
    """
    samples = "unknown, until it is read" if plan.num_samples is None else f"{plan.num_samples:,}"
    table = Table(title=f"parts: {plan.num_parts:,}, samples: {samples}", box=box.SIMPLE_HEAD, title_justify="left")
    for heading in (
        "",
        "bytes a sample",
        "a sample",
        "in all",
        f"with {num_processes} process{'es' if num_processes > 1 else ''}",
    ):
        table.add_column(heading, justify="left" if not heading else "right")
    for estimate in plan.estimates:
        table.add_row(*_cells(estimate, plan.num_samples, num_processes))
    total = Estimate(
        "in all",
        sum(estimate.bytes_per_sample for estimate in plan.estimates),
        sum(estimate.seconds_per_sample for estimate in plan.estimates),
    )
    table.add_section()
    table.add_row(*_cells(total, plan.num_samples, num_processes))
    return table


def _cells(estimate: Estimate, num_samples: int | None, num_processes: int) -> tuple[str, ...]:
    size = time_in_all = "–"
    if num_samples is not None:
        size = amount(estimate.bytes_per_sample * num_samples)
        time_in_all = duration(estimate.seconds_per_sample * num_samples / num_processes)
    measured = estimate.seconds_per_sample > 0
    time_in_all = time_in_all if measured else "–"
    per_sample = (f"{estimate.bytes_per_sample:,}", duration(estimate.seconds_per_sample) if measured else "–")
    return (estimate.name, *per_sample, size, time_in_all)
