"""The first day on a GPU: ten steps, each with what is expected and what was found; ends at the first that differs.

    make smoke-gpu
    python benchmarks/smoke_gpu.py --steps 1 2 4 --json smoke.json

Without a GPU it runs the steps in small sizes.
"""

from __future__ import annotations

import gc
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import smoke_commands
import smoke_networks
import torch
from common import ACCELERATORS, Child, Report, device_of, parse, parser, run
from smoke_commands import Check, Place

from ddm_lightning.core.devices import configure_torch
from ddm_lightning.core.errors import UserError, first_line

Step = Callable[[Place], Iterator[Check]]
ORDER: Sequence[Step] = (
    smoke_networks.environment,
    smoke_networks.kernels,
    smoke_commands.tests,
    smoke_networks.training,
    smoke_commands.training,
    smoke_commands.stop_and_resume,
    smoke_networks.checkpoint,
    smoke_commands.strategies,
    smoke_commands.ensemble,
    smoke_commands.options,
    smoke_commands.two_devices,
)
STEPS = dict(enumerate(ORDER, 1))
"""The docstring of each is its title."""


def main(arguments: Sequence[str] | None) -> None:
    """Run the steps."""
    gc.freeze()  # what is imported is never scanned again, as in ``fit``
    cli = parser(__doc__ or "", fixed=True, device=True)
    cli.add_argument("--steps", type=int, nargs="+", choices=STEPS, help="default: all; 11 needs two GPUs")
    options = parse(cli, arguments)
    device = device_of(options)
    configure_torch(ACCELERATORS[device.type], torch.get_num_threads())  # as commands do
    numbers = options.steps or list(STEPS)
    if options.steps is None and torch.cuda.device_count() < 2:
        numbers.remove(11)

    report = Report(f"First steps on {device.type}", ["what", "expected", "found"])
    try:
        with tempfile.TemporaryDirectory(prefix="smoke-") as folder:
            take(numbers, Place(Path(folder), device, options.quick), report)
    finally:
        for child in Child.running:
            child.kill()

        report.write(options.json)


def take(numbers: Sequence[int], place: Place, report: Report) -> None:
    """Take the steps in turn, print each check and add it to the report.

    Raises:
        UserError: something differs.
    """
    for number in numbers:
        step = STEPS[number]
        title = step.__doc__
        print(f"step {number}: {title}", flush=True)
        began = time.perf_counter()
        for check in checks_of(step, place):
            line = f"{check.what}: {check.found}"
            if check.expected:
                line += f"  (expected: {check.expected})"

            print(f"  {'ok' if check.ok else 'DIFFERS':<8}{line}", flush=True)
            report.row(f"{number}. {check.what}", check.expected, check.found)
            if check.figure is not None:
                report.figures[f"{number}. {check.what}"] = check.figure

            if not check.ok:
                raise UserError(f"step {number} ({title}): {line}")

        seconds = time.perf_counter() - began
        report.figures[f"seconds_of_step_{number}"] = seconds
        print(f"  {seconds:.0f} s", flush=True)

    print(f"as expected: {len(numbers)} steps")


def checks_of(step: Step, place: Place) -> Iterator[Check]:
    """The checks of a step; an error is one that failed."""
    try:
        yield from step(place)
    except Exception as error:  # noqa: BLE001  whatever fails is the finding
        traceback.print_exc()
        yield Check("runs to its end", "no error", first_line(error), False)


if __name__ == "__main__":
    run(main)
