import io

from rich.console import Console
from rich.progress import Progress

from ddm_lightning.core.formatting import TimeColumn


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
