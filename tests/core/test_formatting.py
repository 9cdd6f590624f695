import io

import pytest
from rich.console import Console
from rich.progress import Progress

from ddm_lightning.core.formatting import TimeColumn, amount, duration, operations


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (999.96, "1 kB"),
        (118_000, "118 kB"),
        (1.3e12, "1.3 TB"),
        (2.5e18, "2.5 EB"),
        (2.5e21, "2,500 EB"),
    ],
)
def test_bytes_are_written_in_the_unit_that_fits(value, expected):
    assert amount(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [(2e-6, "2 µs"), (0.0125, "12.5 ms"), (90, "90 s"), (150, "2.5 min"), (9000, "2.5 h"), (864e5, "1,000 days")],
)
def test_durations_are_written_in_the_unit_that_fits(value, expected):
    assert duration(value) == expected


def test_operations_have_their_own_unit():
    assert operations(1.62e14) == "162 TFLOP"


def shown(done, clock):
    console = Console(file=io.StringIO(), width=60)
    now = [0.0]
    progress = Progress(TimeColumn(), console=console, get_time=lambda: now[0], auto_refresh=False)
    task = progress.add_task("", total=100)
    for now[0], count in zip(clock, done, strict=True):
        progress.update(task, completed=count)
    return TimeColumn().render(progress.tasks[0]).plain


def test_time_so_far_then_time_left_then_the_time_that_it_took():
    assert shown([0], [7.0]) == "0:00:07 so far"
    assert shown([10, 20, 30], [10.0, 20.0, 30.0]) == "0:01:10 left"
    assert shown([10, 20, 100], [10.0, 20.0, 95.0]) == "took 0:01:35"
