import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm_lightning.partition.rows import Rows


@st.composite
def rows(draw):
    """Rows and what they have to equal: the kept rows of each array, one behind the other."""
    sizes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    shape = draw(st.sampled_from([(), (2,), (2, 3)]))
    start, arrays, kept = 0, [], []
    for size in sizes:
        numbers = np.arange(start, start + size, dtype=np.int16)
        arrays.append(np.broadcast_to(numbers.reshape(-1, *[1] * len(shape)), (size, *shape)).copy())
        chosen = draw(st.none() | st.sets(st.integers(0, max(0, size - 1)), max_size=size))
        kept.append(None if chosen is None else np.array(sorted(chosen if size else ()), np.int64))
        start += size
    pairs = zip(arrays, kept, strict=True)
    return Rows(arrays, kept), np.concatenate([a if k is None else a[k] for a, k in pairs])


@given(rows(), st.data())
def test_rows_are_those_of_the_arrays_put_together(case, data):
    found, expected = case
    assert len(found) == len(expected)
    assert found.row_shape == expected.shape[1:] and found.dtype == expected.dtype
    assert found.row_bytes * len(found) == expected.nbytes
    which = st.lists(st.integers(0, len(expected) - 1), max_size=12) if len(expected) else st.just([])
    chosen = np.array(data.draw(which), np.int64)
    taken = found.take(chosen)
    np.testing.assert_array_equal(taken, expected[chosen], strict=True)
    taken[...] = -1  # a copy: what it was taken from stays
    np.testing.assert_array_equal(found.take(np.arange(len(expected))), expected, strict=True)


@given(rows(), st.data())
def test_slices_and_iteration_go_across_arrays(case, data):
    found, expected = case
    start, stop = data.draw(st.tuples(st.integers(0, 40), st.integers(0, 40)))
    np.testing.assert_array_equal(found[start:stop], expected[start:stop], strict=True)
    np.testing.assert_array_equal(found[:], expected, strict=True)
    np.testing.assert_array_equal(np.array([*found], expected.dtype).reshape(expected.shape), expected)
    out = np.empty(expected[start:stop].shape, np.float32)
    found.read_into(out, start)
    np.testing.assert_array_equal(out, expected[start:stop])


class Counted(np.ndarray):
    """An array that counts how often rows of it are asked for."""

    asked = 0

    def __getitem__(self, which):
        Counted.asked += 1
        return np.asarray(super().__getitem__(which))


def test_only_arrays_that_hold_a_wanted_row_are_touched():
    found = Rows([np.full((2, 1), number).view(Counted) for number in range(500)])
    Counted.asked = 0
    np.testing.assert_array_equal(found.take(np.array([999, 7, 6, 998, 7]))[:, 0], [499, 3, 3, 499, 3])
    assert Counted.asked == 2
    np.testing.assert_array_equal(found[5:9][:, 0], [2, 3, 3, 4])
    assert Counted.asked == 5


@pytest.mark.parametrize("row", [-1, 5])
def test_a_row_that_is_none_is_refused(row):
    with pytest.raises(IndexError, match="of 5"):
        Rows([np.zeros((2, 3)), np.zeros((3, 3))]).take(np.array([0, row]))


@pytest.mark.parametrize(
    "arrays",
    [
        [],
        [np.zeros((2, 3)), np.zeros((2, 4))],
        [np.zeros(2), np.zeros(2, np.float32)],
        [np.zeros((2, 3)), np.zeros(2)],
    ],
)
def test_arrays_that_differ_are_refused(arrays):
    with pytest.raises(ValueError, match="one dtype and row shape"):
        Rows(arrays)
