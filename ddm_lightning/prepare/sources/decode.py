"""Encoded images of any format as RGB, or the reason why not."""

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
"""Largest width times height to decode: the header of a small file can claim any size."""

# No format that Pillow hands to another program (EPS: Ghostscript) or accepts without a signature (TGA).
_FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"RIFF", b"II*\x00", b"MM\x00*", b"BM")
_ORIENTATION = 0x0112
# Exif 2.32, tag Orientation -> the transposition that turns the stored image upright.
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
    """Decode an image: upright, on white where it is transparent, the first frame of an animation.

    Grey of more than 8 bits is scaled to 8: from 12 bits if no value is larger, else from 16. CMYK is
    converted by Pillow's formula. Colour profiles are not applied.

    Args:
        data: the encoded image.
        key: of the sample, for ``Broken``.
        max_pixels: largest width times height.
    """
    if not data:
        return Broken(key, "empty file")
    load_truncated = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = False  # another package may have asked for grey instead of an error
    try:
        # Pillow warns of large images and of damaged Exif data, which is ignored below.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(BytesIO(data), formats=_formats()) as image:
                return rgb(image, key, max_pixels)
    except Image.DecompressionBombError as error:
        return Broken(key, "too many pixels", one_line(error))
    except UnidentifiedImageError:
        if data.startswith(_SIGNATURES):
            return Broken(key, "truncated image", "the header is damaged or cut off")
        return Broken(key, "no image", f"begins with {data[:8]!r}")
    except Exception as error:  # noqa: BLE001  Pillow raises anything on damaged files
        return _damaged(error, data, key)
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = load_truncated


def rgb(image: Image.Image, key: str, max_pixels: int = MAX_PIXELS) -> UInt8[np.ndarray, "h w 3"] | Broken:
    """Convert an opened Pillow image of any mode as ``decode`` does. Pillow's errors on damaged data pass through."""
    if image.width * image.height > max_pixels:
        return Broken(key, "too many pixels", f"{image.width} x {image.height}; at most {max_pixels}")
    if not image.width * image.height:
        return Broken(key, "no image", "no pixels")
    image.load()
    try:
        orientation = int(image.getexif().get(_ORIENTATION, 1))  # after load(), which turns a TIFF by itself
    except Exception:  # noqa: BLE001  damaged Exif data is no reason to lose an image
        orientation = 1
    try:
        opaque = _opaque(image)
    except ValueError as error:
        return Broken(key, "unsupported pixels", f"mode {image.mode}: {one_line(error)}")
    return np.asarray(opaque.transpose(_UPRIGHT[orientation]) if orientation in _UPRIGHT else opaque)


def _opaque(image: Image.Image) -> Image.Image:
    if image.mode == "I" or image.mode.startswith("I;16"):
        # Pillow would clip. Some of its versions open 16-bit files as mode I.
        grey = np.asarray(image).astype(np.float64)
        grey = np.clip(grey * (255 / (4095 if grey.max() <= 4095 else 65535)), 0, 255)
        return Image.fromarray(np.rint(grey).astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("floating-point numbers of unknown range")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, "white")
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _damaged(error: Exception, data: bytes, key: str) -> Broken:
    words = one_line(error)
    is_cut = (
        isinstance(error, (EOFError, struct.error))
        or any(sign in words.lower() for sign in ("truncated", "unexpected end", "not enough", "broken data stream"))
        # WebP's decoder gives no reason, but the header holds the length.
        or (data[:4] == b"RIFF" and int.from_bytes(data[4:8], "little") + 8 > len(data))
    )
    return Broken(key, "truncated image" if is_cut else "damaged image", words)


def one_line(error: BaseException) -> str:
    """Format an error as ``Type: message`` on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


@cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(name for name in _FORMATS if name in Image.OPEN)
