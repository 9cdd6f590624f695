import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.long]

TESTS = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("killed_prepare.py")
EVERYTHING = ["source", "encode", "index", "partition", "shards", "merge"]


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    search = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)], env=environment, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def stages_done(lines):
    return [line.partition(":")[0] for line in lines if ": done in" in line]


def shards_of(files):
    return {name: digest for name, digest in files.items() if name.startswith("prepared/shards/")}


def test_killed_at_any_moment_it_goes_on_to_the_same_files(result):
    assert len(result["trials"]) > 40
    assert any(name.endswith(".mds") for name in result["reference"])
    for trial in result["trials"]:
        assert (trial["died"], trial["went_on"]) == (-signal.SIGKILL, 0), trial["at"]
        assert trial["files"] == result["reference"], trial["at"]


def test_the_shards_do_not_hang_on_how_the_source_is_cut_into_parts(result):
    assert sum(name.endswith("part.json") for name in result["parts"]) == 3
    assert shards_of(result["parts"]) == shards_of(result["reference"])


def test_what_was_done_before_the_kill_is_not_done_again(result):
    by_moment = {trial["at"]: stages_done(trial["lines"]) for trial in result["trials"]}
    assert by_moment["before parts.json appears"] == EVERYTHING
    assert by_moment["before x_0.npy appears"] == EVERYTHING[1:]
    assert by_moment["before broken.jsonl appears"] == EVERYTHING[2:]
    assert by_moment["shards: 60 of 60"] == EVERYTHING[4:]
    assert by_moment["after manifest.json appeared"] == EVERYTHING[5:]


def test_several_callers_at_once_do_the_work_once(result):
    assert result["shared_codes"] == [0, 0, 0]
    assert result["shared_files"] == result["reference"]
    everything = sorted(stage for lines in result["shared_lines"] for stage in stages_done(lines))
    assert everything == sorted(EVERYTHING)


def test_processes_die_with_the_one_that_started_them_and_leave_nothing_that_harms(result):
    assert [trial["at"] for trial in result["processes"]] == ["encode-group", "encode-parent", "shards-parent"]
    for trial in result["processes"]:
        assert trial["started"] >= 3, "two processes were at work"
        assert (trial["died"], trial["went_on"]) == (-signal.SIGKILL, 0), trial["at"]
        assert trial["outlived"] < 10, trial["at"]
        assert trial["files"] == result["large"], "one process goes on to what it would have made alone"
