"""How do time, memory and files of `prepare` grow with the data set?

Prepares generated images of 8 x 8 pixels, 100,000 and a million of them, in one process each.

    python benchmarks/prepare_scale.py --json benchmarks/results/prepare_scale.json
"""

from __future__ import annotations

import re
import resource
import tempfile
import time
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from common import Report, parse, parser, run, start

# In all, and with ``--quick``.
SIZES = ((100_000, 1_000_000), (1_000, 10_000))
_STAGE = re.compile(r"(\w+): done in ([\d.,]+) s")


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
    small = measure(options, fewer)
    large = measure(options, more)
    report = Report("Seconds of `prepare` by the number of images", ["stage", f"{fewer:,}", f"{more:,}"])
    for name, seconds in large.stages.items():
        report.row(name, f"{small.stages[name]:.1f}", f"{seconds:.1f}")

    report.row("in all", f"{small.seconds:.1f}", f"{large.seconds:.1f}")
    figures = report.figures
    figures["seconds_1m_over_100k"] = large.seconds / small.seconds
    figures["seconds_1m"] = large.seconds
    figures["peak_gb_1m"] = large.peak_gb
    figures["files_1m"] = large.num_files
    report.note(f"Of {more:,} images: {large.num_files:,} files, at most {large.peak_gb:.2f} GB in a process.")
    report.finish(options.json)


def measure(options: Namespace, num_samples: int) -> Measured:
    """Prepare so many generated images in one process."""
    source = f"prepare.source.params={{num_samples: {num_samples}, image_size: 8}}"
    with tempfile.TemporaryDirectory(prefix="prepare-scale-") as folder:
        began = time.monotonic()
        told = start("prepare", options, source, "prepare.num_processes=1", f"run_dir={folder}").ended()
        seconds = time.monotonic() - began
        num_files = sum(path.is_file() for path in (Path(folder) / "prepared").rglob("*"))

    stages = {}
    for name, number in _STAGE.findall(told):
        stages[name] = float(number.replace(",", ""))

    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    return Measured(stages, seconds, peak, num_files)


if __name__ == "__main__":
    run(main)
