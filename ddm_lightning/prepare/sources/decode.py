"""Encoded pictures of any kind to RGB, or the reason why not."""

from __future__ import annotations

import struct
import warnings
from functools import cache
from io import BytesIO

import numpy as np
from jaxtyping import UInt8
from PIL import Image, ImageFile, UnidentifiedImageError

from ddm_lightning.prepare.records import Broken

MAX_PIXELS = 1 << 27
"""Width times height above which a picture is not decoded: a small file can claim to hold any number."""

# No format that Pillow hands to another program (EPS: Ghostscript) or takes without a signature (TGA).
_FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"RIFF", b"II*\x00", b"MM\x00*", b"BM")
_ORIENTATION = 0x0112
# What the stored picture has to undergo to stand upright (Exif 2.32, tag Orientation).
_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


def decode(data: bytes, key: str, max_pixels: int = MAX_PIXELS) -> UInt8[np.ndarray, "h w 3"] | Broken:
    """The picture in ``data``, upright: on white where it is transparent, the first frame where it moves.

    Grey of more than 8 bits is scaled to 8: from 12 bits if no value is larger, else from 16. CMYK is
    converted by Pillow's formula; colour profiles are not applied.

    Args:
        key: of the sample, for ``Broken``.
    """
    if not data:
        return Broken(key, "empty file")
    truncated_are_padded = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # another package may have asked for grey instead of an error
    try:
        # Pillow warns of large pictures and of damaged Exif data, which is left out below.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(BytesIO(data), formats=_formats()) as image:
                return rgb(image, key, max_pixels)
    except Image.DecompressionBombError as error:
        return Broken(key, "too many pixels", _one_line(error))
    except UnidentifiedImageError:
        if data.startswith(_SIGNATURES):
            return Broken(key, "truncated picture", "the header is damaged or cut off")
        return Broken(key, "no picture", f"begins with {data[:8]!r}")
    except Exception as error:  # noqa: BLE001  damaged files make Pillow raise anything
        return _damaged(error, data, key)
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = truncated_are_padded


def rgb(image: Image.Image, key: str, max_pixels: int = MAX_PIXELS) -> UInt8[np.ndarray, "h w 3"] | Broken:
    """An opened Pillow picture of any mode, as ``decode`` gives it. Raises what Pillow raises on damaged data."""
    if image.width * image.height > max_pixels:
        return Broken(key, "too many pixels", f"{image.width} x {image.height}; at most {max_pixels}")
    if not image.width * image.height:
        return Broken(key, "no picture", "no pixels")
    image.load()
    turn = _UPRIGHT.get(_orientation(image))  # after load(), which turns a TIFF by itself
    try:
        opaque = _opaque(image)
    except ValueError as error:
        return Broken(key, "unsupported pixels", f"mode {image.mode}: {_one_line(error)}")
    return np.asarray(opaque if turn is None else opaque.transpose(turn))


def _opaque(image: Image.Image) -> Image.Image:
    if image.mode == "I" or image.mode.startswith("I;16"):
        # Pillow would clip; mode I is what some of its versions open 16-bit files as.
        grey = np.asarray(image).astype(np.float64)
        grey = np.clip(grey * (255 / (4095 if grey.max() <= 4095 else 65535)), 0, 255)
        return Image.fromarray(np.rint(grey).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("floating-point numbers without a known range")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # noqa: BLE001  damaged Exif data is no reason to lose a picture
        return 1


def _damaged(error: Exception, data: bytes, key: str) -> Broken:
    words = _one_line(error)
    is_cut = (
        isinstance(error, (EOFError, struct.error))
        or any(sign in words.lower() for sign in ("truncated", "unexpected end", "not enough", "broken data stream"))
        # WebP's decoder does not say why, but its header holds the length.
        or (data[:4] == b"RIFF" and int.from_bytes(data[4:8], "little") + 8 > len(data))
    )
    return Broken(key, "truncated picture" if is_cut else "damaged picture", words)


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


@cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)
