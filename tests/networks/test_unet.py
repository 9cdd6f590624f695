from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from networks.small import moved, random, randomised
from torch.nn import functional

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.flow.path import interpolate, training_target
from ddm_lightning.members.cost import flops_per_sample
from ddm_lightning.networks.blocks import checkpoint_blocks
from ddm_lightning.networks.unet import UNet, UNetBlock
from ddm_lightning.testing import check_expert

NONE, CLASSES = ConditionSpec("none", 0), ConditionSpec("class", 4)


def test_keeps_the_contract_of_experts() -> None:
    check_expert(partial(UNet, width=8, num_heads=2, num_blocks=1, multipliers=[1, 2]))
    deep = partial(UNet, width=8, num_heads=2, num_blocks=2, multipliers=[1, 2, 3], attention=[1], prediction="x_0")
    check_expert(deep, x_shape=(4, 8, 12), kinds=("tokens", "tokens+text"))


def test_parts_are_where_they_are_said_to_be() -> None:
    network = UNet(x_shape=(3, 16, 8), condition=CLASSES, width=8, multipliers=[1, 2, 4], num_blocks=2, attention=[1])
    shapes: list[tuple[int, ...]] = []
    for block in network.blocks:
        block.register_forward_hook(lambda _, __, out: shapes.append(tuple(out.shape[1:])))
    network(torch.randn(2, 3, 16, 8), torch.rand(2), None)
    down = [(8, 16, 8)] * 2 + [(16, 8, 4)] * 2 + [(32, 4, 2)] * 2
    assert shapes == [*down, (32, 4, 2), (32, 4, 2), *reversed(down)]
    has_attention = [block.attention is not None for block in network.blocks]
    assert has_attention == [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2 + [False] * 2 + [True] * 2 + [False] * 2
    assert flops_per_sample(network, (3, 16, 8), CLASSES, backward=True) > 1e6


@pytest.mark.parametrize("resample", ["", "up", "down"])
@pytest.mark.parametrize("has_skip", [False, True])
def test_a_block_equals_the_formula(resample: str, has_skip: bool) -> None:
    """By torch's functions in float64: resample, join, norm, convolve, modulate, convolve, add, attend."""
    block = randomised(UNetBlock(8, 8 * has_skip, 32, 5, resample, num_heads=2, reads_tokens=True))
    x, features, tokens = random(2, 8, 4, 6), random(2, 5, seed=1), random(2, 3, 5, seed=2)
    given = dict(block.named_parameters())

    def linear(name: str, value: torch.Tensor, how: Callable[..., torch.Tensor], **more: int) -> torch.Tensor:
        return how(value, given[f"{name}.weight"], given[f"{name}.bias"], **more)

    def norm(name: str, value: torch.Tensor) -> torch.Tensor:
        num = value.shape[1] // 4
        parts = value.unflatten(1, (num, -1)).flatten(2)
        parts = (parts - parts.mean(2, keepdim=True)) / (parts.var(2, keepdim=True, correction=0) + 1e-5).sqrt()
        weight, bias = (given[f"{name}.{part}"][:, None, None] for part in ("weight", "bias"))
        return parts.reshape(value.shape) * weight + bias

    h = x.repeat_interleave(2, 2).repeat_interleave(2, 3) if resample == "up" else x
    if resample:
        h = linear("resample", h, functional.conv2d, padding=1, stride=2 if resample == "down" else 1)
    skip = random(2, 8, *h.shape[2:], seed=3) if has_skip else None
    joined = h if skip is None else torch.cat([h, skip], 1)
    inner = linear("first", functional.silu(norm("norms.0", joined)), functional.conv2d, padding=1)
    shift, scale = linear("modulation", features, functional.linear).view(2, 2, 32, 1, 1).unbind(1)
    inner = norm("norms.1", inner) * (1 + scale) + shift
    h = linear("shortcut", joined, functional.conv2d) + linear(
        "second", functional.silu(inner), functional.conv2d, padding=1
    )
    cells = norm("attention_norm", h).flatten(2).transpose(1, 2)
    read = block.cross_attention(cells, linear("context", tokens, functional.linear))
    expected = h + (block.attention(cells) + read).transpose(1, 2).reshape(h.shape)
    torch.testing.assert_close(block(x, features, tokens, skip), expected)


def test_the_first_output_is_zero_and_each_class_changes_a_trained_one() -> None:
    torch.manual_seed(0)
    network = UNet(x_shape=(3, 8, 8), condition=CLASSES, width=8, multipliers=[1, 2], num_blocks=1)
    x_t, t = torch.randn(1, 3, 8, 8).expand(4, -1, -1, -1), torch.full((4,), 0.4)
    assert not network(x_t, t, None).any()
    out = moved(network)(x_t, t, Condition.of(torch.arange(4)))
    assert len({round(row.sum().item(), 4) for row in out}) == 4
    before = network(x_t, t, None)
    checkpoint_blocks(network)
    assert torch.equal(network(x_t, t, None), before)


def test_it_fits_a_handful_of_samples() -> None:
    torch.manual_seed(0)
    network = UNet(x_shape=(2, 8, 8), condition=CLASSES, width=16, multipliers=[1, 2], num_blocks=1, num_heads=2)
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    data, classes = torch.randn(4, 2, 8, 8), torch.arange(4).repeat(4)

    def loss() -> torch.Tensor:
        x_0, noise, t = data[classes], torch.randn(16, 2, 8, 8), torch.rand(16)
        out = network(interpolate(x_0, noise, t), t, Condition.of(classes))
        return functional.mse_loss(out, training_target(x_0, noise, t, "velocity"))

    first = loss().item()
    for _ in range(120):
        optimizer.zero_grad()
        (found := loss()).backward()
        optimizer.step()
    assert first > 1.5 and found.item() < 0.3


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"width": 7}, "width must be even"),
        ({"multipliers": []}, "all multipliers at least 1"),
        ({"attention": [2]}, "names levels from 0 to 1"),
        ({"num_heads": 3}, "num_heads = 3 must divide"),
        ({"multipliers": [1, 1, 1, 1, 1]}, "5 levels need sizes divisible by 16, not 8x8"),
        ({"prediction": "score"}, "'score' is none of"),
        ({"depth": 2}, "has no parameter 'depth'"),
    ],
)
def test_sizes_that_do_not_fit(params: dict[str, object], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        EXPERTS.build("unet", {"width": 8, "multipliers": [1, 2], **params}, x_shape=(3, 8, 8), condition=NONE)


@pytest.mark.parametrize("x_shape", [(3, 8, 6), (3, 6, 8)])
def test_both_sides_must_be_divisible(x_shape: tuple[int, int, int]) -> None:
    with pytest.raises(UserError, match=f"3 levels need sizes divisible by 4, not {x_shape[1]}x{x_shape[2]}"):
        EXPERTS.build("unet", {"width": 8, "multipliers": [1, 1, 1]}, x_shape=x_shape, condition=NONE)
