"""YAML files and ``key=value`` overrides."""

from pathlib import Path

import pytest
from artifact_files import refused
from tiny_runs import TINY

from ddm_lightning.config import load
from ddm_lightning.config.load import load_experiment, to_yaml
from ddm_lightning.core.errors import UserError
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import RunFolder


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
    line = refused(lambda: load.read_override(override, "f.yaml"))
    assert line == f"f.yaml: override {override!r} is not key=value; write for example seed=1"


@pytest.mark.parametrize("override", ["a=[b", 'a="b', "a='", "a={b", "a=!!python/name:os.system x", "a=${"])
def test_an_override_whose_value_is_no_yaml_is_refused(override):
    assert refused(lambda: load.read_override(override, "f.yaml")).startswith(
        f"f.yaml: override {override!r}: its value is not YAML: "
    )


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
    assert refused(lambda: load.read_yaml(path)).startswith(f"{path}: {line}")


def test_a_file_that_is_not_there_is_refused(tmp_path):
    missing, below = tmp_path / "no.yaml", tmp_path / "file" / "e.yaml"
    below.parent.write_text("")
    for path, line in (
        (missing, f"{missing}: no such file or folder; the command init writes one"),
        (tmp_path, f"{tmp_path}: cannot be read: Is a directory; give a YAML file in UTF-8"),
        (below, f"{below}: cannot be read: Not a directory; give a YAML file in UTF-8"),
        (Path("a\0b"), "a\0b: cannot be read: embedded null byte; give a YAML file in UTF-8"),
    ):
        assert refused(lambda path=path: load.read_yaml(path)) == line


def test_an_empty_file_is_an_empty_mapping(tmp_path):
    path = tmp_path / "e.yaml"
    path.write_text("# only a comment\n")
    assert load.read_yaml(path) == {}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("run_dir=runs/take #2", "runs/take #2"),
        ("run_dir=runs/a#b", "runs/a#b"),
        ("run_dir=#2", "#2"),
        ("run_dir='a #2'", "a #2"),
        ('run_dir="a: #2"', "a: #2"),
        ("run_dir=größe #2", "größe #2"),
    ],
)
def test_a_sharp_does_not_cut_an_override(override, expected):
    assert load.read_override(override, "e.yaml") == {"run_dir": expected}


@pytest.mark.parametrize("override", ["sample.prompts=[a, b] # c", "run_dir='a' # c", "a={b: 1} #"])
def test_a_comment_behind_an_override_is_refused(override):
    with pytest.raises(UserError, match="has a comment behind it; quote it"):
        load.read_override(override, "e.yaml")


def test_a_run_folder_stands_for_its_record_and_may_have_moved(tmp_path):
    place = tmp_path / "copy"
    (place / "prepared").mkdir(parents=True)
    experiment = load_experiment(TINY, [f"run_dir={tmp_path / 'first'}", "seed=7"])
    (place / "experiment.yaml").write_text(to_yaml(experiment), encoding="utf-8")
    for path in (place, place / "experiment.yaml"):
        found = load_experiment(path)
        assert (found.run_dir, found.seed) == (str(place), 7)
        assert load_experiment(path, ["run_dir=other"]).run_dir == "other"
    (place / "prepared").rmdir()  # a file like any other
    assert load_experiment(place / "experiment.yaml").run_dir == str(tmp_path / "first")
    with pytest.raises(UserError, match="Is a directory; give a YAML file"):
        load_experiment(place)


def test_a_home_is_expanded_where_a_path_is_used(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    experiment = load_experiment(TINY, ["run_dir=~/runs/a", "island.shards=~/shards"])
    assert experiment.run_dir == "~/runs/a"  # of whoever reads it
    assert RunFolder.of(experiment).root == tmp_path / "runs/a"
    assert Run(experiment).shards == str(tmp_path / "shards")


@pytest.mark.parametrize(
    "override",
    [
        "expert.train.max_steps=9223372036854775808",
        "router.train.global_batch_size=1099511627776",
        "prepare.images.size=100000",
        "launch={slrm: {}}",
        "launch={slurm: 3}",
    ],
)
def test_what_no_machine_can_do_is_refused(override):
    key = override.partition("=")[0]
    assert refused(lambda: load_experiment(TINY, [override])).startswith(f"{TINY} with {override!r}: key '{key}")
