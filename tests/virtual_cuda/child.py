"""Runs commands of the real command line on the virtual CUDA device; started by ``runs.py``, with the device preloaded.

The commands come in JSON on the standard input, what they did goes in JSON to the last line of the standard output.
"""

from __future__ import annotations

import torch
from virtual_cuda import device

recorder = device.install()  # before anything takes a function of torch.cuda by its name

import collections
import contextlib
import functools
import importlib
import io
import json
import os
import signal
import sys
import traceback
from typing import Any

from ddm_lightning.core.compat import defer_torchmetrics, ensure_torchvision_importable

ensure_torchvision_importable()
defer_torchmetrics()

from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from tiny_runs import light_prepare

from ddm_lightning.__main__ import run
from ddm_lightning.ensemble.routing import Batch
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.training import ema
from ddm_lightning.training.checkpoint import CheckpointWriter
from ddm_lightning.training.module import MemberModule

units: collections.Counter[str] = collections.Counter()
steps: list[tuple[int, list[str], collections.Counter[device.Event]]] = []


def counted(owner, function, unit, number=lambda *_: 1):
    """Count the calls of a function as ``unit``."""
    original = getattr(owner, function)

    @functools.wraps(original)
    def counting(*args: Any, **kwargs: Any) -> Any:
        units[unit] += number(*args)
        return original(*args, **kwargs)

    setattr(owner, function, counting)


counted(CheckpointWriter, "start", "save")
counted(CheckpointWriter, "start", "saved tensor", lambda _self, _path, tensors, *_: len(tensors))
counted(MemberModule, "on_validation_start", "validation")
counted(MemberModule, "log_figures", "figure", lambda _self, figures: len(figures) + 1)
counted(MemberModule, "training_step", "step")
counted(_EvaluationLoop, "_evaluation_step", "validation batch")
counted(ema, "unsharded_ema", "average")
counted(Ensemble, "_of_active", "evaluation")
counted(Ensemble, "probabilities", "routing")
counted(Batch, "__init__", "batch")
advance = _TrainingEpochLoop.advance


def advance_counting(self, *args):
    """A training step without the validation after it."""
    before = units.copy()
    with recorder.fresh() as counts:
        advance(self, *args)

    recorder.counts.update(counts)
    due = [unit for unit in ("save", "average") if units[unit] > before[unit]]
    if self.trainer.lightning_module.logs_now():
        due.append("log")
        units["log"] += 1

    steps.append((self.trainer.global_step, due, counts))
    if self.trainer.global_step == stop["at"]:
        os.kill(os.getpid(), signal.SIGTERM)


_TrainingEpochLoop.advance = advance_counting
stop: dict[str, int | None] = {"at": None}


@contextlib.contextmanager
def captured(output):
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        yield


def ran(argv, stop_at, notes):
    """Run one command and describe it."""
    stop["at"] = stop_at
    units.clear()
    steps.clear()
    notes.clear()
    units["command"] += 1
    sys.argv[1:] = argv
    output = io.StringIO()
    with recorder.fresh() as counts, captured(output):
        try:
            code = run()
        except SystemExit as error:
            code = error.code
        except Exception:  # noqa: BLE001  # the test shows it
            traceback.print_exc()
            code = 1

    return {
        "code": code,
        "output": output.getvalue(),
        "counts": rows(counts),
        "units": dict(units),
        "steps": [(number, due, rows(of_step)) for number, due, of_step in steps],
        "notes": [*notes],
    }


def rows(counts):
    return [[*event, number] for event, number in counts.items()]


if __name__ == "__main__":
    task = json.load(sys.stdin)
    notes: list[Any] = []
    torch.set_num_threads(1)
    if task["probe"]:
        module, _, name = task["probe"].partition(":")
        getattr(importlib.import_module(module), name)(notes.append)
    pairs = zip(task["commands"], task["stop_at"], strict=True)
    with light_prepare():
        print(json.dumps([ran(argv, stop_at, notes) for argv, stop_at in pairs]))
