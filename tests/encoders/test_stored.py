import numpy as np
import pytest
import torch

from ddm_lightning.encoders.interfaces import StoredForm

SCALES = [0.5, -2.0, 0.18215]
SHIFTS = [0.0, -1.5, 0.1159]


def generator():
    return torch.Generator().manual_seed(0)


def test_mean_and_std_are_in_the_networks_units_channel_by_channel():
    means = torch.randn(5, 3, 4, 4, generator=generator()) * 3
    spreads = torch.rand(5, 3, 4, 4, generator=generator()) + 0.1
    stored = torch.cat([means, spreads], 1).half()  # as an encoder stores them
    exact = stored.double().numpy()
    scales = np.reshape(SCALES, (-1, 1, 1))
    mean = (exact[:, :3] - np.reshape(SHIFTS, (-1, 1, 1))) * scales
    std = exact[:, 3:] * np.abs(scales)  # positive whatever the sign of the scale

    form = StoredForm("posterior", {"scale": SCALES, "shift": SHIFTS})
    np.testing.assert_allclose(form.mean(stored, torch.float64).numpy(), mean, rtol=1e-12)
    np.testing.assert_allclose(form.std(stored, torch.float64).numpy(), std, rtol=1e-12)
    np.testing.assert_allclose(form.mean(stored).numpy(), mean, rtol=1e-5, atol=1e-6)
    assert form.mean(stored).dtype == form.std(stored).dtype == torch.float32

    noise = torch.randn(5, 3, 4, 4, generator=generator())
    expected = form.mean(stored) + form.std(stored) * noise
    assert torch.equal(form.sample(stored, generator()), expected)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float16, torch.float32])
@pytest.mark.parametrize(("scale", "shift"), [(1 / 127.5, 127.5), (0.18215, 0.0), (0.3611, 0.1159)])
def test_stored_x_0_is_scaled_by_the_plain_formula_bit_for_bit(dtype, scale, shift):
    stored = torch.randint(0, 256, (4, 3, 5, 5), generator=generator()).to(dtype)
    form = StoredForm("x_0", {"scale": scale, "shift": shift})
    drawing = generator()
    expected = (stored.float() - shift) * scale
    assert torch.equal(form.mean(stored), expected)
    assert torch.equal(form.sample(stored, drawing), expected)
    assert torch.equal(drawing.get_state(), generator().get_state()), "nothing was drawn"
    assert form.std(stored) is None
