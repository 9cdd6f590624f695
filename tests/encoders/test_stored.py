import numpy as np
import pytest
import torch

from ddm_lightning.encoders.interfaces import StoredForm

SCALES, SHIFTS = [0.5, 2.0, 0.18215], [0.0, -1.5, 0.1159]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def posterior(num=5, dtype=torch.float16, seed=0):
    """Means and standard deviations, as an encoder stores them."""
    random = torch.Generator().manual_seed(seed)
    means = torch.randn(num, 3, 4, 4, generator=random) * 3
    spreads = torch.rand(num, 3, 4, 4, generator=random) + 0.1
    return torch.cat([means, spreads], 1).to(dtype)


def per_channel(values):
    return np.reshape(values, (-1, 1, 1))


def test_mean_and_std_are_in_the_networks_units_channel_by_channel():
    form = StoredForm("posterior", {"scale": SCALES, "shift": SHIFTS})
    stored = posterior()
    exact = stored.double().numpy()
    mean = (exact[:, :3] - per_channel(SHIFTS)) * per_channel(SCALES)
    spread = exact[:, 3:] * per_channel(SCALES)
    np.testing.assert_allclose(form.mean(stored, torch.float64).numpy(), mean, rtol=1e-12)
    np.testing.assert_allclose(form.std(stored, torch.float64).numpy(), spread, rtol=1e-12)
    assert form.mean(stored).dtype == form.std(stored).dtype == torch.float32
    np.testing.assert_allclose(form.mean(stored).numpy(), mean, rtol=1e-5, atol=1e-6)


def test_a_std_is_positive_whatever_the_sign_of_the_scale():
    form = StoredForm("posterior", {"scale": -2.0, "shift": 0.0})
    assert (form.std(posterior()) > 0).all()


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32])
@pytest.mark.parametrize(("scale", "shift"), [(1 / 127.5, 127.5), (0.18215, 0.0), (0.3611, 0.1159)])
def test_stored_x_0_is_scaled_by_the_plain_formula_bit_for_bit(dtype, scale, shift):
    stored = torch.randint(0, 256, (4, 3, 5, 5), generator=generator()).to(dtype)
    form = StoredForm("x_0", {"scale": scale, "shift": shift})
    expected = (stored.float() - shift) * scale
    assert torch.equal(form.mean(stored), expected)
    assert form.std(stored) is None
    drawing = generator()
    assert torch.equal(form.sample(stored, drawing), expected)
    assert torch.equal(drawing.get_state(), generator().get_state()), "nothing was drawn"
