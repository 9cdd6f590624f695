"""The partition's first stage against faiss and scikit-learn: distance from the centroids, time and memory.

Writes a mixture of unequal clusters to a temporary file (1M x 768 float32, 3 GB). Each library fits 1024 centroids in a
process of its own, with equally many iterations and threads. Also measures the balance of K = 8 clusters, and the
memory that partitioning 10M x 768 float16 (15 GB) takes.

    python benchmarks/partition.py --json benchmarks/results/partition.json
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from common import Report, console, parse, run

from ddm_lightning.core.errors import UserError

BARS = {"inertia_over_faiss": 1.03, "time_over_faiss": 1.5, "largest_over_mean": 1.05, "peak_gb": 4.0}
RATIOS = {"inertia": "inertia", "time": "seconds", "cpu_time": "cpu_seconds"}
SIDES = ("ours", "faiss", "sklearn")
# Input of the cost model: LAION's subset with DINOv2 ViT-L features, on a disk of 1 GB/s.
LARGE_SAMPLES, LARGE_DIM, LARGE_ITERATIONS, DISK_GB_PER_S = 158_000_000, 1024, 20, 1.0
_COMPONENTS = 400
_ROWS_AT_ONCE = 25_000


@dataclass(frozen=True)
class Setting:
    """Sizes of one measurement."""

    num_samples: int
    dim: int
    num_fine: int
    iterations: int
    num_clusters: int
    num_threads: int


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    cli = argparse.ArgumentParser(description=__doc__)
    cli.add_argument("--json", metavar="OUT", type=Path, help="write commit, device, command and figures here")
    cli.add_argument("--quick", action="store_true", help="a minute: 60k and 500k samples; its times mean little")
    cli.add_argument("--folder", metavar="DIR", default=None, help="folder for large temporary files")
    cli.set_defaults(overrides=[])
    options = parse(cli, arguments)
    num_threads = int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1)
    if options.quick:
        speed = Setting(60_000, 128, 256, 5, 8, num_threads)
        memory = Setting(500_000, 128, 64, 2, 8, num_threads)
        num_rounds = 1
    else:
        speed = Setting(1_000_000, 768, 1024, 10, 8, num_threads)
        memory = Setting(10_000_000, 768, 256, 2, 8, num_threads)
        num_rounds = 3
    with tempfile.TemporaryDirectory(prefix="partition-", dir=options.folder) as name:
        report = measure(Path(name), speed, memory, num_rounds)
    report.show(console())
    report.write(options.json)


def measure(folder: Path, speed: Setting, memory: Setting, num_rounds: int) -> Report:
    """Measure the libraries in turn, then memory; remove each large file as soon as it is not needed."""
    data = folder / "features.npy"
    write_features(data, speed.num_samples, speed.dim, np.dtype(np.float32))
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(num_rounds):
        # scikit-learn takes long and no bar depends on it, so run it only once.
        for side in SIDES if number == 0 else SIDES[:2]:
            result = call(side, data, folder, number, speed)
            result |= {"inertia": call("inertia", data, folder, number, speed)["inertia"]}
            found[side].append(result)
            print(f"round {number + 1} of {num_rounds}: {side}: {json.dumps(result)}", file=sys.stderr)
    data.unlink()
    write_features(data, memory.num_samples, memory.dim, np.dtype(np.float16))
    large = call("memory", data, folder, 0, memory)
    data.unlink()
    return report_of(speed, memory, found, large)


def report_of(
    speed: Setting, memory: Setting, found: dict[str, list[dict[str, float]]], large: dict[str, float]
) -> Report:
    """Make the table, the figures and the notes on how they were measured."""
    report = Report(
        f"{speed.num_fine} centroids of {speed.num_samples} x {speed.dim} float32, {speed.iterations} iterations, "
        f"{speed.num_threads} threads",
        ["", "seconds", "CPU seconds", "mean squared distance", "peak memory, GB"],
    )
    for side in SIDES:
        wall, cpu, inertia = (_column(found[side], name) for name in ("seconds", "cpu_seconds", "inertia"))
        peak = max(_column(found[side], "peak_gb"))
        report.row(side, _spread(wall, ".1f"), _spread(cpu, ".1f"), _spread(inertia, ".5f"), f"{peak:.2f}")
        report.figures |= {
            f"seconds_{side}": statistics.median(wall),
            f"inertia_{side}": statistics.median(inertia),
            f"peak_gb_{side}": peak,
        }
    operations = 2e-9 * speed.num_samples * speed.dim * speed.num_fine * speed.iterations
    gflops = operations / report.figures["seconds_ours"]
    uneven = max(_column(found["ours"], "largest_over_mean"))
    report.figures |= {
        **{f"{figure}_over_faiss": _ratio(found, name, "faiss") for figure, name in RATIOS.items()},
        **{f"{figure}_over_sklearn": _ratio(found, name, "sklearn") for figure, name in RATIOS.items()},
        "largest_over_mean": uneven,
        "peak_gb": large["peak_gb"],
        "peak_gb_samples": memory.num_samples,
        "gflops": gflops,
        "rest_seconds": statistics.median(_column(found["ours"], "rest_seconds")),
    }
    for name, bar in BARS.items():
        value = report.figures[name]
        report.note(f"{name} {value:.3f}, bar {bar:g}: {'met' if value <= bar else 'not met'}.")
    report.note(
        f"Medians (lowest–highest) of {len(found['ours'])} rounds, in which the libraries alternate; ratios are "
        "medians of the rounds' ratios. Each library runs in a process of its own. Ours reads from disk; the others "
        "hold the data in memory, and loading it is not timed. scikit-learn's MiniBatchKMeans runs once, with equally "
        "many passes. Distances are measured on all samples, with NumPy."
    )
    report.note(
        f"largest_over_mean: largest of K = {speed.num_clusters} clusters over their mean size, in the worst round; "
        f"counting and grouping took another {report.figures['rest_seconds']:.1f} s. peak_gb: peak memory of a process "
        f"(VmHWM, mapped pages included) that partitions {memory.num_samples} x {memory.dim} float16 in ten files "
        f"({memory.num_fine} centroids, {memory.iterations} iterations) and assigns all samples; it took "
        f"{large['seconds']:.0f} s."
    )
    for fraction in (1.0, 0.05):
        cost = partition_cost(
            LARGE_SAMPLES, LARGE_DIM, 1024, LARGE_ITERATIONS, gflops, DISK_GB_PER_S, fit_fraction=fraction
        )
        report.figures[f"hours_158m_fit_{fraction:g}"] = cost.seconds / 3600
        report.note(
            f"Cost model at {gflops:.0f} GFLOP/s and {DISK_GB_PER_S:g} GB/s: {LARGE_SAMPLES} x {LARGE_DIM} float32, "
            f"1024 fine centroids, {LARGE_ITERATIONS} iterations, fitted on {fraction:.0%}: "
            f"{cost.seconds / 3600:.1f} hours, {cost.bytes / 1e12:.2f} TB read."
        )
    return report


class PartitionCost(NamedTuple):
    """Cost of two-stage k-means and of assigning all samples."""

    seconds: float
    flops: float
    """Floating-point operations; a multiply-add is two."""
    bytes: int
    """Bytes read from the disk, in all passes."""


def partition_cost(
    num_samples: int,
    dim: int,
    num_fine: int,
    iterations: int,
    gflops: float,
    disk_gb_per_s: float,
    *,
    fit_fraction: float = 1.0,
    bytes_per_number: int = 4,
) -> PartitionCost:
    """Model the cost of ``iterations`` passes over the fitted samples and one pass that assigns all samples.

    A pass reads the features and multiplies samples by fine centroids: 2 n d F floating-point operations. The start and
    the second stage depend on F alone and are not counted.

    Args:
        num_samples: n.
        dim: feature entries of a sample, d.
        num_fine: fine centroids, F.
        iterations: passes of the fine stage.
        gflops: 10^9 operations per second of a whole pass; the figure ``gflops`` of this benchmark.
        disk_gb_per_s: 10^9 bytes per second at which features are read.
        fit_fraction: fraction of the samples that is fitted.
        bytes_per_number: 4 for float32, as features are stored.
    """
    sample_passes = num_samples * (iterations * fit_fraction + 1)
    num_bytes = round(sample_passes * dim * bytes_per_number)
    flops = 2 * sample_passes * dim * num_fine
    return PartitionCost(flops / (gflops * 1e9) + num_bytes / (disk_gb_per_s * 1e9), flops, num_bytes)


def mixture(num_samples: int, dim: int, seed: int = 0) -> Iterator[np.ndarray]:
    """Yield blocks of unit vectors from a mixture whose shares fall as 1/rank; each component has its own spread."""
    random = np.random.default_rng(seed)
    fall = np.arange(1, dim + 1, dtype=np.float32) ** -0.5
    centres = random.standard_normal((_COMPONENTS, dim), dtype=np.float32) * fall
    spreads = random.uniform(0.3, 1.2, _COMPONENTS).astype(np.float32)
    shares = 1 / np.arange(1, _COMPONENTS + 1)
    for start in range(0, num_samples, _ROWS_AT_ONCE):
        num_rows = min(_ROWS_AT_ONCE, num_samples - start)
        of = random.choice(_COMPONENTS, num_rows, p=shares / shares.sum())
        x = random.standard_normal((num_rows, dim), dtype=np.float32) * fall * spreads[of, None] + centres[of]
        yield x / np.linalg.norm(x, axis=1, keepdims=True)


def write_features(path: Path, num_samples: int, dim: int, dtype: np.dtype) -> None:
    """Write the mixture as an ``.npy`` file.

    Raises:
        UserError: the disk has too little free space.
    """
    needed = num_samples * dim * dtype.itemsize
    if shutil.disk_usage(path.parent).free < 1.1 * needed:
        raise UserError(f"{path.parent}: {needed / 1e9:.1f} GB are needed there; give another folder with --folder")
    out: np.memmap = np.lib.format.open_memmap(  # type: ignore[no-untyped-call]
        path, mode="w+", dtype=dtype, shape=(num_samples, dim)
    )
    start = 0
    for block in mixture(num_samples, dim):
        out[start : start + len(block)] = block
        start += len(block)
    out.flush()


def call(side: str, data: Path, folder: Path, seed: int, setting: Setting) -> dict[str, float]:
    """Run one library in a process of its own.

    Raises:
        UserError: the process failed; it has printed the reason.
    """
    script = Path(__file__).with_name("partition_sides.py")
    arguments = [side, str(data), str(folder / "centroids.npy"), str(seed), json.dumps(asdict(setting))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(setting.num_threads)}
    done = subprocess.run(
        [sys.executable, str(script), *arguments], stdout=subprocess.PIPE, text=True, check=False, env=environment
    )
    if done.returncode:
        raise UserError(f"{script.name} {side}: ended with code {done.returncode}; see above")
    result: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return result


def _ratio(found: dict[str, list[dict[str, float]]], name: str, other: str) -> float:
    """Median over rounds of our figure over the other library's."""
    pairs = zip(found["ours"], found[other], strict=False)
    return statistics.median(ours[name] / theirs[name] for ours, theirs in pairs)


def _column(results: Sequence[dict[str, float]], name: str) -> list[float]:
    return [result[name] for result in results]


def _spread(values: Sequence[float], form: str) -> str:
    return f"{statistics.median(values):{form}} ({min(values):{form}}–{max(values):{form}})"


if __name__ == "__main__":
    sys.exit(run(main))
