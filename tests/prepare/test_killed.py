import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

TESTS = Path(__file__).parents[1]
SCRIPT = Path(__file__).with_name("killed_prepare.py")


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    folder = tmp_path_factory.mktemp("killed")
    search = os.pathsep.join(filter(None, [str(TESTS), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), str(folder)], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def stages_done(lines):
    return [line.partition(":")[0] for line in lines if ": done in" in line]


def test_killed_at_any_moment_it_goes_on_to_the_same_files(result):
    assert len(result["trials"]) > 20
    assert any(name.endswith(".mds") for name in result["reference"])
    for trial in result["trials"]:
        assert (trial["died"], trial["went_on"]) == (-signal.SIGKILL, 0), trial["at"]
        assert trial["files"] == result["reference"], trial["at"]


def test_what_was_done_before_the_kill_is_not_done_again(result):
    by_moment = {trial["at"]: stages_done(trial["lines"]) for trial in result["trials"]}
    everything = ["source", "features", "captions", "partition", "shards", "report"]
    assert by_moment["source: 1 of 60"] == everything
    assert by_moment["before features.npy appears"] == everything[1:]
    assert by_moment["shards: 60 of 60"] == everything[4:]
    assert by_moment["after manifest.json appeared"] == everything[5:]


def test_several_processes_at_once_do_the_work_once(result):
    assert result["shared_codes"] == [0, 0, 0]
    assert result["shared_files"] == result["reference"]
    everything = sorted(stage for lines in result["shared_lines"] for stage in stages_done(lines))
    assert everything == sorted(["source", "features", "captions", "partition", "shards", "report"])
