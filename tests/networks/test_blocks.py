import pytest
import torch
from networks.small import random, randomised
from torch import nn

from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.networks.attention import rotate
from ddm_lightning.networks.blocks import (
    Architecture,
    CrossAttention,
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
    {"mlp": mlp, "norm": norm, "modulation": modulation, "qk_norm": new, "rope": new}
    for mlp in ("gelu", "swiglu")
    for norm, modulation, new in (("layer", "zero", False), ("rms", "single", True), ("layer", "single", False))
]


def standardised(x):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()


def by_torch(layer):
    """torch's own multi-head attention with the same weights."""
    oracle = nn.MultiheadAttention(layer.out.in_features, layer.num_heads, batch_first=True).double()
    pairs = {"in_proj_weight": layer.qkv.weight, "in_proj_bias": layer.qkv.bias}
    oracle.load_state_dict(pairs | {"out_proj.weight": layer.out.weight, "out_proj.bias": layer.out.bias})
    return oracle


@pytest.mark.parametrize("qk_norm", [False, True])
def test_qk_norm_forgets_the_size_of_queries_and_keys(qk_norm):
    layer = randomised(SelfAttention(12, 3, qk_norm=qk_norm))
    x = random(2, 5, 12)
    before = layer(x)
    layer.qkv.weight.data[:24] *= 100  # queries and keys, not values
    layer.qkv.bias.data[:24] *= 100
    assert torch.allclose(layer(x), before, rtol=0, atol=1e-4) == qk_norm


@pytest.mark.parametrize("qk_norm", [False, True])
def test_self_attention_runs_in_mixed_precision(qk_norm):
    torch.manual_seed(0)
    layer, x = SelfAttention(12, 3, qk_norm=qk_norm), random(2, 5, 12).float()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(x)
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.float(), layer(x), atol=2e-2, rtol=2e-2)
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def mean_square(x):
    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt()


def silu(x):
    return x / (1 + (-x).exp())


def attended(layer, x, context):
    """Softmax head by head, written out."""
    size = x.shape[-1] // layer.num_heads
    q = x @ layer.q.weight.T + layer.q.bias
    k, v = (context @ layer.kv.weight.T + layer.kv.bias).chunk(2, dim=-1)
    outs = []
    for head in range(layer.num_heads):
        part = slice(head * size, (head + 1) * size)
        scores = (q[..., part] @ k[..., part].transpose(1, 2) / size**0.5).exp()
        outs.append(scores / scores.sum(-1, keepdim=True) @ v[..., part])
    return torch.cat(outs, dim=-1) @ layer.out.weight.T + layer.out.bias


def by_formula(block, recipe, x, conditioning, context):
    """Peebles and Xie, figure 3: shift, scale and gate of the attention, then of the MLP."""
    norm = {"layer": standardised, "rms": mean_square}[recipe.norm]
    if recipe.modulation == "single":
        six = conditioning + torch.cat([block.modulation.table[i] for i in range(6)])
    else:
        six = conditioning @ block.modulation.weight.T + block.modulation.bias
    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = (six[:, None, 12 * i : 12 * (i + 1)] for i in range(6))
    inner = norm(x) * (1 + scale_1) + shift_1
    x = x + gate_1 * by_torch(block.attention)(inner, inner, inner, need_weights=False)[0]
    if context is not None:
        x = x + attended(block.cross_attention, x, context)
    inner = norm(x) * (1 + scale_2) + shift_2
    if recipe.mlp == "swiglu":
        gate, up = (inner @ block.mlp.gate_up.weight.T + block.mlp.gate_up.bias).chunk(2, dim=-1)
        return x + gate_2 * ((silu(gate) * up) @ block.mlp.down.weight.T + block.mlp.down.bias)
    first, second = block.mlp[0], block.mlp[2]
    assert first.out_features == 24
    hidden = inner @ first.weight.T + first.bias
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    return x + gate_2 * (hidden @ second.weight.T + second.bias)


@pytest.mark.parametrize("reads_tokens", [False, True])
@pytest.mark.parametrize("modulation", ["zero", "single"])
@pytest.mark.parametrize("norm", ["layer", "rms"])
@pytest.mark.parametrize("mlp", ["gelu", "swiglu"])
def test_block_equals_the_formula(mlp, norm, modulation, reads_tokens):
    recipe = Recipe(mlp_ratio=2.0, mlp=mlp, norm=norm, modulation=modulation)
    block = randomised(DiTBlock(12, 3, recipe, reads_tokens))
    x, conditioning = random(2, 5, 12), random(2, 72 if modulation == "single" else 12, seed=1)
    context = random(2, 4, 12, seed=2) if reads_tokens else None
    torch.testing.assert_close(
        block(x, conditioning, context=context), by_formula(block, recipe, x, conditioning, context)
    )


