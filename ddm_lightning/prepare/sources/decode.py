"""Decode images and captions for records, or give the reason why they are unusable."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from io import BytesIO
from typing import Any, TypeAlias, TypedDict

from PIL import ExifTags, Image, PngImagePlugin, UnidentifiedImageError

from ddm_lightning.core.buckets import Size
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.rgb import rgb
from ddm_lightning.prepare.records import BrokenSample, Pixels

LeastSize: TypeAlias = Callable[[Size], Size]
MAX_PIXELS = 1 << 27
"""Largest width times height to decode: the header of a small file can claim any size."""

# Excludes formats that Pillow passes to another program (EPS: Ghostscript) or accepts without a signature (TGA).
_FORMATS = ("JPEG", "MPO", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "JPEG2000", "AVIF")
# Pillow takes longer text and colour profiles of a PNG, which others write and nobody reads here, for an attack.
PngImagePlugin.MAX_TEXT_CHUNK = PngImagePlugin.MAX_TEXT_MEMORY
# Orientations of the Exif standard.
_UPRIGHT = 1
_ON_ITS_SIDE = range(5, 9)
_LARGEST_FACTOR = 8
_SIGNATURES = (b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"GIF8", b"RIFF", b"II*\x00", b"MM\x00*", b"BM")


class Decoded(TypedDict):
    """Fields of a ``Record``."""

    image: Pixels
    full_size: Size | None


def decode(data: bytes | Image.Image | Exception, key: str, max_pixels: int = MAX_PIXELS) -> Pixels | BrokenSample:
    """Decode all pixels of an image; see ``decode_reduced``."""
    found = decode_reduced(data, key, None, max_pixels)
    return found if isinstance(found, BrokenSample) else found["image"]


def decode_reduced(
    data: bytes | Image.Image | Exception, key: str, least_size: LeastSize | None, max_pixels: int = MAX_PIXELS
) -> Decoded | BrokenSample:
    """Decode an image: upright, on white where it is transparent, the first frame of an animation.

    The one decoder of images from other people; ``rgb`` says what becomes of their pixels.

    Args:
        data: the encoded image, an image that Pillow has opened, or the error of reading it.
        key: of the sample, for ``BrokenSample``.
        least_size: from height and width of an image to those that it keeps at least; a JPEG is decoded at the smallest
            of 1/2, 1/4 and 1/8 that is as large. None keeps all pixels.
        max_pixels: largest width times height.

    Returns:
        ``image`` and ``full_size`` of the ``Record``.
    """
    if isinstance(data, Exception):
        return _unread(data, key)
    if not data:
        return BrokenSample(key, "empty file")

    try:
        # Pillow warns of large images and of damaged Exif data, which is ignored below.
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with Image.open(BytesIO(data), formats=_formats()) if isinstance(data, bytes) else data as image:
                return _rgb(image, key, least_size, max_pixels)
    except Image.DecompressionBombError as error:
        return BrokenSample(key, "too many pixels", one_line(error))
    except UnidentifiedImageError:
        head = b""
        if isinstance(data, bytes):
            head = data[:8]

        cause = "no image"
        if head.startswith(_SIGNATURES):
            cause = "damaged image"

        return BrokenSample(key, cause, f"begins with {head!r}")
    except Exception as error:  # noqa: BLE001  Pillow raises anything on damaged files
        return BrokenSample(key, "damaged image", one_line(error))


def _rgb(image: Image.Image, key: str, least_size: LeastSize | None, max_pixels: int) -> Decoded | BrokenSample:
    if image.width * image.height > max_pixels:
        return BrokenSample(key, "too many pixels", f"{image.width} x {image.height}; at most {max_pixels}")
    if not image.width * image.height:
        return BrokenSample(key, "no image", "no pixels")

    full_size = None
    if least_size is not None:
        full_size = _reduce(image, least_size)

    try:
        return {"image": rgb(image), "full_size": full_size}
    except UserError as error:
        return BrokenSample(key, "unsupported pixels", str(error))


def _reduce(image: Image.Image, least_size: LeastSize) -> Size | None:
    """Let a JPEG be decoded at a lower resolution; return the height and width it would have, None for the same."""
    if image.format not in ("JPEG", "MPO"):
        return None

    turn = _UPRIGHT
    with suppress(Exception):  # ``rgb`` leaves an image with damaged Exif data as it is
        turn = image.getexif().get(ExifTags.Base.Orientation, turn)

    before = image.size
    # The decoder fills up the last column and row, which ``Record.full_size`` expects on the right and at the bottom.
    if turn != _UPRIGHT and (before[0] % _LARGEST_FACTOR or before[1] % _LARGEST_FACTOR):
        return None

    lies = turn in _ON_ITS_SIDE
    full_size = before if lies else before[::-1]  # height and width once it is upright
    least = least_size(full_size)
    image.draft(None, least if lies else least[::-1])
    return full_size if image.size != before else None


def caption_in(value: Any, key: str) -> str | BrokenSample:
    """Return the caption of a cell: its text, the first non-empty entry of a list, or the empty string for null.

    Bytes are UTF-8; a byte-order mark and surrounding white space are removed. An exception stands for a caption that
    could not be read.
    """
    if isinstance(value, Exception):
        return _unread(value, key)
    if isinstance(value, list):
        value = next((one for one in value if caption_in(one, key)), None)

    if isinstance(value, bytes):
        try:
            return value.decode("utf-8-sig").strip()
        except UnicodeDecodeError as error:
            return BrokenSample(key, "caption is not UTF-8", str(error))

    if value is None or isinstance(value, str):
        return value if value and value.strip() else ""

    return BrokenSample(key, "caption is not text", f"a {type(value).__name__}")


def _unread(error: Exception, key: str) -> BrokenSample:
    cause = "unreadable file"
    if isinstance(error, FileNotFoundError):
        cause = "missing file"

    return BrokenSample(key, cause, one_line(error))


def one_line(error: BaseException) -> str:
    """Format an error as ``Type: message`` on one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


@cache
def _formats() -> tuple[str, ...]:
    Image.init()
    return tuple(filter(Image.OPEN.__contains__, _FORMATS))
