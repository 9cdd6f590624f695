import numpy as np
import pytest
import torch
from encoders.tiny_models import save_clip
from PIL import Image
from torch import nn

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.core.registry import FEATURES
from ddm_lightning.encoders import score_features
from ddm_lightning.encoders.interfaces import Features

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*")


def some_images(num=3, side=20, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (num, side, side, 3), dtype=np.uint8)


class Layers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.adaptive_avg_pool2d(x, (32, 32)).flatten(1)[:, :2048]


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = Layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


@pytest.fixture
def inception_file(tmp_path, monkeypatch):
    """Another network in the published file's place."""
    path = tmp_path / score_features.INCEPTION_FILE
    torch.jit.save(torch.jit.script(Whole()), path)
    monkeypatch.setattr(score_features, "INCEPTION_SHA256", sha256_file(path))
    return path


def test_inception_gets_the_pixels_that_clean_fid_gives_it(inception_file, tmp_path):
    from cleanfid.fid import get_files_features
    from cleanfid.inception_torchscript import InceptionV3W

    images = some_images()
    for number, image in enumerate(images):
        Image.fromarray(image).save(tmp_path / f"{number}.png")
    files = [str(tmp_path / f"{number}.png") for number in range(len(images))]
    model = InceptionV3W(str(tmp_path), download=False)
    expected = get_files_features(files, model, num_workers=0, device=torch.device("cpu"), verbose=False)
    for path in (inception_file, tmp_path):
        network = FEATURES.build("inception", {"path": str(path)})
        assert isinstance(network, Features) and network.provenance() == {"weights_sha256": sha256_file(inception_file)}
        np.testing.assert_allclose(network.encode(images), expected, atol=1e-5)


def test_other_weights_than_the_published_ones_are_refused(inception_file, tmp_path, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"is not the published file; download it again from https://nvlabs"):
        FEATURES.build("inception", {"path": str(inception_file)}).encode(some_images())
    with pytest.raises(
        UserError, match=r"other: the weights of 'inception' .* are missing; download them from https://"
    ):
        FEATURES.build("inception", {"path": str(tmp_path / "other")})


def test_clip_gives_the_librarys_image_embedding(tmp_path):
    model = save_clip(tmp_path, whole=True)
    network = FEATURES.build("clip", {"path": str(tmp_path)})
    assert isinstance(network, Features) and network.size == 10
    side = model.config.vision_config.image_size
    images = some_images(2, side)
    mean, std = (np.array(score_features._CLIP[key]) for key in ("mean", "std"))
    pixels = torch.from_numpy(((images / 255 - mean) / std).transpose(0, 3, 1, 2)).float()
    with torch.no_grad():
        expected = model.get_image_features(pixels)
        expected = getattr(expected, "pooler_output", expected).numpy()  # from transformers 5 on
    np.testing.assert_allclose(network.encode(images), expected, atol=1e-4)
    save_clip(tmp_path / "text")
    with pytest.raises(UserError, match="takes clip or"):
        FEATURES.build("clip", {"path": str(tmp_path / "text")})


def test_pixels_are_those_of_a_16_by_16_image():
    images = some_images(2, 16)
    found = FEATURES.build("pixels", {}).encode(images)
    np.testing.assert_allclose(found, images.transpose(0, 3, 1, 2).reshape(2, -1) / 255, atol=1e-6)


def test_random_convolutions_by_plain_numpy_and_the_same_each_time():
    network = FEATURES.build("random-convolutions", {"resolution": 8})
    images = some_images(2, 8)
    found = network.encode(images)
    assert found.shape == (2, network.size) and isinstance(network, Features)
    x = np.pad(images.transpose(0, 3, 1, 2) / 127.5 - 1, ((0, 0), (0, 0), (1, 1), (1, 1)))
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), axis=(2, 3))
    level = np.maximum(np.einsum("nchwij,ocij->nohw", windows, network._kernels[0].numpy()), 0)
    np.testing.assert_allclose(found[:, :32], level.mean((2, 3)), atol=1e-5)
    np.testing.assert_allclose(found[:, 32:64], level.std((2, 3), ddof=1), atol=1e-5)
    # Written down once: the kernels must never change.
    assert float(network._kernels[0][0, 0, 0, 0]) == pytest.approx(0.14574206, abs=1e-7)
