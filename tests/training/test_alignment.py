"""Alignment of hidden tokens with the clustering features: its term, its end, its head, and what is refused."""

import shutil
from dataclasses import replace

import numpy as np
import pytest
import tiny_runs
import torch
from shards.mds import WARNINGS
from tiny_runs import TINY, copy_run
from training.checkpoint_folders import state_by_parameter, stored
from training.members import Recorder, at, batch, build
from training.short_fits import fit, member, trained, weights

from ddm_lightning.cli.parser import main
from ddm_lightning.config.experiment import AlignmentConfig, TrainConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.flow.condition import ConditionSpec
from ddm_lightning.members.artifact import load_network
from ddm_lightning.networks.blocks import DiTBlock
from ddm_lightning.networks.dit import DiT
from ddm_lightning.training.alignment import Alignment, check_alignment
from ddm_lightning.training.optimizer import build_optimizer
from ddm_lightning.training.roles import ExpertModule

pytestmark = WARNINGS

STORED = "prepare.shards.features=true"
ALIGNED = (STORED, "expert.alignment.weight=0.5", "expert.alignment.depth=1", "expert.alignment.until_step=15")
DEPTH, SIZE = 2, 7


def features(num=6):
    return torch.randn(num, SIZE, generator=torch.Generator().manual_seed(3)).half()


def expert(step=0, until_step=None, weight=0.5, **changes):
    """An expert of three blocks that has left its zeros; aligned after the second unless ``weight`` is 0."""
    torch.manual_seed(0)
    network = DiT(x_shape=(3, 4, 4), condition=ConditionSpec("text", 6), width=8, depth=3, num_heads=2, patch_size=2)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    changes["alignment"] = AlignmentConfig(weight, DEPTH, until_step) if weight else None
    module = at(build(ExpertModule, network, **changes), step)
    if weight:
        module.alignment = Alignment(network, module.member, SIZE)
    return module


def whole_batch():
    return {**batch(), "features": features()}


def gradients(module):
    return {name: p.grad for name, p in module.network.named_parameters() if p.grad is not None}


def test_the_loss_is_less_the_cosine_of_the_projected_mean_token():
    """By hand, in float64: the blocks one by one, and the head's three layers."""
    module, plain = expert(), expert(weight=0)
    network, noisy = module.network, module.noisy_batch(whole_batch())
    conditioning = network.conditioning(noisy.t, noisy.condition)
    tokens = network.tokens(noisy.x_t)
    for block in network.blocks[:DEPTH]:
        tokens = block(tokens, conditioning, None, None)
    module.alignment._tokens = None
    hidden = tokens.detach().double().numpy().mean(1)
    layers = [(p["weight"].double().numpy(), p["bias"].double().numpy()) for p in linear_layers(module.alignment)]
    for number, (weight, bias) in enumerate(layers):
        hidden = hidden @ weight.T + bias
        if number < 2:
            hidden = hidden / (1 + np.exp(-hidden))
    wanted = features().double().numpy()
    cosine = (hidden * wanted).sum(1) / np.linalg.norm(hidden, axis=1) / np.linalg.norm(wanted, axis=1)
    loss, without = module.training_step(whole_batch(), 0).item(), plain.training_step(whole_batch(), 0).item()
    assert loss == pytest.approx(without - 0.5 * cosine.mean(), rel=1e-5)
    curves, plain_curves = module.drain("train/"), plain.drain("train/")
    assert curves.pop("train/alignment") == pytest.approx(cosine.mean(), rel=1e-4)
    assert curves == plain_curves


def linear_layers(alignment):
    layers = [part.state_dict() for part in alignment.head if isinstance(part, torch.nn.Linear)]
    assert [tuple(layer["weight"].shape) for layer in layers] == [(8, 8), (8, 8), (SIZE, 8)]
    return layers


def test_the_weight_of_a_timestep_does_not_scale_it():
    aligned, plain = expert(min_snr_gamma=0.1), expert(weight=0, min_snr_gamma=0.1)
    difference = aligned.training_step(whole_batch(), 0).item() - plain.training_step(whole_batch(), 0).item()
    assert difference == pytest.approx(-0.5 * aligned.drain("train/")["train/alignment"], rel=1e-4)


def test_its_gradient_reaches_the_blocks_before_the_aligned_tokens_and_not_beyond():
    module = expert()
    part = whole_batch()
    module.compute_losses(module.noisy_batch(part), part)["alignment"].sum().backward()
    moved = {name for name, grad in gradients(module).items() if bool(grad.abs().sum() > 0)}
    for number, block in enumerate(module.network.blocks):
        assert isinstance(block, DiTBlock)
        reached = any(name.startswith(f"blocks.{number}.") for name in moved)
        assert reached == (number < DEPTH)
    assert not any(name.startswith("final.") for name in moved) and "patch_embedding.weight" in moved
    assert all(bool(p.grad.abs().sum() > 0) for p in module.alignment.parameters())


