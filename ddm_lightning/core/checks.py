"""The one validator: settings against dataclasses, untrusted JSON documents against one check per key."""

from __future__ import annotations

import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import field, fields, is_dataclass
from typing import Any, NoReturn, TypeAlias

from ddm_lightning.core.errors import UserError

Check: TypeAlias = tuple[Callable[[Any], bool], str]
"""Predicate for a value, and a description of valid values ("a positive number")."""

MISSING_MARK = "???"
"""OmegaConf's mark for a field without a value."""


def is_int(value: Any, low: int) -> bool:
    """Whether ``value`` is a 64-bit integer of at least ``low``; booleans are not."""
    return type(value) is int and low <= value < 1 << 63


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number; booleans are not, nor NaN, which Python's JSON reads."""
    return is_int(value, -(1 << 63)) or (type(value) is float and math.isfinite(value))


def is_shape(value: Any, length: int) -> bool:
    """Whether ``value`` is a list of ``length`` positive sizes whose product is at most 2^24."""
    is_sizes = isinstance(value, list) and len(value) == length and all(is_int(size, 1) for size in value)
    return is_sizes and math.prod(value) <= 1 << 24


def integer(low: int) -> Check:
    """Check for an integer of at least ``low``."""
    return lambda value: is_int(value, low), f"an integer of at least {low}"


def within(low: float, high: float = math.inf) -> Check:
    """Check for a number from ``low`` to ``high``."""
    return lambda value: low <= value <= high, f"from {low} to {high}" if high < math.inf else f"at least {low}"


def matching(pattern: str, wanted: str) -> Check:
    """Check for a string that ``pattern`` matches completely."""
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None, wanted


def one_of(choices: Sequence[str]) -> Check:
    """Check for one of several strings."""
    return lambda value: value in choices, f"one of {', '.join(choices)}"


def optional(check: Check) -> Check:
    """Check for null or a value that ``check`` accepts."""
    is_right, wanted = check
    return lambda value: value is None or is_right(value), f"null or {wanted}"


def list_of(check: Check) -> Check:
    """Check for a list whose entries ``check`` accepts."""
    is_right, wanted = check
    return lambda value: isinstance(value, list) and all(map(is_right, value)), f"a list, each {wanted}"


def values_of(check: Check, wanted: str) -> Check:
    """Check for an object with any keys, whose values ``check`` accepts."""
    return lambda value: isinstance(value, dict) and all(map(check[0], value.values())), wanted


def object_of(checks: Mapping[str, Check]) -> Check:
    """Check for an object with exactly the keys of ``checks``."""
    return lambda value: problem_with(value, checks) is None, f"an object of valid {', '.join(checks)}"


def _is_normalisation(value: Any) -> bool:
    if not isinstance(value, dict) or set(value) != {"scale", "shift"}:
        return False
    scale, shift = (entry if isinstance(entry, list) else [entry] for entry in (value["scale"], value["shift"]))
    return bool(scale and shift) and all(map(is_number, [*scale, *shift])) and 0 not in scale


def _is_shares(value: Any) -> bool:
    positive = isinstance(value, list) and all(is_number(share) and share > 0 for share in value)
    return positive and abs(sum(value) - 1) < 1e-6


def _is_interval(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(is_number, value)) and 0 <= value[0] < value[1] <= 1


def uncovered(intervals: Iterable[list[float]]) -> str | None:
    """Describe the first times of [0, 1] that not exactly one of the ``intervals`` holds; None if there are none."""
    reached = 0.0
    for low, high in [*sorted(intervals), [1.0, 1.0]]:
        if low > reached:
            return f"no expert for t from {reached:g} to {low:g}"
        if low < reached:
            return f"two experts for t from {low:g} to {min(reached, high):g}"
        reached = high
    return None


TEXT: Check = (
    lambda value: isinstance(value, str) and value != "" and value.isprintable(),
    "a string of one line",
)
ANY_TEXT: Check = (lambda value: isinstance(value, str), "a string")
OBJECT: Check = (lambda value: isinstance(value, dict), "an object")
POSITIVE: Check = (lambda value: is_number(value) and value > 0, "a positive number")
NUMBERS: Check = values_of((is_number, ""), "an object of finite numbers")
TEXTS: Check = values_of(TEXT, "an object of texts")
SHARES: Check = (_is_shares, "a list of positive numbers that sum to 1")
X_SHAPE: Check = (lambda value: is_shape(value, 3), "a list of channels, height and width, at most 2^24 numbers")
NORMALISATION: Check = (_is_normalisation, "a nonzero scale and a shift, each one number or one per channel")
PLUGIN: Check = object_of({"name": TEXT, "params": OBJECT})
INTERVAL: Check = (_is_interval, "two times, 0 <= low < high <= 1")
_NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
COMPARISON: Check = matching(
    rf"(<|<=|>|>=)\s*{_NUMBER}|(==|!=)\s*\S.*", "a comparison with a number, such as '>= 5', or '== text'"
)
SHA256: Check = matching(r"[0-9a-f]{64}", "64 hexadecimal digits")


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


def field_checks(kind: type) -> dict[str, Check]:
    """Checks of a dataclass's fields by name, from annotations ``Annotated[type, check]``; other fields have none."""
    hints = typing.get_type_hints(kind, include_extras=True)
    return {name: hint.__metadata__[0] for name, hint in hints.items() if hasattr(hint, "__metadata__")}


CHANGEABLE = {"changeable": True}
"""Metadata of a settings field that may differ between two starts: it changes neither the shards nor the training."""


