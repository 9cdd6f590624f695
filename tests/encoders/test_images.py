import json
import re
import shutil
from copy import deepcopy

import numpy as np
import pytest
import torch
from encoders.tiny_models import save_vae
from safetensors.torch import load_file, save_file

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import IMAGE_ENCODERS
from ddm_lightning.encoders import images as image_encoders
from ddm_lightning.encoders import pretrained
from ddm_lightning.encoders.interfaces import ImageEncoder

FAMILIES = {
    "sd": {"scaling_factor": 0.18215},
    "sdxl": {"scaling_factor": 0.13025, "force_upcast": True},
    "sd3": {
        "latent_channels": 16, "scaling_factor": 1.5305, "shift_factor": 0.0609,
        "use_quant_conv": False, "use_post_quant_conv": False,
    },
    "lists": {
        "scaling_factor": 0.5, "latents_mean": [-1.6574, 1.886, -1.383, 2.5155],
        "latents_std": [8.4927, 5.9022, 6.5498, 5.2299],
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folder and model of each family."""
    root = tmp_path_factory.mktemp("vae")
    return {name: (root / name, save_vae(root / name, **config)) for name, config in FAMILIES.items()}


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to damage."""
    return shutil.copytree(saved["sd"][0], tmp_path / "vae")


def build(folder, **params):
    return IMAGE_ENCODERS.build("diffusers-vae", {"path": str(folder), **params})


def some_images(num=3, side=8, width=None):
    return np.random.default_rng(0).integers(0, 256, (num, side, width or side, 3), dtype=np.uint8)


def by_hand(vae, images):
    """The library's own model on pixels from -1 to 1: the posterior's mean and log variance, in float64."""
    pixels = torch.tensor(images.astype(np.float64).transpose(0, 3, 1, 2) / 255 * 2 - 1)
    with torch.no_grad():
        moments = vae.double().encode(pixels).latent_dist

    vae.float()
    return moments.mean.numpy(), moments.logvar.numpy()


def normalised(mean, config):
    """As the pipelines do it."""
    if "latents_mean" in config:
        centre, spread = (np.reshape(config[f"latents_{key}"], (1, -1, 1, 1)) for key in ("mean", "std"))
        return (mean - centre) * config["scaling_factor"] / spread

    return (mean - config.get("shift_factor", 0)) * config["scaling_factor"]


@pytest.mark.parametrize(("family", "width"), [*((family, 8) for family in FAMILIES), ("sd", 14), ("sd3", 4)])
def test_latents_and_their_images_match_the_librarys_model(saved, family, width):
    folder, vae = saved[family]
    images = some_images(width=width)
    mean, log_variance = by_hand(vae, images)
    posterior = build(folder, dtype="float32")
    stored = posterior.encode(images)
    num_channels = FAMILIES[family].get("latent_channels", 4)

    assert isinstance(posterior, ImageEncoder)
    assert posterior.x_shape(8) == (num_channels, 4, 4)
    assert stored.dtype == np.float32
    expected = np.concatenate([mean, np.exp(log_variance / 2)], 1)
    np.testing.assert_allclose(stored, expected, rtol=1e-4, atol=1e-5)

    encoder = build(folder, stores="x_0", dtype="float32")
    means = encoder.encode(images)
    np.testing.assert_array_equal(means, stored[:, :num_channels])
    scale, shift = (torch.tensor(encoder.normalisation[key]).view(1, -1, 1, 1) for key in ("scale", "shift"))
    x_0 = (torch.from_numpy(means) - shift) * scale
    np.testing.assert_allclose(x_0.numpy(), normalised(mean, FAMILIES[family]), atol=1e-5)

    with torch.no_grad():
        decoded = vae.decode(torch.tensor(mean).float()).sample.numpy()

    expected = np.clip((decoded / 2 + 0.5) * 255, 0, 255).transpose(0, 2, 3, 1)
    found = encoder.decode(x_0)
    assert found.dtype == np.uint8
    assert expected.std() > 5
    assert np.abs(found - expected).max() < 0.51


def test_half_precision_is_stored_unless_told_and_beyond_it_is_infinite(saved, folder):
    exact = build(folder, dtype="float32").encode(some_images())
    stored = build(folder).encode(some_images())
    np.testing.assert_array_equal(stored, exact.astype(np.float16), strict=True)

    path = folder / "diffusion_pytorch_model.safetensors"
    state = load_file(path)
    state["quant_conv.bias"][0] = 1e6
    save_file(state, path)
    stored = build(folder).encode(some_images())
    assert np.isinf(stored[:, 0]).all()
    assert np.isfinite(stored[:, 1:]).all()


def test_bfloat16_is_close_and_hands_its_moments_on_in_float32(saved):
    folder, vae = saved["sd"]
    exact, near = (build(folder, dtype="float32", compute_dtype=name) for name in ("float32", "bfloat16"))
    stored = exact.encode(some_images())
    rounded = near.encode(some_images())
    assert 0 < np.abs(rounded - stored)[:, :4].max() < 0.05 * stored[:, :4].std()
    np.testing.assert_allclose(rounded[:, 4:], stored[:, 4:], rtol=0.02)

    pixels = torch.tensor(some_images().transpose(0, 3, 1, 2)) / 127.5 - 1
    with torch.no_grad():
        moments = deepcopy(vae).bfloat16().encode(pixels.bfloat16()).latent_dist.parameters.double().numpy()

    np.testing.assert_array_equal(rounded[:, :4], moments[:, :4])
    np.testing.assert_allclose(rounded[:, 4:], np.exp(moments[:, 4:] / 2), rtol=1e-6)


def test_an_encoder_in_bfloat16_decodes_in_float32_unless_told(saved, monkeypatch):
    folder, _ = saved["sd"]
    x_0 = torch.ones(2, 4, 4, 4)
    monkeypatch.setattr(pretrained.Pretrained, "dtype_on", lambda *_: torch.bfloat16)  # as on a GPU
    encoder = build(folder)
    encoder.encode(some_images())
    np.testing.assert_array_equal(encoder.decode(x_0), build(folder, compute_dtype="float32").decode(x_0))
    assert (encoder.decode(x_0) != build(folder, compute_dtype="bfloat16").decode(x_0)).any()


def test_batches_are_as_large_as_memory_takes_and_do_not_matter(saved, monkeypatch):
    """Latents count as the images that they stand for: four pixels each, here."""
    from diffusers import AutoencoderKL

    folder, _ = saved["sd"]
    images = some_images(7)
    latents = torch.ones(7, 4, 4, 4)
    encoder = build(folder, dtype="float32")
    together = encoder.encode(images)
    decoded = encoder.decode(latents)
    assert together.tobytes() == encoder.encode(images).tobytes()
    assert together.tobytes() == build(folder, dtype="float32").encode(images).tobytes()

    seen = []
    for way in ("encode", "decode"):
        method = getattr(AutoencoderKL, way)
        monkeypatch.setattr(
            AutoencoderKL, way, lambda self, x, method=method, **more: seen.append(len(x)) or method(self, x, **more)
        )

    for num_pixels, sizes in ((3 * 64, [3, 3, 1]), (1, [1] * 7)):
        monkeypatch.setitem(image_encoders._PIXELS_AT_ONCE, "cpu", num_pixels)
        np.testing.assert_allclose(encoder.encode(images), together, atol=1e-5)
        np.testing.assert_array_equal(encoder.decode(latents), decoded)
        assert seen == sizes * 2
        seen.clear()

    assert encoder.encode(images[:0]).shape == (0, 8, 4, 4)


def test_sizes_are_known_without_loading_weights(saved, monkeypatch):
    encoder = build(saved["sd"][0])
    monkeypatch.setattr(pretrained, "loading", None)
    assert encoder.x_shape(256) == (4, 128, 128)
    with pytest.raises(UserError, match=r"255 pixels are not a multiple of 2; set prepare.images.size to 256"):
        encoder.encode(some_images(1, 255))


def test_weights_with_the_attentions_old_names_load(saved, folder):
    """As in sd-vae-ft-mse, which is older than today's names."""
    path = folder / "diffusion_pytorch_model.safetensors"
    old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
    state = load_file(path)
    renamed = {re.sub("|".join(map(re.escape, old)), lambda m: old[m.group()], key): state[key] for key in state}
    assert len(renamed.keys() - state.keys()) == 16
    save_file(renamed, path)
    np.testing.assert_array_equal(build(folder).encode(some_images()), build(saved["sd"][0]).encode(some_images()))


def test_weights_in_several_files_load(saved, tmp_path):
    folder, vae = saved["sd"]
    vae.save_pretrained(tmp_path / "vae", max_shard_size="40KB")
    split = build(tmp_path / "vae")
    before = split.provenance()
    assert not (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").exists()
    np.testing.assert_array_equal(split.encode(some_images()), build(folder).encode(some_images()))

    shard = next(iter((tmp_path / "vae").glob("*-00002-of-*")))
    shard.write_bytes(shard.read_bytes()[:-1] + b"!")
    assert build(tmp_path / "vae").provenance()["weights_sha256"] != before["weights_sha256"]
    shard.unlink()
    with pytest.raises(UserError, match=rf"{tmp_path}/vae/.*: weights are missing"):
        build(tmp_path / "vae")


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_a_missing_device_is_refused_for_encoding_but_not_for_decoding(saved):
    encoder = build(saved["sd"][0], device="cuda")
    with pytest.raises(UserError, match=r"this machine has no 'cuda'; set its parameter 'device'"):
        encoder.encode(some_images())
    x_0 = torch.ones(2, 4, 4, 4)
    np.testing.assert_array_equal(encoder.decode(x_0), build(saved["sd"][0]).decode(x_0))


@pytest.mark.parametrize(
    ("params", "complaint"),
    [
        ({"stores": "samples"}, "stores = 'samples' must be posterior or x_0"),
        ({"dtype": "uint8"}, "dtype = 'uint8' float16 or float32"),
        ({"compute_dtype": "int8"}, "compute_dtype' = 'int8': must be one of float32, bfloat16, float16"),
        ({"device": "gpu"}, "device string: gpu"),
        ({"compute_dtype": "float16"}, "config.json says force_upcast"),
    ],
)
def test_bad_parameters_are_refused(saved, params, complaint):
    with pytest.raises(UserError, match=complaint):
        build(saved["sdxl"][0], **params)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        (
            {"_class_name": "AutoencoderTiny"},
            "_class_name is 'AutoencoderTiny', but image encoder 'diffusers-vae' takes",
        ),
        ({"_class_name": None, "model_type": "clip"}, "_class_name is None"),
        ({"in_channels": 4}, "key 'in_channels' = 4: must be 3"),
        ({"scaling_factor": 0}, "key 'scaling_factor' = 0: must be a positive number"),
        ({"scaling_factor": None}, "key 'scaling_factor': must be a finite number, is null"),
        ({"latents_mean": [0] * 4, "latents_std": [1, 1, 1, 0]}, r"key 'latents_std\[3\]' = 0: must be a positive"),
        ({"latents_mean": "many"}, "key 'latents_mean': must be a list"),
    ],
)
def test_an_unusable_configuration_is_refused(folder, changes, complaint):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(UserError, match=rf"^{path}: .*{complaint}.*$"):
        build(folder)


@pytest.mark.parametrize("changes", [{"decoder.conv_out.bias": None}, {"decoder.conv_out.bias": torch.zeros(5)}])
def test_weights_that_do_not_fit_are_refused(folder, changes):
    path = folder / "diffusion_pytorch_model.safetensors"
    state = load_file(path) | changes
    save_file({name: values for name, values in state.items() if values is not None}, path)
    line = rf"^{folder}: cannot be loaded by image encoder 'diffusers-vae' \(.*\); copy or.*$"
    with pytest.raises(UserError, match=line):
        build(folder).encode(some_images())
