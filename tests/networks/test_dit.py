import copy
import math
from functools import partial

import pytest
import torch
from networks.small import check_mixed_precision, linear, moved

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.networks.dit import DiT, RouterDiT
from ddm_lightning.networks.embeddings import axial_rotation, sincos_positions
from ddm_lightning.networks.mmdit import MMDiT
from ddm_lightning.testing import check_expert

SMALL = {"width": 16, "depth": 2, "num_heads": 2, "patch_size": 2}
NONE = ConditionSpec("none", 0)
TEXT = ConditionSpec("text", 6)
CLASSES = ConditionSpec("class", 1000)
TOKENS = ConditionSpec("tokens", 6, length=3)


ALL_OPTIONS = {"qk_norm": True, "rope": True, "mlp": "swiglu", "norm": "rms", "modulation": "single"}


def perturbed(**changes):
    """A small network that has left its zeros."""
    torch.manual_seed(0)
    return moved(DiT(**({"x_shape": (3, 8, 8), "condition": NONE} | SMALL | changes)))


@pytest.mark.parametrize("x_shape", [(3, 8, 8), (4, 4, 10)])
@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all"])
def test_keeps_the_contract_of_experts(x_shape, options):
    check_expert(partial(DiT, **SMALL, **options), x_shape=x_shape)


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


@pytest.mark.parametrize("options", [{}, {"rope": True, "width": 64, "qk_norm": True}], ids=["fixed", "rotary"])
def test_patches_know_where_they_are(options):
    """Without positions, rolling an image by a patch would roll its velocity."""
    network = perturbed(**options)
    x = torch.randn(1, 3, 8, 8)
    t = torch.tensor([0.5])

    def difference():
        rolled = network(x.roll(2, -1), t, None).roll(-2, -1)
        return (rolled - network(x, t, None)).abs().max()

    assert difference() > 1e-2

    if "rope" in options:
        network.rotation[:, :, 0] = 1
        network.rotation[:, :, 1] = 0
    else:
        network.positions.zero_()

    assert difference() < 1e-4


def test_a_shared_modulation_reaches_each_block_beside_its_own_table():
    network = perturbed(modulation="single", condition=TEXT).double()
    conditioning = network.conditioning(torch.rand(2), Condition.of(torch.randn(2, 6)))
    seen = []
    for block in network.blocks:
        block.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))

    network.run(network.tokens(torch.randn(2, 3, 8, 8)), conditioning, None, None)

    expected = linear(conditioning, network.shared_modulation)
    assert len(seen) == 2
    for given in seen:
        torch.testing.assert_close(given, expected)

    first, second = (block.modulation.table for block in network.blocks)
    assert not torch.equal(first, second)


def test_time_alone_modulates_where_text_tokens_are_attended_to():
    network = perturbed(condition=TOKENS)
    t = torch.rand(2)
    condition = Condition.of(torch.randn(2, 3, 6))
    assert torch.equal(network.conditioning(t, condition), network.conditioning(t, None))
    x = torch.randn(2, 3, 8, 8)
    assert (network(x, t, condition) - network(x, t, None)).abs().max() > 1e-2
    # A set to the cross-attention: what tells tokens' places apart is their encoder's business.
    torch.testing.assert_close(network(x, t, Condition.of(condition.values.flip(1))), network(x, t, condition))


@pytest.mark.parametrize(
    ("spec", "options"),
    [(TEXT, {"qk_norm": True}), (TOKENS, ALL_OPTIONS)],
    ids=["text", "all"],
)
def test_mixed_precision_answers_in_the_type_of_x_t(spec, options):
    network = perturbed(condition=spec, **options)
    check_mixed_precision(network, Condition.of(torch.randn(2, *spec.row_shape)))


@pytest.mark.parametrize("rope", [False, True])
def test_blocks_add_up_in_float32_in_mixed_precision(rope):
    network = perturbed(condition=TEXT, rope=rope, norm="rms")
    seen = []
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


@pytest.mark.parametrize("rope", [False, True])
def test_a_turned_image_gives_the_turned_output_if_weights_and_positions_turn(rope):
    wide = perturbed(rope=rope)
    tall = copy.deepcopy(wide)
    with torch.no_grad():
        for weight, axis in ((tall.patch_embedding.weight, 1), (tall.final.out.weight, 0)):
            patches = weight.unflatten(axis, (3, 2, 2))  # channel, row, column
            weight.copy_(patches.transpose(axis + 1, axis + 2).flatten(axis, axis + 2))

        tall.final.out.bias.copy_(tall.final.out.bias.view(3, 2, 2).transpose(1, 2).flatten())

    x_t = torch.randn(2, 3, 4, 16)
    t = torch.tensor([0.2, 0.7])
    name = "rotation" if rope else "positions"
    table = wide.table(name, x_t).view(1, 2, 8, -1).transpose(1, 2).reshape(wide.table(name, x_t).shape)
    assert not torch.allclose(table, tall.table(name, x_t.mT))  # half of the features is the column's, half the row's
    tall.register_buffer(f"{name}_8x2", table, persistent=False)

    torch.testing.assert_close(tall(x_t.mT, t, None), wide(x_t, t, None).mT)


def test_rows_and_columns_of_a_turned_grid_change_places():
    """With a square as the reference."""
    wide = sincos_positions(16, 2, 8, (4, 4)).view(2, 8, 2, 8)
    tall = sincos_positions(16, 8, 2, (4, 4)).view(8, 2, 2, 8)
    assert torch.equal(tall, wide.transpose(0, 1).flip(2))


@pytest.mark.parametrize(
    "build",
    [
        partial(DiT, condition=NONE),
        partial(DiT, condition=NONE, rope=True),
        partial(RouterDiT, condition=NONE, rope=True, dropout=0.5, num_clusters=3),
        partial(MMDiT, condition=TOKENS),
    ],
    ids=["dit", "rotary", "router", "mmdit"],
)
def test_positions_of_a_shape_are_made_once_and_kept(build, monkeypatch):
    network = moved(build(x_shape=(3, 8, 8), **SMALL))
    before = network.state_dict().keys()
    t = torch.tensor([0.2, 0.7])
    wide = torch.randn(2, 3, 4, 16)
    with torch.inference_mode():  # as a validation before the first step
        network(wide, t, None)

    made = [name for name, _ in network.named_buffers() if name.endswith("_2x8")]
    assert len(made) == 1 and network.state_dict().keys() == before
    assert network.to("meta").get_buffer(made[0]).is_meta

    network = moved(build(x_shape=(3, 8, 8), **SMALL))
    with torch.inference_mode():
        network(wide, t, None)

    monkeypatch.setattr(type(network), "register_buffer", None)
    for kept in (network, copy.deepcopy(network)):
        kept(wide, t, None).sum().backward()
        assert kept.patch_embedding.weight.grad.any()


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
