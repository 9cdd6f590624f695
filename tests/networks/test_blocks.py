from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from ddm_lightning.networks.blocks import DiTBlock, FinalLayer, SelfAttention, modulate


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def randomised(module: nn.Module) -> nn.Module:
    module.double()
    for seed, parameter in enumerate(module.parameters()):
        parameter.data = 0.3 * random(*parameter.shape, seed=100 + seed)
    return module


def standardised(x: Tensor) -> Tensor:
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()


def by_torch(layer: SelfAttention) -> nn.MultiheadAttention:
    """torch's own multi-head attention with the same weights."""
    oracle = nn.MultiheadAttention(layer.out.in_features, layer.num_heads, batch_first=True).double()
    pairs = {"in_proj_weight": layer.qkv.weight, "in_proj_bias": layer.qkv.bias}
    oracle.load_state_dict(pairs | {"out_proj.weight": layer.out.weight, "out_proj.bias": layer.out.bias})
    return oracle


def test_modulate_is_a_layer_norm_scaled_and_shifted_a_row() -> None:
    x, shift, scale = random(2, 5, 8), random(2, 1, 8, seed=1), random(2, 1, 8, seed=2)
    torch.testing.assert_close(modulate(x, shift, scale), standardised(x) * (1 + scale) + shift)


def test_self_attention_equals_that_of_torch() -> None:
    layer = randomised(SelfAttention(12, 3, qk_norm=False))
    x = random(2, 5, 12)
    torch.testing.assert_close(layer(x), by_torch(layer)(x, x, x, need_weights=False)[0])


@pytest.mark.parametrize("qk_norm", [False, True])
def test_qk_norm_forgets_the_size_of_queries_and_keys(qk_norm: bool) -> None:
    layer = randomised(SelfAttention(12, 3, qk_norm=qk_norm))
    x = random(2, 5, 12)
    before = layer(x)
    layer.qkv.weight.data[:24] *= 100  # queries and keys, not values
    layer.qkv.bias.data[:24] *= 100
    assert torch.allclose(layer(x), before, rtol=0, atol=1e-4) == qk_norm


@pytest.mark.parametrize("qk_norm", [False, True])
def test_self_attention_runs_in_mixed_precision(qk_norm: bool) -> None:
    torch.manual_seed(0)
    layer, x = SelfAttention(12, 3, qk_norm=qk_norm), random(2, 5, 12).float()
    with torch.autocast("cpu", torch.bfloat16):
        mixed = layer(x)
    assert mixed.dtype == torch.bfloat16
    torch.testing.assert_close(mixed.float(), layer(x), atol=2e-2, rtol=2e-2)
    assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16


def test_block_equals_the_formula() -> None:
    """Peebles and Xie, figure 3: shift, scale and gate of the attention, then of the MLP."""
    block = randomised(DiTBlock(12, 3, mlp_ratio=2.0, qk_norm=False))
    x, conditioning = random(2, 5, 12), random(2, 12, seed=1)
    six = conditioning @ block.modulation.weight.T + block.modulation.bias
    shift_1, scale_1, gate_1, shift_2, scale_2, gate_2 = (six[:, None, 12 * i : 12 * (i + 1)] for i in range(6))
    inner = standardised(x) * (1 + scale_1) + shift_1
    expected = x + gate_1 * by_torch(block.attention)(inner, inner, inner, need_weights=False)[0]
    first, second = block.mlp[0], block.mlp[2]
    hidden = (standardised(expected) * (1 + scale_2) + shift_2) @ first.weight.T + first.bias
    hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
    expected = expected + gate_2 * (hidden @ second.weight.T + second.bias)
    torch.testing.assert_close(block(x, conditioning), expected)
    assert first.out_features == 24


def test_block_starts_as_the_identity() -> None:
    block = DiTBlock(12, 3, mlp_ratio=4.0, qk_norm=False)
    nn.init.zeros_(block.modulation.bias)
    block.initialise()
    x = random(2, 5, 12).float()
    assert torch.equal(block(x, torch.ones(2, 12)), x)


def test_final_layer_equals_the_formula() -> None:
    final = randomised(FinalLayer(12, 7))
    x, conditioning = random(2, 5, 12), random(2, 12, seed=1)
    two = conditioning @ final.modulation.weight.T + final.modulation.bias
    inner = standardised(x) * (1 + two[:, None, 12:]) + two[:, None, :12]
    torch.testing.assert_close(final(x, conditioning), inner @ final.out.weight.T + final.out.bias)


def test_final_layer_starts_at_its_bias() -> None:
    final = FinalLayer(12, 7)
    final.initialise()
    assert torch.equal(final(random(2, 5, 12).float(), torch.ones(2, 12)), final.out.bias.expand(2, 5, 7))
