from __future__ import annotations

import ast
import dataclasses
import json
import os
import resource
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from artifact_files import refused

from ddm_lightning import config
from ddm_lightning.config import load
from ddm_lightning.config.experiment import Experiment, InitConfig, PluginConfig
from ddm_lightning.config.load import load_experiment, to_yaml
from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError, with_password

ROOT = Path(__file__).parents[2]
CONFIG = Path(config.__file__).parent

SMALLEST = """
name: smallest
prepare:
  source: {name: blobs}
  features: {name: pooled-pixels}
  partition: {num_clusters: 2}
expert:
  network: {name: dit, params: {width: 8}}
  train: {max_steps: 10, global_batch_size: 8}
router:
  network: {name: router-dit}
  train: {max_steps: 20, global_batch_size: 4}
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    file = tmp_path / "e.yaml"
    file.write_text(SMALLEST)
    return file


def refusal(path: Path, *overrides: str) -> str:
    """What ``path`` with ``overrides`` is refused with, without the path in front."""
    line = refused(lambda: load_experiment(path, overrides))
    assert line.startswith(str(path))
    return line.removeprefix(str(path))


@pytest.mark.parametrize(
    "address", ["", "/", "s3://", "s3:///key", "sftp://", "sftp://me@", "sftp://me@:22/x", "file://", "memory://x"]
)
def test_a_remote_that_names_no_place_is_refused(path: Path, address: str) -> None:
    assert "key 'remote' = " in refusal(path, f"remote='{address}'")
    load_experiment(path, ["remote=s3://bucket"])
    load_experiment(path, ["remote=sftp://node-1/x"])


def test_passwords_are_kept_in_the_environment_alone(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("DDM_PASSWORD_ME_HOST_1", raising=False)
    path.write_text(path.read_text().replace("blobs}", "blobs, params: {path: 'sftp://me:s%23cr@t@host-1:22/x'}}"))
    experiment = load_experiment(path, ["remote=ftp://you:other@host-2/y", "island.shards=s3://a/b:c@d"])
    assert "cr@t" not in to_yaml(experiment) and "other" not in to_yaml(experiment)
    assert experiment.prepare.source.params["path"] == "sftp://me@host-1:22/x"
    assert (experiment.remote, experiment.island.shards) == ("ftp://you@host-2/y", "s3://a/b:c@d")
    assert os.environ["DDM_PASSWORD_ME_HOST_1"] == "s#cr@t"
    assert with_password("sftp://me@host-1:22/x") == "sftp://me:s%23cr%40t@host-1:22/x"
    for other in ("sftp://me@host-2/x", "sftp://host-1/me@host-1", "sftp://me:given@host-1/x", "/me@host-1/x"):
        assert with_password(other) == other


def test_defaults_fill_the_file_and_references_are_resolved(path: Path) -> None:
    experiment = load_experiment(path)
    assert experiment.run_dir == "runs/smallest"
    assert experiment.prepare.image_encoder == PluginConfig("pixels")
    assert experiment.prepare.caption_encoder is None
    assert experiment.expert.timesteps.density == "logit-normal"
    assert experiment.router.timesteps.density == "uniform"
    assert experiment.expert.network.params == {"width": 8}


def test_later_overrides_win_over_earlier_ones_and_over_the_file(path: Path) -> None:
    experiment = load_experiment(
        path,
        [
            "expert.train.max_steps=11",
            "expert.train.max_steps=12",
            "expert.network.params.depth=3",
            "prepare.caption_encoder={name: hashed-words, params: {size: 4}}",
            "condition.kind=text",
            "sample.prompts=[red apple, 'flag: Japan']",
            "router.train=${expert.train}",
            "expert.train.learning_rate=1e-3",
        ],
    )
    assert experiment.expert.train.max_steps == 12
    assert experiment.expert.network.params == {"width": 8, "depth": 3}
    assert experiment.prepare.caption_encoder == PluginConfig("hashed-words", {"size": 4})
    assert experiment.sample.prompts == ["red apple", "flag: Japan"]
    assert experiment.router.train == experiment.expert.train
    assert experiment.router.train.learning_rate == 1e-3


def test_a_null_takes_an_optional_section_away(path: Path) -> None:
    given = ["prepare.caption_encoder={name: a}", "expert.train.gradient_clip_norm=null"]
    assert load_experiment(path, given).expert.train.gradient_clip_norm is None
    assert load_experiment(path, [*given, "prepare.caption_encoder=null"]).prepare.caption_encoder is None


@pytest.mark.parametrize(
    ("text", "value"), [("1e-4", 1e-4), ("1E3", 1000.0), (".5", 0.5), ("1.", 1.0), ("1", 1.0), ("1_0.5", 10.5)]
)
def test_numbers_that_yaml_1_1_takes_for_text_are_numbers(path: Path, text: str, value: float) -> None:
    path.write_text(SMALLEST.replace("max_steps: 10,", f"max_steps: 10, learning_rate: {text},"))
    read = load_experiment(path, [f"expert.network.params.rate={text}"])
    assert read.expert.train.learning_rate == value
    assert type(read.expert.train.learning_rate) is float
    assert read.expert.network.params["rate"] == value


@pytest.mark.parametrize("text", ["no", "on", "7", "1e3", "null", "2.0"])
def test_words_that_yaml_1_1_takes_for_something_else_are_refused_where_a_text_belongs(path: Path, text: str) -> None:
    path.write_text(SMALLEST.replace("name: smallest", f"name: {text}"))
    assert refusal(path).startswith(": key 'name': must be a string, is ")
    path.write_text(SMALLEST.replace("name: smallest", f"name: '{text}'"))
    assert load_experiment(path).name == text


def test_the_source_of_a_mistake_is_named(path: Path) -> None:
    assert refusal(path, "seed=1", "expert.train.lr=1").startswith(
        " with 'expert.train.lr=1': unknown key 'expert.train.lr'"
    )
    assert refusal(path, "exprt.train.max_steps=1").startswith(
        " with 'exprt.train.max_steps=1': unknown key 'exprt'; did you mean 'expert'?"
    )
    assert refusal(path, "seed=one").startswith(" with 'seed=one': key 'seed': must be a whole number, is 'one'")
    assert refusal(path, "expert.train=").startswith(" with 'expert.train=': key 'expert.train': must be a section")
    assert refusal(path, "expert.network=dit").endswith("is 'dit'; write it as {name: dit}")
    assert refusal(path, "seed").startswith(": override 'seed' is not key=value")
    path.write_text(SMALLEST + "sample:\n  stratgy: full\n")
    assert refusal(path).startswith(": unknown key 'sample.stratgy'; did you mean 'strategy'?")
    path.write_text(SMALLEST + "colour: red\n")
    assert refusal(path).startswith(": unknown key 'colour'; known there: name, run_dir, seed, remote, prepare")


@pytest.mark.parametrize(
    ("key", "places"),
    [
        ("expert.optimizer", ["expert.train.optimizer"]),
        ("expert.overrides.expert-0.optimizer", ["expert.overrides.expert-0.train.optimizer"]),
        ("expert.precision", ["island.precision", "sample.precision"]),
        ("precision", ["island.precision", "sample.precision"]),
        ("router.condition", ["conditional", "condition"]),
        ("prepare.seed", ["seed"]),
    ],
)
def test_a_key_in_the_wrong_section_is_told_where_it_belongs(path: Path, key: str, places: list[str]) -> None:
    """Within its own section first; else wherever the schema has that name."""
    assert f"unknown key '{key}'; did you mean {' or '.join(map(repr, places))}? known" in refusal(path, f"{key}=1")


def test_every_mandatory_key_is_asked_for(path: Path) -> None:
    path.write_text("")
    line = refusal(path)
    expected = [
        "name",
        "prepare.source.name",
        "prepare.features.name",
        "prepare.partition.num_clusters",
        "expert.network.name",
        "expert.train.max_steps",
        "expert.train.global_batch_size",
        "router.network.name",
        "router.train.max_steps",
        "router.train.global_batch_size",
    ]
    assert line == f": keys {', '.join(map(repr, expected))} are missing; give them values"
    path.write_text(SMALLEST.replace("num_clusters: 2", ""))
    assert refusal(path) == (
        ": key 'prepare.partition.num_clusters' is missing; give it a value (K: number of clusters, hence of experts.)"
    )
    path.write_text(SMALLEST)
    assert "key 'prepare.caption_encoder.name' is missing" in refusal(path, "prepare.caption_encoder.params.size=4")


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("name=${nope}", ": key 'name': Interpolation key 'nope' not found; fix the reference"),
        ("seed=${expert.train.nope}", ": key 'seed': "),
        ("seed=${seed}", ": key 'seed': Recursive interpolation detected; fix the reference"),
        ("name=${run_dir}", ": key 'name': Recursive interpolation detected"),
        ("seed=${name}", ": key 'seed': "),
        ("sample.prompts=['${nope}']", ": key 'sample.prompts[0]': Interpolation key 'nope' not found"),
        ("expert.network.params.width=${nope.x}", ": key 'expert.network.params.width': Interpolation key 'nope.x'"),
    ],
)
def test_a_bad_reference_is_refused(path: Path, override: str, line: str) -> None:
    assert refusal(path, override).startswith(line)


def test_what_a_reference_brings_is_checked_too(path: Path) -> None:
    changes = ["router.train.learning_rate=${expert.network.params.rate}", "expert.network.params.rate=0.25"]
    assert load_experiment(path, changes).router.train.learning_rate == 0.25
    assert refusal(path, changes[0], "expert.network.params.rate='nan'") == (
        ": key 'router.train.learning_rate': must be a finite number, is nan; give a number, without quotes"
    )


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("run_dir", "${oc.env:DDM_SECRET}"),
        ("run_dir", "s3://bucket/${name}/${ oc.env : DDM_SECRET, none }"),
        ("run_dir", "${oc.${name}:DDM_SECRET}"),
        ("run_dir", "${expert.${oc.env:DDM_SECRET}}"),
        ("sample.prompts[0]", "${oc.decode:'${name}'}"),
        ("expert.overrides.expert-0.network.params.url", "\\${oc.env:DDM_SECRET}"),
    ],
)
def test_a_reference_reads_no_environment(path: Path, monkeypatch: pytest.MonkeyPatch, key: str, text: str) -> None:
    monkeypatch.setenv("DDM_SECRET", "hush")
    override = f"sample.prompts=[{json.dumps(text)}]" if "[" in key else f"{key}={json.dumps(text)}"
    said = f"key {key!r} = {text!r}: a reference may only name another key, such as ${{name}}; "
    assert refusal(path, override) == f" with {override!r}: {said}write the value itself"
    document = yaml.safe_load(SMALLEST)
    section, *inner = key.removesuffix("[0]").split(".")[::-1]
    change: Any = {section: [text] if "[" in key else text}
    for outer in inner:
        change = {outer: change}
    path.write_text(yaml.safe_dump({**document, **change}))
    assert refusal(path) == f": {said}write the value itself"


def test_a_reference_that_others_join_to_reads_no_environment_either(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sections of single experts are resolved a second time."""
    monkeypatch.setenv("DDM_SECRET", "hush")
    joined = "expert.overrides.expert-0.network.params.url='${run_dir}{oc.env:DDM_SECRET}'"
    assert "'${oc.env:DDM_SECRET}': a reference may only name another key" in refusal(path, "run_dir=$", joined)


