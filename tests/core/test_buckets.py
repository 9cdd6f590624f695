"""The table of aspect buckets, and the bucket of an image."""

import pytest

from ddm_lightning.core.buckets import Bucket, bucket_sizes, nearest

RULE = {"max_aspect": 2.0, "step": 32}


def test_the_rule_gives_shapes_of_about_the_square_s_area():
    sizes = bucket_sizes(RULE, 256)

    # By hand: 65,536 pixels over 192 and 224 are 341 and 293; over 160 they are 410, more than 2:1.
    assert sizes == [(192, 352), (224, 288), (256, 256), (288, 224), (352, 192)]


def test_a_list_is_taken_as_it_is_wide_before_tall():
    assert bucket_sizes([[320, 192], [256, 256], [192, 320]], 256) == [(192, 320), (256, 256), (320, 192)]


@pytest.mark.parametrize("rule", [None, [[64, 64]], {"max_aspect": 1.0, "step": 64}], ids=["absent", "list", "rule"])
def test_one_square_is_no_table(rule):
    assert bucket_sizes(rule, 64) == []


@pytest.mark.parametrize(
    ("rule", "problem"),
    [
        ({"max_aspect": 2.0}, "must be"),
        ({"max_aspect": 2.0, "step": 0}, "step = 0"),
        ({"max_aspect": 0.5, "step": 32}, "max_aspect = 0.5"),
        ({"max_aspect": 2.0, "step": 48}, "step = 48 must divide"),
        ([], "at least one"),
        ([[64, 64], [64, 64]], "each once"),
        ([[64, 9000]], "8 to 8192 pixels"),
        ([[4, 64]], "8 to 8192 pixels"),
        ({"max_aspect": 2.0, "step": 128}, "step = 128 leaves only the square"),
        ([[64]], "must be"),
        ("wide", "must be"),
    ],
)
def test_impossible_rules_are_refused(rule, problem):
    with pytest.raises(ValueError, match=problem):
        bucket_sizes(rule, 256)


def test_an_image_goes_to_the_nearest_ratio_in_log_space():
    sizes = [(128, 256), (256, 256)]  # 2:1 and 1:1; half-way between them is the root of 2

    assert nearest(sizes, 1000, 1420) == 0
    assert nearest(sizes, 1000, 1410) == 1
    assert nearest(sizes, 1000, 300) == 1


def test_of_equal_distances_the_larger_bucket_wins():
    assert nearest([(100, 200), (200, 100)], 70, 70) == 0
    assert nearest([(64, 64), (128, 128)], 70, 70) == 1
    assert nearest([(100, 200), (220, 110)], 70, 70) == 1


def test_a_bucket_is_named_by_height_and_width():
    assert Bucket(320, 192, (4, 40, 24)).name == "320x192"
