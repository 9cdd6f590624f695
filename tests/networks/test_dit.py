import math
from functools import partial

import pytest
import torch
from networks.small import moved

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.networks.blocks import modulate
from ddm_lightning.networks.dit import DiT
from ddm_lightning.networks.embeddings import axial_rotation, sincos_positions
from ddm_lightning.testing import check_expert

SMALL = {"width": 16, "depth": 2, "num_heads": 2, "patch_size": 2}
NONE, TEXT, CLASSES = ConditionSpec("none", 0), ConditionSpec("text", 6), ConditionSpec("class", 1000)
TOKENS = ConditionSpec("tokens", 6, length=3)


def perturbed(**changes):
    """A small network that has left its zeros."""
    torch.manual_seed(0)
    return moved(DiT(**({"x_shape": (3, 8, 8), "condition": NONE} | SMALL | changes)))


@pytest.mark.parametrize("x_shape", [(3, 8, 8), (4, 4, 10)])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"qk_norm": True},
        {"rope": True},
        {"mlp": "swiglu"},
        {"norm": "rms"},
        {"modulation": "single"},
        {"qk_norm": True, "rope": True, "mlp": "swiglu", "norm": "rms", "modulation": "single"},
    ],
    ids=str,
)
def test_keeps_the_contract_of_experts(x_shape, options):
    check_expert(partial(DiT, **SMALL, **options), x_shape=x_shape)


def test_starts_at_velocity_zero():
    torch.manual_seed(0)
    network = DiT(x_shape=(3, 8, 8), condition=TEXT, **SMALL)
    condition = Condition.of(torch.randn(2, 6))
    assert torch.equal(network(torch.randn(2, 3, 8, 8), torch.rand(2), condition), torch.zeros(2, 3, 8, 8))


def test_initial_weights_are_those_of_the_paper():
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


def test_patches_know_where_they_are():
    """Without positions, rolling an image by a patch would roll its velocity."""
    network = perturbed()
    x, t = torch.randn(1, 3, 8, 8), torch.tensor([0.5])
    rolled = network(x.roll(2, -1), t, None).roll(-2, -1)
    assert (rolled - network(x, t, None)).abs().max() > 1e-2
    network.positions.zero_()
    torch.testing.assert_close(network(x.roll(2, -1), t, None).roll(-2, -1), network(x, t, None))


def test_rotated_patches_know_where_they_are_to_each_other():
    network = perturbed(rope=True, width=64, qk_norm=True)
    assert network.positions is None and "rotation" not in network.state_dict()
    x, t = torch.randn(1, 3, 8, 8), torch.tensor([0.5])
    rolled = network(x.roll(2, -1), t, None).roll(-2, -1)
    assert (rolled - network(x, t, None)).abs().max() > 1e-2
    network.rotation[:, :, 0], network.rotation[:, :, 1] = 1, 0
    torch.testing.assert_close(network(x.roll(2, -1), t, None).roll(-2, -1), network(x, t, None), atol=1e-4, rtol=1e-4)


def test_a_shared_modulation_reaches_each_block_with_its_own_table():
    network = perturbed(modulation="single", condition=TEXT).double()
    x = torch.randn(2, 3, 8, 8).double()
    conditioning = network.conditioning(torch.rand(2), Condition.of(torch.randn(2, 6)))
    shared = conditioning @ network.shared_modulation.weight.T + network.shared_modulation.bias
    tokens = expected = network.tokens(x)
    for block in network.blocks:
        six = (shared.reshape(2, 6, 16) + block.modulation.table)[:, :, None].unbind(1)
        inner = modulate(expected, six[0], six[1])
        expected = expected + six[2] * block.attention(inner)
        expected = expected + six[5] * block.mlp(modulate(expected, six[3], six[4]))
    torch.testing.assert_close(network.run(tokens, conditioning, None, None), expected)
    assert not torch.equal(network.blocks[0].modulation.table, network.blocks[1].modulation.table)


def test_time_alone_modulates_where_text_tokens_are_attended_to():
    network = perturbed(condition=TOKENS)
    t = torch.rand(2)
    condition = Condition.of(torch.randn(2, 3, 6))
    assert torch.equal(network.conditioning(t, condition), network.conditioning(t, None))
    x = torch.randn(2, 3, 8, 8)
    assert (network(x, t, condition) - network(x, t, None)).abs().max() > 1e-2
    # A set to the cross-attention: what tells tokens' places apart is their encoder's business.
    torch.testing.assert_close(network(x, t, Condition.of(condition.values.flip(1))), network(x, t, condition))


def test_time_matters():
    network = perturbed()
    x = torch.randn(1, 3, 8, 8).expand(2, -1, -1, -1)
    early, late = network(x, torch.tensor([0.1, 0.9]), None)
    assert (early - late).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("spec", "options"),
    [(TEXT, {}), (TOKENS, {}), (TOKENS, {"rope": True, "mlp": "swiglu", "norm": "rms", "modulation": "single"})],
    ids=["text", "tokens", "all"],
)
def test_mixed_precision_answers_in_the_type_of_x_t(spec, options):
    network = perturbed(condition=spec, qk_norm=True, **options)
    values = torch.randn(2, 3, 6) if spec is TOKENS else torch.randn(2, 6)
    x, t, condition = torch.randn(2, 3, 8, 8), torch.rand(2), Condition.of(values)
    exact = network(x, t, condition)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = network(x, t, condition)
    assert mixed.dtype == torch.float32
    assert 0 < (mixed - exact).norm() / exact.norm() < 0.05
    narrow = network.bfloat16()(x, t, condition)  # weights in bfloat16, sample in float32, as sharding may have it
    assert narrow.dtype == torch.float32
    assert (narrow - exact).norm() / exact.norm() < 0.1


@pytest.mark.parametrize("rope", [False, True])
def test_blocks_add_up_in_float32_in_mixed_precision(rope):
    network, seen = perturbed(condition=TEXT, rope=rope, norm="rms"), []
    for block in network.blocks:
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        network(torch.randn(2, 3, 8, 8), torch.rand(2), Condition.of(torch.randn(2, 6)))
    assert set(seen) == {torch.float32}


def test_positions_of_an_image_that_is_no_square():
    wide = DiT(x_shape=(3, 4, 8), condition=NONE, **SMALL)
    assert torch.equal(wide.positions, sincos_positions(16, rows=2, columns=4))
    turned = DiT(x_shape=(3, 4, 8), condition=NONE, **SMALL, rope=True)
    assert torch.equal(turned.rotation, axial_rotation(8, rows=2, columns=4))
    with pytest.raises(UserError, match="patch_size = 2 must divide the 8x9 cells"):
        EXPERTS.build("dit", SMALL, x_shape=(3, 8, 9), condition=NONE)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"width": 18}, "divisible by 4"),
        ({"num_heads": 3}, "width = 16 .* num_heads = 3 must divide it"),
        ({"patch_size": 3}, "patch_size = 3 must divide the 8x8 cells"),
        ({"rope": True, "num_heads": 8}, "rope needs width / num_heads = 2 to be divisible by 4"),
        ({"mlp": "relu"}, "key 'params.mlp' = 'relu': must be one of gelu, swiglu"),
    ],
)
def test_sizes_that_do_not_fit_are_one_clear_line(changes, message):
    with pytest.raises(UserError, match=f"expert 'dit'.*{message}"):
        EXPERTS.build("dit", SMALL | changes, x_shape=(3, 8, 8), condition=NONE)
