"""Dry run of ``prepare``: stages, samples, bytes and hours, estimated from the first samples without writing."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import numpy as np
from rich.table import Table

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.devices import tf32
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.formatting import format_bytes, format_duration, table
from ddm_lightning.prepare.encode import in_bucket, latent_rows
from ddm_lightning.prepare.engine import Reporter
from ddm_lightning.prepare.reading import Reading, count_buckets
from ddm_lightning.prepare.records import count_samples
from ddm_lightning.prepare.stages import Preparation
from ddm_lightning.shards.manifest import DataSizes


@dataclass(frozen=True)
class DryRun:
    """The work that ``prepare`` would do."""

    stages: tuple[str, ...]
    """Stages that would run; empty if all is up to date."""
    num_parts: int
    num_unfinished_parts: int
    num_samples: int | None
    """None if unknown before reading."""
    estimates: Mapping[str, tuple[int, float]]
    """Bytes and seconds per sample of each group of columns, measured in one process; 0 seconds if not measured."""
    looked: Reading
    """Samples read, from all over the source."""
    num_captions: int
    """Samples with a caption, of those that can be used."""
    num_labels: int
    """Different labels of those."""

    @property
    def seen(self) -> str:
        """What was found in the samples read, in words."""
        return (
            f"of {self.looked.num_read:,} samples from all over the source: with a caption {self.num_captions:,}, "
            f"different labels {self.num_labels:,}, broken {len(self.looked.broken):,}"
        )

    @property
    def num_kept(self) -> int | None:
        """Estimate of the samples to encode; None if unknown before reading."""
        looked = self.looked
        if self.num_samples is None or not looked.filtered:
            return self.num_samples

        num_lost = len(looked.broken) + looked.filtered.total()
        return round(self.num_samples * (1 - num_lost / looked.num_read))


@tf32()
def dry_run(experiment: Experiment, run_dir: Path, check: Callable[[DataSizes], None] | None = None) -> DryRun:
    """List the source and encode its first samples; write nothing.

    Args:
        experiment: as for ``prepare``.
        run_dir: the run folder.
        check: as for ``prepare``.

    Raises:
        UserError: as ``prepare`` before it writes, or no sample can be read.
    """
    preparation = Preparation(experiment, run_dir, Reporter())
    stages = preparation.pending()
    plugins = preparation.plugins
    parts = preparation.parts
    preparation.check_before_writing(check)

    start = time.monotonic()
    reading = Reading(plugins.look(), plugins)
    chunks = reading.chunks()
    first = next(chunks, None)
    seconds = time.monotonic() - start
    if first is None:
        causes = sorted({one.cause for one in reading.broken} | (+reading.filtered).keys())
        raise UserError(
            f"source {plugins.config.source.name!r}: no sample can be read ({', '.join(causes)}); fix prepare.source, "
            "or change prepare.filters or prepare.images"
        )

    num = len(first.records)
    keys = ""
    captions = list[str]()
    for record in first.records:
        keys += record.key
        captions += record.captions or (record.caption,)

    texts = len("".join([keys, *captions]).encode())
    estimates = {"keys and captions": (texts // num, seconds / num)}

    num_captions = 0
    labels = set()
    for chunk in chain([first], chunks):
        for record in chunk.records:
            num_captions += bool(record.caption)
            labels.add(record.label)

    def encode_images() -> Mapping[str, np.ndarray]:
        rows = {}
        for number, bucket in enumerate(plugins.bucket_names):
            for name, encoded in latent_rows(plugins, first.of_bucket(number)[1], number).items():
                rows[in_bucket(name, bucket)] = encoded

        return rows

    work: dict[str, Callable[[], Mapping[str, np.ndarray]]] = {"encoded images": encode_images}
    if (encoder := plugins.caption_encoder) is not None:
        work["encoded captions"] = lambda: encoder.encode(captions)

    work["features"] = lambda: {"features": plugins.features.encode(first.squares)}
    for name, encode in work.items():
        encode()  # loads the weights
        start = time.monotonic()
        num_bytes = sum(rows.nbytes for rows in encode().values()) // num
        estimates[name] = num_bytes, (time.monotonic() - start) / num

    estimates["shards without texts"] = plugins.sample_bytes(plugins.sizes_at(reading.image_size)), 0.0
    return DryRun(
        stages,
        len(parts),
        len(preparation.unfinished(preparation.part_jobs())),
        count_samples(parts),
        estimates,
        reading,
        num_captions,
        len(labels),
    )


def bucket_table(looked: Reading) -> Table:
    """Format the buckets of the samples read."""
    counts = count_buckets(looked.plugins.buckets, np.array(looked.buckets), np.array(looked.cropped))
    total, _ = counts["all"]
    rows = [(name, f"{num:,}", f"{num / total:.2%}", f"{share:.2%}") for name, (num, share) in counts.items()]
    title = f"shapes of images, by {looked.num_read:,} samples"
    return table(("", "samples", "of all kept", "cropped away"), rows, title)


def dry_run_table(plan: DryRun, num_processes: int, num_gpus: int = 0) -> Table:
    """Format a dry run, one row per group of columns.

    Args:
        plan: the dry run.
        num_processes: number of processes that share the work.
        num_gpus: number of GPUs that the processes share; several on one GPU count as one.
    """
    shares = min(num_processes, num_gpus) or num_processes
    samples = "unknown before reading"
    if plan.num_samples is not None:
        samples = f"{plan.num_samples:,}"
    if plan.num_kept != plan.num_samples:
        samples += f", about {plan.num_kept:,} after filters"

    unit, plural = ("GPU", "GPUs") if num_gpus else ("process", "processes")
    spread = f"with {shares} {plural if shares > 1 else unit}"
    sizes, times = zip(*plan.estimates.values(), strict=True)
    rows = []
    for name, (num_bytes, seconds) in {**plan.estimates, "total": (sum(sizes), sum(times))}.items():
        each = size = hours = "–"
        if seconds:
            each = format_duration(seconds)
        if plan.num_kept is not None:
            size = format_bytes(num_bytes * plan.num_kept)
            if seconds:
                hours = format_duration(seconds * plan.num_kept / shares)

        rows.append((name, f"{num_bytes:,}", each, size, hours))

    headings = ("", "bytes per sample", "per sample", "total", spread)
    return table(headings, rows, f"parts: {plan.num_parts:,}, samples: {samples}")
