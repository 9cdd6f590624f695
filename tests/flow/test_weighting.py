import pytest
import torch

from ddm_lightning.flow.path import interpolate
from ddm_lightning.flow.prediction import PREDICTIONS, min_snr_weights, training_target

T = torch.linspace(0.01, 0.99, 49, dtype=torch.float64)


@pytest.mark.parametrize("gamma", [0.3, 1.0, 5.0])
@pytest.mark.parametrize("kind", PREDICTIONS)
def test_each_kind_weighs_one_guess_of_the_data_alike(kind, gamma):
    """The same wrong guess of x_0, told as velocity or as noise, costs min(SNR, gamma) times its squared error."""
    generator = torch.Generator().manual_seed(0)
    x_0, noise, guess = torch.randn(3, len(T), 5, generator=generator, dtype=torch.float64)
    x_t = interpolate(x_0, noise, T)
    implied_noise = (x_t - (1 - T)[:, None] * guess) / T[:, None]
    predicted = training_target(guess, implied_noise, kind)
    squares = (predicted - training_target(x_0, noise, kind)).square().sum(1)
    snr = ((1 - T) / T).square()
    expected = torch.where(snr < gamma, snr, gamma) * (guess - x_0).square().sum(1)
    torch.testing.assert_close(min_snr_weights(T, gamma, kind) * squares, expected, rtol=1e-10, atol=0)


def test_an_unknown_prediction_is_refused():
    with pytest.raises(ValueError, match="'score' is none of velocity, epsilon, x_0"):
        min_snr_weights(T, 5.0, "score")
