from functools import partial

import pytest
import torch
from networks.small import moved, random, randomised
from torch import nn

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.networks.mmdit import JointBlock, MMDiT, ReadStream, Stream
from ddm_lightning.testing import check_expert

SMALL = {"width": 16, "depth": 2, "num_heads": 2, "patch_size": 2}
TOKENS = ConditionSpec("tokens", 6, length=3)


KINDS = ("tokens", "tokens+text")


def perturbed(**changes):
    torch.manual_seed(0)
    return moved(MMDiT(**({"x_shape": (3, 8, 8), "condition": TOKENS} | SMALL | changes)))


@pytest.mark.parametrize("x_shape", [(3, 8, 8), (4, 4, 10)])
@pytest.mark.parametrize(("qk_norm", "depth"), [(False, 2), (True, 3), (True, 1)])
def test_keeps_the_contract_of_experts(x_shape, qk_norm, depth):
    check_expert(partial(MMDiT, **(SMALL | {"depth": depth}), qk_norm=qk_norm), x_shape=x_shape, kinds=KINDS)


def test_the_setting_of_the_docstring_has_three_billion_parameters():
    assert "Width 1792, depth 26, num_heads 28, patch_size 2 has 3.0 billion" in str(MMDiT.__doc__)
    with torch.device("meta"):
        network = MMDiT(
            x_shape=(4, 32, 32),
            condition=ConditionSpec("tokens", 768, length=77),
            width=1792,
            depth=26,
            num_heads=28,
            patch_size=2,
        )
    assert sum(parameter.numel() for parameter in network.parameters()) == pytest.approx(3.0e9, rel=0.02)


def linear(x, layer):
    return x @ layer.weight.T + layer.bias


def normed(x):
    return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + 1e-6).sqrt()


def rms(x, norm):
    if isinstance(norm, nn.Identity):
        return x

    return x / (x.square().mean(-1, keepdim=True) + 1e-6).sqrt() * norm.weight


def by_formula(block, x, text, conditioning):
    """Esser et al., figure 2b, a head at a time: 12 features, 3 heads."""
    inner, parts = [], []
    for stream, tokens in ((block.patches, x), (block.text, text)):
        parts.append(linear(conditioning, stream.modulation)[:, None].split(12, dim=-1))
        inner.append(normed(tokens) * (1 + parts[-1][1]) + parts[-1][0])
    is_last = isinstance(block.text, ReadStream)
    q, k, v = linear(inner[0], block.patches.qkv).split(12, dim=-1)
    if is_last:
        text_k, text_v = linear(inner[1], block.text.kv).split(12, dim=-1)
    else:
        text_q, text_k, text_v = linear(inner[1], block.text.qkv).split(12, dim=-1)
    outs = [[], []]
    for head in (slice(0, 4), slice(4, 8), slice(8, 12)):
        keys = torch.cat(
            [rms(text_k[..., head], block.text.key_norm), rms(k[..., head], block.patches.key_norm)], dim=1
        )
        values = torch.cat([text_v[..., head], v[..., head]], dim=1)
        queries = [rms(q[..., head], block.patches.query_norm)]
        queries += [] if is_last else [rms(text_q[..., head], block.text.query_norm)]
        for out, query in zip(outs, queries, strict=False):
            weights = (query @ keys.transpose(1, 2) / 2).exp()
            out.append(weights / weights.sum(-1, keepdim=True) @ values)
    results = []
    for stream, tokens, out, six in zip((block.patches, block.text), (x, text), outs, parts, strict=True):
        if isinstance(stream, ReadStream):
            results.append(None)
            continue
        after = tokens + six[2] * linear(torch.cat(out, dim=-1), stream.out)
        hidden = linear(normed(after) * (1 + six[4]) + six[3], stream.mlp[0])
        hidden = hidden * 0.5 * (1 + torch.erf(hidden / 2**0.5))
        results.append(after + six[5] * linear(hidden, stream.mlp[2]))
    return results[0], results[1]


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("is_last", [False, True])
def test_block_equals_the_formula(is_last, qk_norm):
    block = randomised(JointBlock(12, 3, 2.0, qk_norm, is_last))
    x, text, conditioning = random(2, 5, 12), random(2, 4, 12, seed=1), random(2, 12, seed=2)
    for ours, expected in zip(block(x, text, conditioning), by_formula(block, x, text, conditioning), strict=True):
        torch.testing.assert_close(ours, expected)


