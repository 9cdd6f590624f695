"""A citizen of Lightning: any logger, callbacks in any order, Trainer flags, and modules under a plain Trainer."""

import csv
import random
import shutil
from importlib.metadata import PackageNotFoundError

import lightning as L
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger, WandbLogger
from matplotlib.figure import Figure
from shards.mds import WARNINGS
from tiny_runs import TINY, copy_run
from training.short_fits import SHORT, checkpoints, events, fit, member, trained, weights

from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core import registry
from ddm_lightning.core.registry import CALLBACKS
from ddm_lightning.members.run import Run
from ddm_lightning.training.fit import build_data
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.objective import build_objective
from ddm_lightning.training.previews import log_image

pytestmark = WARNINGS
WIDTHS = "expert.train.ema_widths=[0.1,0.2]"


class CountSteps(L.Callback):
    """A plug-in."""

    def __init__(self, start: int = 0):
        self.num_steps = start

    def on_train_batch_end(self, *_):
        self.num_steps += 1

    def on_train_end(self, trainer, module):
        module.network.counted = self.num_steps
        print(f"counted {self.num_steps} with {type(trainer.profiler).__name__}, anomalies: {trainer._detect_anomaly}")


@pytest.fixture(scope="module")
def finished(tiny_prepared, tmp_path_factory):
    return trained(tiny_prepared, tmp_path_factory.mktemp("finished"), WIDTHS, "island.loggers=[tensorboard,csv]")


def rows_of(run, step=0):
    with member(run, "csv", f"from-step-{step:08d}", "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def curves(run):
    shown = events(run)
    tags = {tag.partition("/")[2]: tag for tag in shown.Tags()["scalars"]}  # without the group in front
    return {
        name: [(event.step, event.value) for event in shown.Scalars(tag)]
        for name, tag in tags.items()
        if name not in ("train/samples_per_second", "train/data_wait", "train/memory_gb")
    }


def test_every_logger_has_the_same_curves(finished):
    rows = rows_of(finished)
    drawn = curves(finished)

    assert {"train/loss", "train/learning_rate", "held_out/loss", "train/samples_per_second"} <= set(rows[0])
    assert set(drawn) <= set(rows[0]) and "epoch" not in rows[0]

    for name, points in drawn.items():
        written = [(int(row["step"]), float(row[name])) for row in rows if row[name]]
        assert written == [(step, pytest.approx(value, rel=1e-6)) for step, value in points], name


def test_a_resumed_member_keeps_the_earlier_csv_file(finished, tmp_path):
    run = copy_run(finished, tmp_path / "run", "expert-0")
    shutil.rmtree(member(run, "checkpoints", "step-00000020.ckpt"))

    assert fit(run, WIDTHS, "island.loggers=[csv]") == 0
    assert rows_of(run) == rows_of(finished)
    assert {row["step"] for row in rows_of(run, 18)} == {"20"}


def test_the_order_of_callbacks_does_not_matter(finished, tiny_run, monkeypatch):
    build = L.Trainer.__init__

    def shuffled(self, *, callbacks, **flags):
        random.Random(1).shuffle(callbacks)
        build(self, callbacks=callbacks, **flags)

    with monkeypatch.context() as patched:
        patched.setattr(L.Trainer, "__init__", shuffled)
        assert fit(tiny_run, WIDTHS) == 0

    assert weights(tiny_run) == weights(finished)
    assert checkpoints(tiny_run) == checkpoints(finished)
    assert curves(tiny_run) == curves(finished)

    ours, theirs = (sorted(path.name for path in member(run, "ema").iterdir()) for run in (tiny_run, finished))
    assert ours == theirs


def test_a_checkpoint_never_comes_before_its_snapshots(tiny_run, monkeypatch):
    """Else a training killed between the two would resume without them."""
    saved = []
    save = L.Trainer.save_checkpoint

    def watched(self, path, **named):
        save(self, path, **named)
        saved.append((self.global_step, len(list(member(tiny_run, "ema").glob(f"*{self.global_step:08d}*")))))

    monkeypatch.setattr(L.Trainer, "save_checkpoint", watched)

    assert fit(tiny_run, WIDTHS, "expert.train.ema_snapshots=20") == 0
    assert saved == [(step, 2) for step in (6, 12, 18, 20)]


def test_plug_in_callbacks_and_flags_reach_the_trainer(tiny_run, monkeypatch, capsys):
    monkeypatch.setitem(CALLBACKS._registered, "count", CountSteps)
    plugin = "island.callbacks=[{name: count, params: {start: 100}}]"

    assert fit(tiny_run, plugin, "island.trainer={profiler: simple, detect_anomaly: true}") == 0
    assert "counted 120 with SimpleProfiler, anomalies: True" in capsys.readouterr().out


@pytest.fixture
def without_torchao(monkeypatch):
    installed = registry.distribution

    def distribution(name):
        if name == "torchao":
            raise PackageNotFoundError
        return installed(name)

    monkeypatch.setattr(registry, "distribution", distribution)


@pytest.mark.usefixtures("without_torchao")
@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("island.callbacks=[{name: nowhere}]", "unknown callback 'nowhere'; known: early-stopping, sample-log"),
        ("island.trainer={profiler: magic}", "keys 'island.trainer' and 'island.callbacks': When passing"),
        ("island.loggers=[wandb]", "needs the package 'wandb'; install it with: pip install 'ddm_lightning[wandb]'"),
        ("expert.train.optimizer=adamw-8bit", "install it with: pip install 'ddm_lightning[lowmem]'"),
        ("island.trainer={precision: 16}", "'island.trainer' = {'precision': 16}: must be of the flags benchmark, "),
        ("island.loggers=[tensorbord]", "must be a list of tensorboard, csv, wandb"),
        ("island.loggers=[csv,csv]", "each at most once"),
    ],
)
def test_what_fit_cannot_use_is_one_line(tiny_run, capsys, setting, words):
    assert fit(tiny_run, setting) == 2
    (line,) = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
    assert words in line
    assert not member(tiny_run, "checkpoints").exists()


