import hashlib
import pickle
import re

import numpy as np
import pytest
import torch

from ddm_data.efficientnet import EfficientNetFeatures
from ddm_lightning.core.errors import UserError


def some_images(num=3, size=10):
    return np.random.default_rng(0).integers(0, 256, (num, size, size, 3), dtype=np.uint8)


def test_provenance_has_the_hash_of_the_weights():
    encoder = EfficientNetFeatures(resolution=32)
    assert encoder.provenance() == {"weights_sha256": hashlib.sha256(encoder.path.read_bytes()).hexdigest()}


def test_efficientnet_recognises_photographs():
    """The published classifier on top of our features names what the images show."""
    from sklearn.datasets import load_sample_images

    encoder = EfficientNetFeatures(resolution=224)
    classifier = torch.load(encoder.path, weights_only=True)
    # Central squares of the photographs: a Chinese temple and a flower.
    photographs = [image[:427, 100:527] for image in load_sample_images().images]
    features = torch.from_numpy(encoder.encode(np.stack(photographs)))
    scores = (features @ classifier["_fc.weight"].T + classifier["_fc.bias"]).softmax(1)
    palace, daisy = 698, 985
    assert scores[:, [palace, daisy]].diagonal().min() > 0.25, scores.topk(3)
    assert scores.argmax(1).tolist() == [palace, daisy]


def test_efficientnet_features_do_not_depend_on_the_batch():
    encoder = EfficientNetFeatures(resolution=32)
    images = some_images(70, 12)
    together = encoder.encode(images)
    assert together.shape == (70, encoder.size) and together.dtype == np.float32
    np.testing.assert_allclose(encoder.encode(images[65:]), together[65:], atol=1e-4)
    assert encoder.encode(images[:0]).shape == (0, encoder.size)


@pytest.mark.parametrize("damage", ["missing", "truncated", "pickle", "other"])
def test_invalid_weights_are_refused(tmp_path, damage):
    path = tmp_path / "weights.pth"
    if damage == "truncated":
        path.write_bytes(EfficientNetFeatures().path.read_bytes()[:100_000])
    elif damage == "pickle":
        path.write_bytes(pickle.dumps(print, protocol=2))
    elif damage == "other":
        torch.save({"weight": torch.ones(2)}, path)
    with pytest.raises(UserError, match=re.escape(str(path))) as refusal:
        EfficientNetFeatures(resolution=32, path=str(path)).encode(some_images())
    assert "\n" not in str(refusal.value)
    assert "trust" not in str(refusal.value)  # torch's advice on how to run what is in a pickle
