import os

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddm_lightning.partition.columns import GrowingArray, PackedStrings, Rows, StoredArray, packed_strings, save_array


@pytest.mark.parametrize("shape", [(), (2, 1, 4)])
@pytest.mark.parametrize("sizes", [[], [0], [3, 0, 9, 100]])
def test_a_growing_array_matches_numpys_file(tmp_path, shape, sizes):
    """Rows may be of another type than the file, and in Fortran's order."""
    random = np.random.default_rng(0)
    blocks = [np.asfortranarray(random.integers(0, 256, (size, *shape))) for size in sizes]
    path = tmp_path / "column.npy"

    with GrowingArray(path, np.dtype("float16"), shape) as array:
        for block in blocks:
            array.append(block)

        with pytest.raises(ValueError, match="shape"):
            array.append(np.zeros((1, *shape, 1)))

    expected = np.concatenate([np.empty((0, *shape)), *blocks]).astype(np.float16)
    assert array.num_rows == sum(sizes)
    np.testing.assert_array_equal(np.load(path), expected, strict=True)
    np.testing.assert_array_equal(StoredArray(path)[:], expected, strict=True)


@given(st.lists(st.integers(0, 19), max_size=12), st.slices(20))
def test_a_stored_array_returns_the_requested_rows(tmp_path_factory, numbers, part):
    path = tmp_path_factory.mktemp("stored") / "a.npy"
    expected = np.arange(60, dtype=np.float16).reshape(20, 3)
    save_array(path, expected)
    found = StoredArray(path)
    np.testing.assert_array_equal(found[np.array(numbers, np.int64)], expected[numbers], strict=True)
    np.testing.assert_array_equal(found[part], expected[part], strict=True)
    assert (len(found), found.shape, found.dtype) == (20, (20, 3), expected.dtype)


def test_a_truncated_file_is_an_error(tmp_path):
    save_array(tmp_path / "a.npy", np.arange(20))
    found = StoredArray(tmp_path / "a.npy")
    os.truncate(tmp_path / "a.npy", (tmp_path / "a.npy").stat().st_size - 80)
    with pytest.raises(ValueError, match="greater than file size"):
        found[8:12]


texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=20), max_size=8)


@given(texts)
def test_strings_are_read_one_by_one_and_in_slices(tmp_path_factory, values):
    path = tmp_path_factory.mktemp("strings") / "texts.npz"
    np.savez(path, **packed_strings("captions", values))
    found = PackedStrings(path, "captions", len(values))

    assert len(found) == len(values)
    for index in range(len(values)):
        assert found[np.array([index])].tolist() == [values[index]]

    for part in (slice(None), slice(1, 3), slice(None, None, -1), slice(-2, None), slice(5, 2)):
        assert found[part].tolist() == values[part]


def test_strings_of_any_length_are_kept_and_lone_surrogates_refused(tmp_path):
    values = ["x" * 100_000, "", "\U0001f468\u200d\U0001f680", "\u200f\u05e9\u05dc\u05d5\u05dd", "a\0b\n"]
    np.savez(tmp_path / "a.npz", **packed_strings("a", values))
    assert PackedStrings(tmp_path / "a.npz", "a", 5)[:].tolist() == values
    with pytest.raises(UnicodeEncodeError):
        packed_strings("b", ["\ud800"])


@st.composite
def rows(draw):
    """Rows and what they have to equal: the kept rows of each array, one behind the other."""
    sizes = draw(st.lists(st.integers(0, 6), min_size=1, max_size=5))
    shape = draw(st.sampled_from([(), (2,), (2, 3)]))
    start = 0
    arrays = []
    kept = []
    for size in sizes:
        numbers = np.arange(start, start + size, dtype=np.int16)
        arrays.append(np.broadcast_to(numbers.reshape(-1, *[1] * len(shape)), (size, *shape)).copy())
        chosen = draw(st.none() | st.sets(st.integers(0, max(0, size - 1)), max_size=size))
        kept.append(None if chosen is None else np.array(sorted(chosen if size else ()), np.int64))
        start += size

    pairs = zip(arrays, kept, strict=True)
    return Rows(arrays, kept), np.concatenate([a if k is None else a[k] for a, k in pairs])


@given(rows(), st.data())
def test_rows_match_the_concatenated_arrays(case, data):
    found, expected = case
    chosen = np.array(data.draw(st.lists(st.integers(0, 40), max_size=12)), np.int64)
    chosen = chosen[chosen < len(expected)]
    part = slice(*data.draw(st.tuples(st.integers(0, 40), st.integers(0, 40))))

    taken = found.take(chosen)
    np.testing.assert_array_equal(taken, expected[chosen], strict=True)
    taken[...] = -1  # a copy: the arrays stay

    np.testing.assert_array_equal(found[part], expected[part], strict=True)
    np.testing.assert_array_equal(found[:], expected, strict=True)
    np.testing.assert_array_equal(np.array([*found], expected.dtype).reshape(expected.shape), expected)


@pytest.mark.parametrize("row", [-1, 5])
def test_a_row_out_of_range_is_refused(row):
    with pytest.raises(IndexError):
        Rows([np.zeros((2, 3)), np.zeros((3, 3))]).take(np.array([0, row]))


@pytest.mark.parametrize(
    "arrays",
    [[], [np.zeros((2, 3)), np.zeros((2, 4))], [np.zeros(2), np.zeros(2, np.float32)]],
)
def test_arrays_that_differ_are_refused(arrays):
    with pytest.raises(ValueError, match="one dtype and row shape"):
        Rows(arrays)
