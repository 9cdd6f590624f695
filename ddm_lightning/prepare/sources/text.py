"""Captions as they are found in files and columns."""

from __future__ import annotations

from typing import Any

from ddm_lightning.prepare.records import Broken


def caption_of(data: bytes, key: str) -> str | Broken:
    """The caption in a UTF-8 file, without a byte-order mark and without white space around it."""
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        return Broken(key, "caption is no UTF-8", str(error))


def caption_in(value: Any, key: str) -> str | Broken:
    """The caption in a cell: text as it is, the first of a list, nothing for null."""
    if isinstance(value, list):
        value = value[0] if value else None
    if value is None:
        return ""
    if isinstance(value, bytes):
        return caption_of(value, key)
    return value if isinstance(value, str) else Broken(key, "caption is no text", f"a {type(value).__name__}")
