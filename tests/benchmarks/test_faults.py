"""The plan of faults, what counts as useful, the model against closed forms; a quick run of all of it."""

import json
import math
import os
import subprocess
import sys
import time

import faults
import faults_model as model
import numpy as np
import pytest
from faults_island import clock_variables, useful_time


def test_a_plan_deals_every_fault_and_spares_one_member_in_turn():
    for number in range(8):
        found = faults.plan(number, faults.SIZE, seed=0)
        assert [name for name in faults.MEMBERS if not found[name]] == [faults.MEMBERS[number % 4]]
        assert sorted(kind for mine in found.values() for kind, _ in mine) == sorted(faults.SIZE.faults)
        assert all([step for _, step in mine] == sorted({step for _, step in mine}) for mine in found.values())
        assert found == faults.plan(number, faults.SIZE, seed=0) != faults.plan(number, faults.SIZE, seed=1)
    outages = [kind for number in range(4) for kind, _ in faults.plan_outages(number, faults.SIZE, seed=0)]
    assert {outages.count(kind) for kind in faults.OUTAGES} == {4}


def test_repeated_steps_and_stalls_are_not_useful():
    first = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]
    second = [(2, 10.0), (3, 11.0), (4, 15.0), (5, 25.0), (6, 26.0)]
    # Steps 0 to 2 and 5 take a second, 3 takes four, 4 stalls, and 6 is the last; both count as the median of a second.
    assert useful_time([first, second]) == (10.0, 27.0)


def test_a_clock_jumps_for_one_process_and_its_other_clocks_do_not(tmp_path):
    variables = clock_variables(tmp_path / "clock")
    if not variables:
        pytest.skip("needs a C compiler")
    (tmp_path / "clock").write_text("-3600")
    command = [sys.executable, "-c", "import time; print(time.time(), time.monotonic())"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    wall, monotonic = map(float, done.stdout.split())
    assert wall == pytest.approx(time.time() - 3600, abs=30)
    assert monotonic == pytest.approx(time.monotonic(), abs=30)


def closed_form(rate, interval):
    """Daly 2006, but without failures during a restart; five minutes down, one to start, 0.54 s a pause."""
    return interval / ((1 / rate + 300) * math.exp(60 * rate) * (math.exp(rate * (interval + 0.54)) - 1))


@pytest.mark.parametrize("hours", [1.0, 5.0, 100.0])
@pytest.mark.parametrize("interval", [60.0, 600.0])
def test_an_island_has_the_goodput_of_the_closed_form(hours, interval):
    horizon = 50_000 * (hours * model.HOUR + model.DOWN)
    times = model.up_times(hours, model.DOWN, horizon, np.random.default_rng(1))
    assert model.kept(times, interval) / horizon == pytest.approx(closed_form(1 / (3600 * hours), interval), rel=0.01)


def test_rare_failures_strike_eight_nodes_eight_times_as_often():
    islands, synchronous = model.goodputs(500.0, best=False)
    assert islands == pytest.approx(closed_form(1 / (3600 * 500), 600), abs=1e-4)
    assert synchronous == pytest.approx(closed_form(8 / (3600 * 500), 600), abs=1e-4)


def test_youngs_interval_is_best():
    horizon, hours = 50_000 * 3600.0, 1.0
    times = model.up_times(hours, model.DOWN, horizon, np.random.default_rng(1))
    best = model.kept(times, model.best_interval(hours))
    assert all(model.kept(times, factor * model.best_interval(hours)) < best for factor in (0.5, 2.0))


def test_all_nodes_are_up_as_on_a_grid_of_seconds():
    generator = np.random.default_rng(0)
    nodes = [np.rint(model.up_times(0.05, 60.0, 4000.0, generator)) for _ in range(3)]
    seconds = np.arange(4000) + 0.5
    grid = np.all([((node[:, :1] < seconds) & (seconds < node[:, 1:])).any(0) for node in nodes], 0)
    found = model.all_up(nodes)
    assert grid.sum() == (found[:, 1] - found[:, 0]).sum() > 500
    assert all(grid[int(begin) : int(end)].all() for begin, end in found)


@pytest.mark.slow
@pytest.mark.long
def test_quick_trial_and_what_it_resumes(tmp_path):
    file = tmp_path / "faults.json"
    faults.main(["--quick", "--json", str(file)])
    first = json.loads(file.read_text())
    assert first["figures"]["faults"] == 5
    assert (
        first["figures"]["members_harmed"] == first["figures"]["artifacts_lost"] == first["figures"]["bits_lost"] == 0
    )
    assert 0.5 < first["figures"]["goodput"] < 1
    faults.main(["--quick", "--faults", "5", "--json", str(file)])
    assert json.loads(file.read_text()) == first
