"""Weights that members start from: where they may come from, and what is refused."""

from __future__ import annotations

import hashlib
import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from artifact_files import PARAMS, SHAPE, TEXT, make_network, put, refused
from safetensors.torch import save_file
from tiny_runs import TINY
from torch import nn

from ddm_lightning.config.experiment import InitConfig
from ddm_lightning.config.load import load_experiment
from ddm_lightning.members.initial import Initial
from ddm_lightning.members.member import Member
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.shards.manifest import DataSizes

NETWORK = f"expert.network={{name: dit, params: {json.dumps(PARAMS)}}}"
ROUTER_NETWORK = f"router.network={{name: router-dit, params: {json.dumps(PARAMS)}}}"
SIZES = DataSizes(SHAPE, TEXT.size, None, 0)


def initial(run: Path, source: Path | str, *settings: str, member: str = "expert-1", **config: Any) -> Initial:
    experiment = load_experiment(TINY, [NETWORK, ROUTER_NETWORK, *settings])
    resolved = Member.resolve(member, experiment, SIZES)
    return Initial(resolved, InitConfig(str(source), **config), RunFolder(run), None)


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def equal(weights: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return weights.keys() == other.keys() and all(torch.equal(weights[key], other[key]) for key in weights)


def loaded(start: Initial) -> nn.Module:
    network = start.member.build_network()
    start.load(network)
    assert start.differing == []
    return network


@pytest.mark.parametrize("kind", ["artifact", "run", "file", "url"])
def test_weights_come_from_an_artifact_a_run_a_file_and_a_url(tmp_path: Path, kind: str) -> None:
    artifact = put(tmp_path / "other" / "members" / "monolith" / "artifact", "monolith")
    weights = artifact / "model.safetensors"
    source: Any = {"artifact": artifact, "run": tmp_path / "other", "file": weights, "url": artifact.as_uri()}[kind]

    start = initial(tmp_path / "run", source)

    assert start.sha256 == sha256(weights) == sha256(start.path)
    assert start.path.is_relative_to(tmp_path / "run")
    shutil.rmtree(artifact)  # the run has its own
    assert equal(loaded(initial(tmp_path / "run", source)).state_dict(), dict(make_network("expert").state_dict()))


def test_a_router_starts_from_the_router_of_a_run(tmp_path: Path) -> None:
    monolith = put(tmp_path / "other" / "members" / "monolith" / "artifact", "monolith")
    put(tmp_path / "other" / "members" / "router" / "artifact", "router")

    router = initial(tmp_path / "run", tmp_path / "other", member="router")
    expert = initial(tmp_path / "run", tmp_path / "other")  # which takes that run's monolith, in the same folder

    assert equal(loaded(router).state_dict(), dict(make_network("router").state_dict()))
    assert equal(loaded(expert).state_dict(), dict(make_network("expert").state_dict()))
    wrong = initial(tmp_path / "run", monolith, member="router")
    refused(lambda: wrong.check(wrong.member.build_network()), monolith, "network is 'dit'", "'router-dit'")


def test_what_does_not_fit_is_refused_or_starts_anew(tmp_path: Path) -> None:
    artifact = put(tmp_path / "artifact")
    changed = NETWORK.replace('"patch_size": 2', '"patch_size": 1')
    words = ("'patch_embedding.weight' is floats [8, 12] instead of floats [8, 3]", "partial: true")
    strict = initial(tmp_path / "run", artifact, changed)

    refused(lambda: strict.check(strict.member.plan_network()), artifact, *words)
    assert not (tmp_path / "run").exists()

    start = initial(tmp_path / "run", artifact, changed, partial=True)
    network = start.member.build_network()
    anew = {"patch_embedding.weight", "final.out.weight", "final.out.bias"}
    expected = make_network("expert").state_dict()
    expected |= {name: value.clone() for name, value in network.state_dict().items() if name in anew}
    start.load(network)

    assert equal(network.state_dict(), expected)
    assert {line.split("'")[1] for line in start.differing if line.endswith(": starts anew")} == anew
    assert start.differing[len(anew) :] == ["the network's patch_size is 1, and was 2"]

    unlike = tmp_path / "unlike.safetensors"
    save_file({"weight": torch.ones(2)}, unlike)
    kept = sorted((tmp_path / "run").rglob("*"))
    refused(lambda: initial(tmp_path / "run", artifact, changed).check(network), artifact, *words)
    refused(lambda: initial(tmp_path / "run", unlike, partial=True).check(network), unlike, "do not fit")
    assert sorted((tmp_path / "run").rglob("*")) == kept


def test_weights_that_predict_something_else_are_refused_unless_partial(tmp_path: Path) -> None:
    for key, was, now in (("prediction", "epsilon", "velocity"), ("path", "cosine", "linear")):
        artifact = put(tmp_path / key, **{key: was})
        start = initial(tmp_path / now, artifact)
        network = start.member.plan_network()
        refused(lambda start=start, network=network: start.check(network), artifact, f"{key} is {was!r}", repr(now))
        initial(tmp_path / now, artifact, partial=True).check(network)


def test_an_adapter_is_refused(tmp_path: Path) -> None:
    lora = {"rank": 4, "alpha": 4.0, "target_modules": ["qkv"]}
    artifact = put(tmp_path / "artifact", lora=lora, init_sha256="ab" * 32)
    start = initial(tmp_path / "run", artifact, partial=True)
    refused(lambda: start.check(start.member.plan_network()), artifact, "is an adapter")


def _pickle(folder: Path) -> Path:
    (folder / "weights.pt").write_bytes(pickle.dumps({"weight": 1}))
    return folder / "weights.pt"


def _disguised(folder: Path) -> Path:
    return _pickle(folder).rename(folder / "weights.safetensors")


def _replaced(folder: Path) -> Path:
    put(folder / "artifact")
    save_file(make_network("expert", seed=1).state_dict(), folder / "artifact" / "model.safetensors")
    return folder / "artifact"


def _diverged(folder: Path) -> Path:
    save_file({"weight": torch.tensor([1.0, torch.nan])}, folder / "weights.safetensors")
    return folder / "weights.safetensors"


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (_diverged, "/weights.safetensors: weight 'weight' is not finite in float32; give other weights"),
        (_pickle, "not a whole safetensors file"),
        (_disguised, "not a whole safetensors file"),
        (_replaced, "was recorded: the file is damaged or replaced"),
        (lambda folder: folder / "nothing", "is no artifact, no run whose monolith is finished"),
        (lambda folder: folder, "is no artifact"),
        (lambda _: "nonsense://somewhere", "nonsense://somewhere cannot be read"),
    ],
)
def test_bad_sources_are_refused_and_leave_nothing(tmp_path: Path, make: Any, words: str) -> None:
    (tmp_path / "there").mkdir()
    source = make(tmp_path / "there")
    refused(lambda: initial(tmp_path / "run", source).sha256, source, words)
    assert not (tmp_path / "run").exists()


