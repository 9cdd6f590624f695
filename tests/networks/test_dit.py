from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from torch import nn

from ddm_lightning.errors import UserError
from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.networks import EXPERTS, DiT
from ddm_lightning.testing import check_expert

SMALL = {"width": 16, "depth": 2, "num_heads": 2, "patch_size": 2}
NONE, TEXT, CLASSES = ConditionSpec("none", 0), ConditionSpec("text", 6), ConditionSpec("class", 1000)


def perturbed(**changes: object) -> DiT:
    """A small network that has left its zeros."""
    torch.manual_seed(0)
    network = DiT(**({"x_shape": (3, 8, 8), "condition": NONE} | SMALL | changes))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return network


@pytest.mark.parametrize("x_shape", [(3, 8, 8), (4, 4, 10)])
@pytest.mark.parametrize("qk_norm", [False, True])
def test_keeps_the_contract_of_experts(x_shape: tuple[int, int, int], qk_norm: bool) -> None:
    check_expert(partial(DiT, **SMALL, qk_norm=qk_norm), x_shape=x_shape)


@pytest.mark.parametrize(
    ("width", "depth", "num_heads", "published"),
    # The released DiT-XL/2 reports 675,129,632: its fixed positions (256 of 1152) and its 4 channels of learned
    # variances (16 outputs a patch) are no parameters here.
    [(1152, 28, 16, 675_129_632 - 256 * 1152 - 16 * (1152 + 1)), (768, 12, 12, None)],
)
def test_parameter_counts_are_the_published_ones(width: int, depth: int, num_heads: int, published: int | None) -> None:
    with torch.device("meta"):
        network = DiT(
            x_shape=(4, 32, 32), condition=CLASSES, width=width, depth=depth, num_heads=num_heads, patch_size=2
        )
    count = sum(parameter.numel() for parameter in network.parameters())
    if published is not None:
        assert count == published
    else:
        assert round(count / 1e6) == 130  # DiT-B/2: table 4 of Peebles and Xie
    assert len(network.blocks) == depth


def test_starts_at_velocity_zero() -> None:
    torch.manual_seed(0)
    network = DiT(x_shape=(3, 8, 8), condition=TEXT, **SMALL)
    condition = Condition.of(torch.randn(2, 6))
    assert torch.equal(network(torch.randn(2, 3, 8, 8), torch.rand(2), condition), torch.zeros(2, 3, 8, 8))


def test_initial_weights_are_those_of_the_paper() -> None:
    torch.manual_seed(0)
    network = DiT(x_shape=(3, 8, 8), condition=CLASSES, width=64, depth=2, num_heads=2, patch_size=2)
    state = network.state_dict()
    for name, value in state.items():
        if "modulation" in name or name.startswith("final.") or name.endswith("bias"):
            assert not value.any(), name
        elif name.startswith(("time_embedding", "condition_embedding")):
            assert value.std().item() == pytest.approx(0.02, rel=0.3 if value.ndim == 1 else 0.05), name
            assert abs(value.mean().item()) < 0.01, name
        else:
            fan_out, fan_in = value.shape
            bound = math.sqrt(6 / (fan_in + fan_out))
            assert 0.98 * bound < value.abs().max().item() <= bound, name
            assert value.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05), name
    assert not torch.equal(state["blocks.0.attention.qkv.weight"], state["blocks.1.attention.qkv.weight"])


def test_the_generator_decides_the_initial_weights() -> None:
    networks = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        networks.append(DiT(x_shape=(3, 8, 8), condition=TEXT, **SMALL).state_dict())
    first, same, other = networks
    assert all(torch.equal(first[name], same[name]) for name in first)
    assert not torch.equal(first["patch_embedding.weight"], other["patch_embedding.weight"])


def test_fixed_positions_are_not_stored() -> None:
    assert "positions" not in perturbed().state_dict()


def test_patches_know_where_they_are() -> None:
    """Without positions, a picture that is rolled by a patch would have a velocity that is rolled likewise."""
    network = perturbed()
    x, t = torch.randn(1, 3, 8, 8), torch.tensor([0.5])
    rolled = network(x.roll(2, -1), t, None).roll(-2, -1)
    assert (rolled - network(x, t, None)).abs().max() > 1e-2
    network.positions.zero_()
    torch.testing.assert_close(network(x.roll(2, -1), t, None).roll(-2, -1), network(x, t, None))


def test_time_matters() -> None:
    network = perturbed()
    x = torch.randn(1, 3, 8, 8).expand(2, -1, -1, -1)
    early, late = network(x, torch.tensor([0.1, 0.9]), None)
    assert (early - late).abs().max() > 1e-2


def test_mixed_precision_answers_in_the_type_of_x_t() -> None:
    network = perturbed(condition=TEXT, qk_norm=True)
    x, t, condition = torch.randn(2, 3, 8, 8), torch.rand(2), Condition.of(torch.randn(2, 6))
    exact = network(x, t, condition)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = network(x, t, condition)
    assert mixed.dtype == torch.float32
    assert 0 < (mixed - exact).norm() / exact.norm() < 0.05
    narrow = network.bfloat16()(x, t, condition)  # weights in bfloat16, sample in float32, as sharding may have it
    assert narrow.dtype == torch.float32
    assert (narrow - exact).norm() / exact.norm() < 0.1


def test_attention_backend_reaches_the_network() -> None:
    network = perturbed()
    for block in network.blocks:
        block.attention.attention_backend = "xformers"
    with pytest.raises(UserError, match="xformers"):
        network(torch.randn(1, 3, 8, 8), torch.rand(1), None)


def test_other_shapes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"\(3, 8, 8\), not \(3, 8, 10\)"):
        perturbed()(torch.randn(1, 3, 8, 10), torch.rand(1), None)


def test_a_condition_is_refused_where_none_is_taken() -> None:
    with pytest.raises(ValueError, match="without a condition"):
        perturbed()(torch.randn(1, 3, 8, 8), torch.rand(1), Condition.of(torch.randn(1, 6)))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 18}, "divisible by 4"),
        ({"width": 0}, "width = 0 must be at least 1"),
        ({"depth": 0}, "depth = 0 must be at least 1"),
        ({"num_heads": 0}, "num_heads = 0 must be at least 1"),
        ({"num_heads": 3}, "num_heads = 3 must divide width = 16"),
        ({"patch_size": 0}, "patch_size = 0 must be at least 1"),
        ({"patch_size": 3}, "patch_size = 3 must divide the 8x8 cells"),
        ({"mlp_ratio": 0.0}, "mlp_ratio = 0.0"),
    ],
)
def test_sizes_that_do_not_fit_are_one_clear_line(changes: dict[str, float], message: str) -> None:
    with pytest.raises(UserError, match=f"expert 'dit'.*{message}"):
        EXPERTS.build("dit", SMALL | changes, x_shape=(3, 8, 8), condition=NONE)


def test_is_found_by_name() -> None:
    assert EXPERTS.get("dit") is DiT
    assert isinstance(EXPERTS.build("dit", SMALL, x_shape=(3, 8, 8), condition=TEXT), nn.Module)
