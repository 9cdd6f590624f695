import numpy as np
import pytest
import torch

from ddm_lightning.flow.path import (
    expand_rows,
    interpolate,
    time_rows,
    x_0_from_velocity,
)


def draw(seed=0, shape=(6, 3, 4, 5)):
    generator = torch.Generator().manual_seed(seed)
    x_0, noise = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return x_0, noise, torch.linspace(0, 1, shape[0], dtype=torch.float64)


def test_path_runs_from_data_to_noise_row_by_row():
    x_0, noise, t = draw()
    x_t = interpolate(x_0, noise, t)
    assert torch.equal(x_t[0], x_0[0])
    assert torch.equal(x_t[-1], noise[-1])
    for row, time in enumerate(t.tolist()):
        expected = (1 - time) * x_0[row].numpy() + time * noise[row].numpy()
        np.testing.assert_allclose(x_t[row].numpy(), expected, rtol=1e-15, atol=1e-15)


@pytest.mark.parametrize("shape", [(6,), (6, 3, 4, 5)])
def test_velocity_leads_back_to_the_data(shape):
    x_0, noise, t = draw(1, shape)

    torch.testing.assert_close(x_0_from_velocity(interpolate(x_0, noise, t), noise - x_0, t), x_0)


def test_time_is_not_rounded_to_the_dtype_of_half_precision_data():
    t = torch.tensor([0.9371])
    x_t = interpolate(torch.ones(1, 2, dtype=torch.bfloat16), torch.zeros(1, 2, dtype=torch.bfloat16), t)
    assert x_t.dtype == torch.float32
    torch.testing.assert_close(x_t, torch.full((1, 2), 0.0629))


def test_expand_time_only_adds_axes():
    t = torch.tensor([0.25, 0.5])
    assert expand_rows(t, torch.zeros(2, 3, 4, 5)).shape == (2, 1, 1, 1)
    assert torch.equal(expand_rows(t, torch.zeros(2)), t)


@pytest.mark.parametrize(
    ("dtype", "expected"), [(torch.float64, torch.float64), (torch.bfloat16, torch.float32)], ids=str
)
def test_time_is_repeated_a_row_and_never_narrower_than_float32(dtype, expected):
    rows = time_rows(0.937, torch.zeros(3, 2, dtype=dtype))
    assert rows.dtype == expected
    assert rows.tolist() == pytest.approx([0.937] * 3, abs=1e-7)
