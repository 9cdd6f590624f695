"""The tiny experiment through the real command line: one finished run, shared by all tests, and copies of it."""

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from filelock import FileLock
from PIL import Image
from sample_log import LOGS_SAMPLES, python_path

from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.ensemble.manifest import assemble
from ddm_lightning.members.run import Run

ROOT = Path(__file__).parents[1]
TINY = ROOT / "experiments" / "tiny_2x.yaml"
MEMBERS = ("expert-0", "expert-1", "router")
RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
STEPS = {"expert-0": 60, "expert-1": 60, "router": 40}
# Long enough to be met in mid-training.
LONG_STEPS = {"expert-0": 240, "expert-1": 240, "router": 120}
LONG = ("expert.train.max_steps=240", "router.train.max_steps=120")
SETTINGS = (
    f"expert.train.max_steps={STEPS['expert-0']}",
    f"router.train.max_steps={STEPS['router']}",
    LOGS_SAMPLES,
    "island.log_every_n_steps=5",
    "island.checkpoint_every_n_steps=20",
    "island.validate_every_n_steps=100",
)


def settings(run_dir):
    """What follows the command's name to address ``run_dir``."""
    return ["-c", str(TINY), f"run_dir={run_dir}", *SETTINGS]


def launch(
    *arguments,
    within=(),
    program=("-m", "ddm_lightning"),
    new_session=False,
    **variables,
):
    """The command line in a process of its own; ``within`` goes before it, such as ``nsenter`` with its options."""
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    environment |= {"PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONFAULTHANDLER": "1"}
    return subprocess.Popen(
        [*within, sys.executable, *program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment | variables,
        cwd=ROOT,
        start_new_session=new_session,
    )


def start(command, run_dir, *more, within=()):
    """A command on the tiny run in ``run_dir``."""
    return launch(command, *settings(run_dir), *more, within=within)


@contextmanager
def ended_on_failure(process):
    """Leave no process behind when the block fails, and show what the process was doing."""
    try:
        yield
    except BaseException:
        process.send_signal(signal.SIGABRT)  # Python's fault handler answers with the stack
        print(*process.communicate(timeout=10), sep="\n")
        raise


def finish(process, code=0, seconds=300):
    """What the process printed, after a check of its exit code."""
    with ended_on_failure(process):
        out, err = process.communicate(timeout=seconds)
    assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
    return out, err


def read_status(run_dir, member):
    """The member's status.json; empty before it is written."""
    path = run_dir / "members" / member / "status.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def copy_run(finished, to, *unfinished):
    """A copy of a run at another place, in which ``unfinished`` members have checkpoints but no artifact."""
    shutil.copytree(finished, to)
    record = to / "experiment.yaml"
    record.write_text(record.read_text(encoding="utf-8").replace(str(finished), str(to)), encoding="utf-8")
    for member in unfinished:
        shutil.rmtree(to / "members" / member / "artifact")
        (to / "ensemble.json").unlink(missing_ok=True)
    return to


def made_once(tmp_path_factory, name, make):
    """A folder that the first process of pytest-xdist makes that needs it, for all of them."""
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent

    folder = base / "tiny" / name
    with FileLock(base / f"{name}.lock"):
        if not folder.with_suffix(".made").exists():
            make(folder)
            folder.with_suffix(".made").touch()

    return folder


def _fit(run_dir, *more):
    out, err = finish(start("fit", run_dir, *more))
    run_dir.with_suffix(".err").write_text(err, encoding="utf-8")
    run_dir.with_suffix(".out").write_text(out, encoding="utf-8")


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory):
    """A finished run that nothing disturbed. Do not change it; copy it."""
    return made_once(tmp_path_factory, "undisturbed", _fit)


@pytest.fixture(scope="session")
def long_run(tmp_path_factory):
    """The same of ``LONG_STEPS``, for tests that are marked ``long``."""
    return made_once(tmp_path_factory, "long", lambda run_dir: _fit(run_dir, *LONG))


