"""Experts removed, added, replaced, lost or broken: the other clusters' images stay, and nothing is trained."""

from __future__ import annotations

import json
import re
import shutil

import numpy as np
import pytest
import torch
from artifact_files import PARAMS, edit, refused
from deadline import within
from ensemble_networks import ExactExpert, ExactRouter, finite_set
from finite_set import FiniteSetOracle
from saved_ensembles import PROMPTS, images, load, put_member, saved
from saved_ensembles import kept as kept
from saved_ensembles import three as three

from ddm_lightning.cli.parser import main
from ddm_lightning.ensemble.velocity import Ensemble

STRATEGIES = ("full", "top-1", "bayes")
LOOSE = {"rtol": 0.1, "atol": 0.1}


def change(*arguments):
    return main(["ensemble", *map(str, arguments)])


def tree(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_without_a_cluster_the_velocity_is_that_of_the_other_data():
    points, labels = finite_set([4, 7, 5, 9], 3, seed=0)
    whole = FiniteSetOracle(points, labels, 4)
    rest = labels != 1
    others = FiniteSetOracle(points[rest], labels[rest] - (labels[rest] > 1).long(), 3)
    kept = [0, 2, 3]
    ensemble = Ensemble([ExactExpert(whole, k) for k in kept], ExactRouter(whole), [0.2, 0.3, 0.5], clusters=kept)
    x_t = torch.randn(32, 3, dtype=torch.float64)
    t = torch.linspace(0.05, 1, 32, dtype=torch.float64)
    assert torch.allclose(ensemble.velocity(x_t, t), others.velocity(x_t, t), atol=1e-10)
    all_four = Ensemble([ExactExpert(whole, k) for k in range(4)], ExactRouter(whole), [0.2, 0.3, 0.25, 0.25])
    off = all_four.reweighted([1, 0, 1, 1])
    assert torch.allclose(off.velocity(x_t, t), others.velocity(x_t, t), atol=1e-10)
    assert torch.allclose(off.priors, torch.tensor([2 / 7, 0, 2.5 / 7, 2.5 / 7], dtype=torch.float64))
    assert off.experts[1].num_rows == 0

    less = whole.cluster_posterior(x_t, t) * torch.tensor([3, 0.5, 0.2, 4])
    twice = all_four.reweighted([3, 0.5, 1, 1]).reweighted([1, 1, 0.2, 4])
    assert torch.allclose(twice.probabilities(x_t, t), less / less.sum(1, keepdim=True))
    assert torch.allclose(twice.priors, all_four.reweighted([3, 0.5, 0.2, 4]).priors)


def test_an_expert_opts_out_and_the_images_of_the_others_stay(three, tmp_path, capsys):
    out = tmp_path / "out"
    assert change("remove", three, "expert-1", "--out", out) == 0
    assert capsys.readouterr().out == f"ensemble: {out}\npriors: expert-0 0.2857, expert-2 0.7143\n"
    assert not (out / "expert-1").exists() and "added, removed or replaced" in (out / "README.md").read_text()
    for name in ("expert-0", "expert-2", "router"):
        assert tree(out / name) == tree(three / name)

    before = load(three)
    after = load(out)
    assert after.field.paths == ["linear", "cosine"] and after.about.num_images == 70
    for cluster in (0, 2):
        of_one = {"strategy": "oracle", "strategy_params": {"cluster": cluster}}
        assert images(before, **of_one) == images(after, **of_one)

    calls = []
    before.field.experts[1].register_forward_hook(lambda *_: calls.append(1))
    touched = set()
    for prompt in PROMPTS:
        calls.clear()
        pair = [one.sample(prompt, strategy="top-1")[0].tobytes() for one in (before, after)]
        touched.add(bool(calls))
        assert calls or pair[0] == pair[1]

    assert touched == {True, False}


def test_an_expert_that_comes_back_restores_every_image(three, tmp_path):
    less = tmp_path / "less"
    again = tmp_path / "again"
    assert change("remove", three, "expert-1", "--out", less) == 0
    assert change("add", less, three / "expert-1", "--images", 30, "--out", again) == 0
    assert load(again).manifest.priors == pytest.approx((0.2, 0.3, 0.5), abs=1e-15)
    for strategy in STRATEGIES:
        assert images(load(again), strategy=strategy) == images(load(three), strategy=strategy)
        assert images(load(less), strategy=strategy) != images(load(three), strategy=strategy)


def test_an_expert_of_other_data_needs_bayes(three, tmp_path, capsys):
    stranger = put_member(tmp_path / "stranger", "expert-0", 5, 8, partition_sha256="cd" * 32)
    out = tmp_path / "out"
    more = tmp_path / "more"
    assert change("add", three, stranger, "--images", 100, "--out", out) == 0
    printed = capsys.readouterr().out
    assert "expert-0 0.1000, expert-1 0.1500, expert-2 0.2500, expert-3 0.5000\n" in printed
    assert printed.count("\n") == 3 and "use the strategy bayes, or train a router anew" in printed
    ensemble = load(out)
    assert ensemble.field.router is None and ensemble.about.sample.strategy == "bayes"
    used = []
    for k, expert in enumerate(ensemble.field.experts):
        expert.register_forward_hook(lambda *_, k=k: used.append(k))

    assert len({*images(ensemble)}) == len(PROMPTS) and {*used} == {0, 1, 2, 3}
    refused(lambda: ensemble.sample(PROMPTS, strategy="full", solver="euler"), "no router", "bayes")
    another = put_member(tmp_path / "another", "expert-0", 6, 8, partition_sha256="cd" * 32)
    assert change("add", out, another, "--images", 1, "--out", more) == 0  # of eight clusters: numbers go on after them
    assert load(more).manifest.experts == ["expert-0", "expert-1", "expert-2", "expert-3", "expert-8"]


def test_a_newer_expert_keeps_the_router_and_another_one_costs_it(three, tmp_path):
    newer = put_member(tmp_path / "newer", "expert-1", 6)
    assert change("replace", three, "expert-1", newer, "--out", tmp_path / "out") == 0
    before = load(three)
    after = load(tmp_path / "out")
    assert after.field.router is not None and after.manifest.priors == before.manifest.priors
    assert tree(tmp_path / "out" / "expert-1") == tree(newer)
    assert change("replace", three, "expert-0", newer, "--images", 80, "--out", tmp_path / "other") == 0
    other = load(tmp_path / "other")
    assert other.field.router is None and other.manifest.priors == (0.5, 0.1875, 0.3125)
    assert len(images(other)) == len(PROMPTS)


def test_a_lost_expert_is_left_out_and_said_so(three, tmp_path, capsys):
    assert change("remove", three, "expert-1", "--out", tmp_path / "removed") == 0
    shutil.rmtree(three / "expert-1")
    capsys.readouterr()
    lost = load(three)
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and "artifact of expert-1 is missing" in err and "renormalised" in err
    for strategy in STRATEGIES:
        assert images(lost, strategy=strategy) == images(load(tmp_path / "removed"), strategy=strategy)

    assert change("remove", three, "expert-1", "--out", tmp_path / "again") == 0  # for good
    removed, again = (tmp_path / name / "ensemble.json" for name in ("removed", "again"))
    assert again.read_bytes() == removed.read_bytes()

    lost.save_pretrained(tmp_path / "kept")
    capsys.readouterr()
    assert images(load(tmp_path / "kept")) == images(lost)
    assert capsys.readouterr().err == "", "nothing is missing there"

    for name in ("expert-0", "expert-2"):
        shutil.rmtree(three / name)

    refused(lambda: load(three), three / "ensemble.json", "every expert is missing")


@pytest.mark.parametrize("strategy", ["full", "top-1"])
def test_rows_that_an_expert_breaks_are_made_without_it(three, tmp_path, capsys, strategy):
    assert change("remove", three, "expert-1", "--out", tmp_path / "removed") == 0
    whole, removed, broken = (load(folder) for folder in (three, tmp_path / "removed", three))
    next(broken.field.experts[1].parameters()).data.fill_(torch.nan)
    capsys.readouterr()

    found, full, less = (images(one, strategy=strategy) for one in (broken, whole, removed))

    assert images(broken, strategy=strategy) == found
    err = capsys.readouterr().err
    assert err.count("\n") == 1 and err.startswith("note: expert-1 returns NaN on ")
    kept = [image == intact for image, intact in zip(found, full, strict=True)]
    assert any(kept) == (strategy == "top-1") and not all(kept)  # full asks every expert
    if strategy == "full":
        pixels = [np.frombuffer(b"".join(one), np.uint8).astype(int) for one in (found, less)]
        assert np.abs(pixels[0] - pixels[1]).max() <= 1  # batches of other sizes round otherwise

    only = {"strategy": "oracle", "strategy_params": {"cluster": 1}}
    refused(lambda: images(broken, **only), "expert-1", "returns NaN", "fit it again")


@pytest.mark.parametrize("strategy", ["full", "bayes", "sample-1", "sample-each-step"])
def test_a_broken_router_is_not_blamed_on_an_expert(three, strategy):
    ensemble = load(three)
    next(ensemble.field.networks[-1].parameters()).data.fill_(torch.nan)
    refused(lambda: images(ensemble, strategy=strategy), "router: returns NaN", "bayes")


def test_an_adaptive_solver_survives_a_broken_expert(three):
    ensemble = load(three)
    next(ensemble.field.experts[1].parameters()).data.fill_(torch.nan)
    assert len(ensemble.sample(PROMPTS[:2], strategy="full", solver="dormand-prince", solver_params=LOOSE)) == 2


def test_one_expert_alone(tmp_path, capsys):
    one = saved(tmp_path, (7,))
    out = tmp_path / "out"
    assert images(load(one), strategy="full") == images(load(one), strategy="top-1", factors=[2])
    assert change("remove", one, "expert-0", "--out", out) == 2 and "only expert" in capsys.readouterr().err

    other = put_member(tmp_path / "b", "expert-0", 3, 1)
    assert change("add", one, other, "--images", 7, "--out", out) == 0
    assert load(out).manifest.priors == (0.5, 0.5)
    assert change("remove", out, "expert-0", "--out", tmp_path / "b2") == 0
    assert load(tmp_path / "b2").manifest.priors == (1.0,) and len(images(load(tmp_path / "b2"))) == len(PROMPTS)


def tamper(expert):
    content = (expert / "model.safetensors").read_bytes()
    (expert / "model.safetensors").write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def truncate(expert):
    content = (expert / "model.safetensors").read_bytes()
    (expert / "model.safetensors").write_bytes(content[:-8])


def describe_otherwise(expert):
    edit(expert / "member.json", step=8)


def put_huge(artifact):
    """A well-formed file of a terabyte that takes no room, and would take an hour to hash."""
    header = json.dumps({"w": {"dtype": "F32", "shape": [1 << 38], "data_offsets": [0, 1 << 40]}}).encode()
    with (artifact / "model.safetensors").open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + (1 << 40))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (tamper, "SHA-256 is"),
        (truncate, "not a whole safetensors file"),
        (describe_otherwise, "is not the expert-1"),
    ],
)
def test_damage_is_refused_in_one_line(three, tmp_path, capsys, damage, words):
    damage(three / "expert-1")

    assert change("remove", three, "expert-0", "--out", tmp_path / "out") == 2

    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1 and words in err and not (tmp_path / "out").exists()
    refused(lambda: load(three), words)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("remove THREE expert-7", "expert-7: no such expert; the ensemble has expert-0, "),
        ("remove THREE router", "router: no such expert"),
        ("remove OUT expert-0", "OUT: is not a folder here"),
        ("add THREE THREE/router --images 5", "is the router; give the artifact of an "),
        ("add THREE THREE/expert-0 --images 5", "is already in the ensemble as expert-0"),
        ("add THREE THREE/none --images 5", "is missing"),
        ("add THREE THREE/expert-0 --images 0", "--images 0: must be at least 1"),
        (
            "add THREE SMALL --images 5",
            "SMALL/member.json: has another value of timestep_shift than THREE/expert-0/member.json",
        ),
        ("add THREE UNKNOWN --images 5", "unknown expert 'pixel-net'; known: "),
        ("replace THREE expert-1 UNKNOWN", "install the package that registers it"),
        ("add THREE WIDER --images 5", "WIDER/member.json: the weights do not fit"),
        ("add THREE HUGE --images 5", "HUGE/member.json: needs 1.1 TB of memory"),
    ],
)
def test_a_change_that_cannot_be(three, tmp_path, capsys, arguments, words):
    put_member(tmp_path / "SMALL", "expert-0", 1, timestep_shift=3.0)
    put_member(tmp_path / "UNKNOWN", "expert-1", 1, network="pixel-net")
    put_member(tmp_path / "WIDER", "expert-1", 1, params={**PARAMS, "width": 12})
    put_huge(put_member(tmp_path / "HUGE", "expert-1", 9))
    three.rename(tmp_path / "THREE")

    places = re.sub("(THREE|OUT|SMALL|UNKNOWN|WIDER|HUGE)", rf"{tmp_path}/\1", arguments)
    with within(20):
        assert change(*places.split(), "--out", tmp_path / "OUT") == 2

    err = capsys.readouterr().err
    assert err.count("\n") == 1 and not (tmp_path / "OUT").exists()
    assert words in err.replace(f"{tmp_path}/", "")


def test_a_change_needs_a_new_folder(three, capsys):
    assert change("remove", three, "expert-0", "--out", three) == 2
    assert "exists already; give a new folder" in capsys.readouterr().err


def test_a_manifest_may_not_mix_partitions_unless_it_says_so(three, tmp_path):
    stranger = put_member(tmp_path / "stranger", "expert-0", 5, partition_sha256="cd" * 32)
    assert change("replace", three, "expert-0", stranger, "--out", tmp_path / "out") == 0
    edit(tmp_path / "out" / "ensemble.json", changed=False)
    refused(lambda: load(tmp_path / "out"), "has another value of partition_sha256")
    shutil.copytree(three / "router", tmp_path / "out" / "router")
    document = json.loads((three / "ensemble.json").read_text())
    mixed = json.loads((tmp_path / "out" / "ensemble.json").read_text())["members"]
    edit(tmp_path / "out" / "ensemble.json", changed=True, members=[*mixed, document["members"][-1]])
    refused(lambda: load(tmp_path / "out"), "is not the expert-0 that")
