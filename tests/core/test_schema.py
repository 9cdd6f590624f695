from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from ddm_lightning.core import schema
from ddm_lightning.core.errors import UserError


@dataclass
class Inner:
    rate: float = 0.5
    """How fast."""
    count: int = 1
    """How many.

    With a second paragraph.
    """


@dataclass
class Outer:
    name: str = "x"
    """What it is called."""
    flag: bool = False
    """Whether it is."""
    limit: float | None = None
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


def test_what_fits_passes_and_is_built_with_the_annotated_types() -> None:
    schema.check(RIGHT, Outer, "", "f.yaml")
    built = schema.build(RIGHT, Outer)
    assert built == Outer("y", True, 2.0, ["a", ""], RIGHT["params"], Inner(1.0, 3), Inner(0.25, 0))
    assert type(built.limit) is float
    assert type(built.inner.rate) is float
    assert type(built.inner.count) is int


def test_null_passes_only_where_the_type_says_so() -> None:
    schema.check({"limit": None, "other": None}, Outer, "", "f.yaml")
    assert schema.build({"limit": None, "other": None}, Outer) == Outer()
    for key in ("name", "flag", "words", "params", "inner"):
        with pytest.raises(UserError, match=rf"^f\.yaml: key '{key}': must be .*, is null; "):
            schema.check({key: None}, Outer, "", "f.yaml")


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
        ({"inner": [1]}, "key 'inner': must be a section of keys, is [1]; known there: rate, count"),
        ({"name": True}, "key 'name': must be a text, is True; put it into quotes (YAML reads yes"),
        ({"name": 90}, "key 'name': must be a text, is 90; put it into quotes"),
        ({"name": {"a": 1}}, "key 'name': must be a text, is {'a': 1}; give a text"),
        ({"flag": "yes"}, "key 'flag': must be true or false, is 'yes'"),
        ({"flag": 1}, "key 'flag': must be true or false, is 1"),
        ({"limit": "1e-4"}, "key 'limit': must be a number, is '1e-4'; give a number, without quotes"),
        ({"limit": True}, "key 'limit': must be a number, is True"),
        ({"limit": float("nan")}, "key 'limit': must be a finite number, is nan"),
        ({"limit": float("-inf")}, "key 'limit': must be a finite number, is -inf"),
        ({"inner": {"count": 1e5}}, "key 'inner.count': must be a whole number, is 100000.0; write 100000"),
        ({"inner": {"count": 1.5}}, "key 'inner.count': must be a whole number, is 1.5; give digits only"),
        ({"inner": {"count": True}}, "key 'inner.count': must be a whole number, is True"),
        ({"inner": {"count": "7"}}, "key 'inner.count': must be a whole number, is '7'; give digits only"),
        ({"inner": {"count": [7]}}, "key 'inner.count': must be a whole number, is [7]"),
        ({"words": "a"}, "key 'words': must be a list, is 'a'; write it as [a, b]"),
        ({"words": ["a", 750]}, "key 'words[1]': must be a text, is 750; put it into quotes"),
        ({"params": [1]}, "key 'params': must be a mapping, is [1]; write it as {name: value}"),
        ({"params": {1: 2}}, "key 'params.1': must be a text as a key, is 1; put the key into quotes"),
        ({"params": {"a": [float("inf")]}}, "key 'params.a[0]': must be a finite number, is inf"),
        ({"params": {"a": {"b": object}}}, "key 'params.a.b': must be text, a number, true, false or null"),
        ({"name": ["x" * 100]}, "key 'name': must be a text, is ['" + "x" * 55 + "...; give a text"),
    ],
)
def test_what_does_not_fit_is_one_line(value: Any, line: str) -> None:
    with pytest.raises(UserError) as caught:
        schema.check(value, Outer, "", "f.yaml")
    assert str(caught.value).startswith(f"f.yaml: {line}")
    assert "\n" not in str(caught.value)


def test_references_pass_only_before_they_are_resolved() -> None:
    value = {"inner": {"count": "${other.count}"}, "other": "${inner}", "flag": "${x}"}
    schema.check(value, Outer, "", "f.yaml")
    with pytest.raises(UserError, match=r"'inner\.count': must be a whole number, is '\$\{other\.count\}'"):
        schema.check(value, Outer, "", "f.yaml", references=False)