@pytest.mark.usefixtures("without_torchao")
def test_a_plan_that_measures_this_machine_needs_what_fit_needs(tmp_path, capsys):
    given = ["-c", str(TINY), f"run_dir={tmp_path}", "expert.train.optimizer=adamw-8bit"]

    assert main(["plan", *given, "--only", "expert-0", "--device", "here"]) == 2
    assert "install it with: pip install 'ddm_lightning[lowmem]'" in capsys.readouterr().err


def test_images_go_to_weights_and_biases():
    class Recorded(WandbLogger):
        def __init__(self):
            self.images = []

        def log_image(self, key, images, step):
            self.images.append((key, len(images), step))

    trainer = type("Trainer", (), {"loggers": [Recorded()], "global_step": 7})()
    log_image(trainer, "samples", torch.zeros(2, 3, 3).numpy())
    log_image(trainer, "held_out/routing", Figure())

    assert trainer.loggers[0].images == [("samples", 1, 7), ("held_out/routing", 1, 7)]


@pytest.fixture
def plain(tiny_prepared, tmp_path):
    """Builds the module and the data of a member, and a Trainer that knows nothing of islands."""
    run = Run(load_experiment(TINY, [f"run_dir={tmp_path}", *SHORT]))
    (tmp_path / "prepared").symlink_to(tiny_prepared)

    def build(name, max_steps, *callbacks):
        own = run.member(name)
        trainer = L.Trainer(
            accelerator="cpu", max_steps=max_steps, val_check_interval=3, check_val_every_n_epoch=None,
            log_every_n_steps=2, logger=CSVLogger(tmp_path, "", f"to-{max_steps}"), callbacks=list(callbacks),
            enable_progress_bar=False, enable_model_summary=False, use_distributed_sampler=False,
        )  # fmt: skip
        return trainer, MemberModule(build_objective(own, run), run.experiment.island), build_data(own, run)

    return build


@pytest.mark.filterwarnings("ignore:Experiment logs directory:UserWarning")
@pytest.mark.parametrize(("name", "loss"), [("expert-0", "loss"), ("router", "cross_entropy")])
def test_modules_and_data_work_under_a_plain_trainer(plain, tmp_path, name, loss):
    def checkpointing():
        return ModelCheckpoint(tmp_path / "best", monitor=f"held_out/{loss}", save_last=True, filename="{step}")

    best = checkpointing()
    trainer, module, data = plain(name, 6, best)
    trainer.fit(module, datamodule=data)

    assert best.best_model_score == min(float(row[f"held_out/{loss}"]) for row in rows(tmp_path, 6, f"held_out/{loss}"))
    assert [row["step"] for row in rows(tmp_path, 6, f"train/{loss}")] == ["2", "4", "6"]
    assert [row["step"] for row in rows(tmp_path, 6, f"held_out/{loss}")] == ["3", "6"]

    resumed, again, data = plain(name, 9, checkpointing())
    resumed.fit(again, datamodule=data, ckpt_path=best.last_model_path, weights_only=False)
    straight, module, data = plain(name, 9)
    straight.fit(module, datamodule=data)
    trained, expected = (one.network.state_dict() for one in (again, module))

    assert all(torch.equal(trained[key], expected[key]) for key in expected)


def rows(folder, max_steps, curve):
    with (folder / f"to-{max_steps}" / "metrics.csv").open() as file:
        return [row for row in csv.DictReader(file) if row.get(curve)]
