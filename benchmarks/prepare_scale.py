"""How do time, memory and files of `prepare` grow with the data set, and what would 158 million images take?

Prepares generated images of 8 x 8 pixels, 100,000 and a million of them, in one process each, and some of 15.6 KB,
about the size of LAION's latents. The model of 158 million images multiplies the measured seconds per sample, and takes
the rest from stated inputs.

python benchmarks/prepare_scale.py --json benchmarks/results/prepare_scale.json
"""

from __future__ import annotations

import re
import resource
import tempfile
import time
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from common import Report, parse, parser, run, start

# In all, and with ``--quick``.
SIZES = ((100_000, 1_000_000), (1_000, 10_000))
LARGE_ROWS = (20_000, 1_000)
"""Samples of 15,552 bytes."""
_STAGE = re.compile(r"(\w+): done in ([\d.,]+) s")


@dataclass(frozen=True)
class Model:
    """Inputs of the model that this benchmark does not measure."""

    num_samples: int = 158_000_000
    part_samples: int = 10_000
    latent_bytes: int = 16_384
    text_bytes: int = 1_536
    feature_size: int = 1_024
    num_clusters: int = 8
    num_fine_centroids: int = 1_024
    fit_fraction: float = 0.01
    num_iterations: int = 20
    gpus_per_node: int = 8
    gpu_samples_per_second: float = 300.0
    """SD's VAE and DINOv2 ViT-L on an H100, decoding included: an estimate, not measured."""
    processes_per_node: int = 32
    flops_per_second: float = 2e11
    """Of the machine that fits the partition, float32 on its CPU."""
    store_bytes_per_second: float = 3e8
    """Between a node and the store, in each direction."""
    index_bytes: int = 40
    """Memory per sample while equal keys are sought: hashes, their order and copies."""

    @property
    def part_bytes(self) -> int:
        """Bytes of a sample's columns."""
        return self.latent_bytes + self.text_bytes + 4 * self.feature_size

    def hours(self, num_nodes: int, seconds: Mapping[str, float]) -> dict[str, float]:
        """Return the hours of each stage; several nodes share nothing but the store.

        Args:
            num_nodes: number of nodes.
            seconds: measured seconds per sample, in one process, of the stages other than ``encode`` and ``partition``.
        """
        num = self.num_samples
        link = self.store_bytes_per_second
        # A single node keeps the columns on its disk.
        through_store = self.part_bytes if num_nodes > 1 else 0
        encode = 1 / (self.gpus_per_node * self.gpu_samples_per_second) + through_store / link
        shard_bytes = through_store + self.latent_bytes + self.text_bytes
        shards = seconds["shards"] / self.processes_per_node + shard_bytes / link
        fitted = self.fit_fraction * num * self.feature_size
        flops = 2 * fitted * self.num_fine_centroids * (self.num_iterations + 1)
        hours = {name: num * each / 3600 for name, each in seconds.items()}
        hours["encode"] = num * encode / num_nodes / 3600
        hours["shards"] = num * shards / num_nodes / 3600
        hours["partition"] = (4 * fitted / link + flops / self.flops_per_second) / 3600
        return hours

    def peak_gb(self) -> dict[str, float]:
        """Return the largest memory of one process in the stages that hold more than a part."""
        group = 64 * self.part_samples * self.part_bytes / self.num_clusters
        fit = 4 * self.fit_fraction * self.num_samples * self.feature_size
        return {"index": self.index_bytes * self.num_samples / 1e9, "partition": fit / 1e9, "shards": group / 1e9}


class Measured(NamedTuple):
    """One call of ``prepare``."""

    stages: dict[str, float]
    """Seconds by stage."""
    seconds: float
    peak_gb: float
    """Largest memory of a process so far, of this call and earlier ones."""
    num_files: int


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    options = parse(parser(__doc__ or "", fixed=True), arguments)
    fewer, more = SIZES[options.quick]
    rows = LARGE_ROWS[options.quick]
    small = measure(options, fewer, 8)
    large = measure(options, more, 8)
    per_sample = {"shards": measure(options, rows, 72).stages["shards"] / rows}
    for name, seconds in large.stages.items():
        if name not in ("encode", "partition", "shards"):
            per_sample[name] = max(0.0, seconds - small.stages[name]) / (more - fewer)

    model = Model()
    nodes = (model.hours(1, per_sample), model.hours(8, per_sample))
    peaks = model.peak_gb()
    report = Report(
        "Preparing by the number of images",
        ["stage", f"{fewer:,}: s", f"{more:,}: s", "158 million: h, one node", "eight nodes", "GB of a process"],
    )
    for name, seconds in large.stages.items():
        cells = [f"{small.stages[name]:.1f}", f"{seconds:.1f}"]
        for column in (*nodes, peaks):
            cells.append(f"{column[name]:.2f}" if name in column else "")

        report.row(name, *cells)

    totals = [small.seconds, large.seconds, *(sum(hours.values()) for hours in nodes)]
    report.row("in all", *map("{:.1f}".format, totals), "")
    figures = report.figures
    figures["seconds_1m_over_100k"] = large.seconds / small.seconds
    figures["seconds_1m"] = large.seconds
    figures["peak_gb_1m"] = large.peak_gb
    figures["files_1m"] = large.num_files
    figures["most_hours_one_node"] = max(nodes[0].values())
    figures["most_hours_eight_nodes"] = max(nodes[1].values())
    figures["most_gb_of_a_process"] = max(peaks.values())
    report.details = {"model": asdict(model), "seconds_per_sample": per_sample}
    report.note(
        f"Of {more:,} images: {large.num_files:,} files, at most {large.peak_gb:.2f} GB in a process. "
        f"Shards of 15.6 KB per sample: {1e6 * per_sample['shards']:.0f} µs each."
    )
    report.note(
        "The model, per sample and node: encode = 1 / (GPUs x samples per second) + columns / link; shards = measured "
        "/ processes + (columns + shard) / link; one node keeps the columns on its disk. On one machine: partition = "
        "features of the fit / link + 2 x their entries x centroids x passes / FLOP/s; other stages as measured, by "
        "the difference of the two sizes. The JSON file has the inputs."
    )
    report.finish(options.json)


def measure(options: Namespace, num_samples: int, image_size: int) -> Measured:
    """Prepare so many generated images in one process."""
    params = {"num_samples": num_samples, "image_size": image_size}
    source = [f"prepare.source.params.{name}={value}" for name, value in params.items()]
    with tempfile.TemporaryDirectory(prefix="prepare-scale-") as folder:
        began = time.monotonic()
        told = start("prepare", options, *source, "prepare.num_processes=1", f"run_dir={folder}").ended()
        seconds = time.monotonic() - began
        num_files = sum(path.is_file() for path in (Path(folder) / "prepared").rglob("*"))

    stages = {}
    for name, number in _STAGE.findall(told):
        stages[name] = float(number.replace(",", ""))

    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    return Measured(stages, seconds, peak, num_files)


if __name__ == "__main__":
    run(main)