@pytest.mark.parametrize(
    ("text", "value"), [("060", 48), ("-017", -15), ("0_7", 7), ("1:30", 90), ("1:00:00", 3600), ("0:20.5", 20.5)]
)
def test_numbers_that_yaml_reads_in_another_base_are_refused(path: Path, text: str, value: float) -> None:
    said = f"YAML reads {text} as {value}; write a number without ':' or a leading 0, or quote it"
    override = f"expert.network.params={{a: [1, {text}]}}"
    for change in (override, f"seed={text}"):
        key = "seed" if "seed" in change else "expert.network.params.a[1]"
        assert refusal(path, change) == f" with {change!r}: key {key!r}: {said}"
    path.write_text(SMALLEST.replace("max_steps: 10,", f"max_steps: {text},"))
    assert refusal(path) == f": key 'expert.train.max_steps': {said}"
    path.write_text(SMALLEST)
    quoted = load_experiment(path, ["expert.train.max_steps=60", f"expert.network.params.a='{text}'"])
    assert quoted.expert.train.max_steps == 60 and quoted.expert.network.params["a"] == text


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (["prepare.partition.num_clusters=0"], "'prepare.partition.num_clusters' = 0: must be at least 1"),
        (["router.train.learning_rate=0"], "'router.train.learning_rate' = 0: must be at least 1e-12"),
        (["island.checkpoint_every_n_minutes=0"], "'island.checkpoint_every_n_minutes' = 0: must be at least 0.01"),
        (["island.max_minutes=-1"], "'island.max_minutes' = -1: must be at least 0.01"),
        (
            ["prepare.partition.num_fine_centroids=8", "prepare.partition.num_clusters=16"],
            "'prepare.partition.num_clusters' = 16: exceeds prepare.partition.num_fine_centroids",
        ),
        (
            ["expert.train.global_batch_size=9"],
            "'expert.train.global_batch_size' = 9: must be divisible by prepare.partition.num_clusters = 2",
        ),
        (["island.devices=3"], "'island.devices' = 3: must divide the 4 samples per step of expert-0; change"),
        (["island.devices=4", "router.train.global_batch_size=2"], "'island.devices' = 4: must divide the 2 samples"),
        (["island.devices=2", "island.strategy=single"], "'island.devices' = 2: must be 1 with island.strategy = 'si"),
        (["islands={router: {devices: 3}}"], "'islands.router' = {'devices': 3}: devices must divide the 4 samples"),
        (
            ["islands={expert: {devices: 2}, expert-1: {strategy: single}}"],
            "'islands.expert-1' = {'strategy': 'single'}: devices must be 1 with island.strategy = 'single'",
        ),
        (
            ["distill.global_batch_size=6", "islands={student: {devices: 4}}"],
            "'islands.student' = {'devices': 4}: devices must divide the 6 samples per step of student",
        ),
        (["islands={monolith: {loggers: [csvs]}}"], "'islands.monolith.loggers' = ['csvs']: must be a "),
        (
            ["island.accelerator=cpu", "island.attention=xformers"],
            "'island.attention' = 'xformers': needs a CUDA",
        ),
        (
            ["islands={router: {precision: bf16-true}}", "router.train.optimizer=muon"],
            "'islands.router' = {'precision': 'bf16-true'}: precision keeps no weights in float32, which router.",
        ),
        (
            ["island.precision=bf16-true", "expert.overrides={expert-1: {train: {optimizer: muon}}}"],
            "'island.precision' = 'bf16-true': keeps no weights in float32, which expert.overrides.expert-1.tr",
        ),
        (["sample.strategy=best"], "'sample.strategy' = 'best': is unknown; known: bayes, full, "),
        (["condition.kind=text"], "'condition.kind' = 'text': needs prepare.caption_encoder, which is null"),
        (["sample.prompts=[a]"], "'condition.kind' = 'none': sample.prompts need"),
        (["sample.guidance_scale=2"], "'sample.guidance_scale' = 2.0: guidance needs a condition.kind"),
        (
            ["sample.guidance_scale=2", "condition.kind=class", "condition.dropout=0"],
            "'sample.guidance_scale' = 2.0: guidance needs a condition.kind other than none, and condition",
        ),
        (
            ["sample.guidance_interval=[0.5,0.2]"],
            "'sample.guidance_interval' = [0.5, 0.2]: must be two times, 0 <= low <= high <= 1",
        ),
        (["prepare.shards.compression=gz:3"], "'prepare.shards.compression' = 'gz:3': must be br, bz2"),
        (["name=../elsewhere"], "'name' = '../elsewhere': must be the name of a folder"),
        (["name=a b"], "'name' = 'a b': must be the name of a folder"),
        (["run_dir=''"], "'run_dir' = '': must be a folder"),
    ],
)
def test_values_out_of_range_and_contradictions_are_refused(path: Path, overrides: list[str], line: str) -> None:
    said, first = refusal(path, *overrides), f"{line.partition(' ')[0]}="
    blamed = [text for text in overrides if first.replace("'", "") == f"{text.partition('=')[0]}="] or overrides
    assert said.startswith(tuple(f" with {text!r}: key {line}" for text in blamed))


