import pytest
import torch

from ddm_lightning.flow.condition import Condition, ConditionSpec


@pytest.mark.parametrize(
    ("kind", "size", "length"),
    [
        ("tokens", 4, 0),
        ("tokens", 4, -1),
        ("tokens", 0, 3),
        ("text", 4, 3),
        ("none", 0, 1),
    ],
)
def test_spec_refuses_a_length_that_does_not_fit(unchecked_types, kind, size, length):
    with pytest.raises(ValueError, match="condition"):
        ConditionSpec(kind, size, length)


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        ("words", 4),
        ("text", 0),
        ("class", -1),
        ("none", 3),
        ("none", -1),
    ],
)
def test_spec_refuses_what_does_not_fit(unchecked_types, kind, size):
    with pytest.raises(ValueError, match="condition"):
        ConditionSpec(kind, size)


@pytest.mark.parametrize(
    "value", [{}, {"kind": "none"}, {"kind": "none", "size": 0, "code": "x"}, {"kind": "tokens", "length": 3}]
)
def test_spec_refuses_other_keys(value):
    with pytest.raises(TypeError):
        ConditionSpec(**value)


def test_dropping_only_adds_nulls_and_leaves_the_original():
    condition = Condition.of(torch.arange(4))
    once = condition.dropped(torch.tensor([True, False, False, True]))
    twice = once.dropped(torch.tensor([True, True, False, False]))
    assert condition.keep.tolist() == [True] * 4
    assert once.keep.tolist() == [False, True, True, False]
    assert twice.keep.tolist() == [False, False, True, False]
    assert twice.null().keep.tolist() == [False] * 4
    assert twice.null().values.tolist() == [0, 1, 2, 3]


def test_rows_and_cat_move_values_with_their_flags():
    text = Condition(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([True, False, False]))
    picked = text.rows(torch.tensor([2, 1]))
    assert picked.values.tolist() == [[5.0, 6.0], [3.0, 4.0]] and picked.keep.tolist() == [False, False]
    joined = Condition.cat([picked, text.rows(slice(0, 1)), text.rows(torch.tensor([False, False, True]))])
    assert len(joined.keep) == 4
    assert joined.values[:, 0].tolist() == [5.0, 3.0, 1.0, 5.0] and joined.keep.tolist() == [False, False, True, False]


def test_rows_of_tokens_stay_whole():
    tokens = Condition.of(torch.arange(24.0).reshape(3, 4, 2)).dropped(torch.tensor([False, True, False]))
    assert len(tokens.keep) == 3
    joined = Condition.cat([tokens.rows(torch.tensor([2, 1])), tokens.null().rows(slice(0, 1))])
    assert torch.equal(joined.values, torch.arange(24.0).reshape(3, 4, 2)[[2, 1, 0]])
    assert joined.keep.tolist() == [True, False, False]
    assert joined.to("meta").values.shape == (3, 4, 2)


def test_vectors_stay_beside_their_tokens():
    both = Condition.of(torch.arange(24.0).reshape(3, 4, 2), torch.arange(15.0).reshape(3, 5))
    picked = both.dropped(torch.tensor([False, True, False])).rows(torch.tensor([2, 1]))
    joined = Condition.cat([picked, both.null().rows(slice(0, 1))]).to("cpu")
    assert joined.pooled.values.tolist() == torch.arange(15.0).reshape(3, 5)[[2, 1, 0]].tolist()
    assert joined.keep.tolist() == joined.pooled.keep.tolist() == [True, False, False]
    text = Condition.of(torch.zeros(2, 3))
    assert text.pooled is text
    assert ConditionSpec("tokens+text", 2, 4, 5).pooled == ConditionSpec("text", 5)
    with pytest.raises(ValueError, match="vector_size"):
        ConditionSpec("tokens", 2, 4, 5)
    with pytest.raises(ValueError, match="vector_size"):
        ConditionSpec("tokens+text", 2, 4)


def test_moving_takes_values_and_flags():
    moved = Condition.of(torch.tensor([1, 2])).to("meta")
    assert moved.values.device.type == "meta" and moved.keep.device.type == "meta"
