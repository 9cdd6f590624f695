"""Check untrusted JSON documents: one predicate per key, with a description of valid values."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

Check: TypeAlias = tuple[Callable[[Any], bool], str]
"""Predicate for a value, and a description of valid values ("a positive number")."""


def problem_with(document: Any, checks: Mapping[str, Check]) -> str | None:
    """Describe the first problem of ``document``; None if it is valid.

    Args:
        document: parsed JSON of any type.
        checks: one check per key; the document must have exactly these keys.

    Returns:
        Phrase that names the key, such as ``key 'step' must be an integer of at least 0, not -1``.
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
    """Whether ``value`` is a 64-bit integer of at least ``low``; booleans are not."""
    return type(value) is int and low <= value < 1 << 63


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number; booleans are not, nor NaN, which Python's JSON reads."""
    return is_int(value, -(1 << 63)) or (type(value) is float and math.isfinite(value))


def is_text(value: Any) -> bool:
    """Whether ``value`` is a non-empty text that prints on one line."""
    return isinstance(value, str) and value != "" and value.isprintable()


def integer(low: int) -> Check:
    """Check for an integer of at least ``low``."""
    return lambda value: is_int(value, low), f"an integer of at least {low}"


def matching(pattern: str, wanted: str) -> Check:
    """Check for a text that ``pattern`` matches completely."""
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None, wanted


def one_of(choices: Sequence[str]) -> Check:
    """Check for one of several texts."""
    return lambda value: value in choices, f"one of {', '.join(choices)}"


def optional(check: Check) -> Check:
    """Check for null or what ``check`` accepts."""
    is_right, wanted = check
    return lambda value: value is None or is_right(value), f"null or {wanted}"


def is_shape(value: Any, length: int) -> bool:
    """Whether ``value`` is a list of ``length`` positive sizes whose product is at most 2^24."""
    is_sizes = isinstance(value, list) and len(value) == length and all(is_int(size, 1) for size in value)
    return is_sizes and math.prod(value) <= 1 << 24


def is_normalisation(value: Any) -> bool:
    """Whether ``value`` holds a nonzero scale and a shift, each one number or one per channel."""

    def numbers(entry: Any) -> list[Any]:
        return entry if isinstance(entry, list) else [entry]

    if not isinstance(value, dict) or set(value) != {"scale", "shift"}:
        return False
    every = [*numbers(value["scale"]), *numbers(value["shift"])]
    return all(map(is_number, every)) and 0 not in numbers(value["scale"]) and [] not in value.values()


def list_of(check: Check) -> Check:
    """Check for a list whose entries ``check`` accepts."""
    is_right, wanted = check
    return lambda value: isinstance(value, list) and all(map(is_right, value)), f"a list, each {wanted}"


def object_of(checks: Mapping[str, Check]) -> Check:
    """Check for an object with exactly the keys of ``checks``."""
    return lambda value: problem_with(value, checks) is None, f"an object of valid {', '.join(checks)}"


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
TEXTS: Check = (lambda value: isinstance(value, dict) and all(map(is_text, value.values())), "an object of texts")
SHARES: Check = (_is_shares, "a list of positive numbers that sum to 1")
X_SHAPE: Check = (lambda value: is_shape(value, 3), "a list of channels, height and width, at most 2^24 numbers")
NORMALISATION: Check = (
    is_normalisation,
    "a nonzero scale and a shift, each one number or one per channel",
)
PLUGIN: Check = (_is_plugin, "an object of a name and params")
SHA256: Check = matching(r"[0-9a-f]{64}", "64 hexadecimal digits")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