@pytest.mark.parametrize(
    "overrides",
    [
        ["island.devices=4"],
        ["island.devices=8", "islands={expert: {devices: 4}, router: {devices: 2}}"],
        ["distill.global_batch_size=6", "islands={student: {devices: 3}}"],
        ["island.checkpoint_every_n_minutes=0.01"],
        ["expert.train.ema_widths=[0.005, 0.288]"],
        ["sample.guidance_interval=[0.3, 0.3]"],
        ["prepare.partition.num_clusters=8", "prepare.partition.num_fine_centroids=8"],
    ],
)
def test_values_at_their_limits_are_accepted(path: Path, overrides: list[str]) -> None:
    read = asdict(load_experiment(path, overrides))
    for override in overrides:
        value: Any = read
        for key in override.partition("=")[0].split("."):
            value = value[key]
        assert value == yaml.safe_load(override.partition("=")[2])


def test_of_several_overrides_the_one_that_holds_is_to_blame_and_else_the_file(path: Path) -> None:
    assert refusal(path, "seed=3", "seed=-1").startswith(" with 'seed=-1': key 'seed' = -1: ")
    assert refusal(path, "expert.train={warmup_steps: -1}", "seed=4").startswith(
        " with 'expert.train={warmup_steps: -1}': key 'expert.train.warmup_steps' = -1: "
    )
    # What the file has is named, and what was typed contradicts it.
    assert refusal(path, "seed=1", "prepare.partition.num_clusters=3").startswith(
        " with 'prepare.partition.num_clusters=3': key 'expert.train.global_batch_size' = 8: must be divisible"
    )
    path.write_text(SMALLEST + "run_dir: ''\n")
    assert refusal(path, "name=other").startswith(": key 'run_dir' = '': must be a folder")
    path.write_text(SMALLEST + "seed: -1\n")
    assert refusal(path, "run_dir=elsewhere").startswith(": key 'seed' = -1: ")


