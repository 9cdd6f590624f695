import contextlib
import io
import re

import numpy as np
import pytest
import torch
from lightning.pytorch.loggers import TensorBoardLogger
from shards.mds import WARNINGS
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tiny_runs import read_status
from torch.utils.data import DataLoader
from training.members import MEMBER, Recorder, batch, expert
from training.short_fits import fit, weights
from training.two_processes import in_two_processes, trainer_of

from ddm_lightning.config.experiment import IslandConfig, SampleConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.encoders import images as encoders
from ddm_lightning.encoders.interfaces import StoredForm
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.islands.publish import _is_shared
from ddm_lightning.training import previews
from ddm_lightning.training.callbacks import RollingCheckpoints, StopOnRequest
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.previews import SampleLogger, build_loggers, routing_heat_map, sample_like
from ddm_lightning.use.rows import Rows

pytestmark = WARNINGS


def test_samples_from_a_stored_posterior_have_the_channels_of_an_image():
    objective = expert(stored=StoredForm("posterior", {"scale": 0.5, "shift": 0.0}))
    given = {**batch(), "x_0": torch.randn(6, 8, 4, 4, generator=torch.Generator().manual_seed(0))}
    found = sample_like(objective, objective.network, given, SampleConfig())

    assert found.shape == objective.x_0(given).shape == (6, 4, 4, 4)
    assert all(x_t.shape == found.shape for x_t, *_ in objective.network.calls)


def test_rows_of_another_shape_have_its_noise_of_the_command():
    objective = expert()
    given = {**batch(), "x_0": torch.zeros(6, 3, 2, 8)}
    sample_like(objective, objective.network, given, SampleConfig(), Rows(["no condition"], ["no condition"]))

    generator = keyed_generator(MEMBER.seed, "x_1", "no condition", 0, 3, 2, 8)
    (x_t, *_), *_ = objective.network.calls
    assert torch.equal(x_t[0], torch.randn(3, 2, 8, generator=generator))


def test_all_starts_of_a_member_are_one_run_of_weights_and_biases(tmp_path, monkeypatch):
    monkeypatch.setattr(previews, "WandbLogger", lambda *_, **settings: settings)
    for name in ("a", "b"):
        (tmp_path / name / "expert-0").mkdir(parents=True)

    (first,), (again,) = (build_loggers(["wandb"], tmp_path / "a/expert-0", "faces", step) for step in (0, 20))
    (other,) = build_loggers(["wandb"], tmp_path / "b/expert-0", "faces", 0)

    assert first == again and first["resume"] == "allow"
    assert first["id"] != other["id"] and re.fullmatch(r"expert-0-[0-9a-f]{12}", first["id"])
    assert _is_shared("wandb.txt")  # another machine goes on with the same


def test_samples_are_guided():
    """One step from t = 1 to 0: the noise less the guided velocity."""

    class Answers(torch.nn.Module):
        def forward(self, x_t, t, condition):
            return x_t * (1.0 + 2.0 * condition.keep[:, None, None, None])  # 1 without the condition, 3 with it

    noise = torch.randn((6, 3, 4, 4), generator=keyed_generator(MEMBER.seed, "images"))
    objective = expert(Answers())
    found = sample_like(objective, objective.network, batch(), SampleConfig(guidance_scale=4, num_steps=1))
    torch.testing.assert_close(found, noise - (1 + 4 * (3 - 1)) * noise)


@pytest.mark.parametrize("ahead", [-3600, 0, 3600])
def test_tensorboard_reads_starts_in_order_whatever_their_clocks(tmp_path, ahead):
    def start(resumed_step, steps, value):
        (logger,) = build_loggers(["tensorboard"], tmp_path, "project", resumed_step)
        for step in steps:
            logger.log_metrics({"train/loss": value}, step)

        logger.finalize("stopped")

    start(0, range(5, 101, 5), 1.0)
    (first,) = (tmp_path / "tensorboard").glob("events*")
    prefix, began, host = first.name.partition(str(int(first.name.split(".")[3])))
    first.rename(first.with_name(f"{prefix}{int(began) + ahead}.zz{host}"))  # of another machine, last by its name

    start(64, range(65, 151, 5), 2.0)
    start(104, range(105, 201, 5), 3.0)

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("1_watch/train/loss")

    assert [one.step for one in events] == [*range(5, 201, 5)]
    assert [one.value for one in events] == [1.0] * 12 + [2.0] * 8 + [3.0] * 20


