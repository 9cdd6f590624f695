"""Checks of JSON documents that strangers wrote: one predicate a key, and the words for what it wants."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Check: TypeAlias = tuple[Callable[[Any], bool], str]
"""Whether a value will do, and what it must be ("a positive number")."""


def problem_with(document: Any, checks: Mapping[str, Check]) -> str | None:
    """The first thing wrong with ``document``, or None.

    Args:
        document: parsed JSON, of any type.
        checks: one check for every key; the document must have exactly these keys.

    Returns:
        A phrase that names the key, such as ``key 'step' must be an integer of at least 0, not -1``.
    """
    if not isinstance(document, dict):
        return f"must be a JSON object, not {_short(document)}"
    for key, (is_right, wanted) in checks.items():
        if key not in document:
            return f"key {key!r} is missing; it must be {wanted}"
        if not is_right(document[key]):
            return f"key {key!r} must be {wanted}, not {_short(document[key])}"
    unknown = sorted(set(document) - set(checks))
    return f"unknown key {unknown[0]!r}; known: {', '.join(checks)}" if unknown else None


def is_int(value: Any, low: int) -> bool:
    """An integer of at least ``low``; JSON's true and false are none."""
    return type(value) is int and value >= low


def is_number(value: Any) -> bool:
    """A finite number; JSON's true and false are none, and Python's JSON reads NaN."""
    return type(value) in (int, float) and math.isfinite(value)


def is_text(value: Any) -> bool:
    """A text that is not empty and prints on one line."""
    return isinstance(value, str) and value != "" and value.isprintable()


def integer(low: int) -> Check:
    """An integer of at least ``low``."""
    return lambda value: is_int(value, low), f"an integer of at least {low}"


def matching(pattern: str, wanted: str) -> Check:
    """A text that ``pattern`` matches as a whole."""
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None, wanted


def one_of(choices: Sequence[str]) -> Check:
    """One of a few texts."""
    return lambda value: value in choices, f"one of {', '.join(choices)}"


def optional(check: Check) -> Check:
    """Null, or what ``check`` wants."""
    is_right, wanted = check
    return lambda value: value is None or is_right(value), f"null or {wanted}"


def _is_plugin(value: Any) -> bool:
    parts = isinstance(value, dict) and set(value) == {"name", "params"}
    return parts and is_text(value["name"]) and isinstance(value["params"], dict)


def _is_shares(value: Any) -> bool:
    positive = isinstance(value, list) and all(is_number(share) and share > 0 for share in value)
    return positive and abs(sum(value) - 1) < 1e-6


TEXT: Check = (is_text, "a text of one line")
OBJECT: Check = (lambda value: isinstance(value, dict), "an object")
LIST: Check = (lambda value: isinstance(value, list), "a list")
POSITIVE: Check = (lambda value: is_number(value) and value > 0, "a positive number")
NUMBERS: Check = (
    lambda value: isinstance(value, dict) and all(map(is_number, value.values())),
    "an object of finite numbers",
)
SHARES: Check = (_is_shares, "a list of positive numbers that sum to 1")
PLUGIN: Check = (_is_plugin, "an object of a name and params")
SHA256: Check = matching(r"[0-9a-f]{64}", "64 hexadecimal digits")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
