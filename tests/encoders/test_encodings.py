import numpy as np
import pytest
from streaming.base.format.mds.encodings import get_mds_encoded_size, mds_encode

from ddm_lightning.encoders.interfaces import array_encoding, bytes_per_sample


@pytest.mark.parametrize(("dtype", "shape"), [("float16", (8, 32, 32)), ("int32", (77,)), ("uint8", (3, 1, 5))])
def test_an_array_takes_what_streaming_writes(dtype, shape):
    encoding = array_encoding(dtype, shape)
    written = len(mds_encode(encoding, np.zeros(shape, dtype)))
    assert bytes_per_sample({"x": encoding}) == written == get_mds_encoded_size(encoding)


def test_columns_add_up():
    columns = {"text_tokens": array_encoding("float16", (77, 768)), "text_length": "int32"}
    assert bytes_per_sample(columns) == sum(map(get_mds_encoded_size, columns.values())) == 118_276
    assert bytes_per_sample({}) == 0


@pytest.mark.parametrize("encoding", ["str", "ndarray", "ndarray:float16", "ndarray:float9:3", "int32:4"])
def test_sizes_that_differ_from_sample_to_sample_are_refused(encoding):
    with pytest.raises(ValueError, match=r"'caption'.*no fixed size"):
        bytes_per_sample({"caption": encoding})
