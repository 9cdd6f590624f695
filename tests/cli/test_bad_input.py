"""Bad input ends in exit code 2 and one line that names file or key and a remedy; nothing is left half-written."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tiny_runs import TINY, copy_run, settings

from ddm_lightning.cli.parser import main

Refuse = Callable[..., str]


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Run a command that has to be refused at once; gives its only line on stderr."""

    def run(*arguments: str) -> str:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        assert code == 2, (code, out, err)
        assert err.startswith("error: ")
        assert err.count("\n") == 1, err
        return err.removeprefix("error: ").rstrip("\n")

    return run


def tree(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


# The experiment: refused before anything is written.


@pytest.mark.parametrize("command", ["fit", "sample", "config"])
def test_missing_experiment_file(refuse: Refuse, tmp_path: Path, command: str) -> None:
    line = refuse(command, "-c", tmp_path / "none.yaml")
    assert line.startswith(f"{tmp_path / 'none.yaml'}: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("share", "settings"), [("9/8", ["remote=there"]), ("0/8", ["remote=there"]), ("x", []), ("1/2", [])]
)
def test_a_share_that_is_none(refuse: Refuse, tmp_path: Path, share: str, settings: list[str]) -> None:
    line = refuse("prepare", "-c", TINY, f"run_dir={tmp_path / 'run'}", "--parts", share, *settings)
    assert line.startswith("--parts: the machines" if share == "1/2" else f"--parts {share}: give the number")
    assert list(tmp_path.iterdir()) == []


BAD_SETTINGS: dict[str, tuple[str, list[str]]] = {
    "unknown key": ("expert.train.max_stepz=1", ["unknown key 'expert.train.max_stepz'", "did you mean 'max_steps'"]),
    "more clusters than samples": (
        "prepare.source.params.num_samples=6",
        ["num_fine_centroids", "6 samples"],
    ),
    "unknown expert": (
        "expert.network.name=resnet",
        ["'expert.network'", "unknown expert 'resnet'", "known: ", "dit", "check the spelling"],
    ),
    "unknown router": ("router.network.name=mlp", ["'router.network'", "unknown router 'mlp'", "router-dit"]),
    "unknown source": ("prepare.source.name=coco", ["'prepare.source'", "unknown source 'coco'", "blobs"]),
    "value it turns down": ("expert.network.params.num_heads=5", ["'expert.network'", "num_heads", "32"]),
    "router's value": ("router.network.params.num_heads=5", ["'router.network'", "num_heads", "32"]),
    "patches that do not fit": ("expert.network.params.patch_size=3", ["'expert.network'", "patch_size", "8"]),
    "strategy with another solver": ("sample.strategy=bayes", ["'sample.strategy' = 'bayes'", "add sample.solver="]),
    "unknown solver": ("sample.solver=rk4", ["'sample.solver' = 'rk4'", "check the spelling", "dpm++2m"]),
    "param of another solver": (
        "sample.solver_params={rtol: 1}",
        ["'sample.solver' = 'dpm++2m'", "no parameter 'rtol'"],
    ),
    "param of another strategy": ("sample.strategy_params={k: 1}", ["'sample.strategy' = 'top-1'", "no parameter 'k'"]),
    "initial weights that are not there": (
        "expert.init_from=nothing",
        [
            "'expert.init_from'",
            "nothing: does not exist, or is no artifact, no run whose monolith is finished",
            "never unpickled",
        ],
    ),
    "initial weights without a source": (
        "router.init_from={partial: true}",
        ["key 'router.init_from.source': must be a string, is null"],
    ),
    "initial weights of no hash": (
        "expert.overrides={expert-1: {init_from: {source: a, sha256: ab}}}",
        ["key 'expert.overrides.expert-1.init_from.sha256' = 'ab': must be 64 hexadecimal digits"],
    ),
    "features of nothing": ("prepare.features.params.grid=0", ["'pooled-pixels' refuses its params: grid = 0"]),
    "text of nothing": ("prepare.caption_encoder={name: hashed-words, params: {size: 0}}", ["size = 0", "at least 1"]),
    "clusters of no file": (
        "prepare.partition={kind: existing, path: runs/other}",
        ["key 'prepare.partition.path': runs/other is no file", "give another run's prepared/partition.safetensors"],
    ),
    "no width at all": ("expert.network.params.width=0", ["'expert.network'", "width"]),
}


@pytest.mark.parametrize(
    ("command", "name"),
    [*(("prepare", name) for name in BAD_SETTINGS), ("fit", "unknown key"), ("fit", "router's value")],
)
def test_a_setting_that_cannot_be(refuse: Refuse, tmp_path: Path, command: str, name: str) -> None:
    setting, words = BAD_SETTINGS[name]
    line = refuse(command, "-c", TINY, f"run_dir={tmp_path / 'run'}", setting)
    for word in words:
        assert word in line
    assert list(tmp_path.iterdir()) == []


def test_muon_for_a_network_without_blocks(refuse: Refuse, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddm_lightning.members.member.Member.plan_network", lambda _: torch.nn.Linear(2, 2))
    line = refuse("prepare", "-c", TINY, f"run_dir={tmp_path / 'run'}", "router.train.optimizer=muon")
    assert line.startswith(f"{TINY} with 'router.train.optimizer=muon': key 'router.train.optimizer' = 'muon'")
    assert "set adamw" in line
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_no_setting(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["fit", "-c", str(TINY), f"run_dir={tmp_path / 'run'}", "--jobs", "2", "sed"])
    assert caught.value.code == 2
    assert "settings are given as key=value" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_prepare_refused_may_be_put_right_in_the_same_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    uneven = ["prepare.partition.num_fine_centroids=2", "prepare.partition.max_largest_over_mean=1"]
    assert main(["prepare", "-c", str(TINY), f"run_dir={run}", *uneven]) == 2
    assert "prepare.partition.max_largest_over_mean" in capsys.readouterr().err
    assert not (run / "experiment.yaml").exists()  # which would refuse other settings


@pytest.mark.parametrize("member", ["expert-2", "expert", "experts", "all,router", "expert-0,", ""])
def test_unknown_member(refuse: Refuse, tmp_path: Path, member: str) -> None:
    line = refuse("fit", "-c", TINY, f"run_dir={tmp_path / 'run'}", f"member={member}")
    assert line.startswith(f"member={member}: unknown member ")
    assert "known: expert-0, expert-1, router, monolith, " in line and line.endswith(", all")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("jobs", ["0", "-1"])
def test_no_jobs(refuse: Refuse, tmp_path: Path, jobs: str) -> None:
    assert refuse("fit", *settings(tmp_path / "run"), f"--jobs={jobs}") == f"--jobs {jobs}: must be at least 1"
    assert list(tmp_path.iterdir()) == []


def test_a_run_folder_that_cannot_be(refuse: Refuse, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    line = refuse("prepare", "-c", TINY, f"run_dir={tmp_path / 'file' / 'run'}")
    assert str(tmp_path / "file") in line
    assert "run_dir" in line
    assert tree(tmp_path) == {"file": b"mine"}


# The run: shards, checkpoints, members.


def test_a_member_before_prepare(refuse: Refuse, tmp_path: Path) -> None:
    line = refuse("fit", *settings(tmp_path / "run"), "member=expert-0")
    assert line.startswith(f"{tmp_path / 'run' / 'prepared' / 'manifest.json'}: ")
    assert "run prepare first" in line
    assert list(tmp_path.iterdir()) == []


def test_an_island_given_shards_refuses_before_it_makes_a_run(
    refuse: Refuse, finished_run: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(finished_run / "prepared", run / "prepared")
    before = tree(run)
    line = refuse("fit", *settings(run), "expert.network.params.num_heads=5", "member=expert-0")
    assert line.startswith(f"{TINY} with 'expert.network.params.num_heads=5': key 'expert.network': ")
    assert tree(run) == before


# Artifacts and samples.


@pytest.fixture
def copied(finished_run: Path, tmp_path: Path) -> Path:
    return copy_run(finished_run, tmp_path / "run")


@pytest.fixture
def refuse_sample(refuse: Refuse, copied: Path) -> Refuse:
    """``sample`` that has to be refused and to leave the run as it was."""

    def run(*more: str) -> str:
        before = tree(copied)
        line = refuse("sample", *settings(copied), *more)
        assert tree(copied) == before
        return line

    return run


def test_an_experiment_with_texts_takes_no_class(refuse_sample: Refuse) -> None:
    assert refuse_sample("--class", "3").startswith("tiny_2x is conditioned on 'text', not on class; leave classes out")


@pytest.mark.parametrize("prompt", ["", "  "])
def test_an_empty_prompt(refuse_sample: Refuse, prompt: str) -> None:
    assert refuse_sample("--prompt", "red disc", "--prompt", prompt).startswith("a prompt is empty")


def test_a_prompt_of_bytes_that_are_no_text(refuse_sample: Refuse) -> None:
    assert refuse_sample("--prompt", "caf\udce9").startswith("a prompt is not UTF-8")  # café in Latin-1


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENAMETOOLONG])
def test_a_folder_that_cannot_be_written(
    refuse: Refuse, copied: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def mkdtemp(dir: Path, **_: object) -> None:
        raise OSError(number, os.strerror(number), str(dir))

    monkeypatch.setattr("tempfile.mkdtemp", mkdtemp)
    line = refuse("export", *settings(copied), "--to", "ensemble", "--out", tmp_path / "out")
    assert line.startswith(f"{tmp_path}: {os.strerror(number)}; ")


@pytest.mark.parametrize("out", ["image.jpg", "", "nowhere/image.png", "nowhere/folder"])
def test_a_image_that_cannot_be_written(
    refuse_sample: Refuse, out: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)

    def load(*_: object) -> None:
        raise AssertionError("images are drawn for nothing")

    monkeypatch.setattr("ddm_lightning.use.ensemble.load_ensemble", load)
    assert refuse_sample("--out", out).startswith(f"--out {out!r}: ")


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--num", "0", ["sample.num_per_prompt", "at least 1"]),
        ("--seed", "-1", ["'seed' = -1", "from 0"]),
        ("--strategy", "best", ["sample.strategy", "bayes, full, "]),
    ],
)
def test_sample_options_that_cannot_be(refuse_sample: Refuse, option: str, value: str, words: list[str]) -> None:
    line = refuse_sample(option, value)
    assert line.startswith(f"{option} {value}: ")
    for word in words:
        assert word in line


def test_more_images_than_the_disk_holds(refuse_sample: Refuse, copied: Path) -> None:
    line = refuse_sample("--prompt", "a", "--prompt", "b", "--num", str(10**9))
    assert line.startswith(f"{copied / 'samples'}: 2,000,000,000 images take at least 8.2 TB, and ")


@pytest.mark.parametrize(
    ("command", "words"), [("sample", "/ensemble.json: does not exist yet"), ("status", ": no run here; start it")]
)
def test_a_run_that_is_not_there(refuse: Refuse, tmp_path: Path, command: str, words: str) -> None:
    line = refuse(command, *settings(tmp_path / "run"))
    assert line.startswith(f"{tmp_path / 'run'}{words}") and "fit" in line
    assert list(tmp_path.iterdir()) == []


def test_sample_names_the_members_that_are_missing(refuse: Refuse, finished_run: Path, tmp_path: Path) -> None:
    run = copy_run(finished_run, tmp_path / "run", "expert-1", "router")
    line = refuse("sample", *settings(run))
    assert line.startswith(f"{run / 'ensemble.json'}: ")
    assert "not finished: expert-1, router;" in line


def test_a_deleted_manifest_of_finished_members_is_named(refuse: Refuse, finished_run: Path, tmp_path: Path) -> None:
    run = copy_run(finished_run, tmp_path / "run")
    (run / "ensemble.json").unlink()
    line = refuse("sample", *settings(run))
    assert line == f"{run / 'ensemble.json'}: is missing, although all members are finished; fit writes it again"


@pytest.mark.parametrize("more", [[], ["member=expert-1"]])
def test_a_finished_member_of_other_clusters_is_not_passed_over(
    refuse: Refuse, finished_run: Path, tmp_path: Path, more: list[str]
) -> None:
    run = copy_run(finished_run, tmp_path / "run")
    manifest = run / "prepared" / "manifest.json"
    document = json.loads(manifest.read_text(encoding="utf-8"))
    document["partition_sha256"] = "0" * 64
    manifest.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
    line = refuse("fit", *settings(run), *more)
    member = "expert-1" if more else "expert-0"
    assert line.startswith(f"{run / 'members' / member / 'artifact'}: has partition_sha256 = '")


def test_a_manifest_of_other_data_than_the_experts_saw(refuse_sample: Refuse, copied: Path) -> None:
    path = copied / "prepared" / "manifest.json"
    columns = {**json.loads(path.read_text(encoding="utf-8"))["columns"], "x_0": "ndarray:uint8:3,512,512"}
    edit_json(path, x_shape=[3, 512, 512], columns=columns)
    line = refuse_sample()
    assert line.startswith(f"{path}: the experts were trained on other data ((3, 8, 8), ")


@pytest.mark.parametrize("changes", [{"num_classes": 10**9}, {"num_classes": 10**18}], ids=str)
def test_a_manifest_that_asks_for_a_network_that_does_not_fit(
    refuse: Refuse, tiny_run: Path, changes: dict[str, object]
) -> None:
    edit_json(tiny_run / "prepared" / "manifest.json", class_counts=[], **changes)
    line = refuse("fit", *settings(tiny_run), "condition.kind=class", "sample.prompts=[]", "member=expert-0")
    assert re.search(r"needs [\d.]+ [TGE]B of memory, |cannot be built|refuses its params", line), line


def test_a_manifest_of_another_number_of_clusters(refuse: Refuse, tiny_run: Path) -> None:
    path = tiny_run / "prepared" / "manifest.json"
    edit_json(path, clusters=json.loads(path.read_text(encoding="utf-8"))["clusters"][:1], priors=[1], class_counts=[])
    line = refuse("fit", *settings(tiny_run), "member=expert-1")
    assert line.startswith("key 'prepare.partition.num_clusters' = 2: the manifest has 1; copy this run's")


def test_memory_that_is_full_is_one_line(refuse: Refuse, tiny_run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddm_lightning.training.fit.build_data", lambda *_: torch.empty(1 << 50))
    line = refuse("fit", *settings(tiny_run), "member=expert-0")
    assert line.startswith("out of memory (") and "set island.micro_batch_size" in line
    monkeypatch.setattr("ddm_lightning.prepare.stages.fit_partition", lambda *_, **__: torch.empty(1 << 50))
    line = refuse("prepare", *settings(tiny_run.with_name("new")))
    assert line.startswith("out of memory (") and "lower prepare.num_processes or prepare.partition.fit" in line
