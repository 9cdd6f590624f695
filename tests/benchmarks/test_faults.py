"""The plan of faults, what counts as useful, a moved clock; a quick run of all of it."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter

import faults
import pytest
from faults_island import clock_variables, useful_time


def test_a_plan_deals_every_fault_and_spares_one_member_in_turn():
    outages = Counter()
    for number in range(4):
        found = faults.plan(number, faults.SIZE)
        kinds = []
        for mine in found.values():
            kinds += [kind for kind, _ in mine]
            steps = [step for _, step in mine]
            assert steps == sorted(set(steps))

        assert sorted(kinds) == sorted(faults.SIZE.faults)
        assert found[faults.MEMBERS[number]] == []
        assert found == faults.plan(number, faults.SIZE) != faults.plan(number + 1, faults.SIZE)
        outages.update(kind for kind, _ in faults.plan_outages(number, faults.SIZE))

    assert outages == dict.fromkeys(faults.OUTAGES, 4)


def test_repeated_steps_and_stalls_are_not_useful():
    first = [(0, 0.0), (1, 1.0), (2, 2.0), (3, 3.0)]
    second = [(2, 10.0), (3, 11.0), (4, 15.0), (5, 25.0), (6, 26.0)]
    # Steps 0 to 2 and 5 take a second, 3 takes four, 4 stalls, and 6 is the last; both count as the median of a second.
    assert useful_time([first, second]) == (10.0, 27.0)


def test_a_clock_jumps_for_one_process_and_its_other_clocks_do_not(tmp_path):
    if not shutil.which("cc"):
        pytest.skip("needs a C compiler")
    variables = clock_variables(tmp_path / "clock")
    (tmp_path / "clock").write_text("-3600")
    command = [sys.executable, "-c", "import time; print(time.time(), time.monotonic())"]
    done = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    wall, monotonic = map(float, done.stdout.split())
    assert wall == pytest.approx(time.time() - 3600, abs=30)
    assert monotonic == pytest.approx(time.monotonic(), abs=30)


@pytest.mark.slow
@pytest.mark.long
def test_quick_trial_and_what_it_resumes(tmp_path):
    file = tmp_path / "faults.json"
    faults.main(["--quick", "--json", str(file)])
    first = json.loads(file.read_text())
    assert first["figures"]["faults"] == 5
    assert [first["figures"][key] for key in faults.HARMS] == [0, 0, 0]
    assert 0.5 < first["figures"]["goodput"] < 1
    faults.main(["--quick", "--faults", "5", "--json", str(file)])
    assert json.loads(file.read_text()) == first
