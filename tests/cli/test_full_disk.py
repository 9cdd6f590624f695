"""Commands that write to a full disk: one line that names what could not be written, and nothing half-written."""

import shutil
from contextlib import suppress
from pathlib import Path

import lightning as L
import pytest
from small_disk import small_disk as small_disk
from tiny_runs import read_status, settings

from ddm_lightning.cli.parser import main
from ddm_lightning.core.registry import CALLBACKS

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


class FullForAMoment(L.Callback):
    """Leaves no byte of the disk below ``folder`` from step 12 to 27: three times of a status, and no checkpoint."""

    def __init__(self, folder):
        self.filler = Path(folder) / "filler"

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if trainer.global_step == 12:
            with self.filler.open("wb", buffering=0) as file, suppress(OSError):
                while True:
                    file.write(bytes(4096))
        if trainer.global_step == 27:
            self.filler.unlink()


@pytest.mark.parametrize("small_disk", ["40m"], indirect=True)
def test_a_moment_of_a_full_disk_costs_a_status_and_no_training(small_disk, tiny_prepared, monkeypatch, capsys):
    run = shutil.copytree(tiny_prepared, small_disk / "run" / "prepared").parent
    monkeypatch.setitem(CALLBACKS._registered, "full", FullForAMoment)
    full = f"island.callbacks=[{{name: full, params: {{folder: {small_disk}}}}}]"
    often = ["island.checkpoint_every_n_steps=60", "island.loggers=[]", full]
    assert main(["fit", *settings(run), *often, "member=expert-0"]) == 0
    said = capsys.readouterr().err
    assert f"note: {run}/members/expert-0: its status cannot be written (No space left on device); it goes on" in said
    status = read_status(run, "expert-0")
    assert (status["state"], status["step"]) == ("done", 60)
