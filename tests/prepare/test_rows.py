import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm_lightning.prepare.rows import Rows


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


@given(rows(), st.integers(1, 8))
def test_blocks_are_all_rows_in_order_and_never_of_two_arrays(case, num_rows):
    found, expected = case
    blocks = list(found.blocks(num_rows))
    np.testing.assert_array_equal(np.concatenate([expected[:0], *blocks]), expected)
    assert all(0 < len(block) <= num_rows for block in blocks)
    sizes = np.diff(found.starts)
    assert len(blocks) == sum(-(-size // num_rows) for size in sizes)
    ends = np.cumsum([len(block) for block in blocks])
    assert set(np.cumsum(sizes)[sizes > 0].tolist()) <= set(ends.tolist()), "each array ends with a block"


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


def test_memory_maps_are_not_read_before_rows_are_asked_for(tmp_path):
    np.save(tmp_path / "a.npy", np.arange(12).reshape(4, 3))
    mapped = np.load(tmp_path / "a.npy", mmap_mode="r")
    found = Rows([mapped, mapped], [np.array([1, 3]), None])
    assert found.arrays[0] is mapped
    np.testing.assert_array_equal(found.take(np.array([1, 5, 0])), [[9, 10, 11], [9, 10, 11], [3, 4, 5]])
    assert type(found.take(np.array([0]))) is np.ndarray
