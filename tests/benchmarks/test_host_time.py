"""Host time of a step; what it measures is in benchmarks/results."""

import json
import subprocess
import sys

import host_time
import pytest

from ddm_lightning.core.errors import UserError


@pytest.mark.long
def test_the_average_is_a_small_part_of_a_sharded_step(tmp_path):
    # In a process of its own: run-time checks of shapes cannot be compiled.
    command = [sys.executable, host_time.__file__, "--quick", "--json", str(tmp_path / "found.json")]
    subprocess.run(command, check=True)
    figures = json.loads((tmp_path / "found.json").read_text())["figures"]
    for name in ("unsharded", "fsdp2", "gathered"):
        assert figures[f"{name}_ms_low"] <= figures[f"{name}_ms"] <= figures[f"{name}_ms_high"]
        assert 0 < figures[f"{name}_ema_ms"] < 0.05 * figures["fsdp2_ms"]


def test_a_folder_without_the_package_is_refused(tmp_path):
    with pytest.raises(UserError, match="give a checkout of this repository"):
        host_time.measure_other(tmp_path, quick=True)
