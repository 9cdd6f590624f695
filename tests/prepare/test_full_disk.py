"""A disk that fills up while ``prepare`` writes: a real one, a tmpfs of half a megabyte."""

import pytest
from small_disk import mount
from small_disk import small_disk as small_disk
from tiny_runs import TINY

from ddm_lightning.cli.parser import main

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("quick_prepare")]
LARGER = ("prepare.source.params.num_samples=2000", "prepare.source.params.image_size=16")


@pytest.mark.parametrize("small_disk", ["600k"], indirect=True)
def test_a_full_disk_is_one_line_and_with_more_room_the_same_command_goes_on(small_disk, tmp_path, capsys):
    def prepare(run):
        return main(["prepare", "-c", str(TINY), f"run_dir={run}", *LARGER])

    assert prepare(small_disk / "run") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "is full; free some space" in line
    assert not list(small_disk.rglob(".tmp-*")), "nothing half-written is left behind"
    assert mount("-o", "remount,size=60m", str(small_disk))
    assert prepare(small_disk / "run") == 0
    assert prepare(tmp_path / "elsewhere") == 0
    here, there = ((run / "prepared/manifest.json").read_text() for run in (small_disk / "run", tmp_path / "elsewhere"))
    assert here == there, "it has the hashes of the shards"
