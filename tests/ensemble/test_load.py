"""From a run folder to an ensemble that computes what the trained networks computed."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from artifact_files import PARAMS, SHAPE, edit, make_meta, make_network, put, refused

from ddm_lightning.core.registry import EXPERTS, ROUTERS
from ddm_lightning.ensemble.load import load_ensemble
from ddm_lightning.ensemble.manifest import read_ensemble, single, write_ensemble
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members.artifact import write_artifact
from ddm_lightning.members.load import load_network

PRIORS = [0.25, 0.75]


@pytest.fixture
def run_dir(tmp_path):
    """A run of two experts and a router, all different."""
    folders = []
    for seed, member in enumerate(["expert-0", "expert-1", "router"]):
        meta = make_meta(member)
        folders.append(tmp_path / "run" / member)
        write_artifact(folders[-1], make_network(meta.role, seed).state_dict(), meta)

    write_ensemble(tmp_path / "run", folders, PRIORS)
    return tmp_path / "run"


def inputs():
    generator = torch.Generator().manual_seed(0)
    x_t = torch.randn(6, *SHAPE, generator=generator)
    text = torch.randn(6, 5, generator=generator)
    return x_t, torch.linspace(0.1, 1, 6), Condition(text, torch.arange(6) % 3 > 0)


def test_the_loaded_ensemble_computes_what_was_trained(run_dir):
    manifest = read_ensemble(run_dir / "ensemble.json")
    loaded = load_ensemble(manifest)
    trained = Ensemble([make_network("expert", 0), make_network("expert", 1)], make_network("router", 2), PRIORS)
    x_t, t, condition = inputs()
    expected = trained.velocity(x_t, t, condition, guidance_scale=2.0)
    got = loaded.velocity(x_t, t, condition, guidance_scale=2.0)
    assert torch.equal(got, expected) and got.abs().sum() > 0
    assert loaded.priors.tolist() == PRIORS
    assert manifest.meta.member == "expert-0" and manifest.meta.timestep_shift == 1.5


def test_the_routers_temperatures_are_applied(run_dir):
    plain = load_ensemble(read_ensemble(run_dir / "ensemble.json"))
    without = (2.0, 3.0)
    given = (0.5, 0.25)
    figures = {f"held_out/temperature_t{t}": one for t, one in zip((0.25, 0.75), without, strict=True)}
    figures |= {f"held_out/temperature_conditional_t{t}": one for t, one in zip((0.25, 0.75), given, strict=True)}
    put(run_dir / "router", "router", metrics=figures)
    write_ensemble(run_dir, [run_dir / member for member in ("expert-0", "expert-1", "router")], PRIORS)
    calibrated = load_ensemble(read_ensemble(run_dir / "ensemble.json"))
    plain.router = calibrated.router
    x_t, t, condition = inputs()
    of_rows = [given if keep else without for keep in condition.keep]
    divisors = [np.interp(time, (0.25, 0.75), pair) for time, pair in zip(t.tolist(), of_rows, strict=True)]
    expected = (plain.probabilities(x_t, t, condition).log() / torch.tensor(divisors)[:, None].float()).softmax(1)
    assert torch.allclose(calibrated.probabilities(x_t, t, condition), expected, atol=1e-5)
    edit(run_dir / "router" / "member.json", metrics={"held_out/temperature_t0.25": 0.0})
    refused(lambda: load_network(run_dir / "router"), run_dir / "router" / "member.json", "temperature", "not positive")


def test_a_router_without_a_condition_is_given_none(run_dir):
    router = ROUTERS.build("router-dit", PARAMS, x_shape=SHAPE, condition=ConditionSpec("none", 0), num_clusters=2)
    meta = replace(make_meta("router"), condition=ConditionSpec("none", 0), timestep_shift=1.0)
    write_artifact(run_dir / "router", router.state_dict(), meta)
    write_ensemble(run_dir, [run_dir / member for member in ("expert-0", "expert-1", "router")], PRIORS)
    assert load_ensemble(read_ensemble(run_dir / "ensemble.json")).velocity(*inputs()).shape == (6, *SHAPE)


def test_counts_of_classes_come_with_the_artifacts(tmp_path):
    spec = ConditionSpec("class", 2)
    folders = []
    for k, counts in enumerate([[10, 0], [5, 15]]):
        meta = replace(make_meta(f"expert-{k}"), condition=spec, caption_encoder=None, class_counts=counts)
        folders.append(tmp_path / meta.member)
        write_artifact(folders[k], EXPERTS.build("dit", PARAMS, x_shape=SHAPE, condition=spec).state_dict(), meta)

    write_ensemble(tmp_path, folders, [1 / 3, 2 / 3])
    loaded = load_ensemble(read_ensemble(tmp_path / "ensemble.json", partial=True))
    weights = loaded.prior_weights(Condition.of(torch.tensor([0, 1])), 2)
    assert torch.allclose(weights, torch.tensor([[2 / 3, 1 / 3], [0, 1]], dtype=torch.float64))


@pytest.mark.parametrize("member", ["monolith", "expert-1"])
def test_a_single_member_is_an_ensemble_of_itself(run_dir, member):
    if member == "monolith":
        write_artifact(run_dir / member, make_network("monolith", 1).state_dict(), make_meta("monolith"))

    manifest = single(run_dir / member)
    loaded = load_ensemble(manifest)
    x_t, t, condition = inputs()
    expected = make_network("expert", 1).eval()(x_t, t, condition)
    assert torch.allclose(loaded.velocity(x_t, t, condition), expected, atol=1e-6)
    assert torch.equal(load_network(run_dir / member)[1](x_t, t, condition), expected)
    assert manifest.meta.member == member and loaded.names == [member]
    refused(lambda: single(run_dir / "router"), run_dir / "router" / "member.json", "give an expert")
