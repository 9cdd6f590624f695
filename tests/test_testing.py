import itertools
from functools import partial

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddm_lightning.core.errors import UserError
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.testing import check_expert

NUMBERS = itertools.count()


class Good(nn.Module):
    """The least that keeps the contract: a linear layer a channel, shifted by the condition."""

    prediction = "epsilon"

    def __init__(self, *, x_shape, condition):
        super().__init__()
        channels = x_shape[0]
        self.mix = nn.Conv2d(channels, channels, 1)
        self.time = nn.Parameter(torch.zeros(channels))
        if condition.kind != "none":
            self.null = nn.Parameter(torch.randn(channels))
        if condition.kind in ("text", "tokens", "tokens+text"):
            self.embed = nn.Linear(condition.size, channels)
        elif condition.kind == "class":
            self.embed = nn.Embedding(condition.size, channels)

    def shift(self, condition, num_rows):
        if not hasattr(self, "null"):
            return torch.zeros(1)[:, None]
        if condition is None:
            return self.null.expand(num_rows, -1)
        embedded = self.embed(condition.values)
        embedded = embedded.mean(1) if embedded.ndim == 3 else embedded
        return torch.where(condition.keep[:, None], embedded, self.null)

    def forward(self, x_t, t, condition):
        shift = self.shift(condition, len(x_t)) + t[:, None] * self.time
        return self.mix(x_t) + shift[:, :, None, None]


def test_a_good_expert_passes_and_the_global_generator_stays():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    check_expert(Good)
    assert torch.equal(torch.get_rng_state(), before)


def changed(change=None, **members):
    """Good experts that are changed once they are built, or have other members."""

    class Changed(Good):
        def __init__(self, **arguments):
            super().__init__(**arguments)
            if change is not None:
                change(self)

    for name, value in members.items():
        setattr(Changed, name, value)
    return Changed


def answers(change):
    return changed(forward=lambda self, x_t, t, condition: change(Good.forward(self, x_t, t, condition)))


def test_zero_weights_at_the_start_are_fine():
    check_expert(changed(lambda self: [nn.init.zeros_(parameter) for parameter in self.parameters()]))


def test_an_expert_may_take_some_kinds_and_shapes_only():
    class TokensOnly(Good):
        def __init__(self, *, x_shape, condition):
            assert (condition.kind, x_shape) == ("tokens", (4, 2, 6))
            super().__init__(x_shape=x_shape, condition=condition)

        def shift(self, condition, num_rows):
            if condition is not None:
                _, length, size = condition.values.shape
                assert 1 < length != size
            return super().shift(condition, num_rows)

    check_expert(TokensOnly, x_shape=(4, 2, 6), kinds=("tokens",))


class Tokens(Good):
    """Pixels as tokens, of width 16, in ``blocks``."""

    def __init__(self, blocks, **arguments):
        super().__init__(**arguments)
        channels = arguments["x_shape"][0]
        self.first, self.last = nn.Linear(channels, 16), nn.Linear(16, channels)
        self.blocks = blocks()

    def forward(self, x_t, t, condition):
        x = self.first(super().forward(x_t, t, condition).flatten(2).transpose(1, 2))
        for block in self.blocks.children():
            x = block(x)
        return self.last(x).transpose(1, 2).reshape(x_t.shape)


class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.out_proj = nn.Linear(16, 16)

    def forward(self, x):
        return x + self.out_proj(self.attention(x, x, x)[0])


class Acts(nn.Module):
    """Adds what ``act`` makes of a linear layer and a gain, scaled by a buffer in float16."""

    def __init__(self, act, gain=(1.0,)):
        super().__init__()
        self.layer, self.gain, self.act = nn.Linear(16, 16), nn.Parameter(torch.tensor(gain)), act
        self.register_buffer("scale", torch.ones(16, dtype=torch.float16))

    def forward(self, x):
        return x + self.scale * self.gain * self.act(self.layer, x)


def reads_past_the_layer(layer, x):
    return layer(x) if layer.training else nn.functional.linear(x, layer.weight, layer.bias)


def depends_on_data(layer, x):
    return layer(x) if x.sum() > -1e9 else x


