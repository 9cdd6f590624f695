"""How do time, memory and files of `prepare` grow with the data set?

Prepares generated images of 8 x 8 pixels, 100,000 and a million of them, in one process each.

    python benchmarks/prepare_scale.py --json benchmarks/results/prepare_scale.json
"""

from __future__ import annotations

import re
import resource
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from common import Report, parse, parser, run, start

# In all, and with ``--quick``.
SIZES = ((100_000, 1_000_000), (1_000, 10_000))
_STAGE = re.compile(r"(\w+): done in ([\d.,]+) s")


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    options = parse(parser(__doc__ or "", fixed=True), arguments)
    sizes = SIZES[options.quick]
    found = []
    num_files = 0
    for num_samples in sizes:
        source = f"prepare.source.params={{num_samples: {num_samples}, image_size: 8}}"
        with tempfile.TemporaryDirectory(prefix="prepare-scale-") as folder:
            began = time.monotonic()
            told = start("prepare", options, source, "prepare.num_processes=1", f"run_dir={folder}").ended()
            took = time.monotonic() - began
            seconds = {}
            for name, number in _STAGE.findall(told):
                seconds[name] = float(number.replace(",", ""))

            seconds["in all"] = took
            found.append(seconds)
            num_files = sum(map(Path.is_file, Path(folder, "prepared").rglob("*")))

    fewer, more = found
    report = Report("Seconds of `prepare` by the number of images", ["stage", *map("{:,}".format, sizes)])
    for name, each in more.items():
        report.row(name, f"{fewer[name]:.1f}", f"{each:.1f}")

    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024 / 1e9
    figures = report.figures
    figures["seconds_1m_over_100k"] = more["in all"] / fewer["in all"]
    figures["seconds_1m"] = more["in all"]
    figures["peak_gb_1m"] = peak
    figures["files_1m"] = num_files
    report.note(f"Of {sizes[1]:,} images: {num_files:,} files, at most {peak:.2f} GB in a process.")
    report.finish(options.json)


if __name__ == "__main__":
    run(main)