def test_an_experiment_survives_yaml_whatever_reads_it(path: Path, tmp_path: Path) -> None:
    odd = "sample.prompts=['no', '1e-4', '12:30', 'flag: Japan', '#', '', 'ß ☂', 'null', '0o7']"
    experiment = load_experiment(
        path, [odd, "condition.kind=text", "prepare.caption_encoder={name: x}", "expert.train.learning_rate=1e-5"]
    )
    text = to_yaml(experiment)
    assert yaml.safe_load(text) == asdict(experiment)
    again = tmp_path / "again.yaml"
    again.write_text(text, encoding="utf-8")
    assert load_experiment(again) == experiment


def sections(kind: Any = Experiment) -> set[type]:
    """``kind`` and the dataclasses of its fields, at any depth."""
    found = {kind}
    for hint in checks.hints(kind).values():
        for option in (hint, *getattr(hint, "__args__", ())):
            if dataclasses.is_dataclass(option):
                found |= sections(option)
    return found


SECTIONS = sections() | {InitConfig}  # of a key that may be a text instead


def test_every_field_has_its_documentation_on_the_line_below() -> None:
    for kind in SECTIONS:
        texts = load._docs(kind)
        assert kind.__doc__ and texts.keys() == checks.hints(kind).keys()
        assert all(text.endswith(".") for text in texts.values())