def option(
    default: Any,
    *,
    choices: Sequence[str] = (),
    low: float = -math.inf,
    high: float = math.inf,
    changeable: bool = False,
) -> Any:
    """Field of a settings dataclass: a text among ``choices``, or a number from ``low`` to ``high``."""
    return field(
        default=default,
        metadata={
            "check": one_of(choices) if choices else within(low, high),
            "choices": choices,
            "changeable": changeable,
        },
    )


@functools.cache
def hints(kind: Any) -> dict[str, Any]:
    """Types of a dataclass's fields by name."""
    resolved = typing.get_type_hints(kind)
    return {field.name: resolved[field.name] for field in fields(kind)}


@functools.cache
def limits(kind: Any) -> dict[str, Check]:
    """Checks of a dataclass's ``option`` fields, by name."""
    return {field.name: field.metadata["check"] for field in fields(kind) if "check" in field.metadata}


def check(value: Any, kind: Any, key: str, source: str, references: bool = True) -> None:
    """Check ``value`` against ``kind``; missing values pass.

    OmegaConf's own conversions are too lenient: a boolean becomes the text "False", NaN is a valid learning rate.

    Args:
        value: parsed YAML: dicts, lists, text, numbers, booleans, None.
        kind: a dataclass, ``int``, ``float``, ``bool``, ``str``, ``list[...]``, ``dict[str, ...]``, or a union of one
            of these and None. Any other kind, such as a plug-in's, takes what can be stored as JSON.
        key: dotted key of ``value``, empty at the top.
        source: begins the error line, such as the file's name.
        references: whether a reference ``${…}`` passes for any kind.

    Raises:
        UserError: an unknown key, a wrong type, or a value outside the limits of its ``option``.
    """
    kind, is_optional = without_none(kind)
    if _is_open(value, references) or (is_optional and value is None):
        return
    if is_dataclass(kind):
        _check_section(value, kind, key, source, references)
        return
    origin = typing.get_origin(kind) or kind
    inner = typing.get_args(kind)[-1] if origin in _CONTAINERS and typing.get_args(kind) else Any
    is_right, wanted, remedy = _KINDS.get(_CONTAINERS.get(origin, origin), _KINDS[Any])
    if not is_right(value):
        _refuse(source, key, wanted, value, remedy)
    if isinstance(value, list):
        for index, item in enumerate(value):
            check(item, inner, f"{key}[{index}]", source, references)
    elif isinstance(value, dict):
        for name, item in value.items():
            below = f"{key}.{name}"
            if not isinstance(name, str):
                _refuse(source, below, "a string as a key", name, "put the key into quotes")
            check(item, inner, below, source, references)


# Of each kind: whether a value is one, its name, and the remedy for any other value.
_KINDS: dict[Any, tuple[Callable[[Any], bool], str, str]] = {
    bool: (lambda value: type(value) is bool, "true or false", "write true or false, without quotes"),
    str: (
        lambda value: type(value) is str,
        "a string",
        "put it into quotes (YAML reads yes, no and 1e3 as other types)",
    ),
    int: (
        lambda value: is_int(value, -(1 << 63)),
        "a whole number",
        "give digits only, without quotes, for a number below 2^63",
    ),
    float: (is_number, "a finite number", "give a number, without quotes"),
    list: (lambda value: isinstance(value, list), "a list", "write it as [a, b]"),
    dict: (lambda value: isinstance(value, dict), "a mapping", "write it as {name: value}"),
    Any: (
        lambda value: value is None or isinstance(value, (str, bool, list, dict)) or is_number(value),
        "text, a finite number, true, false or null",
        "change the value",
    ),
}
_CONTAINERS: dict[Any, Any] = {list: list, Sequence: list, dict: dict, Mapping: dict}


def kept(record: Any, kind: Any) -> Any:
    """The keys of a record that the dataclass ``kind`` has; others, of earlier releases, do not count."""
    kind, _ = without_none(kind)
    is_section = is_dataclass(kind) and isinstance(record, dict)
    known = hints(kind) if is_section else {}
    return {name: kept(record[name], known[name]) for name in record if name in known} if is_section else record


def without_none(kind: Any) -> tuple[Any, bool]:
    """A type without its option None, and whether it has that option."""
    options = [inner for inner in typing.get_args(kind) if inner is not type(None)]
    is_union = isinstance(kind, types.UnionType) or typing.get_origin(kind) is typing.Union
    return (options[0], True) if is_union and len(options) == 1 else (kind, False)


def _is_open(value: Any, references: bool) -> bool:
    """Whether ``value`` is not known yet: missing, or a reference."""
    return isinstance(value, str) and (value == MISSING_MARK or (references and "${" in value))


def _check_section(value: Any, kind: Any, key: str, source: str, references: bool) -> None:
    kinds = hints(kind)
    known = f"known there: {', '.join(kinds)}"
    if not isinstance(value, dict):
        remedy = f"write it as {{name: {value}}}" if "name" in kinds and isinstance(value, str) else known
        _refuse(source, key, "a section of keys", value, remedy)
    for name, inner in value.items():
        below = f"{key}.{name}" if key else str(name)
        if name not in kinds:
            near = difflib.get_close_matches(str(name), list(kinds), n=1)
            guess = f"did you mean {near[0]!r}? " if near else ""
            raise UserError(f"{source}: unknown key {below!r}; {guess}{known}")
        check(inner, kinds[name], below, source, references)
        if name in limits(kind) and inner is not None and not _is_open(inner, references):
            is_right, wanted = limits(kind)[name]
            if not is_right(inner):
                raise UserError(f"{source}: key {below!r} = {inner!r}: must be {wanted}")


def _refuse(source: str, key: str, wanted: str, value: Any, remedy: str) -> NoReturn:
    where = f"key {key!r}: " if key else ""
    shown = "null" if value is None else _short(value)
    raise UserError(f"{source}: {where}must be {wanted}, is {shown}; {remedy}")


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
