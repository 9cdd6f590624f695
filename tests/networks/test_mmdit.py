from functools import partial

import pytest
import torch
from networks.small import (
    attend,
    check_mixed_precision,
    linear,
    mlp,
    moved,
    random,
    randomised,
    rms,
    standardised,
)
from torch.nn.functional import silu

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.networks.mmdit import JointBlock, MMDiT, ReadStream, Stream
from ddm_lightning.testing import check_expert

SMALL = {"width": 16, "depth": 2, "num_heads": 2, "patch_size": 2}
TOKENS = ConditionSpec("tokens", 6, length=3)


KINDS = ("tokens", "tokens+text")


def perturbed(**changes):
    torch.manual_seed(0)
    return moved(MMDiT(**({"x_shape": (3, 8, 8), "condition": TOKENS} | SMALL | changes)))


@pytest.mark.parametrize(
    ("x_shape", "qk_norm", "depth"), [((3, 8, 8), False, 2), ((4, 4, 10), True, 3), ((3, 8, 8), True, 1)]
)
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


def by_formula(block, x, text, conditioning):
    """Esser et al., figure 2b, for 12 features and 3 heads."""
    of_patches = linear(conditioning, block.patches.modulation)[:, None].split(12, dim=-1)
    of_text = linear(conditioning, block.text.modulation)[:, None].split(12, dim=-1)
    is_last = isinstance(block.text, ReadStream)

    inner = standardised(x) * (1 + of_patches[1]) + of_patches[0]
    q, k, v = linear(inner, block.patches.qkv).unflatten(-1, (3, 3, 4)).unbind(2)
    inner = standardised(text) * (1 + of_text[1]) + of_text[0]
    heads = linear(inner, block.text.kv if is_last else block.text.qkv).unflatten(-1, (-1, 3, 4)).unbind(2)
    keys = torch.cat([rms(heads[-2], block.text.key_norm), rms(k, block.patches.key_norm)], dim=1)
    values = torch.cat([heads[-1], v], dim=1)

    def finished(stream, tokens, q, six):
        after = tokens + six[2] * linear(attend(rms(q, stream.query_norm), keys, values), stream.out)
        return after + six[5] * mlp(standardised(after) * (1 + six[4]) + six[3], stream.mlp)

    patches = finished(block.patches, x, q, of_patches)
    if is_last:
        return patches, None

    return patches, finished(block.text, text, heads[0], of_text)


@pytest.mark.parametrize("qk_norm", [False, True])
@pytest.mark.parametrize("is_last", [False, True])
def test_block_equals_the_formula(is_last, qk_norm):
    block = randomised(JointBlock(12, 3, 2.0, qk_norm, is_last))
    x = random(2, 5, 12)
    text = random(2, 4, 12, seed=1)
    conditioning = random(2, 12, seed=2)
    for ours, expected in zip(block(x, text, conditioning), by_formula(block, x, text, conditioning), strict=True):
        torch.testing.assert_close(ours, expected)


@pytest.mark.parametrize("qk_norm", [False, True])
def test_blocks_start_as_the_identity(qk_norm):
    torch.manual_seed(0)
    network = MMDiT(x_shape=(3, 8, 8), condition=TOKENS, qk_norm=qk_norm, **SMALL)
    x = torch.randn(2, 16, 16)
    text = torch.randn(2, 3, 16)
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
    network = perturbed()
    seen = []
    network.blocks[0].register_forward_pre_hook(lambda _, inputs: seen.append(inputs[2]))
    tokens = torch.randn(2, 3, 6)
    t = torch.full((2,), 0.3)

    network(torch.randn(2, 3, 8, 8), t, Condition.of(tokens))

    hidden = silu(linear(linear(tokens.mean(1), network.token_embedding.embed), network.pooled_text.hidden))
    expected = silu(network.time_embedding(t) + linear(hidden, network.pooled_text.out))
    torch.testing.assert_close(seen[0], expected)


def test_mixed_precision_answers_in_the_type_of_x_t():
    check_mixed_precision(perturbed(qk_norm=True), Condition.of(torch.randn(2, 3, 6).half()))


@pytest.mark.parametrize("spec", [ConditionSpec("none", 0), ConditionSpec("text", 6), ConditionSpec("class", 3)])
def test_another_condition_is_one_clear_line(spec):
    with pytest.raises(UserError, match=rf"mmdit.*needs condition\.kind=tokens or tokens\+text, not {spec.kind}"):
        EXPERTS.build("mmdit", SMALL, x_shape=(3, 8, 8), condition=spec)


def test_sizes_that_do_not_fit_are_one_clear_line():
    with pytest.raises(UserError, match=r"expert 'mmdit'.*width = 16 .* num_heads = 3 must divide it"):
        EXPERTS.build("mmdit", SMALL | {"num_heads": 3}, x_shape=(3, 8, 8), condition=TOKENS)
