from __future__ import annotations

from functools import partial

import pytest
import torch
from networks.small import moved, random, randomised
from torch import nn
from torch.nn import functional

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.networks.blocks import checkpoint_blocks
from ddm_lightning.networks.unet import UNet, UNetBlock
from ddm_lightning.testing import check_expert

NONE = ConditionSpec("none", 0)
CLASSES = ConditionSpec("class", 4)


def test_keeps_the_contract_of_experts() -> None:
    check_expert(partial(UNet, width=8, num_heads=2, num_blocks=1, multipliers=[1, 2]))
    deep = partial(UNet, width=8, num_heads=2, num_blocks=1, multipliers=[1, 2, 3], attention=[1], prediction="x_0")
    check_expert(deep, x_shape=(4, 8, 12), kinds=("tokens", "tokens+text"))


def test_parts_are_where_they_are_said_to_be() -> None:
    network = UNet(x_shape=(3, 16, 8), condition=CLASSES, width=8, multipliers=[1, 2, 4], num_blocks=2, attention=[1])
    shapes: list[tuple[int, ...]] = []
    for block in network.blocks:
        block.register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape[1:])))

    network(torch.randn(2, 3, 16, 8), torch.rand(2), None)
    down = [(8, 16, 8)] * 2 + [(16, 8, 4)] * 2 + [(32, 4, 2)] * 2
    assert shapes == [*down, (32, 4, 2), (32, 4, 2), *reversed(down)]
    attending = [index for index, block in enumerate(network.blocks) if block.attention is not None]
    assert attending == [2, 3, 6, 7, 10, 11]


@pytest.mark.parametrize("resample", ["", "up", "down"])
@pytest.mark.parametrize("has_skip", [False, True])
def test_a_block_equals_the_formula(resample: str, has_skip: bool) -> None:
    """In float64: resample, join, norm, convolve, modulate, convolve, add, attend; four channels to a group."""
    block = randomised(UNetBlock(8, 8 * has_skip, 32, 5, resample, num_heads=2, reads_tokens=True))
    x = random(2, 8, 4, 6)
    features = random(2, 5, seed=1)
    tokens = random(2, 3, 5, seed=2)

    def norm(layer: nn.GroupNorm, value: torch.Tensor) -> torch.Tensor:
        return functional.group_norm(value, value.shape[1] // 4, layer.weight, layer.bias)

    h = x
    if resample == "up":
        h = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
    if resample:
        stride = 2 if resample == "down" else 1
        h = functional.conv2d(h, block.resample.weight, block.resample.bias, padding=1, stride=stride)

    skip = random(2, 8, *h.shape[2:], seed=3) if has_skip else None
    joined = h if skip is None else torch.cat([h, skip], 1)
    inner = block.first(functional.silu(norm(block.norms[0], joined)))
    shift, scale = block.modulation(features).view(2, 2, 32, 1, 1).unbind(1)
    inner = norm(block.norms[1], inner) * (1 + scale) + shift
    h = block.shortcut(joined) + block.second(functional.silu(inner))
    cells = norm(block.attention_norm, h).flatten(2).transpose(1, 2)
    read = block.attention(cells) + block.cross_attention(cells, block.context(tokens))
    expected = h + read.transpose(1, 2).reshape(h.shape)

    torch.testing.assert_close(block(x, features, tokens, skip), expected)


def test_the_first_output_is_zero_and_each_class_changes_a_trained_one() -> None:
    torch.manual_seed(0)
    network = UNet(x_shape=(3, 8, 8), condition=CLASSES, width=8, multipliers=[1, 2], num_blocks=1)
    x_t = torch.randn(1, 3, 8, 8).expand(4, -1, -1, -1)
    t = torch.full((4,), 0.4)

    assert not network(x_t, t, None).any()
    out = moved(network)(x_t, t, Condition.of(torch.arange(4)))
    assert len({round(row.sum().item(), 4) for row in out}) == 4
    before = network(x_t, t, None)
    checkpoint_blocks(network)
    assert torch.equal(network(x_t, t, None), before)


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"width": 7}, "width must be even"),
        ({"multipliers": []}, "all multipliers at least 1"),
        ({"attention": [2]}, "names levels from 0 to 1"),
        ({"num_heads": 3}, "num_heads = 3 must divide"),
        ({"x_shape": (3, 8, 5)}, "2 levels need sizes divisible by 2, not 8x5"),
        ({"x_shape": (3, 5, 8)}, "2 levels need sizes divisible by 2, not 5x8"),
        ({"prediction": "score"}, "'score' is none of"),
        ({"depth": 2}, "has no parameter 'depth'"),
    ],
)
def test_sizes_that_do_not_fit(params: dict[str, object], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        context = {"x_shape": params.pop("x_shape", (3, 8, 8)), "condition": NONE}
        EXPERTS.build("unet", {"width": 8, "multipliers": [1, 2], **params}, **context)


def test_it_takes_any_size_that_its_levels_divide() -> None:
    """Not only that of its ``x_shape``, which no layer depends on."""
    torch.manual_seed(0)
    network = moved(UNet(x_shape=(3, 8, 8), condition=NONE, width=8, multipliers=[1, 2, 2], num_blocks=1))
    torch.manual_seed(0)
    own = moved(UNet(x_shape=(3, 4, 12), condition=NONE, width=8, multipliers=[1, 2, 2], num_blocks=1))
    x_t = torch.randn(2, 3, 4, 12)
    t = torch.tensor([0.2, 0.7])

    assert torch.equal(network(x_t, t, None), own(x_t, t, None))
    with pytest.raises(ValueError, match="3 levels need sizes divisible by 4, not 4x10"):
        network(x_t[..., :10], t, None)
