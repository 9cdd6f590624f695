import pickle

import numpy as np
import pytest
import torch

from ddm_data.squeezenet import SqueezeNetFeatures, _OnlyArrays
from ddm_lightning.core.errors import UserError


def test_squeezenet_recognises_photographs():
    """The published classifier on top of our features names what the images show."""
    from skimage import data

    encoder = SqueezeNetFeatures(resolution=227)
    photographs = np.stack([data.chelsea()[:300, 80:380], data.coffee()[:300, 150:450]])
    features = torch.from_numpy(encoder.encode(photographs))
    classifier = encoder.network.classifier[1]
    scores = features @ classifier.weight.detach()[:, :, 0, 0].T  # the bias is for features of another scale
    egyptian_cat, espresso = 285, 967
    assert scores.argmax(1).tolist() == [egyptian_cat, espresso], scores.topk(3)


def test_squeezenet_features_do_not_depend_on_the_batch():
    encoder = SqueezeNetFeatures(resolution=32)
    images = np.random.default_rng(0).integers(0, 256, (70, 12, 12, 3), dtype=np.uint8)
    together = encoder.encode(images)
    assert together.shape == (70, encoder.size) and together.dtype == np.float32
    np.testing.assert_allclose((together**2).mean(1), 1, rtol=1e-5)
    np.testing.assert_allclose(encoder.encode(images[65:]), together[65:], atol=1e-3)
    assert encoder.encode(images[:0]).shape == (0, encoder.size)


def test_weights_other_than_the_published_ones_are_refused(tmp_path):
    encoder = SqueezeNetFeatures()
    encoder.path = tmp_path / "weights.pkl"
    encoder.path.write_bytes(pickle.dumps({"conv1": [np.ones(1), np.ones(1)]}))
    with pytest.raises(UserError, match=r"weights.pkl: is missing, or differs"):
        encoder.encode(np.zeros((1, 8, 8, 3), np.uint8))


def test_a_pickle_that_runs_code_is_not_read(tmp_path):
    path = tmp_path / "weights.pkl"
    path.write_bytes(pickle.dumps(print, protocol=2))
    with path.open("rb") as stored, pytest.raises(pickle.UnpicklingError, match="print"):
        _OnlyArrays(stored).load()
