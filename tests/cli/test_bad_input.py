"""Bad input ends in exit code 2 and one line that names file or key and a remedy; nothing is left half-written."""

import errno
import json
import os
import re
import shutil

import pytest
import torch
from tiny_runs import TINY, copy_run, settings

from ddm_lightning.cli.parser import main


def tree(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def edit_json(path, **changes):
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **changes}), encoding="utf-8")


# The experiment: refused before anything is written.

HEADS = "num_heads=5"
OF_EXPERT = r".*'expert\.network'.*"
OF_ROUTER = r".*'router\.network'.*"


@pytest.mark.parametrize(
    ("command", "word", "line"),
    [
        ("prepare", "--parts=x", "--parts x: give the number"),
        ("prepare", "--parts=9/8", "--parts 9/8: give the number"),
        ("prepare", "--parts=0/8", "--parts 0/8: give the number"),
        ("prepare", "--parts=1/2", "--parts: the machines"),
        *(
            (command, "expert.train.max_stepz=1", r".*unknown key 'expert\.train\.max_stepz'.*did you mean 'max_steps'")
            for command in ("prepare", "fit")
        ),
        ("prepare", "prepare.source.params.num_samples=6", ".*num_fine_centroids.* 6 samples"),
        (
            "prepare",
            "expert.network.name=resnet",
            f"{OF_EXPERT}unknown expert 'resnet'.*known: .*dit.*check the spelling",
        ),
        ("prepare", "router.network.name=mlp", f"{OF_ROUTER}unknown router 'mlp'.*router-dit"),
        ("prepare", "prepare.source.name=coco", r".*'prepare\.source'.*unknown source 'coco'.*blobs"),
        ("prepare", f"expert.network.params.{HEADS}", f"{OF_EXPERT}32.*num_heads|{OF_EXPERT}num_heads.*32"),
        *(
            (command, f"router.network.params.{HEADS}", f"{OF_ROUTER}32.*num_heads|{OF_ROUTER}num_heads.*32")
            for command in ("prepare", "fit")
        ),
        ("prepare", "expert.network.params.patch_size=3", f"{OF_EXPERT}8.*patch_size|{OF_EXPERT}patch_size.*8"),
        ("prepare", "expert.network.params.width=0", f"{OF_EXPERT}width"),
        ("prepare", "sample.strategy=bayes", r".*'sample\.strategy' = 'bayes'.*add sample\.solver="),
        ("prepare", "sample.solver=rk4", r".*'sample\.solver' = 'rk4'.*dpm\+\+2m.*check the spelling"),
        ("prepare", "sample.solver_params={rtol: 1}", r".*'sample\.solver' = 'dpm\+\+2m'.*no parameter 'rtol'"),
        ("prepare", "sample.strategy_params={k: 1}", r".*'sample\.strategy' = 'top-1'.*no parameter 'k'"),
        (
            "prepare",
            "expert.init_from=nothing",
            r".*'expert\.init_from'.*nothing: does not exist, or is no artifact, no run whose monolith is finished.*"
            "never unpickled",
        ),
        (
            "prepare",
            "router.init_from={partial: true}",
            r".*key 'router\.init_from\.source': must be a string, is null",
        ),
        (
            "prepare",
            "expert.overrides={expert-1: {init_from: {source: a, sha256: ab}}}",
            r".*'expert\.overrides\.expert-1\.init_from\.sha256' = 'ab': must be 64 hexadecimal digits",
        ),
        ("prepare", "prepare.features.params.grid=0", ".*'pooled-pixels' refuses its params: grid = 0"),
        ("prepare", "prepare.caption_encoder={name: hashed-words, params: {size: 0}}", ".*size = 0.*at least 1"),
        (
            "prepare",
            "prepare.partition={kind: existing, path: runs/other}",
            r".*key 'prepare\.partition\.path': runs/other is no file.*give another run's prepared/partition\.safetens",
        ),
        *(
            (
                "fit",
                f"member={name}",
                f"member={name}: unknown member .*known: expert-0, expert-1, router, mono.*, all$",
            )
            for name in ("expert-2", "expert", "experts", "all,router", "expert-0,", "")
        ),
        ("fit", "--jobs=0", "jobs 0: must be at least 1$"),
        ("fit", "--jobs=-1", "jobs -1: must be at least 1$"),
        ("fit", "member=expert-0", r".*/run/prepared/manifest\.json: .*run prepare first"),
        ("sample", "seed=0", r".*/run/ensemble\.json: does not exist yet.*fit"),
        ("status", "seed=0", ".*/run: no run here; start it with fit"),
    ],
    ids=lambda text: text[:24],
)
def test_what_cannot_be_is_refused_before_anything_is_written(refuse, tmp_path, command, word, line):
    found = refuse(command, "-c", TINY, f"run_dir={tmp_path / 'run'}", word)
    assert re.match(line, found), found
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", ["fit", "sample", "config"])
def test_missing_experiment_file(refuse, tmp_path, command):
    assert refuse(command, "-c", tmp_path / "none.yaml").startswith(f"{tmp_path / 'none.yaml'}: ")
    assert list(tmp_path.iterdir()) == []