def test_the_heat_map_has_a_panel_per_timestep_and_rows_that_sum_to_one():
    confusion = (
        torch.rand(8, 3, 3, generator=torch.Generator().manual_seed(0)) * torch.tensor([10.0, 50.0, 1.0])[:, None]
    )
    confusion[2, 1] = 0.0  # a cluster without held-out samples
    figure = routing_heat_map(confusion)
    axes = figure.get_axes()

    assert [axis.get_title() for axis in axes] == [f"t = {(index + 0.5) / 8:.2f}" for index in range(8)]

    for index, axis in enumerate(axes):
        shown = axis.get_images()[0].get_array()
        sums = confusion[index].sum(1, keepdim=True)
        expected = np.where(sums > 0, confusion[index] / sums.clamp_min(1e-9), 0)
        np.testing.assert_allclose(shown, expected, atol=1e-6)
        labels = {text.get_position(): text.get_text() for text in axis.texts}
        # Position is (column, row): the true cluster goes downwards.
        assert labels[2, 0] == f"{float(expected[0, 2]):.2f}"
        assert len(labels) == 9


class Fails(Recorder):
    """Fails where sampling begins, and neither training nor validation comes."""

    def __init__(self, error):
        super().__init__()
        self.gain = torch.nn.Parameter(torch.ones(1))
        self.error = error

    def forward(self, x_t, t, condition):
        if t[0] == 1:
            raise self.error
        return super().forward(x_t, t, condition)


ODD = "expert-0: step 1: no images of this validation: odd"


def show(folder, network, rank=None):
    """Take a step and validate with images, on one rank or one of two."""
    stop = StopOnRequest(RollingCheckpoints(folder, IslandConfig(), {}))
    callbacks = [stop, SampleLogger(SampleConfig(num_steps=1), stop)]
    logger = TensorBoardLogger(folder, version=rank)
    trainer = trainer_of(rank, max_steps=1, log_every_n_steps=1, callbacks=callbacks, logger=logger)
    trainer.fit(MemberModule(expert(network)), *(DataLoader([batch()], batch_size=None) for _ in range(2)))


def test_networks_that_fail_end_no_training_on_one_rank(tmp_path, capsys):
    show(tmp_path, Fails(ValueError("odd")))
    assert ODD in capsys.readouterr().err.splitlines()


def test_networks_that_fail_on_one_of_several_ranks_end_all_at_once(tmp_path):
    """The others would wait in a collective. The error keeps its type: another rank may say why."""

    def task(rank):
        with pytest.raises(RuntimeError, match="closed by peer"):
            show(tmp_path, Fails(RuntimeError("closed by peer")), rank)

    in_two_processes(task)


def test_a_decoder_that_fails_ends_no_training_on_several_ranks(tmp_path, monkeypatch):
    def fails(*_):
        raise ValueError("odd")

    def task(rank):
        with contextlib.redirect_stderr(io.StringIO()) as said:
            show(tmp_path, Recorder(), rank)
        return ODD in said.getvalue().splitlines()

    monkeypatch.setattr(encoders.Pixels, "decode", fails)

    assert in_two_processes(task) == {0: True, 1: False}


@pytest.mark.parametrize("place", ["__init__", "decode"])
def test_an_island_that_cannot_decode_trains_without_images_and_says_so(finished, tiny_run, monkeypatch, capsys, place):
    """As one without the autoencoder's weights, or one whose memory is too small for it."""

    def fails(*_, **__):
        raise UserError("no weights here\nand more")

    monkeypatch.setattr(encoders.Pixels, place, fails)

    assert fit(tiny_run) == 0

    said = [line for line in capsys.readouterr().err.splitlines() if "no weights here" in line]
    assert said == [f"expert-0: step {at}: no images of this validation: no weights here" for at in (12, 20)]
    assert weights(tiny_run) == weights(finished)
    assert read_status(tiny_run, "expert-0")["metrics"]["held_out/loss"] > 0


def test_the_curve_of_a_resumed_training_keeps_the_point_of_its_checkpoint(tmp_path):
    for resumed, steps in ((0, (4, 8, 12)), (8, (12, 16))):
        (logger,) = build_loggers(["tensorboard"], tmp_path, "project", resumed)
        for step in steps:
            logger.log_metrics({"train/loss": float(resumed)}, step)
        logger.finalize("success")

    points = EventAccumulator(str(tmp_path / "tensorboard")).Reload().Scalars("1_watch/train/loss")

    assert [(point.step, point.value) for point in points] == [(4, 0), (8, 0), (12, 8), (16, 8)]
