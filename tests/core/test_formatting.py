import io
import time

import pytest
from deadline import within
from rich.console import Console

from ddm_lightning.core import formatting
from ddm_lightning.core.formatting import Bars, format_bytes, format_duration


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0, "0 bytes"),
        (1000.9, "1.0 kB"),
        (1.3e12, "1.3 TB"),
        (2.5e21, "2.5 ZB"),
    ],
)
def test_bytes_are_written_in_the_unit_that_fits(value, expected):
    assert format_bytes(value) == expected


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (2e-6, "2 µs"),
        (0.0125, "12.5 ms"),
        (90, "90 s"),
        (150, "2.5 min"),
        (9000, "2.5 h"),
        (864e5, "1,000 days"),
    ],
)
def test_durations_are_written_in_the_unit_that_fits(value, expected):
    assert format_duration(value) == expected


def test_a_log_gets_lines_in_place_of_bars(monkeypatch):
    monkeypatch.setattr(formatting, "LINE_SECONDS", 0.01)
    out = io.StringIO()

    def wait_for(line):
        while f"{line}\n" not in out.getvalue():
            time.sleep(0.01)

    with within(20):
        with Bars(Console(file=out)) as bars:
            experts = bars.add_task("experts", total=8)
            bars.add_task("router", start=False, total=5)
            wait_for("experts: 0 of 8")
            bars.update(experts, completed=8)
            wait_for("experts: 8 of 8")  # the newest one, if none is under way
            images = [bars.add_task(name, total=2000, note=note) for name, note in {"a": "", "b": "slow"}.items()]
            bars.advance(images[1], 1200)
            wait_for("a: 0 of 2,000; b: 1,200 of 2,000, slow")
        said = out.getvalue()
        time.sleep(0.1)
    assert out.getvalue() in (said, said + said.splitlines()[-1] + "\n")


def test_what_ends_at_once_leaves_no_line():
    out = io.StringIO()
    with Bars(Console(file=out)) as bars:
        bars.update(bars.add_task("experts", total=8), completed=8)
    assert out.getvalue() == ""


@pytest.mark.parametrize("variable", ["FORCE_COLOR", "TTY_COMPATIBLE"])
def test_colours_that_a_variable_forces_bring_no_bars_into_a_log(monkeypatch, variable):
    monkeypatch.setenv(variable, "1")
    monkeypatch.setattr(formatting, "LINE_SECONDS", 0.05)
    out = io.StringIO()
    with within(20), Bars(Console(file=out, width=80)) as bars:
        task = bars.add_task("images", total=8)
        while not out.getvalue():
            time.sleep(0.01)
        bars.update(task, completed=8)
    assert out.getvalue() == "images: 0 of 8\nimages: 8 of 8\n"  # the last one as it ends


def test_a_terminal_gets_bars_and_no_lines(monkeypatch):
    monkeypatch.setattr(formatting, "LINE_SECONDS", 0.01)
    for show in (True, False):
        out = io.StringIO()
        out.isatty = lambda: True
        with Bars(Console(file=out, width=100), show=show) as bars:
            bars.add_task("experts", total=8)
            time.sleep(0.1)
        assert "0 of 8" not in out.getvalue() and bool(out.getvalue()) == ("0/8" in out.getvalue()) == show
