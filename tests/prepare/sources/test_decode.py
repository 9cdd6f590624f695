import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from ddm_lightning.prepare.records import BrokenSample
from ddm_lightning.prepare.sources.decode import decode


def encoded(image, format="PNG", **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def noise(*shape, high=256, dtype=np.uint8):
    return np.random.default_rng(0).integers(0, high, shape).astype(dtype)


def picture(data):
    image = decode(data, "a")
    assert not isinstance(image, BrokenSample), image
    assert image.dtype == np.uint8 and image.ndim == 3 and image.shape[2] == 3
    return image


def cause(data, **limits):
    broken = decode(data, "a", **limits)
    assert isinstance(broken, BrokenSample) and broken.key == "a" and "\n" not in broken.detail
    return broken.cause


@pytest.mark.parametrize("format", ["PNG", "BMP", "TIFF", "PPM"])
def test_lossless_rgb_comes_back_as_it_was(format):
    for height, width in ((1, 1), (5, 7), (1, 300)):
        pixels = noise(height, width, 3)
        np.testing.assert_array_equal(picture(encoded(Image.fromarray(pixels), format)), pixels)


@pytest.mark.parametrize("format", ["JPEG", "WEBP", "JPEG2000"])
def test_lossy_images_are_what_pillow_says(format):
    data = encoded(Image.fromarray(noise(9, 12, 3)), format)
    np.testing.assert_array_equal(picture(data), np.asarray(Image.open(io.BytesIO(data)).convert("RGB")))


def test_cmyk_follows_the_formula():
    ink = noise(6, 5, 4)
    expected = (255 - ink[..., :3].astype(float)) * (255 - ink[..., 3:].astype(float)) / 255
    np.testing.assert_allclose(picture(encoded(Image.fromarray(ink, "CMYK"), "TIFF")), expected, atol=1)
    jpeg = encoded(Image.fromarray(np.full((8, 8, 4), (0, 255, 255, 0), np.uint8), "CMYK"), "JPEG", quality=100)
    np.testing.assert_allclose(picture(jpeg), np.broadcast_to([255, 0, 0], (8, 8, 3)), atol=3)


def on_white(colour, alpha):
    alpha = alpha[..., None].astype(float) / 255
    return alpha * colour + (1 - alpha) * 255


def test_transparent_pixels_show_white():
    pixels = noise(6, 5, 4)
    np.testing.assert_allclose(
        picture(encoded(Image.fromarray(pixels))), on_white(pixels[..., :3], pixels[..., 3]), atol=1
    )
    grey = noise(6, 5, 2)
    np.testing.assert_allclose(
        picture(encoded(Image.fromarray(grey, "LA"))), on_white(grey[..., :1].repeat(3, 2), grey[..., 1]), atol=1
    )


@pytest.mark.parametrize("is_transparent", [False, True])
def test_palettes(is_transparent):
    index, palette = noise(4, 6, high=5), noise(5, 3)
    image = Image.fromarray(index, "P")
    image.putpalette(palette.ravel().tolist())
    expected = palette[index]
    options = {}
    if is_transparent:
        options, expected[index == 2] = {"transparency": 2}, 255
    np.testing.assert_array_equal(picture(encoded(image, **options)), expected)
    assert (index == 2).any()


def test_one_transparent_colour_of_an_rgb_or_grey_image():
    pixels = noise(4, 4, 3)
    expected = pixels.copy()
    expected[1, 1] = 255
    data = encoded(Image.fromarray(pixels), transparency=tuple(int(c) for c in pixels[1, 1]))
    np.testing.assert_array_equal(picture(data), expected)
    grey = np.arange(16, dtype=np.uint8).reshape(4, 4)
    assert picture(encoded(Image.fromarray(grey), transparency=3)).tolist()[0][2:] == [[2, 2, 2], [255, 255, 255]]


def test_16_bit_grey_is_scaled_and_not_clipped():
    narrow = np.array([[0, 16, 2056, 4095]], np.uint16)
    assert picture(encoded(Image.fromarray(narrow)))[0, :, 0].tolist() == [0, 1, 128, 255], "12 bits in 16"
    wide = np.array([[0, 257, 256 * 128, 65535]], np.uint16)
    for data in (encoded(Image.fromarray(wide)), encoded(Image.fromarray(wide), "TIFF")):
        np.testing.assert_array_equal(picture(data)[0, :, 0], [0, 1, 128, 255])
    as_int32 = encoded(Image.fromarray(wide.astype(np.int32)), "TIFF")
    np.testing.assert_array_equal(picture(as_int32)[0, :, 1], [0, 1, 128, 255])


def test_16_bit_rgb_png_is_scaled():
    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    row = b"\0" + struct.pack(">6H", 0, 32896, 65535, 257, 2570, 65535)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0))
    png += chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b"")
    np.testing.assert_array_equal(picture(png), [[[0, 128, 255], [1, 10, 255]]])


