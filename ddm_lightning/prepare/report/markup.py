"""Pieces of HTML; every text that comes in is cut and escaped."""

from __future__ import annotations

import base64
import html
import io
import unicodedata
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import UInt8
from PIL import Image

CAPTION_LENGTH = 120
_JOINERS = "\u200d\ufe0e\ufe0f"


def escape(text: str) -> str:
    """Text as HTML, quotes included; what is no Unicode becomes a question mark."""
    return html.escape(text.encode("utf-8", "replace").decode("utf-8"))


def shorten(text: str, length: int = CAPTION_LENGTH) -> str:
    """One line of at most ``length`` characters, without control characters, ended with dots where it was cut."""
    # A caption may be a book; and a run of spaces may be long, too.
    start = text[: 8 * length]
    line = " ".join("".join(c if unicodedata.category(c) != "Cc" else " " for c in start).split())
    if len(line) <= length and len(start) == len(text):
        return line
    line = line[:length]
    # Half a family of joined emoji, or a letter without its accents, is better than a dangling joiner.
    while line and (line[-1] in _JOINERS or line[-1].isspace()):
        line = line[:-1]
    return line + "…"


def text_of(text: str) -> str:
    """A text of strangers, shortened and escaped; whatever direction it is written in stays inside it."""
    return f"<bdi>{escape(shorten(text))}</bdi>"


def table(head: Sequence[str], rows: Iterable[Sequence[str]], texts: int = 1) -> str:
    """A table whose first ``texts`` columns are text and whose others are numbers.

    Cells are HTML; headings are texts, all empty for none.
    """
    kinds = ["" if column < texts else ' class="number"' for column in range(len(head))]
    top = "".join(f'<th scope="col"{kind}>{escape(text)}</th>' for text, kind in zip(head, kinds, strict=True))
    body = ""
    for first, *others in rows:
        cells = "".join(f"<td{kind}>{cell}</td>" for cell, kind in zip(others, kinds[1:], strict=True))
        body += f'<tr><th scope="row">{first}</th>{cells}</tr>\n'
    thead = f"<thead><tr>{top}</tr></thead>\n" if any(head) else ""
    return f'<div class="wide"><table>\n{thead}<tbody>\n{body}</tbody>\n</table></div>\n'


def chart(light: bytes, dark: bytes, alt: str, caption: str) -> str:
    """A figure in two versions, of which the page's colours choose."""
    return (
        '<figure class="card"><picture>'
        f'<source media="(prefers-color-scheme: dark)" srcset="{data_url(dark)}">'
        f'<img src="{data_url(light)}" alt="{escape(alt)}"></picture>'
        f"<figcaption>{escape(caption)}</figcaption></figure>\n"
    )


def thumbnail(picture: UInt8[np.ndarray, "s s 3"], caption: str) -> str:
    """A small picture; its caption shows when pointed at."""
    text = escape(shorten(caption))
    title = f' title="{text}"' if text else ""
    return f'<img src="{data_url(picture_bytes(picture))}" alt="{text}"{title} loading="lazy">'


def picture_bytes(picture: UInt8[np.ndarray, "s s 3"]) -> bytes:
    """PNG or JPEG, whichever is smaller: drawings take the one, photographs the other."""
    image = Image.fromarray(np.ascontiguousarray(picture))
    png, jpeg = io.BytesIO(), io.BytesIO()
    image.save(png, format="PNG", optimize=True)
    image.save(jpeg, format="JPEG", quality=88)
    return min(png.getvalue(), jpeg.getvalue(), key=len)


def data_url(image: bytes) -> str:
    """PNG or JPEG bytes as a URL that needs no network."""
    kind = "png" if image.startswith(b"\x89PNG") else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(image).decode('ascii')}"