def test_missing_values_are_named_in_the_order_of_the_schema() -> None:
    schema.check({"name": "???", "inner": {"count": "???"}}, Outer, "", "f.yaml")
    with pytest.raises(
        UserError, match=r"^f\.yaml: key 'inner\.count' is missing; give it a value \(How many\."
    ) as one:
        schema.check_complete({"name": "x", "inner": {"count": "???"}}, Outer, "f.yaml")
    assert "\n" not in str(one.value)
    with pytest.raises(UserError, match=r"^f\.yaml: key 'params\.a' is missing; give it a value$"):
        schema.check_complete({"params": {"a": "???"}}, Outer, "f.yaml")
    with pytest.raises(UserError, match=r"^f\.yaml: keys 'name', 'inner\.count' are missing; give them values$"):
        schema.check_complete({"name": "???", "inner": {"count": "???"}}, Outer, "f.yaml")
    schema.check_complete(RIGHT, Outer, "f.yaml")


def test_documentation_of_a_key_is_found_through_sections_and_optional_ones() -> None:
    assert schema.doc(Outer, "name") == "What it is called."
    assert schema.doc(Outer, "inner.rate") == "How fast."
    assert schema.doc(Outer, "other.rate") == "How fast."
    assert schema.doc(Outer, "inner.count") == "How many."
    assert schema.doc(Outer, "params.anything") == ""
    assert schema.doc(Outer, "nothing") == ""


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("a=1", {"a": 1}),
        ("a.b_c.d-e=x=y", {"a": {"b_c": {"d-e": "x=y"}}}),
        ("a=1e-4", {"a": 1e-4}),
        ("a='1e-4'", {"a": "1e-4"}),
        ("a=[x, 2]", {"a": ["x", 2]}),
        ("a={b: true}", {"a": {"b": True}}),
        ("a=", {"a": None}),
        ("a=null", {"a": None}),
        ("a=flag: Japan", {"a": {"flag": "Japan"}}),
    ],
)
def test_overrides_are_yaml(override: str, expected: dict[str, Any]) -> None:
    assert schema.read_override(override, "f.yaml") == expected


@pytest.mark.parametrize(
    "override",
    ["", "=", "=1", "seed", "seed 3", ".a=1", "a.=1", "a..b=1", "a b=1", "a[0]=1", "[=1", "--a=1", "a =1", "1a=2"],
)
def test_what_is_no_override_is_refused(override: str) -> None:
    with pytest.raises(UserError) as caught:
        schema.read_override(override, "f.yaml")
    assert str(caught.value) == f"f.yaml: override {override!r} is not key=value; write for example seed=1"


@pytest.mark.parametrize("override", ["a=[b", 'a="b', "a='", "a={b", "a=!!python/name:os.system x", "a=${"])
def test_an_override_whose_value_is_no_yaml_is_refused(override: str) -> None:
    with pytest.raises(UserError) as caught:
        schema.read_override(override, "f.yaml")
    assert str(caught.value).startswith(f"f.yaml: override {override!r}: its value is not YAML: ")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "line"),
    [
        (b"a: 1\nb: [1, 2\nc: 3\n", "YAML syntax at line 3: "),
        (b"a: 1\nb:\n\tc: 1\n", "YAML syntax at line 3: "),
        (b"a: b: c\n", "YAML syntax at line 1: "),
        (b"a: 1\nb: 2\na: 3\n", "YAML syntax at line 3: found duplicate key a"),
        (b"a: 1\n---\nb: 1\n", "YAML syntax at line 2: "),
        (b"a: !!python/object/apply:os.system ['true']\n", "YAML syntax at line 1: "),
        (b"name: caf\xe9\n", "cannot be read: 'utf-8' codec can't decode"),
        (b"name: a\x00b\n", "cannot be read: "),
        (b"a: ${\n", "cannot be read: "),
        (b"- a\n- b\n", "the top level must be a mapping of keys; "),
    ],
)
def test_a_file_that_is_no_yaml_mapping_is_refused_with_its_line(tmp_path: Path, content: bytes, line: str) -> None:
    path = tmp_path / "e.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        schema.read_yaml(path)
    assert str(caught.value).startswith(f"{path}: {line}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    missing, below = tmp_path / "no.yaml", tmp_path / "file" / "e.yaml"
    below.parent.write_text("")
    for path, line in (
        (missing, f"{missing}: no such file; experiments/ has examples"),
        (tmp_path, f"{tmp_path}: is a folder; give a YAML file in it"),
        (below, f"{below}: cannot be read: Not a directory; give a YAML file in UTF-8"),
        (Path("a\0b"), "a\0b: cannot be read: embedded null byte; give a YAML file in UTF-8"),
    ):
        with pytest.raises(UserError) as caught:
            schema.read_yaml(path)
        assert str(caught.value) == line


def test_an_empty_file_is_an_empty_mapping(tmp_path: Path) -> None:
    path = tmp_path / "e.yaml"
    path.write_text("# only a comment\n")
    assert schema.read_yaml(path) == {}
