import math

import numpy as np
import pytest
import torch
from torch.nn import functional

from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.networks.embeddings import (
    ConditionEmbedding,
    TimestepEmbedding,
    axial_rotation,
    coordinates,
    patchify,
    sincos_positions,
    sinusoidal,
    unpatchify,
)


def random(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_linear_on_patches_is_a_strided_convolution():
    x = random(2, 3, 6, 10)
    weight = random(7, 3, 2, 2, seed=1)
    by_convolution = functional.conv2d(x, weight, stride=2).flatten(2).transpose(1, 2)
    torch.testing.assert_close(functional.linear(patchify(x, 2), weight.flatten(1)), by_convolution)


@pytest.mark.parametrize("shape", [(3, 6, 6), (4, 8, 4), (1, 2, 10)])
def test_unpatchify_inverts_patchify(shape):
    x = random(3, *shape)
    patches = patchify(x, 2)
    assert patches.shape == (3, shape[1] * shape[2] // 4, shape[0] * 4)
    assert torch.equal(unpatchify(patches, shape, 2), x)


def test_positions_equal_a_second_implementation():
    width = 12
    rows = 3
    columns = 5
    row, column = np.divmod(np.arange(rows * columns), columns)
    waves = []
    for coordinate in (column, row):
        angles = coordinate[:, None] * 10000 ** (-np.arange(3) / 3)
        waves += [np.sin(angles), np.cos(angles)]

    positions = sincos_positions(width, rows, columns)
    assert positions.dtype == torch.float32
    np.testing.assert_allclose(positions.numpy(), np.concatenate(waves, axis=1), atol=1e-6)


@pytest.mark.parametrize(("rows", "columns", "reference"), [(2, 8, (4, 4)), (3, 5, (4, 4)), (7, 2, (3, 6))])
def test_positions_of_another_shape_equal_the_formula(rows, columns, reference):
    """Centred on the reference, and scaled to its area; in plain Python."""
    scale = math.sqrt(reference[0] * reference[1] / (rows * columns))
    positions = sincos_positions(8, rows, columns, reference)
    rotation = axial_rotation(8, rows, columns, reference)[0]
    for i in range(rows):
        for j in range(columns):
            row = (i + 0.5 - rows / 2) * scale + reference[0] / 2 - 0.5
            column = (j + 0.5 - columns / 2) * scale + reference[1] / 2 - 0.5
            angles = [column, column / 100, row, row / 100]
            cosines = [math.cos(angle) for angle in angles]
            sines = [math.sin(angle) for angle in angles]
            waves = [*sines[:2], *cosines[:2], *sines[2:], *cosines[2:]]
            torch.testing.assert_close(positions[i * columns + j], torch.tensor(waves))
            torch.testing.assert_close(rotation[i * columns + j], torch.tensor([cosines, sines]))


@pytest.mark.parametrize("grid", [(16, 16), (3, 5), (1, 7)])
def test_the_reference_has_whole_numbers_to_the_bit(grid):
    column, row = coordinates(*grid, reference=grid)
    numbers = torch.arange(grid[0] * grid[1], dtype=torch.float64)
    assert torch.equal(row, numbers // grid[1]) and torch.equal(column, numbers % grid[1])
    assert torch.equal(sincos_positions(8, *grid, reference=grid), sincos_positions(8, *grid))


def test_sinusoidal_equals_the_formula():
    t = torch.tensor([0.0, 0.25, 0.937, 1.0], dtype=torch.float64)
    waves = sinusoidal(t, 8)
    for row, time in enumerate(t.tolist()):
        angles = [1000 * time / 10000 ** (i / 4) for i in range(4)]
        expected = [math.cos(angle) for angle in angles] + [math.sin(angle) for angle in angles]
        torch.testing.assert_close(waves[row], torch.tensor(expected, dtype=torch.float64))


def test_sinusoidal_is_accurate_in_float32():
    t = torch.linspace(0, 1, 1001)
    torch.testing.assert_close(sinusoidal(t, 256).double(), sinusoidal(t.double(), 256), atol=2e-4, rtol=0)


def test_times_are_embedded_before_they_are_rounded():
    embedding = TimestepEmbedding(16).bfloat16()
    near = embedding(torch.tensor([0.9360, 0.9365]))  # equal in bfloat16
    assert near.dtype == torch.bfloat16
    assert not torch.equal(near[0], near[1])


def made(spec, **options):
    torch.manual_seed(0)
    embedding = ConditionEmbedding(spec, 6, **options)
    embedding.initialise()
    return embedding


def test_text_goes_through_a_linear_layer_at_unit_norm():
    embedding = made(ConditionSpec("text", 5))
    text = random(3, 5).float()
    linear = embedding.embed[1]
    expected = text / math.sqrt(5) @ linear.weight.T + linear.bias
    torch.testing.assert_close(embedding(Condition.of(text), 3), expected)


def test_classes_are_looked_up():
    embedding = made(ConditionSpec("class", 4))
    classes = torch.tensor([3, 0, 3])
    assert torch.equal(embedding(Condition.of(classes), 3), embedding.embed.weight[[3, 0, 3]])


@pytest.mark.parametrize(
    ("embedding", "values"),
    [
        (made(ConditionSpec("text", 5)), random(3, 5).float()),
        (made(ConditionSpec("class", 4)), torch.tensor([1, 2, 3])),
        (made(ConditionSpec("tokens", 5, length=4), keep_tokens=True), random(3, 4, 5).float()),
    ],
    ids=["text", "class", "tokens"],
)
def test_dropped_rows_are_the_learned_null(embedding, values):
    kept = Condition.of(values)
    null = embedding.null.expand(2, *embedding.tokens, -1)

    mixed = embedding(kept.dropped(torch.tensor([False, True, False])), 3)
    assert torch.equal(mixed[[0, 2]], embedding(kept, 3)[[0, 2]])
    assert torch.equal(mixed[1], null[0])
    assert torch.equal(embedding(None, 2), null)


def test_a_vector_of_tokens_is_that_of_their_mean():
    tokens = random(3, 4, 5).float()
    as_tokens = made(ConditionSpec("tokens", 5, length=4))
    as_text = made(ConditionSpec("text", 5))
    torch.testing.assert_close(as_tokens(Condition.of(tokens), 3), as_text(Condition.of(tokens.mean(1)), 3))


def test_each_token_goes_through_a_linear_layer():
    embedding = made(ConditionSpec("tokens", 5, length=4), keep_tokens=True)
    tokens = random(3, 4, 5).half()  # as they may be stored

    expected = tokens.float() @ embedding.embed.weight.T + embedding.embed.bias
    torch.testing.assert_close(embedding(Condition.of(tokens), 3), expected)
    assert embedding.embed.weight.std().item() == pytest.approx(0.02, rel=0.4)