def test_streams_with_the_same_weights_are_one_sequence():
    """A permutation of patches and text tokens then permutes the outputs."""
    block = randomised(JointBlock(12, 3, 2.0, True, False))
    block.text.load_state_dict(block.patches.state_dict())
    tokens, conditioning = random(2, 9, 12), random(2, 12, seed=2)
    order = torch.tensor([3, 8, 1, 0, 5, 7, 2, 6, 4])
    together = torch.cat(block(tokens[:, :5], tokens[:, 5:], conditioning), dim=1)
    permuted = torch.cat(block(tokens[:, order[:5]], tokens[:, order[5:]], conditioning), dim=1)
    torch.testing.assert_close(permuted, together[:, order])


@pytest.mark.parametrize("qk_norm", [False, True])
def test_blocks_start_as_the_identity(qk_norm):
    torch.manual_seed(0)
    network = MMDiT(x_shape=(3, 8, 8), condition=TOKENS, qk_norm=qk_norm, **SMALL)
    x, text = torch.randn(2, 16, 16), torch.randn(2, 3, 16)
    for block in network.blocks:
        after_x, after_text = block(x, text, torch.randn(2, 16))
        assert torch.equal(after_x, x)
        assert after_text is None if isinstance(block.text, ReadStream) else torch.equal(after_text, text)
    out = network(torch.randn(2, 3, 8, 8), torch.rand(2), Condition.of(torch.randn(2, 3, 6)))
    assert torch.equal(out, torch.zeros(2, 3, 8, 8))


def test_the_last_text_stream_alone_has_no_output():
    blocks = perturbed(depth=3).blocks
    assert [type(block.text) for block in blocks] == [Stream, Stream, ReadStream]


def test_time_and_the_mean_of_the_text_modulate():
    network, seen = perturbed(), []
    network.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[2]))
    x, tokens = torch.randn(2, 3, 8, 8), torch.randn(2, 3, 6)
    for t, values in ((0.3, tokens), (0.3, tokens.flip(1)), (0.3, tokens + 1), (0.6, tokens)):
        network(x, torch.full((2,), t), Condition.of(values))
    torch.testing.assert_close(seen[1], seen[0])
    assert min((other - seen[0]).abs().max().item() for other in seen[2:]) > 1e-2
    first, second = network.pooled_text.hidden, network.pooled_text.out
    pooled = linear(
        torch.nn.functional.silu(linear(linear(tokens.mean(1), network.token_embedding.embed), first)), second
    )
    expected = torch.nn.functional.silu(network.time_embedding(torch.full((2,), 0.3)) + pooled)
    torch.testing.assert_close(seen[0], expected)


def test_mixed_precision_answers_in_the_type_of_x_t():
    network = perturbed(qk_norm=True)
    x, t, condition = torch.randn(2, 3, 8, 8), torch.rand(2), Condition.of(torch.randn(2, 3, 6).half())
    exact = network(x, t, condition)
    with torch.autocast("cpu", torch.bfloat16):
        mixed = network(x, t, condition)
    assert mixed.dtype == torch.float32
    assert 0 < (mixed - exact).norm() / exact.norm() < 0.05
    narrow = network.bfloat16()(x, t, condition)
    assert narrow.dtype == torch.float32
    assert (narrow - exact).norm() / exact.norm() < 0.1


@pytest.mark.parametrize("spec", [ConditionSpec("none", 0), ConditionSpec("text", 6), ConditionSpec("class", 3)])
def test_another_condition_is_one_clear_line(spec):
    with pytest.raises(UserError, match=rf"mmdit.*needs condition\.kind=tokens or tokens\+text, not {spec.kind}"):
        EXPERTS.build("mmdit", SMALL, x_shape=(3, 8, 8), condition=spec)


def test_sizes_that_do_not_fit_are_one_clear_line():
    with pytest.raises(UserError, match=r"expert 'mmdit'.*width = 16 .* num_heads = 3 must divide it"):
        EXPERTS.build("mmdit", SMALL | {"num_heads": 3}, x_shape=(3, 8, 8), condition=TOKENS)
