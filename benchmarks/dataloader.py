"""Loading speed from a local disk: our two back ends, StreamingDataset, WebDataset and LitData.

The samples are latents of 4×32×32 fp16, first alone, then with a pooled text vector of 768 fp16; batches hold 256
shuffled samples. Each loader is timed with 0, 1 and 2 workers; the best number counts. A timing covers whole epochs, at
least one second, after a warm-up epoch, in a process of its own. Every other round visits the loaders in reverse order.

    python benchmarks/dataloader.py --json benchmarks/results/dataloader.json
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from common import Report, console, progress, run
from dataloader_sides import BATCH_SIZE, SIDES, WRITERS, Data, Side, samples_per_second
from rich.progress import Progress

from ddm_lightning.core import registry
from ddm_lightning.core.errors import UserError

WORKERS = (0, 1, 2)
TEXT_SIZE = 768
NUM_SAMPLES, NUM_ROUNDS = 160 * BATCH_SIZE, 5
QUICK_SAMPLES, QUICK_ROUNDS = 16 * BATCH_SIZE, 1
_SECONDS = 300.0
Speeds = Mapping[tuple[str, int], Sequence[float]]


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    cli = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cli.add_argument("--json", metavar="OUT", type=Path, help="write commit, device, command and figures here")
    cli.add_argument("--quick", action="store_true", help="about a minute; the same ratios with less certainty")
    cli.add_argument("--folder", metavar="DIR", type=Path, help="folder for 2 GB of temporary samples")
    options = cli.parse_args(arguments)
    if options.json is not None and options.json.suffix != ".json":
        raise UserError(f"--json {options.json}: give a file that ends in .json")
    registry.require("benchmarks/dataloader.py", "webdataset", "litdata")
    torch.set_num_threads(1)
    num_samples, num_rounds = (QUICK_SAMPLES, QUICK_ROUNDS) if options.quick else (NUM_SAMPLES, NUM_ROUNDS)
    report = Report(
        f"Samples per second of {num_samples:,} in shuffled batches of {BATCH_SIZE}: median (lowest to highest) of "
        f"{num_rounds} timing{'s' if num_rounds > 1 else ''}",
        ["samples", "loader", *(f"{workers} workers" for workers in WORKERS), "best"],
    )
    shown = console()
    with (
        tempfile.TemporaryDirectory(prefix="dataloader-", dir=options.folder) as folder,
        progress(shown) as bars,
    ):
        for data in (Data("latents", num_samples, 0), Data("latents and text", num_samples, TEXT_SIZE)):
            add(report, data, measure(data, Path(folder), num_rounds, bars))
    report.note(
        "WebDataset and LitData store a sample as one block of bytes, which both read faster than columns; LitData "
        "decodes 256 at a time. LitData shuffles within its chunks, WebDataset within a buffer of 1,000 samples, the "
        "others over the whole data set."
    )
    report.show(shown)
    report.write(options.json)


def measure(data: Data, folder: Path, num_rounds: int, bars: Progress) -> dict[tuple[str, int], list[float]]:
    """Measure samples per second by loader and number of workers, one value per round."""
    task = bars.add_task(data.name, total=len(WRITERS) + num_rounds * len(SIDES) * len(WORKERS))
    for name, write in WRITERS.items():
        write(data, folder / data.name / name)
        bars.advance(task)
    speeds: dict[tuple[str, int], list[float]] = {(side, workers): [] for side in SIDES for workers in WORKERS}
    for number in range(num_rounds):
        for side, workers in list(speeds)[:: 1 if number % 2 == 0 else -1]:
            speeds[side, workers].append(in_a_process(SIDES[side], data, folder, workers))
            bars.advance(task)
    return speeds


def in_a_process(side: Side, data: Data, folder: Path, num_workers: int) -> float:
    """Measure ``samples_per_second`` in a fresh process, unaffected by other loaders.

    Raises:
        UserError: the measurement failed; the line gives the reason.
    """
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_child, args=(theirs, side, data, folder, num_workers))
    process.start()
    theirs.close()
    try:
        answer = ours.recv() if ours.poll(_SECONDS) else f"no answer within {_SECONDS:.0f} s"
    except EOFError:
        answer = "its process died"
    finally:
        process.kill()
        process.join()
    if isinstance(answer, str):
        raise UserError(f"{side.title}, {num_workers} workers: {answer}")
    return float(answer)


def _child(answer: Connection, side: Side, data: Data, folder: Path, num_workers: int) -> None:
    # Hide the libraries' advice, and Python's warnings about shared memory that they leave behind.
    warnings.simplefilter("ignore")
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stderr.fileno())
    try:
        answer.send(samples_per_second(side, data, folder, num_workers, time.perf_counter))
    except Exception as error:  # noqa: BLE001  # the parent reports it
        answer.send(f"{type(error).__name__}: {error}".splitlines()[0])


def add(report: Report, data: Data, speeds: Speeds) -> None:
    """Add the rows and figures of one data set; figures with text vectors end in ``_text``."""
    medians = {key: statistics.median(values) for key, values in speeds.items()}
    best = {side: max(medians[side, workers] for workers in WORKERS) for side in SIDES}
    for side, shown in SIDES.items():
        cells = [_cell(speeds[side, workers]) for workers in WORKERS]
        report.row(data.name, shown.title, *cells, f"{best[side]:,.0f}")
    end = "_text" if data.text_size else ""
    figures = {f"{side}_samples_per_second": value for side, value in best.items()}
    figures["ours_over_streaming"] = best["ours"] / best["streaming"]
    for peer in ("streaming", "webdataset", "litdata"):
        figures[f"local_over_{peer}"] = best["local"] / best[peer]
    report.figures |= {f"{name}{end}": value for name, value in figures.items()}


def _cell(values: Sequence[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


if __name__ == "__main__":
    sys.exit(run(main))
