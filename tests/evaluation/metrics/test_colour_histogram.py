"""``colour-histogram`` against NumPy's histograms, and at its ends."""

import numpy as np
import pytest

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import METRICS


def distance(generated, real, num_bins=16):
    metric = METRICS.build("colour-histogram", {"num_bins": num_bins})
    for images, is_real in ((generated[:3], False), (real, True), (generated[3:], False)):
        metric.update(images, real=is_real)
    return float(metric.compute())


def test_against_numpys_histograms():
    random = np.random.default_rng(0)
    generated = random.integers(0, 200, (7, 5, 4, 3), dtype=np.uint8)
    real = random.integers(30, 256, (4, 5, 4, 3), dtype=np.uint8)
    found = []
    for channel in range(3):
        own, theirs = (np.histogram(one[..., channel], 8, (0, 256))[0] for one in (generated, real))
        found.append(np.abs(own / own.sum() - theirs / theirs.sum()).sum() / 2)
    assert distance(generated, real, 8) == pytest.approx(np.mean(found), abs=1e-12)


def test_black_against_white_is_1_and_a_set_against_itself_0():
    black = np.zeros((4, 2, 2, 3), np.uint8)
    assert distance(black, black + 255) == 1 and distance(black, black) == 0
    with pytest.raises(UserError, match="num_bins = 300 must be from 1 to 256"):
        METRICS.build("colour-histogram", {"num_bins": 300})
