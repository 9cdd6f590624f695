"""The one validator, by type annotations: settings, which people write, and records, JSON that may be a stranger's.

Both are described by dataclasses. ``Annotated[int, within(0)]`` narrows a type by a ``Check``; so does ``option``, a
field of settings.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import types
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias, TypeVar

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import read_json

Check: TypeAlias = tuple[Callable[[Any], bool], str]
"""Predicate for a value of the right type, and a description of valid values ("at least 1")."""

MISSING_MARK = "???"
"""OmegaConf's mark for a field without a value."""
_Kind = TypeVar("_Kind")


def is_int(value: Any, low: int) -> bool:
    """Whether ``value`` is a 64-bit integer of at least ``low``; booleans are not."""
    return type(value) is int and low <= value < 1 << 63


def is_number(value: Any) -> bool:
    """Whether ``value`` is a finite number; booleans are not, nor NaN, which Python's JSON reads."""
    return is_int(value, -(1 << 63)) or (type(value) is float and math.isfinite(value))


def within(low: float, high: float = math.inf) -> Check:
    """Check for a number from ``low`` to ``high``."""
    return lambda value: low <= value <= high, f"from {low} to {high}" if high < math.inf else f"at least {low}"


def matching(pattern: str, wanted: str) -> Check:
    """Check for a string that ``pattern`` matches completely."""
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None, wanted


def one_of(choices: Iterable[str]) -> Check:
    """Check for one of several strings."""
    return lambda value: value in choices, f"one of {', '.join(choices)}"


def version(number: int) -> Check:
    """Check for the version of a format."""
    return within(number, number)[0], f"{number} (for another, install the release of ddm_lightning that wrote it)"


def shape(length: int) -> Check:
    """Check for a shape of ``length`` sizes; larger ones would exhaust the memory."""
    return (
        lambda sizes: len(sizes) == length and math.prod(sizes) <= 1 << 24,
        f"{length} sizes, of at most 2^24 numbers",
    )


def _is_normalisation(value: Any) -> bool:
    if set(value) != {"scale", "shift"}:
        return False

    numbers = {}
    for name, entry in value.items():
        numbers[name] = entry if isinstance(entry, list) else [entry]
        if not numbers[name] or not all(map(is_number, numbers[name])):
            return False

    return 0 not in numbers["scale"]


def uncovered(intervals: Iterable[list[float] | tuple[float, float]]) -> str | None:
    """Describe the first times of [0, 1] that not exactly one of the ``intervals`` holds; None if there are none."""
    reached = 0.0
    for low, high in [*sorted(intervals), (1.0, 1.0)]:
        if low > reached:
            return f"no expert for t from {reached:g} to {low:g}"
        if low < reached:
            return f"two experts for t from {low:g} to {min(reached, high):g}"

        reached = high

    return None


INTERVAL: Check = (
    lambda times: len(times) == 2 and 0 <= times[0] < times[1] <= 1,
    "two times, 0 <= low < high <= 1",
)
_NUMBER = r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?"
COMPARISON: Check = matching(
    rf"(<|<=|>|>=)\s*{_NUMBER}|(==|!=)\s*\S.*", "a comparison with a number, such as '>= 5', or '== text'"
)
SHA256: Check = matching(r"[0-9a-f]{64}", "64 hexadecimal digits")

Text: TypeAlias = Annotated[str, (lambda text: text != "" and text.isprintable(), "a string of one line")]
Sha256: TypeAlias = Annotated[str, SHA256]
Count: TypeAlias = Annotated[int, within(0)]
Size: TypeAlias = Annotated[int, within(1)]
Amount: TypeAlias = Annotated[float, within(0)]
Positive: TypeAlias = Annotated[float, (lambda number: number > 0, "a positive number")]
Shares: TypeAlias = Annotated[
    tuple[Positive, ...], (lambda shares: abs(sum(shares) - 1) < 1e-6, "positive numbers that sum to 1")
]
Shape3: TypeAlias = Annotated[tuple[Size, Size, Size], shape(3)]
Normalisation: TypeAlias = Annotated[
    dict[str, Any], (_is_normalisation, "a nonzero scale and a shift, each one number or one per channel")
]


CHANGEABLE = {"changeable": True}
"""Metadata of a settings field that may differ between two starts: it changes neither the shards nor the training."""


