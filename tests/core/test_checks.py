from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import pytest
from artifact_files import refused

from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError


@dataclass
class Inner:
    rate: float = 0.5
    """How fast."""
    count: int = checks.option(1, low=0, high=9)
    """How many."""


@dataclass
class Outer:
    name: str = checks.choice("x", "y")
    """What it is called."""
    flag: bool = False
    """Whether it is."""
    limit: float | None = checks.option(None, low=0.5)
    """At most."""
    words: list[str] = field(default_factory=list)
    """Some texts."""
    params: dict[str, Any] = field(default_factory=dict)
    """Anything."""
    inner: Inner = field(default_factory=Inner)
    """A section."""
    other: Inner | None = None
    """A section that may be absent."""


RIGHT = {
    "name": "y",
    "flag": True,
    "limit": 2,
    "words": ["a", ""],
    "params": {"a": [1, {"b": None}], "c": 0.5, "d": False},
    "inner": {"rate": 1, "count": 3},
    "other": {"rate": 0.25, "count": 0},
}


def test_what_fits_passes_and_no_part_of_it_goes_unchecked() -> None:
    assert RIGHT.keys() == checks.hints(Outer).keys()
    for change in ({}, *({key: object()} for key in RIGHT)):
        found = []
        try:
            checks.check({**RIGHT, **change}, Outer, "", "f.yaml")
        except UserError as error:
            found = [str(error).partition("'")[2].partition("'")[0]]
        assert found == list(change)


def test_null_passes_only_where_the_type_says_so() -> None:
    checks.check({"limit": None, "other": None}, Outer, "", "f.yaml")

    for key in ("name", "flag", "words", "params", "inner"):
        with pytest.raises(UserError, match=rf"^f\.yaml: key '{key}': must be .*, is null; "):
            checks.check({key: None}, Outer, "", "f.yaml")


@pytest.mark.parametrize(
    ("value", "line"),
    [
        (
            {"nam": 1},
            "unknown key 'nam'; did you mean 'name'? known there: name, flag, limit, words, params, inner, other",
        ),
        ({"inner": {"zzz": 1}}, "unknown key 'inner.zzz'; known there: rate, count"),
        ({"other": {3: 1}}, "unknown key 'other.3'; known there: rate, count"),
        ({"inner": 3}, "key 'inner': must be a section of keys, is 3; known there: rate, count"),
        ({"name": True}, "key 'name': must be a string, is True; put it into quotes (YAML reads yes"),
        ({"flag": "yes"}, "key 'flag': must be true or false, is 'yes'"),
        ({"limit": "1e-4"}, "key 'limit': must be a finite number, is '1e-4'; give a number, without quotes"),
        ({"limit": True}, "key 'limit': must be a finite number, is True"),
        ({"limit": math.nan}, "key 'limit': must be a finite number, is nan"),
        ({"limit": 10**400}, "key 'limit': must be a finite number, is 1000"),
        ({"inner": {"count": 1e5}}, "key 'inner.count': must be a whole number, is 100000.0; give digits only"),
        ({"inner": {"count": True}}, "key 'inner.count': must be a whole number, is True"),
        ({"words": "a"}, "key 'words': must be a list, is 'a'; write it as [a, b]"),
        ({"words": ["a", 750]}, "key 'words[1]': must be a string, is 750; put it into quotes"),
        ({"params": [1]}, "key 'params': must be a mapping, is [1]; write it as {name: value}"),
        ({"params": {1: 2}}, "key 'params.1': must be a string as a key, is 1; put the key into quotes"),
        (
            {"params": {"a": {"b": [math.inf]}}},
            "key 'params.a.b[0]': must be text, a finite number, true, false or null, is inf",
        ),
        ({"name": ["x" * 100]}, "key 'name': must be a string, is ['" + "x" * 55 + "...; put it into quotes"),
        ({"name": "z"}, "key 'name' = 'z': must be one of x, y"),
        ({"inner": {"count": 10}}, "key 'inner.count' = 10: must be from 0 to 9"),
        ({"inner": {"count": -1}}, "key 'inner.count' = -1: must be from 0 to 9"),
        ({"limit": 0}, "key 'limit' = 0: must be at least 0.5"),
    ],
)
def test_what_does_not_fit_is_one_line(value: Any, line: str) -> None:
    assert refused(lambda: checks.check(value, Outer, "", "f.yaml")).startswith(f"f.yaml: {line}")


