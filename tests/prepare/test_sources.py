import json
from dataclasses import asdict
from functools import partial

import numpy as np
import pytest

from ddm_lightning.core.registry import SOURCES
from ddm_lightning.prepare.records import Part
from ddm_lightning.testing import check_source


def build(name, **params):
    return SOURCES.build(name, params)


def records_of(source):
    return [record for part in source.parts() for record in source.read(part)]


@pytest.mark.parametrize(("name", "params", "size"), [("blobs", {"num_samples": 30}, 16), ("digits", {}, 8)])
def test_every_source_keeps_the_contract(name, params, size):
    check_source(partial(SOURCES.build, name, params))
    source = build(name, **params)
    parts = source.parts()
    # As another process would read it: built anew, the part from JSON.
    last = Part(**json.loads(json.dumps(asdict(parts[-1]))))

    again = list(build(name, **params).read(last))

    assert last == parts[-1] and last.fingerprint
    assert {record.image.shape for record in again} == {(size, size, 3)} and all(record.caption for record in again)


@pytest.mark.parametrize(("name", "caption"), [("blobs", "{}"), ("digits", "digit {}")])
def test_class_names_are_the_words_of_the_captions(name, caption):
    source = build(name)
    assert len(source.class_names) == source.num_classes
    for record in records_of(source):
        assert record.caption == caption.format(source.class_names[record.label])


def test_digits_are_those_of_scikit_learn():
    from sklearn.datasets import load_digits

    reference = load_digits()
    records = records_of(build("digits"))
    assert [record.label for record in records] == reference.target.tolist()
    assert records[4].caption == f"digit {['zero', 'one', 'two', 'three', 'four'][reference.target[4]]}"
    pixels = np.stack([record.image for record in records])
    np.testing.assert_allclose(pixels[..., 1] / 255 * 16, reference.images, atol=0.05)
    assert (pixels == pixels[..., :1]).all()


def test_blobs_show_their_caption_and_grow_by_appending():
    few, many = (records_of(build("blobs", num_samples=num, num_kinds=20)) for num in (20, 60))
    for one, other in zip(few, many, strict=False):
        np.testing.assert_array_equal(one.image, other.image)
    channel = {"red": 0, "green": 1, "blue": 2}
    seen = set()
    for record in many:
        colour, shape = record.caption.split()
        seen.add(shape)
        painted = record.image[(record.image.max(2) - record.image.min(2)) > 50].astype(int)
        assert len(painted) >= 8
        if colour in channel:
            assert (painted.argmax(1) == channel[colour]).all()
    assert seen == {"disc", "square", "cross", "ring"}
    small = records_of(build("blobs", num_samples=2000, num_kinds=20, image_size=4))
    assert len({record.caption for record in small}) == 20