def choice(*names: str, changeable: bool = False) -> Any:
    """Field of a settings dataclass: one of several texts, by default the first."""
    return option(names[0], check=one_of(names), changeable=changeable)


def option(
    default: Any,
    *,
    low: float = -math.inf,
    high: float = math.inf,
    check: Check | None = None,
    changeable: bool = False,
) -> Any:
    """Field of a settings dataclass: a number from ``low`` to ``high``, or as ``check`` says.

    A value that may be null is checked only if it is not.
    """
    metadata = {"check": check or within(low, high), "changeable": changeable}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)

    return field(default=default, metadata=metadata)


def guess(name: str, known: Iterable[str], others: Iterable[str] = ()) -> str:
    """Part of a line about an unknown ``name``: the known one that resembles it and ``others``, or nothing."""
    near = [*difflib.get_close_matches(name, known, n=1), *others]
    return f"did you mean {' or '.join(map(repr, near))}? " if near else ""


@functools.cache
def hints(kind: Any) -> dict[str, Any]:
    """Types of a dataclass's fields by name, with the checks that narrow them."""
    resolved = typing.get_type_hints(kind, include_extras=True)
    return {own.name: narrowed(resolved[own.name], own) for own in fields(kind)}


def keys_of(kind: Any, key: str) -> Iterator[str]:
    """Yield ``key``, of type ``kind``, and all dotted keys below it."""
    yield key
    kind, _ = without_none(kind)
    if is_dataclass(kind):
        for name, inner in hints(kind).items():  # type: ignore[arg-type]  # a class
            yield from keys_of(inner, f"{key}.{name}")


def narrowed(kind: Any, own: Field[Any]) -> Any:
    """The type of a field with the check of its ``option``, if it has one."""
    if "check" in own.metadata:
        return Annotated[kind, own.metadata["check"]]

    return kind


def check_positive(name: str, value: int | None) -> None:
    """Refuse an option or argument below 1."""
    if value is not None and value < 1:
        raise UserError(f"{name} {value}: must be at least 1")