NOT_FINITE = [math.nan, math.inf, -math.inf]


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (checks.Count, [0, 2**63 - 1], [-1, 2**63, True, 1.0, "1", None]),
        (checks.Positive, [1, 1e-300], [0, -1, True, "1", *NOT_FINITE]),
        (dict[str, float], [{}, {"a": -1.5, "b": 2}], [[], {"a": True}, {"a": "1"}]),
        (checks.Shares, [[1], [0.25, 0.75]], [[], [0.5, 0.4], [0.5, 0.6], [1.0, 0.0], [1.5, -0.5], [1.0, math.nan]]),
        (checks.Shape3, [[1, 1, 1], [1, 2**12, 2**12]], [[1, 2**12, 2**12 + 1], [3, 4, 0], [3, 4], [3, 4, True]]),
        (
            checks.Normalisation,
            [{"scale": -2, "shift": 0}, {"scale": [1, 2.5], "shift": [0, 1]}],
            [
                *({"scale": scale, "shift": 0} for scale in (0, [1, 0], [], True, math.inf)),
                *({"scale": 1, "shift": shift} for shift in ([], True, math.nan)),
                {"scale": 1},
            ],
        ),
        (checks.Sha256, ["0a" * 32], ["0a" * 31, "0A" * 32, "0a" * 32 + "\n", None]),
        (checks.Text, ["a b"], ["", "a\nb", 1]),
        (checks.Text | None, ["a b", None], ["", 1]),
    ],
)
def test_records_at_their_limits(kind: Any, right: list[Any], wrong: list[Any]) -> None:
    for value in right:
        assert checks.record({"a": value}, dict[str, kind], "f.json", "fetch it") == {"a": value} or kind
    for value in wrong:
        with pytest.raises(UserError, match=r"^f\.json: key 'a\b.*; fetch it$"):
            checks.record({"a": value}, dict[str, kind], "f.json", "fetch it")


@dataclass
class Point:
    at: tuple[float, float]
    """Where."""
    name: checks.Text
    """What."""
    number: checks.Count = 0
    """Which."""

    def __post_init__(self) -> None:
        if self.at == (1.0, 1.0):
            raise ValueError("key 'at' is taken")


@dataclass
class Line:
    points: list[Point]
    """Its points."""
    style: dict[str, Any] | None = None
    """How it is drawn."""


def test_a_record_becomes_what_it_describes() -> None:
    found = checks.record({"points": [{"at": [0, 1], "name": "a"}], "style": {"b": [1]}}, Line, "f.json", "fetch it")
    assert found == Line([Point((0.0, 1.0), "a")], {"b": [1]})
    assert all(type(number) is float for number in found.points[0].at)


@pytest.mark.parametrize(
    ("point", "line"),
    [
        ({"at": [0, 1]}, "key 'points[0].name' is missing"),
        ({"at": [0, 1], "name": "???"}, "key 'points[0].name': must be a string, is '???'"),
        ({"at": [0, "1"], "name": "a"}, "key 'points[0].at[1]': must be a finite number, is '1'"),
        ({"at": [0, 1], "name": ""}, "key 'points[0].name' = '': must be a string of one line"),
        ({"at": [0, 1], "name": "a", "number": -1}, "key 'points[0].number' = -1: must be at least 0"),
        ({"at": [1, 1], "name": "a"}, "key 'points[0]': key 'at' is taken"),
    ],
)
def test_a_wrong_record_is_one_line_with_the_remedy(point: Any, line: str) -> None:
    found = refused(lambda: checks.record({"points": [point]}, Line, "f.json", "fetch it"))
    assert found.startswith(f"f.json: {line}")
    assert found.endswith("; fetch it")


@pytest.mark.parametrize("levels", [200, 450, 900])
def test_lists_in_lists_are_one_line(levels: int) -> None:
    nested: Any = 1
    for _ in range(levels):
        nested = [nested]

    with pytest.raises(UserError, match=r"^f.json: key 'params.x\[0\]\[0\].*is nested too deep; write it anew$"):
        checks.record({**RIGHT, "params": {"x": nested}}, Outer, "f.json", "write it anew")


def test_references_pass_only_before_they_are_resolved() -> None:
    value = {"inner": {"count": "${other.count}"}, "other": "${inner}"}
    checks.check({**value, "flag": "${x}"}, Outer, "", "f.yaml")
    with pytest.raises(UserError, match=r"'inner\.count': must be a whole number, is '\$\{other\.count\}'"):
        checks.check(value, Outer, "", "f.yaml", references=False)
