"""Commands that write to a full disk: one line that names what could not be written, and nothing half-written."""

import pytest
from small_disk import small_disk as small_disk
from tiny_runs import settings

from ddm_lightning.cli.parser import main

ENDS = "is full; free some space, then run the same command again\n"


@pytest.mark.parametrize("small_disk", ["100k"], indirect=True)
@pytest.mark.parametrize("kind", ["ensemble", "diffusers"])
def test_export_blames_its_own_folder(small_disk, finished_run, capsys, kind):
    out = small_disk / "out"
    assert main(["export", *settings(finished_run), "--to", kind, "--out", str(out)]) == 2
    assert capsys.readouterr().err == f"error: {out}: {ENDS}"
    assert not list(small_disk.iterdir())


@pytest.mark.parametrize("small_disk", ["100k"], indirect=True)
@pytest.mark.parametrize("name", ["", "new", "grid.png"])
def test_sample_blames_its_own_folder(small_disk, finished_run, capsys, name):
    out = small_disk / name
    # Their 24 blocks of 4 kB would just fit, and the grid does not.
    few = ["sample.num_steps=1", "--prompt", "red disc", "--num", "24", "--out", str(out)]
    assert main(["sample", *settings(finished_run), *few]) == 2
    assert capsys.readouterr().err == f"error: {out if name == 'new' else small_disk}: {ENDS}"
    assert not list(small_disk.iterdir())
