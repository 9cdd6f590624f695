"""YAML files and ``key=value`` overrides."""

from pathlib import Path

import pytest

from ddm_lightning.config import load
from ddm_lightning.core.errors import UserError


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
def test_overrides_are_yaml(override, expected):
    assert load.read_override(override, "f.yaml") == expected


@pytest.mark.parametrize(
    "override",
    ["", "=", "=1", "seed", "seed 3", ".a=1", "a.=1", "a..b=1", "a b=1", "a[0]=1", "[=1", "--a=1", "a =1", "1a=2"],
)
def test_what_is_no_override_is_refused(override):
    with pytest.raises(UserError) as caught:
        load.read_override(override, "f.yaml")
    assert str(caught.value) == f"f.yaml: override {override!r} is not key=value; write for example seed=1"


@pytest.mark.parametrize("override", ["a=[b", 'a="b', "a='", "a={b", "a=!!python/name:os.system x", "a=${"])
def test_an_override_whose_value_is_no_yaml_is_refused(override):
    with pytest.raises(UserError) as caught:
        load.read_override(override, "f.yaml")
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
def test_a_file_that_is_no_yaml_mapping_is_refused_with_its_line(tmp_path, content, line):
    path = tmp_path / "e.yaml"
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        load.read_yaml(path)
    assert str(caught.value).startswith(f"{path}: {line}")
    assert "\n" not in str(caught.value)


def test_a_file_that_is_not_there_is_refused(tmp_path):
    missing, below = tmp_path / "no.yaml", tmp_path / "file" / "e.yaml"
    below.parent.write_text("")
    for path, line in (
        (missing, f"{missing}: no such file or folder; experiments/ has examples"),
        (tmp_path, f"{tmp_path}: cannot be read: Is a directory; give a YAML file in UTF-8"),
        (below, f"{below}: cannot be read: Not a directory; give a YAML file in UTF-8"),
        (Path("a\0b"), "a\0b: cannot be read: embedded null byte; give a YAML file in UTF-8"),
    ):
        with pytest.raises(UserError) as caught:
            load.read_yaml(path)
        assert str(caught.value) == line


def test_an_empty_file_is_an_empty_mapping(tmp_path):
    path = tmp_path / "e.yaml"
    path.write_text("# only a comment\n")
    assert load.read_yaml(path) == {}