@pytest.mark.parametrize(
    ("width", "hidden", "gated"),
    # 2/3 of hidden, up to a multiple of 64, or of 8 for narrow ones.
    [
        (1152, 4608, 3072),
        (1024, 4096, 2752),
        (768, 3072, 2048),
        (512, 2048, 1408),
        (384, 1536, 1024),
        (16, 64, 48),
        (12, 24, 16),
    ],
)
def test_a_gated_mlp_has_about_as_many_parameters(width, hidden, gated):
    with torch.device("meta"):
        mlp, plain = SwiGLU(width, hidden), plain_mlp(width, hidden)
    assert mlp.down.in_features == gated and mlp.gate_up.out_features == 2 * gated
    if width not in (512, 16, 12):  # there the rounding shows
        gated_count, plain_count = (sum(p.numel() for p in part.parameters()) for part in (mlp, plain))
        assert gated_count == pytest.approx(plain_count, rel=0.01)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_qk_norm_serves_cross_attention_too(qk_norm):
    layer = randomised(CrossAttention(12, 3, qk_norm=qk_norm))
    x, context = random(2, 5, 12), random(2, 4, 12, seed=1)
    before = layer(x, context)
    layer.q.weight.data *= 100
    layer.q.bias.data *= 100
    assert torch.allclose(layer(x, context), before, rtol=0, atol=1e-4) == qk_norm


@pytest.mark.parametrize("qk_norm", [False, True])
def test_self_attention_rotates_what_its_norms_leave(qk_norm):
    """The norms' weights act on features that mean something, so they come before the rotation."""
    layer, x = randomised(SelfAttention(24, 3, qk_norm=qk_norm)), random(2, 6, 24)
    rotation = axial_rotation(8, 3, 2)
    q, k, v = (x @ layer.qkv.weight.T + layer.qkv.bias).reshape(2, 6, 3, 3, 8).unbind(2)
    if qk_norm:
        q, k = mean_square(q) * layer.query_norm.weight, mean_square(k) * layer.key_norm.weight
    q, k = rotate(q, rotation), rotate(k, rotation)
    weights = (torch.einsum("bnhd,bmhd->bhnm", q, k) / 8**0.5).softmax(-1)
    expected = torch.einsum("bhnm,bmhd->bnhd", weights, v).flatten(2) @ layer.out.weight.T + layer.out.bias
    torch.testing.assert_close(layer(x, rotation), expected)
    assert (layer(x, rotation) - layer(x)).abs().max() > 1e-2


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("reads_tokens", [False, True])
def test_block_starts_as_the_identity(recipe, reads_tokens):
    spec = ConditionSpec("tokens", 6, length=3) if reads_tokens else ConditionSpec("text", 6)
    torch.manual_seed(0)
    options = Architecture(width=16, depth=2, num_heads=2, patch_size=2, **recipe)
    trunk = Trunk(x_shape=(3, 4, 4), condition=spec, options=options, out_features=12)
    initialise(trunk)
    x, conditioning = torch.randn(2, 4, 16), torch.randn(2, 16)
    condition = Condition.of(torch.randn(2, 3, 6)) if reads_tokens else None
    assert torch.equal(trunk.run(x, conditioning, trunk.rotation, condition), x)
    for block in trunk.blocks:  # and only their zeros make them so
        nn.init.ones_(block.modulation.table if options.modulation == "single" else block.modulation.bias)
    assert not torch.equal(trunk.run(x, conditioning, trunk.rotation, condition), x)


@pytest.mark.parametrize(("norm", "oracle"), [("layer", standardised), ("rms", mean_square)])
def test_final_layer_equals_the_formula(norm, oracle):
    final = randomised(FinalLayer(12, 7, norm))
    x, conditioning = random(2, 5, 12), random(2, 12, seed=1)
    two = conditioning @ final.modulation.weight.T + final.modulation.bias
    inner = oracle(x) * (1 + two[:, None, 12:]) + two[:, None, :12]
    torch.testing.assert_close(final(x, conditioning), inner @ final.out.weight.T + final.out.bias)
