import numpy as np
import pytest
import torch
from encoders.tiny_models import save_clip, save_dinov2
from PIL import Image
from torch import nn

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.core.registry import FEATURES
from ddm_lightning.encoders import features, pretrained
from ddm_lightning.encoders.interfaces import Features

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*")
MEAN = np.array([0.485, 0.456, 0.406])
STD = np.array([0.229, 0.224, 0.225])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Name of the feature network, folder and the library's model of each kind."""
    root = tmp_path_factory.mktemp("features")
    return {
        "dinov2": ("dinov2", root / "dinov2", save_dinov2(root / "dinov2")),
        "registers": ("dinov2", root / "registers", save_dinov2(root / "registers", registers=True)),
    }


def build(entry, **params):
    return FEATURES.build(entry[0], {"path": str(entry[1]), **params})


def some_images(num=3, side=28):
    return np.random.default_rng(0).integers(0, 256, (num, side, side, 3), dtype=np.uint8)


def normalised(images, mean=MEAN, std=STD):
    return torch.from_numpy(((images / 255 - mean) / std).transpose(0, 3, 1, 2)).float()


@pytest.mark.parametrize("kind", ["dinov2", "registers"])
def test_dinov2_gives_the_class_token_of_the_librarys_model(saved, kind):
    encoder = build(saved[kind], resolution=28)
    with torch.no_grad():
        expected = saved[kind][2](normalised(some_images())).pooler_output.numpy()

    found = encoder.encode(some_images())
    assert isinstance(encoder, Features)
    assert encoder.size == 16
    assert expected.std() > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-4, strict=True)


def test_images_are_resized_as_pillow_resizes_them(saved):
    encoder = build(saved["dinov2"], resolution=28)
    images = some_images(2, 64)  # noise, which shows every filter at once
    resized = [np.asarray(Image.fromarray(image).resize((28, 28), Image.Resampling.BICUBIC)) for image in images]
    with torch.no_grad():
        expected = saved["dinov2"][2](normalised(np.stack(resized))).pooler_output

    # Pillow rounds to whole pixel values.
    np.testing.assert_allclose(encoder.encode(images), expected, atol=0.02 * float(expected.std()) + 0.01)


def test_batch_size_and_process_do_not_matter(saved, monkeypatch):
    encoder = build(saved["dinov2"], resolution=28)
    images = some_images(5)
    together = encoder.encode(images)
    assert together.tobytes() == build(saved["dinov2"], resolution=28).encode(images).tobytes()
    monkeypatch.setitem(pretrained._IMAGES_AT_ONCE, "cpu", 2)
    np.testing.assert_allclose(encoder.encode(images), together, atol=1e-4)
    assert encoder.encode(images[:0]).shape == (0, encoder.size)


def test_dinov2_knows_its_size_without_loading_weights(saved, monkeypatch):
    monkeypatch.setattr(pretrained, "loading", None)
    encoder = build(saved["dinov2"])
    assert (encoder.size, encoder.resolution) == (16, 224)


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        ({"resolution": 100}, "resolution = 100 must be a multiple of the model's patch size, 14"),
        ({"resolution": 0}, "resolution = 0 must be a multiple"),
        ({"compute_dtype": "int8"}, "compute_dtype' = 'int8': must be one of"),
        ({"device": "gpu"}, "device string: gpu"),
        ({"model": "resnet10t"}, "has no parameter 'model'"),
    ],
)
def test_bad_parameters_are_refused(saved, params, complaint):
    with pytest.raises(UserError, match=complaint):
        build(saved["dinov2"], **params)


class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = Layers()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Layers(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.adaptive_avg_pool2d(x, (32, 32)).flatten(1)[:, :2048]


@pytest.fixture
def inception_file(tmp_path, monkeypatch):
    """Another network in the published file's place."""
    path = tmp_path / features.INCEPTION_FILE
    torch.jit.save(torch.jit.script(Whole()), path)
    monkeypatch.setattr(features, "INCEPTION_SHA256", sha256_file(path))
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
        assert isinstance(network, Features)
        assert network.provenance() == {"weights_sha256": sha256_file(inception_file)}
        np.testing.assert_allclose(network.encode(images), expected, atol=1e-5)


def test_other_weights_than_the_published_ones_are_refused(inception_file, tmp_path, monkeypatch):
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"is not the published file; download it again from https://nvlabs"):
        FEATURES.build("inception", {"path": str(inception_file)}).encode(some_images())

    missing = r"other: the weights of 'inception' .* are missing; download them from https://"
    with pytest.raises(UserError, match=missing):
        FEATURES.build("inception", {"path": str(tmp_path / "other")})


def test_clip_gives_the_librarys_image_embedding(tmp_path):
    model = save_clip(tmp_path, whole=True)
    network = FEATURES.build("clip", {"path": str(tmp_path)})
    assert isinstance(network, Features)
    assert network.size == 10
    images = some_images(2, model.config.vision_config.image_size)
    with torch.no_grad():
        expected = model.get_image_features(normalised(images, network.mean, network.std))
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
