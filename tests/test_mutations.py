"""Files of strangers in which anything may be wrong: refused in a line, quickly and in little memory, or harmless."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from mutations import SECONDS

HERE = Path(__file__).parent


@pytest.mark.parametrize(
    ("first", "num"), [pytest.param(0, 12, marks=pytest.mark.slow), pytest.param(12, 488, marks=pytest.mark.long)]
)
def test_every_mutation_is_refused_in_a_line_or_harmless(finished_run, tmp_path, first, num):
    source = tmp_path / "source"
    shutil.copytree(finished_run, source, ignore=shutil.ignore_patterns("checkpoints", "tensorboard"))
    done = subprocess.run(
        [sys.executable, HERE / "mutations.py", source, tmp_path, str(first), str(num)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120 + SECONDS * num,
        env={**os.environ, "PYTHONPATH": str(HERE.parent)},
    )
    found = {}
    for line in done.stdout.splitlines():
        found.setdefault(json.loads(line)["number"], {}).update(json.loads(line))
    assert done.returncode == 0 and len(found) == num, (done.stderr[-2000:], list(found.values())[-1:])
    bad = [one for one in found.values() if one["found"] != "harmless" and not one["found"].startswith("refused: ")]
    long = [one for one in found.values() if "\n" in one["found"] or len(one["found"]) > 1500]
    slow = [one for one in found.values() if one["seconds"] > SECONDS]
    assert not bad + long + slow, (bad + long + slow)[0]
    assert sum(one["found"] != "harmless" for one in found.values()) > num / 2
