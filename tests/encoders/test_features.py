import json
import shutil

import numpy as np
import pytest
import torch
from encoders.tiny_models import save_dinov2, save_timm
from PIL import Image

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import FEATURES
from ddm_lightning.encoders import features, pretrained
from ddm_lightning.encoders.interfaces import Features

MEAN, STD = np.array([0.485, 0.456, 0.406]), np.array([0.229, 0.224, 0.225])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Name of the feature network, folder and the library's model of each kind."""
    root = tmp_path_factory.mktemp("features")
    return {
        "dinov2": ("dinov2", root / "dinov2", save_dinov2(root / "dinov2")),
        "registers": ("dinov2", root / "registers", save_dinov2(root / "registers", registers=True)),
        "resnet": ("timm", root / "resnet", save_timm(root / "resnet", num_classes=7)),
        "vit": ("timm", root / "vit", save_timm(root / "vit", "test_vit")),
    }


def build(entry, **params):
    return FEATURES.build(entry[0], {"path": str(entry[1]), **params})


def some_images(num=3, height=28, width=28, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (num, height, width, 3), dtype=np.uint8)


def normalised(images, mean=MEAN, std=STD):
    return torch.from_numpy(((images / 255 - mean) / std).transpose(0, 3, 1, 2))


@pytest.mark.parametrize("kind", ["dinov2", "registers"])
def test_dinov2_gives_the_class_token_of_the_librarys_model(saved, kind):
    encoder = build(saved[kind], resolution=28)
    assert isinstance(encoder, Features) and encoder.size == 16
    with torch.no_grad():
        model = saved[kind][2].double()
        expected = model(normalised(some_images())).pooler_output.numpy()
        model.float()
    found = encoder.encode(some_images())
    assert found.dtype == np.float32 and expected.std() > 0.1
    np.testing.assert_allclose(found, expected, atol=1e-4)


@pytest.mark.parametrize("kind", ["resnet", "vit"])
def test_timm_gives_the_pooled_features_of_its_own_model(saved, kind):
    _, folder, model = saved[kind]
    config = json.loads((folder / "config.json").read_text())["pretrained_cfg"]
    size = config["input_size"][1]
    encoder = build(saved[kind])
    assert isinstance(encoder, Features)
    images = some_images(2, size, size)
    with torch.no_grad():
        inputs = normalised(images, np.array(config["mean"]), np.array(config["std"])).float()
        expected = model.forward_head(model.forward_features(inputs), pre_logits=True).numpy()
    found = encoder.encode(images)
    assert found.shape == (2, encoder.size) and expected.std() > 0.01
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("kind", ["dinov2", "resnet"])
def test_images_are_resized_as_pillow_resizes_them(saved, kind):
    name, folder, model = saved[kind]
    encoder = build(saved[kind], **({"resolution": 28} if name == "dinov2" else {}))
    images = some_images(2, 64, 64)  # noise, which shows every filter at once
    if name == "dinov2":
        size, mean, std, how = 28, MEAN, STD, Image.Resampling.BICUBIC
    else:
        config = json.loads((folder / "config.json").read_text())["pretrained_cfg"]
        size, mean, std = config["input_size"][1], np.array(config["mean"]), np.array(config["std"])
        how = getattr(Image.Resampling, config["interpolation"].upper())
    resized = np.stack([np.asarray(Image.fromarray(image).resize((size, size), how)) for image in images])
    with torch.no_grad():
        inputs = normalised(resized, mean, std).float()
        expected = model(inputs).pooler_output if name == "dinov2" else model.forward_head(
            model.forward_features(inputs), pre_logits=True
        )  # fmt: skip
    # Pillow rounds to whole pixel values.
    np.testing.assert_allclose(encoder.encode(images), expected, atol=0.02 * float(expected.std()) + 0.01)


def test_batch_size_and_process_do_not_matter(saved, monkeypatch):
    for kind in ("dinov2", "resnet"):
        params = {"resolution": 28} if kind == "dinov2" else {}
        encoder = build(saved[kind], **params)
        images = some_images(5)
        together = encoder.encode(images)
        assert together.tobytes() == build(saved[kind], **params).encode(images).tobytes()
        with monkeypatch.context() as patch:
            patch.setitem(features._BATCH_SIZE, "cpu", 2)
            np.testing.assert_allclose(encoder.encode(images), together, atol=1e-4)
        assert encoder.encode(images[:0]).shape == (0, encoder.size)


def test_dinov2_knows_its_size_without_loading_weights(saved, monkeypatch):
    monkeypatch.setattr(pretrained, "loading", None)
    assert build(saved["dinov2"]).size == 16
    assert build(saved["dinov2"]).resolution == 224


@pytest.mark.parametrize(
    ("kind", "params", "complaint"),
    [
        ("dinov2", {"resolution": 100}, "resolution = 100 must be a multiple of the model's patch size, 14"),
        ("dinov2", {"resolution": 0}, "resolution = 0 must be a multiple"),
        ("dinov2", {"compute_dtype": "int8"}, "compute_dtype = 'int8' must be one of"),
        ("resnet", {"device": "gpu"}, "device = 'gpu' must be"),
        ("resnet", {"model": "resnet10t"}, "has no parameter 'model'"),
    ],
)
def test_bad_parameters_are_refused(saved, kind, params, complaint):
    with pytest.raises(UserError, match=complaint):
        build(saved[kind], **params)


@pytest.mark.parametrize(
    ("config", "complaint"),
    [
        ({"architecture": "resnet10_of_mine"}, "knows no 'resnet10_of_mine'"),
        ({"model_type": "dinov2"}, "'architecture'"),
        ({"architecture": "test_resnet", "model_args": {"in_chans": 1}}, "cannot be loaded by feature network 'timm'"),
        ({"architecture": "test_resnet", "num_classes": 9}, "cannot be loaded by feature network 'timm'"),
    ],
)
def test_a_configuration_unknown_to_timm_is_refused(saved, tmp_path, config, complaint):
    folder = shutil.copytree(saved["resnet"][1], tmp_path / "model")
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=complaint) as refusal:
        FEATURES.build("timm", {"path": str(folder)}).encode(some_images())
    assert str(refusal.value).startswith(str(folder)) and "\n" not in str(refusal.value)


def test_networks_for_grey_images_are_refused(tmp_path):
    save_timm(tmp_path / "grey", in_chans=1)
    with pytest.raises(UserError, match="takes images of 1 channels, not 3"):
        FEATURES.build("timm", {"path": str(tmp_path / "grey")}).encode(some_images())
