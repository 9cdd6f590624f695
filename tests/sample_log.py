"""A plug-in callback for tests: which samples each step was trained on.

The folder beside this file makes it a package with an entry point wherever ``tests`` is on Python's path.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

import ddm_lightning  # noqa: F401 isort: skip (before Lightning, for a CPU torch beside a torchvision built for CUDA)
import lightning as L

FOLDER = Path(__file__).parent
LOGS_SAMPLES = "island.callbacks=[{name: sample-log}]"


class SampleLog(L.Callback):
    """Appends ``step: ids`` for each step to ``sample_ids.txt``; several ranks write ``sample_ids-0.txt`` and so on.

    The variable ``STEP_SECONDS`` slows a training down that is to be met in mid-training. ``STEP_LOG`` names a file
    for each step's number and the monotonic time at which it began.
    """

    def on_train_batch_start(self, trainer, module, batch, batch_idx):
        if log := os.environ.get("STEP_LOG"):
            with Path(log).open("a", encoding="utf-8") as stream:
                stream.write(f"{trainer.global_step} {time.monotonic()}\n")
        time.sleep(float(os.environ.get("STEP_SECONDS", 0)))
        name = "sample_ids.txt" if trainer.world_size == 1 else f"sample_ids-{trainer.global_rank}.txt"
        with (Path(trainer.default_root_dir) / name).open("a", encoding="utf-8") as stream:
            stream.write(f"{trainer.global_step}: {' '.join(map(str, batch['sample_id'].tolist()))}\n")


def python_path():
    """PYTHONPATH of a process that shall find the plug-in."""
    return os.pathsep.join(filter(None, (str(FOLDER), os.environ.get("PYTHONPATH"))))
