"""Experts with different networks, paths and predictions: their training, and one ensemble of them."""

import json

import pytest
import torch
from shards.mds import WARNINGS
from tiny_runs import TINY
from training.members import Recorder, at, batch, build, expert

from ddm_lightning.cli.parser import main
from ddm_lightning.ensemble.load import load_ensemble
from ddm_lightning.ensemble.manifest import read_ensemble
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.path import PATHS
from ddm_lightning.members.roles import ROLES
from ddm_lightning.training.roles import StudentModule

pytestmark = WARNINGS


@pytest.mark.parametrize("path", ["cosine", "vp"])
def test_a_batch_lies_on_the_members_path_in_training_and_validation(path):
    module = expert(Recorder(), path=path)
    noisy = module.noisy_batch(batch())
    held_out = module.noisy_validation_batch(batch(), 0, 5)
    for one in (noisy, held_out):
        alpha, sigma = (scale[:, None, None, None] for scale in PATHS[path].scales(one.t))
        torch.testing.assert_close(one.x_t, alpha * one.x_0 + sigma * one.noise)
    straight = expert(Recorder()).noisy_batch(batch())
    assert torch.equal(straight.t, noisy.t) and torch.equal(straight.noise, noisy.noise)


def test_the_target_and_the_weights_are_the_paths():
    recorder = Recorder("velocity", lambda x_t, _: torch.zeros_like(x_t))
    module = expert(recorder, path="cosine", loss="velocity")
    noisy = module.noisy_batch(batch())
    losses = module.compute_losses(noisy, batch())
    angle = torch.pi / 2 * noisy.t[:, None, None, None]
    target = torch.pi / 2 * (angle.cos() * noisy.noise - angle.sin() * noisy.x_0)
    expected = target.square().flatten(1).mean(1)
    torch.testing.assert_close(losses["loss"], expected)
    angle = angle.flatten()
    scale = (angle.cos() + angle.sin()) / (torch.pi / 2)
    torch.testing.assert_close(module.weighted(losses, noisy.t), expected * scale**2)


def test_a_student_on_another_path_asks_its_teacher_on_the_linear_one():
    module = at(build(StudentModule, Recorder(), name="student", role=ROLES["student"], path="vp"), step=0)
    asked = []

    def answer(x_t, t):
        asked.append((x_t, t))
        return 2 / 0.7 * x_t

    module.teacher = Ensemble([Recorder(answer=answer)] * 3, None, [1 / 3] * 3)
    module.strategy = None
    noisy = module.noisy_batch(batch(4))
    x_0, noise = module.ends(noisy, {"cluster": torch.zeros(4, dtype=torch.int64)})
    ((x_t, t),) = asked
    expected_x_t, expected_t = PATHS["vp"].to_linear(noisy.x_t, noisy.t)
    assert torch.equal(t, expected_t) and torch.equal(x_t, expected_x_t)
    torch.testing.assert_close(noise - x_0, 2 * x_t)
    time = t[:, None, None, None]
    torch.testing.assert_close((1 - time) * x_0 + time * noise, x_t)


@pytest.mark.slow
def test_two_networks_and_objectives_in_one_ensemble(tiny_run, capsys):
    unet = "{network: {name: unet, params: {width: 8, multipliers: [1, 2], prediction: epsilon}}, path: cosine}"
    own = [
        *("-c", str(TINY), f"run_dir={tiny_run}", f"expert.overrides.expert-1={unet}", "island.compile=false"),
        *("expert.train.max_steps=4", "router.train.max_steps=4", "island.validate_every_n_steps=4"),
        *("sample.num_steps=3", "sample.strategy=full", "sample.solver=dpm++2m", "sample.num_per_prompt=1"),
    ]
    for member in ("expert-0", "expert-1", "router"):
        assert main(["fit", *own, f"member={member}"]) == 0
    assert main(["fit", *own]) == 0
    metas = {
        member: json.loads((tiny_run / "members" / member / "artifact" / "member.json").read_text())
        for member in ("expert-0", "expert-1", "router")
    }
    said = [(meta["network"], meta["prediction"], meta["path"]) for meta in metas.values()]
    assert said == [("dit", "velocity", "linear"), ("unet", "epsilon", "cosine"), ("router-dit", None, "linear")]
    assert load_ensemble(read_ensemble(tiny_run / "ensemble.json")).paths == ["linear", "cosine"]
    assert (tiny_run / "samples" / "full.png").exists()
    assert "without sample images" not in capsys.readouterr().err
    # Another path is another experiment.
    assert main(["fit", *own, "expert.overrides.expert-1.path=vp", "member=expert-1"]) == 2
    assert "expert.overrides.expert-1.path" in capsys.readouterr().err