def test_muon_for_a_network_without_blocks(refuse, tmp_path, monkeypatch):
    monkeypatch.setattr("ddm_lightning.members.member.Member.plan_network", lambda _: torch.nn.Linear(2, 2))
    line = refuse("prepare", "-c", TINY, f"run_dir={tmp_path / 'run'}", "router.train.optimizer=muon")
    assert line.startswith(f"{TINY} with 'router.train.optimizer=muon': key 'router.train.optimizer' = 'muon'")
    assert "set adamw" in line
    assert list(tmp_path.iterdir()) == []


def test_eight_bits_for_a_network_without_large_matrices(refuse, tmp_path):
    small = ("expert.network.params.width=8", "expert.train.optimizer=adamw-8bit")
    line = refuse("prepare", "-c", TINY, f"run_dir={tmp_path / 'run'}", *small)
    assert "key 'expert.train.optimizer' = 'adamw-8bit': expert.network has no matrix of at least 4096 weights" in line
    assert line.endswith("set adamw")
    assert list(tmp_path.iterdir()) == []


def test_text_that_is_no_setting(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["fit", "-c", str(TINY), f"run_dir={tmp_path / 'run'}", "--jobs", "2", "sed"])
    assert "settings are given as key=value" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_what_prepare_refused_may_be_put_right_in_the_same_folder(tmp_path, capsys):
    run = tmp_path / "run"
    uneven = ["prepare.partition.num_fine_centroids=2", "prepare.partition.max_largest_over_mean=1"]
    assert main(["prepare", "-c", str(TINY), f"run_dir={run}", *uneven]) == 2
    assert "prepare.partition.max_largest_over_mean" in capsys.readouterr().err
    assert not (run / "experiment.yaml").exists()  # which would refuse other settings


def test_a_run_folder_that_cannot_be(refuse, tmp_path):
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    line = refuse("prepare", "-c", TINY, f"run_dir={tmp_path / 'file' / 'run'}")
    assert str(tmp_path / "file") in line
    assert "run_dir" in line
    assert tree(tmp_path) == {"file": b"mine"}


# The run: shards, checkpoints, members.


def test_an_island_given_shards_refuses_before_it_makes_a_run(refuse, tiny_run):
    before = tree(tiny_run)
    line = refuse("fit", *settings(tiny_run), "expert.network.params.num_heads=5", "member=expert-0")
    assert line.startswith(f"{TINY} with 'expert.network.params.num_heads=5': key 'expert.network': ")
    assert tree(tiny_run) == before


@pytest.mark.parametrize("number", [errno.EROFS, errno.ENAMETOOLONG])
def test_a_folder_that_cannot_be_written(refuse, finished_run, tmp_path, monkeypatch, number):
    def mkdtemp(dir, **_):
        raise OSError(number, os.strerror(number), str(dir))

    monkeypatch.setattr("tempfile.mkdtemp", mkdtemp)
    line = refuse("export", *settings(finished_run), "--to", "ensemble", "--out", tmp_path / "out")
    assert line.startswith(f"{tmp_path}: {os.strerror(number)}; ")


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["--class", "3"], "tiny_2x is conditioned on 'text', not on class; leave classes out"),
        (["--prompt", "red disc", "--prompt", ""], "a prompt is empty"),
        (["--prompt", "red disc", "--prompt", "  "], "a prompt is empty"),
        (["--prompt", "caf\udce9"], "a prompt is not UTF-8"),  # café in Latin-1
        (["--num", "0"], r"--num 0: .*sample\.num_per_prompt.*at least 1"),
        (["--seed", "-1"], "--seed -1: .*'seed' = -1.*from 0"),
        (["--strategy", "best"], r"--strategy best: .*sample\.strategy.*bayes, full, "),
        (["--strategy", "top-p", "sample.strategy_params.p=2"], ".*p = 2"),
        (["--strategy", "bayes", "sample.solver=heun"], r".*add sample\.solver=ancestral"),
        (
            ["--prompt", "a", "--prompt", "b", "--num", str(10**9)],
            r".*/run/samples: 2,000,000,000 images take at least 8\.2 TB, and ",
        ),
        *((["--out", out], f"--out {out!r}: ") for out in ("image.jpg", "", "nowhere/image.png", "nowhere/folder")),
    ],
)
def test_what_cannot_be_sampled_leaves_the_run_as_it_was(refuse, run, tmp_path, monkeypatch, words, line):
    def load(*_):
        raise AssertionError("images are drawn for nothing")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("ddm_lightning.use.loaded.load_ensemble", load)
    before = tree(run)

    found = refuse("sample", *settings(run), *words)

    assert re.match(line, found), found
    assert tree(run) == before