@contextmanager
def light_prepare():
    """A stand-in for the report, and no waiting for the disk: together nine tenths of the time of a tiny run."""

    def write_report(path, *_, **__):
        path.parent.mkdir(exist_ok=True)
        path.write_text("a light stand-in")

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("ddm_lightning.prepare.report.write_report", write_report)
        patched.setattr(os, "fsync", lambda _: None)
        yield


@pytest.fixture
def quick_prepare():
    """For a test that runs ``prepare`` and does not look at the report."""
    with light_prepare():
        yield


def prepared(run, *settings):
    """The folder ``prepared`` of the tiny experiment in ``run``."""
    with light_prepare():
        assert main(["prepare", "-c", str(TINY), f"run_dir={run}", *settings]) == 0
    return run / "prepared"


@pytest.fixture(scope="session")
def tiny_prepared(tmp_path_factory):
    """The folder ``prepared`` of the tiny experiment. Not to be changed: copy it."""
    return made_once(tmp_path_factory, "prepared", prepared) / "prepared"


SHAPES = {"4x16": (8, 30), "8x8": (15, 16), "16x4": (30, 8)}
"""Bucket -> height and width of the images that go there: none exactly, so each is resized and cropped."""
BUCKETS = "{size: 8, buckets: {max_aspect: 4.0, step: 4}}"
"""``prepare.images``: buckets of 4 x 16, 8 x 8 and 16 x 4 pixels."""


def write_shapes(folder, num=100):
    """Write noisy red and blue PNGs, of which two in ten are wide, five nearly square and three tall."""
    folder.mkdir(parents=True)
    random = np.random.default_rng(0)
    captions = []
    for number in range(num):
        name = "4x16" if number % 10 < 2 else "8x8" if number % 10 < 7 else "16x4"
        colour = ("red", "blue")[number // 10 % 2]
        pixels = random.integers(60, 110, (*SHAPES[name], 3), dtype=np.uint8)
        pixels[:, :, 2 * (colour == "blue")] += 80
        file = f"image-{number}.png"
        Image.fromarray(pixels).save(folder / file)
        captions.append(json.dumps({"file_name": file, "caption": f"{colour} {name}"}) + "\n")

    (folder / "captions.jsonl").write_text("".join(captions))


def bucket_settings(folder, images=BUCKETS):
    """What makes the tiny experiment one on the images of ``write_shapes`` in three buckets."""
    return [
        f"prepare.source={{name: imagefolder, params: {{path: {folder}}}}}",
        f"prepare.images={images}",
        "prepare.partition.max_largest_over_mean=1.5",
    ]


def _prepare_buckets(run):
    write_shapes(run / "images")
    prepared(run, *bucket_settings(run / "images"))


@pytest.fixture(scope="session")
def bucket_prepared(tmp_path_factory):
    """The folder ``prepared`` of the tiny experiment in three buckets. Not to be changed: copy it."""
    return made_once(tmp_path_factory, "buckets", _prepare_buckets) / "prepared"


def bucket_experiment(run):
    """What follows a command's name to address a run of ``bucket_finished``, whose members train for a few steps."""
    steps = ["expert.train.max_steps=12", "router.train.max_steps=8"]
    return [*settings(run), *bucket_settings(run / "images"), *steps]


@pytest.fixture(scope="session")
def bucket_finished(bucket_prepared, tmp_path_factory):
    """A finished run on images of three shapes. Not to be changed: copy it."""

    def make(run):
        copy_run(bucket_prepared.parent, run)
        for member in MEMBERS:
            assert main(["fit", *bucket_experiment(run), f"member={member}"]) == 0
        assert assemble(Run(load_experiment(TINY, bucket_experiment(run)[2:])))

    return made_once(tmp_path_factory, "buckets-fit", make)


@pytest.fixture
def bucket_run(bucket_prepared, tmp_path):
    """A run folder with shards of three buckets and their images; train it with ``bucket_settings(run / "images")``."""
    return copy_run(bucket_prepared.parent, tmp_path / "run")


@pytest.fixture
def tiny_run(tiny_prepared, tmp_path):
    """A run folder with shards and nothing else, so that any training setting fits."""
    shutil.copytree(tiny_prepared, tmp_path / "run" / "prepared")
    return tmp_path / "run"