def test_grey_and_black_and_white():
    grey = noise(3, 5)
    np.testing.assert_array_equal(picture(encoded(Image.fromarray(grey))), grey[..., None].repeat(3, 2))
    bits = Image.fromarray(grey > 128)
    np.testing.assert_array_equal(picture(encoded(bits))[..., 0], np.where(grey > 128, 255, 0))


@pytest.mark.parametrize("format", ["JPEG", "PNG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(orientation, format):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(Image.fromarray(noise(8, 16, 3)), format, exif=exif)
    image = Image.open(io.BytesIO(data))
    np.testing.assert_array_equal(picture(data), np.asarray(ImageOps.exif_transpose(image).convert("RGB")))
    assert picture(data).shape == ((8, 16, 3) if orientation < 5 else (16, 8, 3))


def test_damaged_exif_loses_no_image():
    exif = Image.Exif()
    exif[0x0112] = 6
    data = encoded(Image.fromarray(noise(8, 16, 3)), "JPEG", exif=exif)
    at = data.index(b"Exif\0\0") + 6
    assert picture(data[:at] + b"XXXX" + data[at + 4 :]).shape == (8, 16, 3)


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_the_first_frame_of_what_moves(format):
    frames = [Image.new("RGB", (6, 4), colour) for colour in ("red", "blue", "lime")]
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:], lossless=True)
    assert Image.open(io.BytesIO(data)).n_frames == 3
    np.testing.assert_array_equal(picture(data), np.broadcast_to([255, 0, 0], (4, 6, 3)))


def test_empty_and_no_image():
    assert cause(b"") == "empty file"
    for data in (b"<html>404 Not Found</html>", b"\0" * 1000, b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"):
        assert cause(data) == "no image"


@pytest.mark.parametrize("format", ["JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP"])
def test_every_cut_image_is_damaged(format):
    data = encoded(Image.fromarray(noise(40, 40, 3)), format)
    for length in (20, len(data) // 4, len(data) // 2, len(data) * 9 // 10):
        assert cause(data[:length]) == "damaged image", length


def test_random_damage_gives_an_image_or_a_cause():
    random = np.random.default_rng(1)
    causes = {"damaged image", "too many pixels", "no image", "unsupported pixels"}
    for format in ("JPEG", "PNG", "GIF", "WEBP", "TIFF", "BMP"):
        whole = np.frombuffer(encoded(Image.fromarray(noise(16, 16, 3)), format), np.uint8)
        for _ in range(40):
            damaged = whole.copy()
            damaged[random.integers(8, len(whole), 6)] = random.integers(0, 256, 6)
            result = decode(damaged.tobytes(), "a")
            assert not isinstance(result, BrokenSample) or result.cause in causes


def test_too_many_pixels_are_not_decoded():
    data = encoded(Image.new("1", (200, 100)))
    assert cause(data, max_pixels=19_999) == "too many pixels"
    assert not isinstance(decode(data, "a", max_pixels=20_000), BrokenSample)
    bomb = encoded(Image.new("1", (1, 1)))
    at = bomb.index(b"IHDR")
    for side in (20_000, 60_000):  # below and above the number that Pillow itself refuses
        header = b"IHDR" + struct.pack(">II", side, side) + bomb[at + 12 : at + 17]
        assert cause(bomb[:at] + header + struct.pack(">I", zlib.crc32(header)) + bomb[at + 21 :]) == "too many pixels"


def test_numbers_without_a_range_are_refused():
    assert cause(encoded(Image.fromarray(np.ones((2, 2), np.float32)), "TIFF")) == "unsupported pixels"


def test_a_long_colour_profile_or_text_loses_no_image_and_a_bomb_is_refused():
    pixels = noise(4, 4, 3)
    for num_bytes in (2 << 20, 70 << 20):
        text = PngInfo()
        text.add_text("notes", "x" * num_bytes, zip=True)
        for options in ({"icc_profile": bytes(num_bytes)}, {"pnginfo": text}):
            data = encoded(Image.fromarray(pixels), **options)
            if num_bytes < 64 << 20:
                np.testing.assert_array_equal(picture(data), pixels)
            else:
                assert cause(data) == "damaged image"


def test_an_opened_image_is_decoded_alike():
    grey = noise(3, 4, high=4096, dtype=np.uint16)
    np.testing.assert_array_equal(picture(Image.fromarray(grey)), picture(encoded(Image.fromarray(grey))))
    alpha = noise(3, 4, 2)
    # Premultiplied: grey that is not above its alpha.
    alpha[..., 0] = alpha[..., 0].astype(int) * alpha[..., 1] // 255
    premultiplied = Image.frombytes("La", (4, 3), alpha.tobytes())
    expected = alpha[..., 0].astype(int) + 255 - alpha[..., 1]
    np.testing.assert_allclose(picture(premultiplied)[..., 0], expected, atol=1)
    for mode in ("P", "PA"):
        assert cause(Image.frombytes(mode, (4, 3), alpha[..., : len(mode)].tobytes())) == "unsupported pixels"
