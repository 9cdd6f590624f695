import pytest
import torch

from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import ConditionSpec


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("words", (4,)),
        ("text", (0,)),
        ("class", (-1,)),
        ("none", (3,)),
        ("none", (-1,)),
        ("tokens", (4, 0)),
        ("tokens", (4, -1)),
        ("tokens", (0, 3)),
        ("text", (4, 3)),
        ("none", (0, 1)),
        ("tokens", (2, 4, 5)),
        ("tokens+text", (2, 4)),
    ],
)
def test_a_spec_refuses_what_does_not_fit(unchecked_types, kind, sizes):
    with pytest.raises(ValueError, match="vector_size"):
        ConditionSpec(kind, *sizes)


@pytest.mark.parametrize(
    ("spec", "shape"), [(("class", 4), ()), (("text", 4), (4,)), (("tokens+text", 4, 3, 2), (3, 4))]
)
def test_a_spec_knows_the_shape_of_a_row(spec, shape):
    assert ConditionSpec(*spec).row_shape == shape


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
    joined = Condition.cat([picked, text.rows(slice(0, 1)), text.rows(torch.tensor([False, False, True]))])

    assert joined.values.tolist() == [[5.0, 6.0], [3.0, 4.0], [1.0, 2.0], [5.0, 6.0]]
    assert joined.keep.tolist() == [False, False, True, False]


def test_vectors_stay_beside_their_tokens():
    tokens = torch.arange(24.0).reshape(3, 4, 2)
    vectors = torch.arange(15.0).reshape(3, 5)
    both = Condition.of(tokens, vectors)

    picked = both.dropped(torch.tensor([False, True, False])).rows(torch.tensor([2, 1]))
    joined = Condition.cat([picked, both.null().rows(slice(0, 1))])

    assert torch.equal(joined.values, tokens[[2, 1, 0]])
    assert torch.equal(joined.pooled.values, vectors[[2, 1, 0]])
    assert joined.keep.tolist() == joined.pooled.keep.tolist() == [True, False, False]
    moved = joined.to("meta")
    assert {one.device.type for one in (moved.values, moved.keep, moved.vectors)} == {"meta"}
    assert ConditionSpec("tokens+text", 2, 4, 5).pooled == ConditionSpec("text", 5)
    text = Condition.of(torch.zeros(2, 3))
    assert text.pooled is text