def test_sample_names_the_members_that_are_missing(refuse, finished_run, tmp_path):
    run = copy_run(finished_run, tmp_path / "run", "expert-1", "router")
    line = refuse("sample", *settings(run))
    assert line.startswith(f"{run / 'ensemble.json'}: ")
    assert "not finished: expert-1, router;" in line


def test_a_deleted_manifest_of_finished_members_is_named(refuse, run):
    (run / "ensemble.json").unlink()
    line = refuse("sample", *settings(run))
    assert line == f"{run / 'ensemble.json'}: is missing, although all members are finished; fit writes it again"


@pytest.mark.parametrize(("member", "more"), [("expert-0", []), ("expert-1", ["member=expert-1"])])
def test_a_finished_member_of_other_clusters_is_not_passed_over(refuse, run, member, more):
    manifest = run / "prepared" / "manifest.json"
    document = {**json.loads(manifest.read_text(encoding="utf-8")), "partition_sha256": "0" * 64}
    manifest.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")  # as prepare does
    line = refuse("fit", *settings(run), *more)
    assert line.startswith(f"{run / 'members' / member / 'artifact'}: has partition_sha256 = '")


def test_a_manifest_of_other_data_than_the_experts_saw(refuse, run):
    path = run / "prepared" / "manifest.json"
    columns = {**json.loads(path.read_text(encoding="utf-8"))["columns"], "x_0": "ndarray:uint8:3,512,512"}
    edit_json(path, x_shape=[3, 512, 512], columns=columns)
    line = refuse("sample", *settings(run))
    assert line.startswith(f"{path}: the experts were trained on other data ((3, 8, 8), ")


@pytest.mark.parametrize("num_classes", [10**9, 10**18])
def test_a_manifest_that_asks_for_a_network_that_does_not_fit(refuse, tiny_run, num_classes):
    edit_json(tiny_run / "prepared" / "manifest.json", class_counts=[], num_classes=num_classes)
    line = refuse("fit", *settings(tiny_run), "condition.kind=class", "sample.prompts=[]", "member=expert-0")
    assert re.search(r"needs [\d.]+ [TGE]B of memory, |cannot be built|refuses its params", line), line


def test_a_manifest_of_another_number_of_clusters(refuse, tiny_run):
    path = tiny_run / "prepared" / "manifest.json"
    edit_json(path, clusters=json.loads(path.read_text(encoding="utf-8"))["clusters"][:1], priors=[1], class_counts=[])
    line = refuse("fit", *settings(tiny_run), "member=expert-1")
    assert line.startswith("key 'prepare.partition.num_clusters' = 2: the manifest has 1; copy this run's")


@pytest.mark.parametrize(
    ("place", "command", "remedy"),
    [
        ("training.fit.build_data", "fit member=expert-0", "set island.micro_batch_size"),
        ("prepare.stages.fit_partition", "prepare", "lower prepare.num_processes or prepare.partition.fit"),
    ],
)
def test_memory_that_is_full_is_one_line(refuse, tiny_run, monkeypatch, place, command, remedy):
    monkeypatch.setattr(f"ddm_lightning.{place}", lambda *_, **__: torch.empty(1 << 50))
    if command == "prepare":
        shutil.rmtree(tiny_run)
    name, *more = command.split()
    line = refuse(name, *settings(tiny_run), *more)
    assert line.startswith("out of memory (")
    assert remedy in line