def test_every_key_is_read_somewhere() -> None:
    read: set[str] = set()
    for file in (ROOT / "ddm_lightning").rglob("*.py"):
        if file.parent != CONFIG or file.name == "merge.py":
            tree = ast.parse(file.read_text(encoding="utf-8"))
            read |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    keys = {f"{kind.__name__}.{field.name}" for kind in SECTIONS for field in dataclasses.fields(kind)}
    assert sorted(key for key in keys if key.rpartition(".")[2] not in read) == []


@pytest.mark.parametrize(
    "overrides",
    [
        ["prepare.source.name=webdataset", "prepare.source.params.path=tars"],
        ["prepare.source.params.path=tars", "prepare.source.name=webdataset"],
        ["prepare.source={name: webdataset, params: {path: tars}}"],
    ],
)
def test_a_plug_in_of_another_name_takes_none_of_the_files_params(overrides):
    loaded = load_experiment(ROOT / "experiments" / "folder_4x.yaml", overrides)
    assert (loaded.prepare.source.name, loaded.prepare.source.params) == ("webdataset", {"path": "tars"})
    # The same name merges.
    same = load_experiment(
        ROOT / "experiments" / "folder_4x.yaml", ["prepare.source={name: imagefolder, params: {path: x}}"]
    )
    assert same.prepare.source.params == {"path": "x", "labels": False}


def test_a_list_replaces_a_mapping_and_a_mapping_a_list():
    rule = {"max_aspect": 2.0, "step": 4}
    sizes = "prepare.images.buckets=[[28, 28], [20, 40]]"
    for overrides, expected in (([sizes], [[28, 28], [20, 40]]), ([sizes, f"prepare.images.buckets={rule}"], rule)):
        loaded = load_experiment(ROOT / "experiments" / "shapes_4x.yaml", overrides)
        assert loaded.prepare.images.buckets == expected


def test_a_batch_that_does_not_divide_is_refused_with_one_that_does():
    with pytest.raises(UserError, match=r"= 64: must be divisible by .* = 3.*set expert\.train\.global_batch_size=66"):
        load_experiment(ROOT / "experiments" / "folder_4x.yaml", ["prepare.partition.num_clusters=3"])


def test_a_yaml_bomb_is_one_line_at_once(tmp_path: Path) -> None:
    """Ten aliases of ten aliases … of a list: 10**9 entries if they were expanded, as OmegaConf 2.3 does."""
    path = tmp_path / "bomb.yaml"
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    path.write_text("\n".join(lines) + SMALLEST.replace("params: {width: 8}", "params: {bomb: *a8}"))
    done = subprocess.run(
        [sys.executable, "-m", "ddm_lightning", "config", "-c", str(path)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        cwd=ROOT,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)),
    )
    assert done.returncode == 2, done.stderr[-500:]
    assert done.stderr.startswith(f"error: {path}: ") and done.stderr.count("\n") == 1
