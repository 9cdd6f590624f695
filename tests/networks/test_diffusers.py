"""Experts made of diffusers' transformers, compared with diffusers itself."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import pytest
import torch
from artifact_files import make_meta, refused
from shards.mds import WARNINGS
from tiny_runs import TINY

from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.compat import ensure_torchvision_importable
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.members.artifact import build_network, load_network
from ddm_lightning.members.member import Member
from ddm_lightning.shards.manifest import DataSizes
from ddm_lightning.testing import check_expert

pytestmark = WARNINGS
DIT, PIXART, SD3 = "DiTTransformer2DModel", "PixArtTransformer2DModel", "SD3Transformer2DModel"
SHAPE, CLASSES, TOKENS = (4, 8, 8), ConditionSpec("class", 5), ConditionSpec("tokens", 6, length=3)
SIZES = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "in_channels": 4, "sample_size": 8}
OWN = {
    DIT: {"out_channels": 8, "num_embeds_ada_norm": 5},
    PIXART: {"out_channels": 8, "cross_attention_dim": 16, "caption_channels": 6},
    SD3: {"out_channels": 4, "joint_attention_dim": 6, "caption_projection_dim": 16, "pooled_projection_dim": 10}
    | {"pos_embed_max_size": 6},
}


def saved(kind, folder, safe=True, **changes):
    ensure_torchvision_importable()
    import diffusers

    torch.manual_seed(0)
    model = getattr(diffusers, kind)(**SIZES | OWN[kind] | changes)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder, safe_serialization=safe)
    return model.eval()


def built(condition=CLASSES, x_shape=SHAPE, **params):
    return EXPERTS.build("diffusers", params, x_shape=x_shape, condition=condition)


def vp_time(step):
    """Root of 19.9/4·tau² + 0.1/2·tau = -log(alpha), for the alpha of diffusers' own scheduler."""
    from diffusers import DDPMScheduler

    decay = -0.5 * math.log(DDPMScheduler(beta_schedule="linear").alphas_cumprod.double()[step])
    return (-0.05 + math.sqrt(0.05**2 + 19.9 * decay)) / (19.9 / 2)


@pytest.mark.parametrize("kind", OWN)
def test_it_answers_as_diffusers_does(kind, tmp_path):
    model = saved(kind, tmp_path)
    network = built(CLASSES if kind == DIT else TOKENS, path=str(tmp_path)).eval()
    assert (network.prediction, network.path) == (("velocity", "linear") if kind == SD3 else ("epsilon", "vp"))
    x_t, steps = torch.randn(4, *SHAPE), [0, 17, 500, 990]
    t = torch.tensor([step / 1000 if kind == SD3 else vp_time(step) for step in steps])
    keep = torch.tensor([True, True, False, True])
    if kind == DIT:
        condition = Condition(torch.tensor([0, 1, 2, 4]), keep)
        given, null = {"class_labels": torch.tensor([0, 1, 5, 4])}, {"class_labels": torch.full((4,), 5)}
    else:
        condition = Condition(torch.randn(4, 3, 6).half(), keep)
        given = {"encoder_hidden_states": condition.values.float() * keep[:, None, None]}
        pooled = {"pooled_projections": torch.zeros(4, 10)} if kind == SD3 else {}
        given, null = given | pooled, {"encoder_hidden_states": torch.zeros(4, 3, 6)} | pooled
    for ours, theirs in ((condition, given), (None, null)):
        with torch.no_grad():
            expected = model(x_t, timestep=torch.tensor(steps), **theirs).sample[:, :4]
            torch.testing.assert_close(network(x_t, t, ours), expected, rtol=1e-3, atol=1e-3)
    many = torch.arange(4).repeat(25)
    with torch.no_grad():  # in training, too, conditions are dropped by the trainer alone
        twice = [network.train(mode)(x_t[many], t[many], condition.rows(many)) for mode in (True, False)]
    assert torch.equal(*twice)


@pytest.mark.parametrize("kind", OWN)
def test_it_keeps_the_contract_of_experts(kind):
    def factory(**context):
        network = EXPERTS.get("diffusers")(**context, config={"_class_name": kind} | SIZES | OWN[kind])
        if kind == SD3:  # whose last block computes queries of the text for nothing
            network.blocks[-1].attn.add_q_proj.requires_grad_(False)
        return network

    check_expert(factory, x_shape=SHAPE, kinds=("none", "class") if kind == DIT else ("tokens",))


