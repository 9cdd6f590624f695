import contextlib
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from shards.mds import WARNINGS
from tiny_runs import read_status
from training.members import MEMBER, batch, expert
from training.short_fits import fit, weights

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.encoders import images
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.shards.manifest import StoredForm
from ddm_lightning.training.loggers import SampleLogger, routing_heat_map

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