def plain(layer, x):
    return layer(x)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(16, 16, batch_first=True)

    def forward(self, x):
        return self.cell(x)[0]


def both(kind, **arguments):
    return lambda: nn.ModuleList([kind(**arguments), kind(**arguments)])


def of_blocks(blocks):
    return lambda **arguments: Tokens(blocks, **arguments)


def normed():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(16, 16)), nn.BatchNorm1d(64), nn.Dropout(0.2))


@pytest.mark.parametrize(
    "blocks",
    [
        both(nn.TransformerEncoderLayer, d_model=16, nhead=2, dim_feedforward=32, batch_first=True),
        both(nn.Linear, in_features=16, out_features=16),
        both(normed),
        both(Attends),
        both(Acts, act=plain),
        lambda: nn.Sequential(nn.Linear(16, 16), nn.GELU()),
        lambda: nn.ModuleDict({"first": Acts(plain), "second": nn.Linear(16, 16)}),
    ],
    ids=["encoder", "linear", "weight norm", "attention", "half buffer", "sequential", "dict"],
)
def test_blocks_may_be_torch_s_own(blocks):
    check_expert(of_blocks(blocks), kinds=("none", "class"))


def in_bfloat16(**arguments):
    return Good(**arguments).bfloat16()


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (of_blocks(both(Recurrent)), "compiled and sharded: raises Unsupported: Attempted to wrap RNN"),
        (of_blocks(both(Acts, act=depends_on_data)), "compiled and sharded: raises "),
        (of_blocks(both(Acts, act=plain, gain=1.0)), "compiled and sharded: .*scalar parameters. Change gain"),
        (of_blocks(both(Acts, act=reads_past_the_layer)), "with LoRA adapters: .* reads weights past their layers"),
        (in_bfloat16, "weight 'time' is torch.bfloat16: it must be built in float32"),
    ],
)
def test_what_an_island_cannot_do_is_one_clear_line(factory, message):
    with pytest.raises(AssertionError, match=rf"^expert for x_shape=\(3, 8, 8\), condition 'none': .*{message}"):
        check_expert(factory, kinds=("none",))


def steep(self):
    """Zero, with a gradient that is too large for float32."""
    return (self.unused - self.unused.detach()).sum() * 3e38 * 1e6


def root(self):
    """Zero, with a gradient of NaN."""
    return (self.unused - self.unused.detach()).abs().sqrt().sum()


def unused(term=None):
    """An expert with another parameter, and a term that is made of it."""

    def change(self):
        self.unused = nn.Parameter(torch.ones(2))

    def forward(self, x_t, t, condition):
        out = Good.forward(self, x_t, t, condition)
        return out if term is None else out + term(self) * x_t.abs()

    return changed(change, forward=forward)


class OtherArguments(Good):
    def __init__(self, channels):
        super().__init__(x_shape=(channels, 1, 1), condition=ConditionSpec("none", 0))


class NeedsCondition(Good):
    def shift(self, condition, num_rows):
        assert not hasattr(self, "null") or len(condition.values) == num_rows
        return super().shift(condition, num_rows)


class OtherNull(Good):
    def shift(self, condition, num_rows):
        return super().shift(condition, num_rows) + (condition is None)


class IgnoresKeep(Good):
    def shift(self, condition, num_rows):
        if condition is None:
            return super().shift(None, num_rows)
        gradient_alone = self.null - self.null.detach()
        return super().shift(Condition.of(condition.values), num_rows) + gradient_alone


class IgnoresCondition(Good):
    def shift(self, condition, num_rows):
        shift = super().shift(condition, num_rows)
        return shift - shift.detach()


def with_other_inputs(change):
    """An expert that is given what ``change`` makes of x_t and t."""
    return changed(forward=lambda self, x_t, t, condition: Good.forward(self, *change(x_t, t), condition))


def hidden_state(self):
    self.frequencies = torch.randn(1)


def random_key(self):
    self.register_buffer(f"buffer_{next(NUMBERS)}", torch.zeros(1))


def uninitialised(self):
    if hasattr(self, "null"):
        self.null = nn.Parameter(torch.empty_like(self.null))