@pytest.mark.slow
def test_a_pretrained_one_trains_and_its_artifact_does_not_need_the_folder(tiny_run, tmp_path):
    folder = tmp_path / "pretrained"
    model = saved(DIT, folder, in_channels=3, out_channels=3, num_embeds_ada_norm=4)
    expert = [f"expert.network={{name: diffusers, params: {{path: {folder}}}}}", "expert.path=vp"]
    expert += [
        "expert.train.max_steps=2",
        "expert.train.learning_rate=1e-4",
        "condition.kind=class",
        "sample.prompts=[]",
    ]
    fit = ["fit", "-c", str(TINY), f"run_dir={tiny_run}", "member=expert-0", *expert]
    assert main(fit) == 0
    assert main(fit) == 0  # finished: its artifact is recognised
    shutil.rmtree(folder)
    meta, network = load_network(tiny_run / "members" / "expert-0" / "artifact")
    assert list(meta.params) == ["config"] and str(tmp_path) not in json.dumps(meta.params)
    assert (meta.path, meta.prediction) == ("vp", "epsilon")
    state = network.model.state_dict()
    distances = [float((state[name] - value).abs().max()) for name, value in model.state_dict().items()]
    assert 0 < max(distances) < 1e-3


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        (DIT, {"x_shape": (3, 8, 8)}, r"samples of shape \(4, 8, 8\), not \(3, 8, 8\)"),
        (PIXART, {"condition": TOKENS, "x_shape": (4, 16, 16)}, r"samples of shape \(4, 8, 8\)"),
        (SD3, {"condition": TOKENS, "x_shape": (4, 14, 14)}, "of at most 12 and divisible by 2"),
        (DIT, {"condition": TOKENS}, "kind 'class' of at most 5, or 'none', not kind 'tokens', size 6"),
        (DIT, {"condition": ConditionSpec("class", 6)}, "at most 5"),
        (PIXART, {}, "kind 'tokens' of size 6, not kind 'class', size 5"),
        (SD3, {"condition": ConditionSpec("tokens", 7, length=3)}, "'tokens' of size 6"),
        (DIT, {"path": "elsewhere"}, "one of 'path' and 'config'"),
        (PIXART, {"condition": TOKENS, "also": {"use_additional_conditions": True}}, "resolution and aspect ratio"),
        (PIXART, {"also": {"_class_name": "os.system"}}, "_class_name is 'os.system', not DiT"),
        (DIT, {"also": {"num_layers": "many"}}, "config: TypeError"),
    ],
)
def test_what_does_not_match_is_refused_in_one_line(kind, changes, problem):
    config = {"_class_name": kind} | SIZES | OWN[kind] | changes.pop("also", {})
    with pytest.raises(UserError, match=problem) as refusal:
        built(**{"config": config} | changes)
    assert "\n" not in str(refusal.value)


def test_folders_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(UserError, match=r"nowhere.config\.json: .*missing; set 'path'"):
        built(path=str(tmp_path / "nowhere"))
    saved(DIT, tmp_path / "pickled", safe=False)
    with pytest.raises(UserError, match=r"pytorch_model\.safetensors: the weights are missing; .*save_pretrained"):
        built(path=str(tmp_path / "pickled"))
    saved(DIT, tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    # Of before diffusers 0.30, and with another depth.
    file.write_text(json.dumps(json.loads(file.read_text()) | {"_class_name": "Transformer2DModel", "num_layers": 3}))
    for device in ("cpu", "meta"):
        with torch.device(device), pytest.raises(UserError, match=r"do not fit config\.json: .*blocks\.2"):
            built(path=str(tmp_path / "other"))


def test_another_path_and_an_artifact_that_names_a_folder_are_refused(tmp_path):
    saved(DIT, tmp_path)
    network = f"expert.network={{name: diffusers, params: {{path: {tmp_path}}}}}"
    experiment = load_experiment(TINY, [network, "condition.kind=class", "sample.prompts=[]"])
    with pytest.raises(UserError, match=r"works on the path 'vp', not 'linear'; set expert\.path=vp"):
        Member.resolve("expert-0", experiment, DataSizes(SHAPE, 16, None, 4)).build_network()
    state, same = built(path=str(tmp_path)).state_dict(), EXPERTS.get("diffusers").portable({"path": tmp_path})
    meta = replace(make_meta(), network="diffusers", params=same, x_shape=SHAPE, condition=CLASSES.to_dict())
    meta = replace(meta, prediction="epsilon", path="vp")
    build_network(meta, state)
    refused(lambda: build_network(replace(meta, params={"path": str(tmp_path)}), state), "expert-0", "outside the")
    refused(lambda: build_network(replace(meta, path="linear"), state), "expert-0", "'vp'")
    small = {"_class_name": SD3} | SIZES | OWN[SD3]
    state, huge = built(TOKENS, config=small).state_dict(), small | {"pos_embed_max_size": 10**6}
    meta = replace(meta, params={"config": huge}, condition=TOKENS.to_dict(), prediction="velocity", path="linear")
    refused(lambda: build_network(meta, state), "expert-0", "of memory")
