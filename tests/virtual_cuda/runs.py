"""Commands on a virtual CUDA device, for tests: what they print, where they wait for the device and what they copy.

The device needs no GPU. Its tensors say ``cuda:0`` (or ``cuda:1``), compute on the CPU and raise an error if devices
mix, as on a GPU. A test runs commands of the real command line, one after the other, in a process of their own::

    from virtual_cuda.runs import Command, run

    def test_sampling_waits_only_where_it_must(tmp_path):
        fit, sample = run([Command(["fit", *settings]), Command(["sample", *settings])])
        assert sample.counts == {("wait", "ensemble.velocity:rows_by_expert"): 4}

``probe="training.probes:teacher_devices"`` names a function in ``tests`` that is called in that process before the
first command. It may patch what it likes, and gets a function ``note``; what is noted comes back in ``Ran.notes``.
``environment`` adds variables, such as ``LOCAL_RANK``.

Not covered: NCCL, streams and races, kernels' own limits, Triton code, memory and speed.
"""

from __future__ import annotations

import collections
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from filelock import FileLock
from tiny_runs import RANK_VARIABLES, ROOT

HERE = Path(__file__).parent
SOURCE = HERE / "device.cpp"

Counts = collections.Counter[tuple[str, str]]
"""How often each kind of event happened at each place; see ``device.Event``."""


@dataclass(frozen=True)
class Command:
    """One command."""

    argv: Sequence[str]
    """What follows ``python -m ddm_lightning``."""
    settings: Sequence[str] = ()
    """Settings that go after the command's name and are not shown."""
    code: int = 0
    """Exit code that it must have."""
    stop_at: int | None = None
    """Step of a training after which it is told to stop, as by SIGTERM."""


@dataclass(frozen=True)
class Step:
    """One training step, without the validation after it."""

    number: int
    due: frozenset[str]
    """What else happened: ``log``, ``save``, ``average`` (a snapshot)."""
    counts: Counts


@dataclass(frozen=True)
class Ran:
    """What a command did."""

    argv: list[str]
    """``Command.argv``."""
    code: int
    output: str
    counts: Counts
    """Waits and copies of the whole command."""
    units: collections.Counter[str]
    """How much there was to do: steps, saves, validations, evaluations of the ensemble …"""
    steps: list[Step] = field(default_factory=list)
    notes: list[Any] = field(default_factory=list)

    @property
    def name(self) -> str:
        """The command's name."""
        return self.argv[0]

    def __str__(self) -> str:
        return " ".join(self.argv)


def run(commands, probe=None, environment=None):
    """Run commands in one process, whose imports take some seconds; fail the test if one exits with another code."""
    whole = [[command.argv[0], *command.settings, *command.argv[1:]] for command in commands]
    task = {"commands": whole, "stop_at": [command.stop_at for command in commands], "probe": probe}
    printed = start([str(HERE / "child.py")], json.dumps(task), environment)
    records = json.loads(printed.splitlines()[-1])
    found = [_ran(command.argv, record) for command, record in zip(commands, records, strict=True)]
    for command, ran in zip(commands, found, strict=True):
        assert ran.code == command.code, f"{ran}: exit code {ran.code}\n{ran.output}"

    return found


def _ran(argv, record):
    def counts(rows: list[list[Any]]) -> Counts:
        return Counts({(kind, place): number for kind, place, number in rows})

    steps = [Step(number, frozenset(due), counts(rows)) for number, due, rows in record.pop("steps")]
    units = collections.Counter(record.pop("units"))
    return Ran([*argv], **{**record, "counts": counts(record["counts"]), "units": units, "steps": steps})


def start(arguments, stdin="", environment=None):
    """Run Python with the device preloaded, and return what it printed; skip the test without a C++ compiler."""
    inherited = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
    own = {"LD_PRELOAD": str(library()), "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=900,
        cwd=ROOT,
        env={**inherited, **own, **(environment or {})},
    )

    assert done.returncode == 0, f"exit code {done.returncode}\n{done.stdout}\n{done.stderr}"

    return done.stdout


@cache
def library():
    """Compile the device, once for all processes and sessions; skip the test where that is not possible."""
    packages = Path(torch.__file__).parent
    compiler = next(filter(None, map(shutil.which, (os.environ.get("CXX", "c++"), "g++", "clang++"))), None)
    if sys.platform != "linux" or torch.version.cuda is not None:
        pytest.skip("the virtual CUDA device needs Linux and a CPU build of torch")

    if compiler is None or not (packages / "include" / "ATen").is_dir():
        pytest.skip("the virtual CUDA device needs a C++ compiler and torch's headers")

    made_of = hashlib.sha256(f"{torch.__version__} {compiler}".encode() + SOURCE.read_bytes())
    path = ROOT / ".pytest_cache" / "virtual_cuda" / f"{made_of.hexdigest()[:16]}.so"
    path.parent.mkdir(parents=True, exist_ok=True)
    flags = ["-shared", "-fPIC", "-O0", "-std=c++20", f"-I{packages / 'include'}"]
    flags += [f"-L{packages / 'lib'}", "-lc10", "-ltorch_cpu", f"-Wl,-rpath,{packages / 'lib'}"]
    with FileLock(path.with_suffix(".lock")):
        if not path.exists():
            temporary = path.with_suffix(".tmp")
            command = [compiler, str(SOURCE), *flags, "-o", str(temporary)]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            temporary.rename(path)

    return path