def own_generator(self):
    self.mix.weight = nn.Parameter(torch.tensor(np.random.default_rng().normal(size=self.mix.weight.shape)).float())


class OfOneShape(Good):
    """Adds a table of its shape, and refuses others with ``error`` or not at all."""

    def __init__(self, *, error=None, **arguments):
        super().__init__(**arguments)
        self.error = error
        self.x_shape = arguments["x_shape"]
        self.table = nn.Parameter(torch.zeros(self.x_shape))

    def forward(self, x_t, t, condition):
        if self.error is not None and x_t.shape[1:] != self.x_shape:
            raise self.error

        return super().forward(x_t, t, condition) + self.table


class OfTheFirstShape(Good):
    """Keeps what it computed for samples of another shape: tensors of inference mode, if nobody prevents it."""

    def forward(self, x_t, t, condition):
        if x_t.shape[3] == 16:
            self.kept = getattr(self, "kept", torch.ones(16))
            return super().forward(x_t, t, condition) * self.kept

        return super().forward(x_t, t, condition)


class OfItsOwnShape(Good):
    def forward(self, x_t, t, condition):
        return super().forward(x_t, t, condition)[..., :8]


@pytest.mark.parametrize("error", [ValueError("one shape"), UserError("one shape"), None])
def test_an_expert_may_refuse_other_shapes(error):
    check_expert(partial(OfOneShape, error=error))


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (OfTheFirstShape, "raises RuntimeError: Inference tensors cannot be saved for backward"),
        (OfItsOwnShape, r"returns shape \(4, 3, 8, 8\) instead of \(4, 3, 8, 16\)"),
    ],
)
def test_other_shapes_break_no_expert(factory, message):
    with pytest.raises(AssertionError, match=rf"condition 'text': samples of shape \(3, 8, 16\): .*{message}"):
        check_expert(factory)


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda **_: 3, "returns a int, which is no Module"),
        (changed(prediction="score"), "'prediction' is 'score', not one of velocity, epsilon, x_0"),
        (OtherArguments, "raises TypeError"),
        (answers(lambda out: out.repeat(1, 2, 1, 1)), r"returns shape \(4, 6, 8, 8\) instead of \(4, 3, 8, 8\)"),
        (answers(Tensor.double), "returns torch.float64 for x_t of torch.float32"),
        (answers(lambda out: (out, out)), "returns a tuple, not a tensor"),
        (answers(lambda out: out / 0), "returns numbers that are not finite"),
        (unused(), "no gradient reaches parameter 'unused'"),
        (unused(lambda self: 0 * self.unused.sum()), "no gradient reaches parameter 'unused'"),
        (unused(steep), "gradient of 'unused' not finite"),
        (unused(root), "gradient of 'unused' not finite"),
        (with_other_inputs(lambda x_t, t: (x_t - x_t.mean(0), t)), "depends on the other rows"),
        (NeedsCondition, "raises AttributeError"),
        (OtherNull, "condition=None differs from a condition whose rows are all null"),
        (IgnoresKeep, "condition=None differs from a condition whose rows are all null"),
        (IgnoresCondition, "the condition does not change the output"),
        (with_other_inputs(lambda x_t, t: (x_t.clamp_(0.2, 0.8), t)), "changes x_t, t or the condition"),
        (with_other_inputs(lambda x_t, t: (x_t, t.clamp_(0.2, 0.8))), "changes x_t, t or the condition"),
        (with_other_inputs(lambda x_t, t: (x_t, t.long().cos())), "t does not change the output"),
        (
            changed(hidden_state, forward=lambda self, *given: Good.forward(self, *given) * self.frequencies),
            "some state is not in it",
        ),
        (changed(lambda self: setattr(self, "again", self.time)), "raises RuntimeError: .*share memory"),
        (changed(uninitialised), "two networks built from one seed differ in 'null': initialise it with torch's"),
        (changed(own_generator), "two networks built from one seed differ in 'mix.weight'"),
        (changed(random_key), "raises RuntimeError: .*buffer_"),
    ],
)
def test_each_breach_is_one_clear_line(factory, message):
    with pytest.raises(AssertionError, match=rf"^expert for x_shape=\(3, 8, 8\), condition '\w+': .*{message}"):
        check_expert(factory)
