import numpy as np
import pytest
import torch
from sklearn.neighbors import NearestNeighbors

from ddm_lightning.core.registry import METRICS
from ddm_lightning.evaluation.metrics.features import covered, precision_recall


def features(num, seed, shift=0.0):
    return torch.randn(num, 5, generator=torch.Generator().manual_seed(seed)) + shift


def share_within(rows, centres, k):
    """The paper's definition by scikit-learn, one centre at a time."""
    radii = NearestNeighbors(n_neighbors=k + 1).fit(centres).kneighbors(centres)[0][:, k]
    hits = np.zeros(len(rows), bool)
    for centre, radius in zip(centres, radii, strict=True):
        hits |= np.linalg.norm(rows - centre, axis=1) <= radius

    return hits.mean()


@pytest.mark.parametrize("k", [1, 3])
def test_agrees_with_a_second_implementation_on_2000_features(k):
    generated = features(2000, 0, shift=0.8)
    real = features(2000, 1)
    found = precision_recall(generated, real, k)
    pairs = ((generated, real), (real, generated))
    expected = [share_within(a.double().numpy(), b.double().numpy(), k) for a, b in pairs]
    assert [found["precision"].value, found["recall"].value] == pytest.approx(expected, rel=1e-3)
    assert 0.1 < expected[0] < 0.95


def test_a_ball_holds_its_border_and_any_ball_will_do():
    rows = torch.tensor([[-1.0], [-1.1], [4.5], [3.0]])
    centres = torch.tensor([[0.0], [5.0]])
    assert covered(rows, centres, torch.tensor([1.0, 0.5])).tolist() == [True, False, True, False]


def test_intervals_cover_a_share_of_none_and_all():
    found = precision_recall(features(40, 0, shift=50.0), features(40, 1))
    assert found["precision"].value == 0 and 0.05 < found["precision"].high < 0.1
    same = precision_recall(features(40, 1), features(40, 1))
    assert same["recall"].value == 1 and 0.9 < same["recall"].low < 0.95


def test_both_shares_are_named_by_their_features():
    metric = METRICS.build("precision-recall", {"features": "pixels"})
    assert list(metric.scores(features(9, 1), features(9, 0))) == ["precision (pixels)", "recall (pixels)"]