def check(value: Any, kind: Any, key: str, source: str, references: bool = True) -> None:
    """Check settings against ``kind``; missing values pass.

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
    _Checker(source, references, keys=keys_of(kind, key)).checked(value, kind, key)


def record(document: Any, kind: type[_Kind], source: str, remedy: str) -> _Kind:
    """Check parsed JSON, and make what it describes.

    Args:
        document: perhaps a stranger's.
        kind: a dataclass, or any other kind that ``check`` takes. Keys whose fields have defaults may be missing.
        source: begins the error line, such as the file's name.
        remedy: ends it.

    Raises:
        UserError: a wrong, missing or unknown key, or a ``ValueError`` of the dataclass.
    """
    return typing.cast("_Kind", _Checker(source, remedy=remedy).checked(document, kind, ""))


def read_record(path: Path, kind: type[_Kind], what: str, remedy: str) -> _Kind:
    """Read the JSON file ``path`` as ``record`` does; ``what`` it is begins some error lines.

    Raises:
        UserError: the file is missing or not JSON, or as ``record``.
    """
    return record(read_json(path, what, remedy), kind, str(path), remedy)


def kept(record: Any, kind: Any) -> Any:
    """The keys of a record that the dataclass ``kind`` has; others, of earlier releases, do not count."""
    kind, _ = without_none(kind)
    is_section = is_dataclass(kind) and isinstance(record, dict)
    if not is_section:
        return record

    known = hints(kind)
    return {name: kept(value, known[name]) for name, value in record.items() if name in known}


@functools.cache
def without_none(kind: Any) -> tuple[Any, bool]:
    """A type without its option None, and whether it has that option."""
    is_union = typing.get_origin(kind) in (types.UnionType, typing.Union)
    options = [inner for inner in typing.get_args(kind) if inner is not type(None)]
    if is_union and len(options) == 1:
        return options[0], True

    return kind, False


# Of each type: whether a value has it, its name, and the remedy for any other value of settings.
_TYPES: dict[Any, tuple[Callable[[Any], bool], str, str]] = {
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
    list: (lambda value: isinstance(value, (list, tuple)), "a list", "write it as [a, b]"),
    dict: (lambda value: isinstance(value, dict), "a mapping", "write it as {name: value}"),
    Any: (
        lambda value: value is None or isinstance(value, (str, bool, list, dict)) or is_number(value),
        "text, a finite number, true, false or null",
        "change the value",
    ),
}
_MOST_LEVELS = 100
_CONTAINERS: dict[Any, Any] = {list: list, tuple: list, Sequence: list, dict: dict, Mapping: dict}


@dataclass(frozen=True)
class _Checker:
    """Checks values against types."""

    source: str
    """Begins error lines."""
    references: bool = False
    """Whether references pass."""
    remedy: str = ""
    """Ends error lines about a record, which must be complete and becomes what it describes; empty for settings."""
    keys: Iterable[str] = ()
    """All dotted keys, for a hint where a misplaced one belongs."""

    def checked(self, value: Any, kind: Any, key: str) -> Any:
        """Check a value; return what it describes."""
        kind, is_optional = without_none(kind)
        if self._is_open(value) or (is_optional and value is None):
            return value

        if hasattr(kind, "__metadata__"):
            found = self.checked(value, kind.__origin__, key)
            is_right, wanted = kind.__metadata__[0]
            if value is not None and not is_right(value):
                self._refuse(f"key {key!r} = {_short(value)}: must be {wanted}")

            return found

        if is_dataclass(kind):
            return self._section(value, kind, key)

        origin = typing.get_origin(kind) or kind
        is_right, wanted, remedy = _TYPES.get(_CONTAINERS.get(origin, origin), _TYPES[Any])
        if not is_right(value) or (value == MISSING_MARK and self.remedy):
            self._refuse_value(key, wanted, value, remedy)

        if key.count(".") + key.count("[") > _MOST_LEVELS:
            self._refuse(f"key {_short(key)} is nested too deep")

        inner = (typing.get_args(kind) if origin in _CONTAINERS else ()) or (Any,)
        if isinstance(value, (list, tuple)):
            entries = [self.checked(entry, inner[0], f"{key}[{index}]") for index, entry in enumerate(value)]
            if origin is tuple:
                return tuple(entries)

            return entries

        if isinstance(value, dict):
            found = {}
            for name, entry in value.items():
                below = f"{key}.{name}".lstrip(".")
                if not isinstance(name, str):
                    self._refuse_value(below, "a string as a key", name, "put the key into quotes")

                found[name] = self.checked(entry, inner[-1], below)

            return found

        if kind is float:
            return float(value)

        return value

    def _is_open(self, value: Any) -> bool:
        """Whether a setting is not known yet: missing, or a reference."""
        is_missing = value == MISSING_MARK and not self.remedy
        return isinstance(value, str) and (is_missing or (self.references and "${" in value))

    def _section(self, value: Any, kind: Any, key: str) -> Any:
        kinds = hints(kind)
        known = f"known there: {', '.join(kinds)}"
        if not isinstance(value, dict):
            if "name" in kinds and isinstance(value, str):
                remedy = f"write it as {{name: {value}}}"
            else:
                remedy = known

            self._refuse_value(key, "a section of keys", value, remedy)

        found = {}
        for own in fields(kind):
            below = f"{key}.{own.name}".lstrip(".")
            if own.name in value:
                found[own.name] = self.checked(value[own.name], kinds[own.name], below)
            elif self.remedy and own.default in (MISSING, MISSING_MARK) and own.default_factory is MISSING:
                self._refuse(f"key {below!r} is missing")

        for name in value:
            if name not in kinds:
                below = f"{key}.{name}".lstrip(".")
                others = [full.lstrip(".") for full in self.keys if full.endswith(f".{name}")]
                inside = [full for full in others if full.startswith(f"{key}.")]
                self._refuse(f"unknown key {below!r}; {guess(str(name), kinds, inside or others)}{known}")

        if not self.remedy:
            return found

        try:
            return kind(**found)
        except ValueError as error:
            self._refuse(f"key {key!r}: {error}" if key else str(error))

    def _refuse_value(self, key: str, wanted: str, value: Any, remedy: str) -> NoReturn:
        where = f"key {key!r}: " if key else ""
        found = "null" if value is None else _short(value)
        self._refuse(f"{where}must be {wanted}, is {found}", remedy)

    def _refuse(self, problem: str, remedy: str = "") -> NoReturn:
        remedy = self.remedy or remedy
        raise UserError(f"{self.source}: {problem}" + (f"; {remedy}" if remedy else ""))


def _short(value: Any) -> str:
    text = repr(value)
    if len(text) <= 60:
        return text

    return text[:57] + "..."
