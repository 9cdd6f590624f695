"""Temperatures of routers that are too sure by a known factor; scores are compared in ``tests/benchmarks``."""

import numpy as np
import pytest
import torch
from scipy.optimize import minimize_scalar
from scipy.special import log_softmax

from ddm_lightning.networks.calibration import Calibration, temperature_at


def predictions(num, factor, seed=0):
    """Logits of a router that is ``factor`` times too sure, and clusters of the true probabilities."""
    generator = torch.Generator().manual_seed(seed)
    logits = 1.5 * torch.randn(num, 4, generator=generator)
    return factor * logits, torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]


@pytest.mark.parametrize("factor", [0.5, 1.0, 2.4])
def test_the_temperature_undoes_a_router_that_is_too_sure(factor):
    logits, clusters = predictions(20_000, factor)
    calibration = Calibration(num_times=2)
    for part in range(4):  # in batches, at the second of two times
        rows = slice(part * 5000, (part + 1) * 5000)
        calibration.add(1, logits[rows], clusters[rows], torch.arange(20_000)[rows])

    nothing, fitted = calibration.temperatures()
    before, after = (errors[1] for errors in calibration.errors())
    assert nothing == 1.0
    assert fitted == pytest.approx(factor, rel=0.05)
    assert after < 0.015 and (factor == 1.0 or before > 0.05)


def test_the_fit_is_the_minimum_and_uses_half_of_the_samples():
    logits, clusters = predictions(120, 1.7)
    ids = torch.arange(120) * 3 + 1
    calibration = Calibration(num_times=1)
    calibration.add(0, logits, clusters, ids)
    first = ((ids * 2654435761 >> 16) % 2 == 0).numpy()
    assert 36 < first.sum() < 84
    # Which half a sample is in depends on itself alone.
    alone = Calibration(num_times=1)
    for row in range(120):
        alone.add(0, logits[row : row + 1], clusters[row : row + 1], ids[row : row + 1])

    assert torch.allclose(alone.loss, calibration.loss) and torch.allclose(alone.reliability, calibration.reliability)

    def loss(exponent):
        rows = log_softmax(logits.double().numpy()[first] / 2**exponent, axis=1)
        return -float(rows[np.arange(len(rows)), clusters.numpy()[first]].sum())

    assert np.log2(calibration.temperatures()[0]) == pytest.approx(minimize_scalar(loss).x, abs=0.02)

    # The other half judges: |confidence - accuracy| by the bin, at the temperatures nearest to 1 and to the fitted one.
    fitted = calibration.temperatures()[0]
    choices = 2 ** np.linspace(-2, 2, 41)
    for found, temperature in zip(calibration.errors(), (1.0, choices[np.abs(choices - fitted).argmin()]), strict=True):
        rows = np.exp(log_softmax(logits.double().numpy()[~first] / temperature, axis=1))
        hits = rows.argmax(1) == clusters.numpy()[~first]
        bins = np.ceil(rows.max(1) * 15)
        gaps = [np.abs((rows.max(1) - hits)[bins == one].sum()) for one in range(1, 16)]
        assert found == pytest.approx([sum(gaps) / len(rows)])


def test_temperatures_are_linear_between_the_middles_of_the_parts():
    t = torch.tensor([0.0, 0.125, 0.25, 0.375, 0.5, 0.625, 0.875, 0.9, 1.0])
    expected = np.interp(t.numpy(), [0.125, 0.375, 0.625, 0.875], [1.0, 2.0, 4.0, 3.0])
    assert temperature_at(t, [1.0, 2.0, 4.0, 3.0]).tolist() == pytest.approx(expected.tolist())