def test_other_weights_than_those_of_the_first_start_are_refused(tmp_path: Path) -> None:
    artifact = put(tmp_path / "artifact")
    run = tmp_path / "run"
    first = sha256(artifact / "model.safetensors")
    refused(lambda: initial(run, artifact, sha256="ab" * 32).sha256, artifact, first[:12], "not abababababab")
    start = initial(run, artifact, sha256=first)
    path = start.path
    refused(lambda: initial(run, artifact, sha256="ab" * 32).sha256, artifact, "not abababababab")
    shutil.copy(_replaced(tmp_path / "there") / "model.safetensors", path)
    refused(
        lambda: start.load(start.member.build_network()),
        path,
        "damaged or replaced",
        f"remove {run / 'initial'} to fetch",
    )
    shutil.rmtree(path.parent)
    shutil.copytree(tmp_path / "there" / "artifact", artifact, dirs_exist_ok=True)
    put(artifact, step=8)
    assert sha256(initial(run, artifact).path) == first, "another description of the same weights"


def test_a_source_that_has_changed_since_is_refused(tmp_path: Path) -> None:
    source = tmp_path / "weights.safetensors"
    run = tmp_path / "run"
    save_file(make_network("expert").state_dict(), source)
    start = initial(run, source)
    first = start.sha256
    save_file(make_network("expert", seed=1).state_dict(), source)
    assert sha256(initial(run, source).path) == first
    shutil.rmtree(start.path.parent)
    refused(lambda: initial(run, source).path, source, sha256(source)[:12], f"not {first[:12]}", "run_dir=")


def test_an_island_takes_what_prepare_has_published(tmp_path: Path) -> None:
    first = initial(tmp_path / "run", put(tmp_path / "artifact"))
    store = tmp_path / "store"
    shutil.copytree(first.path.parents[1], store / "initial")
    island = Initial(first.member, first.config, RunFolder(tmp_path / "island"), store.as_uri())
    shutil.rmtree(tmp_path / "artifact")
    assert island.sha256 == first.sha256
    assert not (tmp_path / "island" / "initial" / first.sha256).exists(), "not before the weights are needed"
    assert sha256(island.path) == first.sha256


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_folder_of_diffusers_fills_the_model_within(tmp_path: Path, is_sharded: bool) -> None:
    import diffusers

    config = {"num_attention_heads": 1, "attention_head_dim": 8, "in_channels": 3, "num_layers": 1, "sample_size": 4}
    config |= {"caption_channels": TEXT.size, "cross_attention_dim": 8, "norm_type": "ada_norm_single"}
    model = diffusers.PixArtTransformer2DModel(**config)
    model.save_pretrained(tmp_path / "model", max_shard_size="10KB" if is_sharded else "1GB")
    files = [*(tmp_path / "model").glob("*.safetensors")]
    assert (len(files) > 1) == is_sharded
    source = (tmp_path / "model").as_uri()
    sizes = DataSizes(SHAPE, TEXT.size, (2, TEXT.size), 0)
    changes = ["expert.network.name=diffusers", f"expert.init_from={source}", f"run_dir={tmp_path / 'run'}"]
    run = Run(load_experiment(TINY, [*changes, "condition.kind=tokens", "expert.path=vp", "sample.prompts=[]"]))
    member = run.resolve("expert-0", sizes)
    assert not (tmp_path / "run").exists(), "a plan does not fetch the weights"
    start = member.initial
    assert start is not None
    built = loaded(start)
    assert equal(dict(built.model.state_dict()), dict(model.state_dict()))
    assert is_sharded or start.sha256 == sha256(files[0])
    (tmp_path / "model").rename(tmp_path / "gone")
    assert run.resolve("expert-0", sizes) == member, "the run has its configuration, too"