@pytest.mark.parametrize(("step", "counts"), [(4, True), (5, False), (6, False)])
def test_it_stops_after_its_last_step(step, counts):
    module, plain = expert(step, until_step=5), expert(step, weight=0)
    losses = [one.training_step(whole_batch(), 0) for one in (module, plain)]
    for loss in losses:
        loss.backward()
    assert (losses[0].item() != losses[1].item()) == counts
    found, expected = gradients(module), gradients(plain)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in found) != counts
    # DDP waits for a gradient of every parameter.
    assert all((p.grad is not None) and bool(p.grad.any()) == counts for p in module.alignment.parameters())


def test_validation_knows_nothing_of_it():
    module, plain = expert(), expert(weight=0)
    for one in (module, plain):
        one.eval()
        one.validation_step(batch(), 0)  # without features
    assert module.drain("held_out/") == plain.drain("held_out/")
    assert module.alignment._tokens is None


def test_the_head_begins_by_the_seed_alone():
    module = expert()
    heads = []
    for noise, seed in ((1, 7), (2, 7), (1, 8)):
        torch.manual_seed(noise)
        heads.append(Alignment(module.network, replace(module.member, seed=seed), SIZE).head[0].weight)
        drawn = torch.rand(1)
        assert torch.equal(drawn, torch.rand(1, generator=torch.Generator().manual_seed(noise)))
    assert torch.equal(heads[0], heads[1]) and not torch.equal(heads[0], heads[2])


def test_muon_leaves_the_head_to_adamw():
    module = expert()
    train = TrainConfig(10, 4, optimizer="muon")
    optimizer = build_optimizer(module.network, train, module.alignment.parameters())
    groups = [{id(p) for p in group["params"]} for group in optimizer.param_groups]
    head = {id(p) for p in module.alignment.parameters()}
    assert not head & groups[0] and head <= set.union(*groups[1:])


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return tiny_runs.prepared(tmp_path_factory.mktemp("with_features"), STORED)


@pytest.fixture(scope="module")
def aligned(prepared, tmp_path_factory):
    return trained(prepared, tmp_path_factory.mktemp("aligned"), *ALIGNED)


def test_the_artifact_is_the_plain_network_and_the_checkpoint_has_the_head(aligned, finished):
    states = [load_network(member(run, "artifact"))[1].state_dict() for run in (aligned, finished)]
    assert states[0].keys() == states[1].keys() and weights(aligned) != weights(finished)
    checkpoint = member(aligned, "checkpoints", "step-00000020.ckpt")
    head = {f"alignment.head.{number}.{kind}" for number in (0, 2, 4) for kind in ("weight", "bias")}
    assert {f"model/{name}" for name in head} <= stored(checkpoint)[0].keys()
    assert {"exp_avg", "exp_avg_sq", "step"} <= state_by_parameter(checkpoint)["alignment.head.0.weight"].keys()


@pytest.mark.parametrize("step", [12, 18])
def test_it_resumes_to_the_same_bits_with_its_head(aligned, tmp_path, step):
    """From before and from after the last step of the alignment, which is the 15th."""
    run = copy_run(aligned, tmp_path / "run", "expert-0")
    for path in member(run, "checkpoints").iterdir():
        if int(path.stem.removeprefix("step-")) > step:
            shutil.rmtree(path)
    assert fit(run, *ALIGNED) == 0
    assert weights(run) == weights(aligned)
    resumed, straight = (stored(member(one, "checkpoints", "step-00000020.ckpt"))[0] for one in (run, aligned))
    assert resumed.keys() == straight.keys()
    assert all(torch.equal(resumed[name], straight[name]) for name in straight)


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (["expert.alignment.weight=0.5"], "'expert.alignment.weight' = 0.5: the shards hold no features; prepare with"),
        ([*ALIGNED, "expert.alignment.depth=3"], "depth' = 3: the expert's network has only 2 blocks; lower it"),
    ],
)
@pytest.mark.parametrize("command", ["prepare", "fit member=expert-0"])
def test_what_cannot_be_aligned_is_one_line(prepared, tiny_prepared, tmp_path, capsys, command, settings, line):
    run, (command, *more) = tmp_path / "run", command.split()
    if command == "fit":
        shutil.copytree(prepared if STORED in settings else tiny_prepared, run / "prepared")
    assert main([command, "-c", str(TINY), f"run_dir={run}", *settings, *more]) == 2
    said = [words for words in capsys.readouterr().err.splitlines() if words.startswith("error: ")]
    assert len(said) == 1 and line in said[0]
    assert not (run / "members").exists() and not (run / "experiment.yaml").exists()


def test_a_network_without_blocks_cannot_be_aligned():
    with pytest.raises(UserError, match="no 'blocks' of tokens and their 'width'"):
        check_alignment(Recorder(), 1)
    check_alignment(expert().network, 3)
