import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from shards.mds import WARNINGS
from tiny_runs import read_status
from training.members import MEMBER, batch, expert
from training.short_fits import fit, weights
from training.two_processes import in_two_processes

from ddm_lightning.config.experiment import EvaluateConfig, PluginConfig, SampleConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.encoders import images
from ddm_lightning.encoders.stored import StoredForm
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.training.callbacks import StopOnRequest
from ddm_lightning.training.previews import SampleLogger, ScoreLogger, routing_heat_map

pytestmark = WARNINGS


def sampled(module, given, **settings):
    module._trainer.precision_plugin = SimpleNamespace(forward_context=contextlib.nullcontext)
    stop = SimpleNamespace(cuts_validation=lambda _: False)
    return SampleLogger(MEMBER, SampleConfig(**settings), stop).sampled(module, given)


def test_samples_from_a_stored_posterior_have_the_channels_of_an_image():
    module = expert(stored=StoredForm("posterior", {"scale": 0.5, "shift": 0.0}))
    given = {**batch(), "x_0": torch.randn(6, 8, 4, 4, generator=torch.Generator().manual_seed(0))}
    found = sampled(module, given)
    assert found.shape == module.normalised(given).shape == (6, 4, 4, 4)
    assert all(x_t.shape == found.shape for x_t, *_ in module.network.calls)


def test_samples_are_guided():
    """One step from t = 1 to 0: the noise less the guided velocity."""

    class Answers(torch.nn.Module):
        def forward(self, x_t, t, condition):
            return x_t * (1.0 + 2.0 * condition.keep[:, None, None, None])  # 1 without the condition, 3 with it

    noise = torch.randn((6, 3, 4, 4), generator=keyed_generator(MEMBER.seed, "images"))
    found = sampled(expert(Answers()), batch(), guidance_scale=4, num_steps=1)
    torch.testing.assert_close(found, noise - (1 + 4 * (3 - 1)) * noise)


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


class Fails(torch.nn.Module):
    prediction = "velocity"

    def __init__(self, error):
        super().__init__()
        self.error = error

    def forward(self, x_t, t, condition):
        raise self.error


def in_validation(module, num_ranks=1, rank=0, **settings):
    """A Trainer in a validation at step 4 of 8."""
    defaults = {"global_step": 4, "max_steps": 8, "should_stop": False, "scaler": None}
    trainer = SimpleNamespace(world_size=num_ranks, global_rank=rank, is_global_zero=rank == 0, **defaults)
    trainer.precision_plugin = SimpleNamespace(forward_context=contextlib.nullcontext)
    trainer.loggers, module._trainer = [], trainer
    return trainer


def log_samples(module, num_ranks):
    trainer = in_validation(module, num_ranks)
    logger = SampleLogger(MEMBER, SampleConfig(num_steps=1), SimpleNamespace(cuts_validation=lambda _: False))
    logger.on_validation_batch_start(trainer, module, batch(), 0)
    logger.on_validation_epoch_end(trainer, module)


def test_networks_that_fail_end_no_training_on_one_rank(capsys):
    log_samples(expert(Fails(ValueError("odd"))), num_ranks=1)
    assert capsys.readouterr().err == "expert-0: step 4: no images of this validation: odd\n"


def test_networks_that_fail_on_one_of_several_ranks_end_all_at_once():
    """The others would wait in a collective. What may be a lost connection keeps its type: another rank says why."""
    with pytest.raises(RuntimeError, match="closed by peer"):
        log_samples(expert(Fails(RuntimeError("closed by peer"))), num_ranks=2)
    with pytest.raises(UserError, match=r"^expert-0: step 4: rank 0 cannot make images .*: out of memory .*\[csv\]"):
        log_samples(expert(Fails(RuntimeError("Tried to allocate 2 GiB"))), num_ranks=2)


def test_a_decoder_that_fails_ends_no_training_on_several_ranks(monkeypatch, capsys):
    def fails(*_):
        raise ValueError("odd")

    monkeypatch.setattr(images.Pixels, "decode", fails)
    log_samples(expert(), num_ranks=2)
    assert capsys.readouterr().err == "expert-0: step 4: no images of this validation: odd\n"


@pytest.mark.parametrize("failing", [None, 1])
def test_ranks_skip_scores_together_when_one_cannot_score(failing):
    """At its first batch of two; a collective after that finds both ranks in step."""

    def scored(rank):
        def fails(*_, **__):
            raise OSError("no disk")

        module, logged = expert(), {}
        trainer = in_validation(module, num_ranks=2, rank=rank)
        module.log_figures = logged.update
        stop = StopOnRequest(None)
        stop.on_train_start(trainer, module)
        evaluate = EvaluateConfig([PluginConfig("kid", {"features": "pixels"})], num_images=24)
        scores = ScoreLogger(SampleLogger(MEMBER, SampleConfig(num_steps=2), stop), evaluate, 4)
        if rank == failing:
            scores.metrics[0][1].update = fails
        for index in range(2):
            scores.on_validation_batch_start(trainer, module, batch(seed=2 * rank + index), index)
        scores.on_validation_epoch_end(trainer, module)
        return logged, stop.any_rank(rank == 1)

    (first, in_step), second = in_two_processes(scored).values()
    assert (first, in_step) == second and in_step
    assert [*first] == (["score/KID (pixels)"] if failing is None else [])


@pytest.mark.parametrize("place", ["__init__", "decode"])
def test_an_island_that_cannot_decode_trains_without_images_and_says_so(finished, tiny_run, monkeypatch, capsys, place):
    """As one without the autoencoder's weights, or one whose memory is too small for it."""

    def fails(*_, **__):
        raise UserError("no weights here\nand more")

    monkeypatch.setattr(images.Pixels, place, fails)
    assert fit(tiny_run) == 0
    said = [line for line in capsys.readouterr().err.splitlines() if "no weights here" in line]
    if place == "__init__":
        assert said == ["expert-0: trains without sample images: no weights here"]
    else:
        assert said == [f"expert-0: step {at}: no images of this validation: no weights here" for at in (12, 20)]
    assert weights(tiny_run) == weights(finished)
    assert read_status(tiny_run, "expert-0")["metrics"]["held_out/loss"] > 0
