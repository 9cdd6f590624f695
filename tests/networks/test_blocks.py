import pytest
import torch
from networks.small import attend, linear, mean_square, mlp, random, randomised, rms, standardised
from torch import nn

from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.networks.attention import rotate
from ddm_lightning.networks.blocks import (
    Architecture,
    DiTBlock,
    FinalLayer,
    Recipe,
    SelfAttention,
    SwiGLU,
    initialise,
    plain_mlp,
)
from ddm_lightning.networks.dit import Trunk
from ddm_lightning.networks.embeddings import axial_rotation

RECIPES = [
    {"mlp": kind, "norm": norm, "modulation": modulation, "qk_norm": new, "rope": new}
    for kind in ("gelu", "swiglu")
    for norm, modulation, new in (("layer", "zero", False), ("rms", "single", True), ("layer", "single", False))
]


@pytest.mark.parametrize("qk_norm", [False, True])
def test_self_attention_runs_in_mixed_precision(qk_norm):
    torch.manual_seed(0)
    layer = SelfAttention(12, 3, qk_norm=qk_norm)
    x = random(2, 5, 12).float()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(x)

    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.float(), layer(x), atol=2e-2, rtol=2e-2)
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def silu(x):
    return x / (1 + (-x).exp())


def by_formula(block, recipe, x, conditioning, context):
    """Peebles and Xie, figure 3: shift, scale and gate of the attention, then of the MLP."""
    norm = {"layer": standardised, "rms": mean_square}[recipe.norm]
    if recipe.modulation == "single":
        six = conditioning + torch.cat([block.modulation.table[i] for i in range(6)])
    else:
        six = linear(conditioning, block.modulation)

    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = six[:, None].split(12, dim=-1)
    inner = norm(x) * (1 + scale_1) + shift_1
    own = block.attention
    q, k, v = linear(inner, own.qkv).unflatten(-1, (3, 3, 4)).unbind(2)
    x = x + gate_1 * linear(attend(rms(q, own.query_norm), rms(k, own.key_norm), v), own.out)
    if context is not None:
        cross = block.cross_attention
        q = linear(x, cross.q).unflatten(-1, (3, 4))
        k, v = linear(context, cross.kv).unflatten(-1, (2, 3, 4)).unbind(2)
        x = x + linear(attend(rms(q, cross.query_norm), rms(k, cross.key_norm), v), cross.out)

    inner = norm(x) * (1 + scale_2) + shift_2
    if recipe.mlp == "swiglu":
        gate, up = linear(inner, block.mlp.gate_up).chunk(2, dim=-1)
        return x + gate_2 * linear(silu(gate) * up, block.mlp.down)

    return x + gate_2 * mlp(inner, block.mlp)


@pytest.mark.parametrize("reads_tokens", [False, True])
@pytest.mark.parametrize("modulation", ["zero", "single"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("kind", ["gelu", "swiglu"])
def test_block_equals_the_formula(kind, norm, modulation, reads_tokens):
    recipe = Recipe(mlp_ratio=2.0, mlp=kind, norm=norm, modulation=modulation, qk_norm=norm == "rms")
    block = randomised(DiTBlock(12, 3, recipe, reads_tokens))
    x = random(2, 5, 12)
    conditioning = random(2, 72 if modulation == "single" else 12, seed=1)
    context = random(2, 4, 12, seed=2) if reads_tokens else None

    torch.testing.assert_close(
        block(x, conditioning, context=context), by_formula(block, recipe, x, conditioning, context)
    )


@pytest.mark.parametrize(
    ("width", "hidden", "gated"),
    # 2/3 of hidden, up to a multiple of 64, or of 8 for narrow ones.
    [
        (1024, 4096, 2752),
        (512, 2048, 1408),
        (384, 1536, 1024),
        (16, 64, 48),
    ],
)
def test_a_gated_mlp_has_about_as_many_parameters(width, hidden, gated):
    with torch.device("meta"):
        made = SwiGLU(width, hidden)
        plain = plain_mlp(width, hidden)

    assert (made.down.in_features, made.gate_up.out_features) == (gated, 2 * gated)
    if width not in (512, 16):  # there the rounding shows
        gated_count, plain_count = (sum(p.numel() for p in part.parameters()) for part in (made, plain))
        assert gated_count == pytest.approx(plain_count, rel=0.01)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_self_attention_rotates_what_its_norms_leave(qk_norm):
    """The norms' weights act on features that mean something, so they come before the rotation."""
    layer = randomised(SelfAttention(24, 3, qk_norm=qk_norm))
    x = random(2, 6, 24)
    rotation = axial_rotation(8, 3, 2)

    q, k, v = linear(x, layer.qkv).reshape(2, 6, 3, 3, 8).unbind(2)
    q = rotate(rms(q, layer.query_norm), rotation)
    k = rotate(rms(k, layer.key_norm), rotation)
    expected = linear(attend(q, k, v), layer.out)

    torch.testing.assert_close(layer(x, rotation), expected)
    assert (layer(x, rotation) - layer(x)).abs().max() > 1e-2


@pytest.mark.parametrize("recipe", RECIPES[2:5], ids=str)
@pytest.mark.parametrize("reads_tokens", [False, True])
def test_block_starts_as_the_identity(recipe, reads_tokens):
    spec = ConditionSpec("tokens", 6, length=3) if reads_tokens else ConditionSpec("text", 6)
    torch.manual_seed(0)
    options = Architecture(width=16, depth=2, num_heads=2, patch_size=2, **recipe)
    trunk = Trunk(x_shape=(3, 4, 4), condition=spec, options=options, out_features=12)
    initialise(trunk)
    x = torch.randn(2, 4, 16)
    conditioning = torch.randn(2, 16)
    condition = Condition.of(torch.randn(2, 3, 6)) if reads_tokens else None
    assert torch.equal(trunk.run(x, conditioning, trunk.rotation, condition), x)
    for block in trunk.blocks:  # and only their zeros make them so
        nn.init.ones_(block.modulation.table if options.modulation == "single" else block.modulation.bias)

    assert not torch.equal(trunk.run(x, conditioning, trunk.rotation, condition), x)


@pytest.mark.parametrize(("norm", "oracle"), [("layer", standardised), ("rms", mean_square)])
def test_final_layer_equals_the_formula(norm, oracle):
    final = randomised(FinalLayer(12, 7, norm))
    x = random(2, 5, 12)
    conditioning = random(2, 12, seed=1)

    shift, scale = linear(conditioning, final.modulation)[:, None].chunk(2, dim=-1)
    expected = linear(oracle(x) * (1 + scale) + shift, final.out)

    torch.testing.assert_close(final(x, conditioning), expected)
