"""``uniform`` takes the mean of the experts' velocities, whatever the router says."""

import torch
from toy_ensemble import SHAPE, draw, two

from ddm_lightning.core.registry import STRATEGIES


def test_a_step_from_noise_lands_at_the_mean_of_the_experts_means():
    """At t = 1 an exact expert's velocity is x_1 minus its mean, here 1 and -1; the router would not average them."""
    torch.testing.assert_close(draw(two(), 5, strategy="uniform", num_steps=1), torch.zeros(5, *SHAPE))
    assert draw(two(), 5, num_steps=1).abs().min() > 0.01


def test_weights():
    assert STRATEGIES.build("uniform", {}).weights(torch.tensor([[0.7, 0.3, 0.0, 0.0]])).tolist() == [[0.25] * 4]
