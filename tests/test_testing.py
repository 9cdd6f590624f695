from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.testing import check_expert


class Good(nn.Module):
    """The least that keeps the contract: a linear layer a channel, shifted by the condition."""

    prediction = "epsilon"

    def __init__(self, *, x_shape: tuple[int, int, int], condition: ConditionSpec) -> None:
        super().__init__()
        channels = x_shape[0]
        self.mix = nn.Conv2d(channels, channels, 1)
        self.time = nn.Parameter(torch.zeros(channels))
        if condition.kind != "none":
            self.null = nn.Parameter(torch.randn(channels))
        if condition.kind in ("text", "tokens"):
            self.embed = nn.Linear(condition.size, channels)
        elif condition.kind == "class":
            self.embed = nn.Embedding(condition.size, channels)

    def shift(self, condition: Condition | None, num_rows: int) -> Tensor:
        if not hasattr(self, "null"):
            return torch.zeros(1)[:, None]
        if condition is None:
            return self.null.expand(num_rows, -1)
        embedded = self.embed(condition.values)
        embedded = embedded.mean(1) if embedded.ndim == 3 else embedded
        return torch.where(condition.keep[:, None], embedded, self.null)

    def forward(self, x_t: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        shift = self.shift(condition, len(x_t)) + t[:, None] * self.time
        return self.mix(x_t) + shift[:, :, None, None]


def test_a_good_expert_passes_and_the_global_generator_stays() -> None:
    torch.manual_seed(3)
    expected = torch.rand(1)
    torch.manual_seed(3)
    check_expert(Good)
    assert torch.equal(torch.rand(1), expected)


def test_zero_weights_at_the_start_are_fine() -> None:
    class Zero(Good):
        def __init__(self, **arguments: object) -> None:
            super().__init__(**arguments)  # type: ignore[arg-type]
            for parameter in self.parameters():
                nn.init.zeros_(parameter)

    check_expert(Zero)


def test_an_expert_may_take_some_kinds_and_shapes_only() -> None:
    class TextOnly(Good):
        def __init__(self, *, x_shape: tuple[int, int, int], condition: ConditionSpec) -> None:
            assert condition.kind == "text" and x_shape == (4, 2, 6)
            super().__init__(x_shape=x_shape, condition=condition)

    check_expert(TextOnly, x_shape=(4, 2, 6), kinds=("text",))


def test_tokens_are_handed_over_as_a_sequence() -> None:
    class TakesTokens(Good):
        shapes: set[tuple[int, ...]] = set()

        def shift(self, condition: Condition | None, num_rows: int) -> Tensor:
            if condition is not None:
                self.shapes.add(tuple(condition.values.shape[1:]))
            return super().shift(condition, num_rows)

    check_expert(TakesTokens, kinds=("tokens",))
    ((length, size),) = TakesTokens.shapes
    assert length > 1 and length != size


class NoPrediction(Good):
    prediction = "score"


class OtherArguments(Good):
    def __init__(self, channels: int) -> None:
        super().__init__(x_shape=(channels, 1, 1), condition=ConditionSpec("none", 0))


class OtherShape(Good):
    def forward(self, x_t: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        return super().forward(x_t, t, condition).repeat(1, 2, 1, 1)


class OtherType(Good):
    def forward(self, x_t: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        return super().forward(x_t, t, condition).double()


class ManyOutputs(Good):
    def forward(self, x_t: Tensor, t: Tensor, condition: Condition | None) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(x_t, t, condition), t


class NotFinite(Good):
    def forward(self, x_t: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        return super().forward(x_t, t, condition) / 0


class DeadParameter(Good):
    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self.unused = nn.Parameter(torch.ones(2))


class ZeroGradient(DeadParameter):
    def forward(self, x_t: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        return super().forward(x_t, t, condition) + 0 * self.unused.sum()


class InfiniteGradient(DeadParameter):
    def forward(self, x_t: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        root = (self.unused - self.unused.detach()).abs().sqrt().sum()
        return super().forward(x_t, t, condition) + root * x_t.abs()


class MixesRows(Good):
    def forward(self, x_t: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        return super().forward(x_t - x_t.mean(0), t, condition)


class NeedsCondition(Good):
    def shift(self, condition: Condition | None, num_rows: int) -> Tensor:
        if hasattr(self, "null"):
            assert len(condition.values) == num_rows  # type: ignore[union-attr]
        return super().shift(condition, num_rows)


class OtherNull(Good):
    def shift(self, condition: Condition | None, num_rows: int) -> Tensor:
        return super().shift(condition, num_rows) + (1 if condition is None else 0)


class IgnoresKeep(Good):
    def shift(self, condition: Condition | None, num_rows: int) -> Tensor:
        if condition is None:
            return super().shift(None, num_rows)
        gradient_alone = self.null - self.null.detach() if hasattr(self, "null") else 0
        return super().shift(Condition.of(condition.values), num_rows) + gradient_alone


class IgnoresCondition(Good):
    def shift(self, condition: Condition | None, num_rows: int) -> Tensor:
        shift = super().shift(condition, num_rows)
        return shift - shift.detach()


class HiddenState(Good):
    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self.frequencies = torch.randn(1)

    def forward(self, x_t: Tensor, t: Tensor, condition: Condition | None) -> Tensor:
        return super().forward(x_t, t, condition) * self.frequencies


class TiedWeights(Good):
    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self.again = self.time


class RandomKeys(Good):
    count = 0

    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        RandomKeys.count += 1
        self.register_buffer(f"buffer_{RandomKeys.count}", torch.zeros(1))


class Uninitialised(Good):
    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        if hasattr(self, "null"):
            self.null = nn.Parameter(torch.empty_like(self.null))


class OwnGenerator(Good):
    def __init__(self, **arguments: object) -> None:
        super().__init__(**arguments)  # type: ignore[arg-type]
        self.mix.weight = nn.Parameter(torch.tensor(np.random.default_rng().normal(size=self.mix.weight.shape)).float())


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        (lambda **_: 3, "returns a int, not an nn.Module"),
        (NoPrediction, "'prediction' is 'score', not one of velocity, epsilon, x_0"),
        (OtherArguments, "the factory raises TypeError"),
        (OtherShape, r"returns shape \(4, 6, 8, 8\) instead of \(4, 3, 8, 8\)"),
        (OtherType, "returns torch.float64 for x_t of torch.float32"),
        (ManyOutputs, "returns a tuple, not a tensor"),
        (NotFinite, "returns numbers that are not finite"),
        (DeadParameter, "no gradient reaches parameter 'unused'"),
        (ZeroGradient, "no gradient reaches parameter 'unused'"),
        (InfiniteGradient, "gradient of 'unused' not finite"),
        (MixesRows, "depends on the other rows"),
        (NeedsCondition, "forward with condition=None raises AttributeError"),
        (OtherNull, "condition=None differs from a condition whose rows are all null"),
        (IgnoresKeep, "condition=None differs from a condition whose rows are all null"),
        (IgnoresCondition, "the condition does not change the output"),
        (HiddenState, "some state is not in it"),
        (TiedWeights, "saved as safetensors, raises RuntimeError"),
        (Uninitialised, "two networks built from one seed differ in 'null': initialise it with torch's generator"),
        (OwnGenerator, "two networks built from one seed differ in 'mix.weight'"),
        (RandomKeys, "load_state_dict raises RuntimeError"),
    ],
)
def test_each_breach_is_one_clear_line(factory: type[nn.Module], message: str) -> None:
    with pytest.raises(AssertionError, match=rf"^expert for x_shape=\(3, 8, 8\), condition '\w+': .*{message}"):
        check_expert(factory)
