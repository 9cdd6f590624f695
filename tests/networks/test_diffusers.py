"""Experts made of diffusers' transformers, compared with diffusers itself."""

from __future__ import annotations

import itertools
import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from artifact_files import make_meta, refused
from safetensors.torch import load_file
from saved_ensembles import ABOUT
from shards.mds import WARNINGS
from tiny_runs import TINY

from ddm_lightning.cli.parser import main
from ddm_lightning.config.experiment import LoraConfig
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.compat import ensure_torchvision_importable
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.core.weights import save_weights
from ddm_lightning.ensemble.load import load_ensemble
from ddm_lightning.ensemble.manifest import single
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members.artifact import write_artifact
from ddm_lightning.members.cost import MemberCost
from ddm_lightning.members.flops import flops_per_sample, forward_flops
from ddm_lightning.members.load import build_network, load_network
from ddm_lightning.members.member import Member
from ddm_lightning.members.run import Run
from ddm_lightning.networks.lora import adapt
from ddm_lightning.shards.manifest import DataSizes
from ddm_lightning.testing import check_expert
from ddm_lightning.use.export import export_member

pytestmark = WARNINGS
DIT = "DiTTransformer2DModel"
PIXART = "PixArtTransformer2DModel"
SD3 = "SD3Transformer2DModel"
PRX = "PRXTransformer2DModel"
LUMINA = "Lumina2Transformer2DModel"
SHAPE = (4, 8, 8)
CLASSES = ConditionSpec("class", 5)
TOKENS = ConditionSpec("tokens", 6, length=3)
SIZES = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 2, "in_channels": 4, "sample_size": 8}
ROTARY = {"in_channels": 4, "patch_size": 2}
MODELS = {
    DIT: SIZES | {"out_channels": 8, "num_embeds_ada_norm": 5},
    PIXART: SIZES | {"out_channels": 8, "cross_attention_dim": 16, "caption_channels": 6},
    SD3: SIZES
    | {"out_channels": 4, "joint_attention_dim": 6, "caption_projection_dim": 16, "pooled_projection_dim": 10}
    | {"pos_embed_max_size": 6},
    PRX: ROTARY
    | {"context_in_dim": 6, "hidden_size": 16, "mlp_ratio": 2.0, "num_heads": 2, "depth": 2, "axes_dim": [4, 4]},
    LUMINA: ROTARY
    | {"hidden_size": 24, "num_layers": 2, "num_refiner_layers": 1, "num_attention_heads": 2, "num_kv_heads": 1}
    | {"multiple_of": 8, "axes_dim_rope": [4, 4, 4], "axes_lens": [6, 8, 8], "cap_feat_dim": 6},
}


def saved(kind, folder, safe=True, **changes):
    ensure_torchvision_importable()
    import diffusers

    torch.manual_seed(0)
    model = getattr(diffusers, kind)(**MODELS[kind] | changes)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)

    model.save_pretrained(folder, safe_serialization=safe)
    return model.eval()


def params_of(folder):
    return EXPERTS.get("diffusers").params_of(json.loads((folder / "config.json").read_text()))


def built(condition=CLASSES, x_shape=SHAPE, folder=None, **params):
    """With the weights of a folder, if it is given."""
    params = params if folder is None else params_of(folder)
    network = EXPERTS.build("diffusers", params, x_shape=x_shape, condition=condition)
    if folder is not None:
        network.model.load_state_dict(load_file(folder / "diffusion_pytorch_model.safetensors"))

    return network


def handed_over(network, tmp_path, condition, **changes):
    """Ensemble of the artifact of a network with the configuration in ``given``."""
    description = {"network": "diffusers", "params": params_of(tmp_path / "given"), "x_shape": SHAPE}
    description |= {"condition": condition, "prediction": network.prediction}
    write_artifact(tmp_path / "artifact", network.state_dict(), make_meta(**description, **changes))
    return replace(single(tmp_path / "artifact"), about=ABOUT)


def vp_time(step):
    """Root of 19.9/4·tau² + 0.1/2·tau = -log(alpha), for the alpha of diffusers' own scheduler."""
    from diffusers import DDPMScheduler

    decay = -0.5 * math.log(DDPMScheduler(beta_schedule="linear").alphas_cumprod.double()[step])
    return (-0.05 + math.sqrt(0.05**2 + 19.9 * decay)) / (19.9 / 2)


@pytest.mark.parametrize(
    ("kind", "spec"), [(DIT, CLASSES), (PIXART, TOKENS), (SD3, TOKENS), (SD3, ConditionSpec("tokens+text", 6, 3, 10))]
)
def test_it_answers_as_diffusers_does(kind, spec, tmp_path):
    model = saved(kind, tmp_path)
    network = built(spec, folder=tmp_path).eval()
    x_t = torch.randn(4, *SHAPE)
    steps = torch.tensor([0, 17, 500, 990])
    keep = torch.tensor([True, True, False, True])
    pooled = {}
    if kind == SD3:
        t = steps / 1000
        pooled["pooled_projections"] = torch.zeros(4, 10)
    else:
        t = torch.tensor([vp_time(step) for step in steps])

    if kind == DIT:
        condition = Condition(torch.tensor([0, 1, 2, 4]), keep)
        given = {"class_labels": torch.tensor([0, 1, 5, 4])}
        null = {"class_labels": torch.full((4,), 5)}
    else:
        vectors = torch.randn(4, 10) if spec.vector_size else None
        condition = Condition(torch.randn(4, 3, 6).half(), keep, vectors)
        given = pooled | {"encoder_hidden_states": condition.values.float() * keep[:, None, None]}
        null = pooled | {"encoder_hidden_states": torch.zeros(4, 3, 6)}
        if vectors is not None:
            given["pooled_projections"] = vectors * keep[:, None]

    assert (network.prediction, network.path) == (("velocity", "linear") if kind == SD3 else ("epsilon", "vp"))
    for ours, theirs in ((condition, given), (None, null)):
        with torch.no_grad():
            expected = model(x_t, timestep=steps, **theirs).sample[:, :4]
            torch.testing.assert_close(network(x_t, t, ours), expected, rtol=1e-3, atol=1e-3)

    many = torch.arange(4).repeat(25)
    with torch.no_grad():  # in training, too, conditions are dropped by the trainer alone
        twice = [network.train(mode)(x_t[many], t[many], condition.rows(many)) for mode in (True, False)]

    assert torch.equal(*twice)


def stock_pipeline(kind, transformer, scheduler):
    """diffusers' own pipeline of a class; DiT's decodes by a tiny random autoencoder, the others give latents."""
    import diffusers

    parts = {"transformer": transformer, "scheduler": scheduler, "vae": None}
    if kind == DIT:
        parts["vae"] = diffusers.AutoencoderKL(block_out_channels=(4,), norm_num_groups=2, layers_per_block=1).eval()
    else:
        numbers = ("", "_2", "_3") if kind == SD3 else ("",)
        parts |= dict.fromkeys(f"{part}{number}" for part in ("text_encoder", "tokenizer") for number in numbers)

    build = {
        DIT: diffusers.DiTPipeline,
        PIXART: diffusers.PixArtAlphaPipeline,
        SD3: diffusers.StableDiffusion3Pipeline,
        PRX: diffusers.PRXPipeline,
        LUMINA: diffusers.Lumina2Pipeline,
    }[kind]
    pipeline = build(**parts)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def text_arguments(kind, network, tokens, mask):
    """One caption, and what the model card of an exported expert says of a dropped one."""
    null = torch.zeros_like(tokens)
    null[:, : len(network.null)] = network.null.detach()
    given = {"prompt_embeds": tokens, "negative_prompt_embeds": null}
    if kind == SD3:
        for name, values in (("pooled_prompt_embeds", tokens), ("negative_pooled_prompt_embeds", null)):
            given[name] = network.pooled(values.mean(1)).detach()
    else:
        given |= {"prompt_attention_mask": mask, "negative_prompt_attention_mask": torch.arange(3)[None] < 1}

    own = {
        PIXART: {"use_resolution_binning": False, "negative_prompt": None},
        PRX: {"use_resolution_binning": False},
        LUMINA: {"cfg_normalization": False},
    }
    return given | own.get(kind, {})


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("guidance", [1.0, 3.0])
@pytest.mark.filterwarnings("ignore:`LoraLoaderMixin` is deprecated:FutureWarning")  # a base of PRX's pipeline
def test_an_exported_expert_makes_its_images_in_the_stock_pipeline(kind, guidance, tmp_path):
    """Time, sign, masks and the dropped caption are as the pipeline has them.

    A step of DDIM for the noise is Euler's for the velocity: both keep the estimates of x_0 and of the noise.
    """
    import diffusers

    # DiTPipeline takes 1000 for the null class, whatever the model.
    changes = {"num_embeds_ada_norm": 1000} if kind == DIT else {}
    condition = ConditionSpec("class", 1000) if kind == DIT else TOKENS
    saved(kind, tmp_path / "given", **changes)
    network = built(condition, folder=tmp_path / "given").eval()
    for name, parameter in network.named_parameters():
        if not name.startswith("model."):
            torch.nn.init.normal_(parameter, std=0.3)

    manifest = handed_over(network, tmp_path, condition, path=network.path)
    export_member(manifest, tmp_path / "out")
    transformer = getattr(diffusers, kind).from_pretrained(tmp_path / "out").eval()
    scheduler = diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0)
    if network.path == "vp":
        # The first steps of the usual ones: later on, random weights imply an x_0 that we would bound.
        betas = np.linspace(1e-4, 0.02, 1000)[:400]
        scheduler = diffusers.DDIMScheduler(400, trained_betas=betas, clip_sample=False)

    pipeline = stock_pipeline(kind, transformer, scheduler)
    noise = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(1))
    mask = torch.arange(3) < torch.tensor([[3], [1]])
    tokens = torch.randn(2, 3, 6) * mask[:, :, None]
    if kind == DIT:
        given = Condition.of(torch.tensor([3, 7]))
        generator = torch.Generator().manual_seed(1)
        expected = pipeline([3, 7], guidance, generator, num_inference_steps=4, output_type="np").images
    else:
        given = Condition.of(tokens)
        made = []
        for row in (slice(0, 1), slice(1, 2)):  # alone, as PRX's pipeline guides a single prompt only
            arguments = text_arguments(kind, network, tokens[row], mask[row])
            arguments |= {"guidance_scale": guidance, "latents": noise[row], "num_inference_steps": 4}
            made.append(pipeline(**arguments, height=64, width=64, output_type="latent").images)

        expected = torch.cat(made)

    x = noise
    if network.path == "vp":
        alpha = torch.cat([scheduler.alphas_cumprod[scheduler.timesteps], torch.ones(1)]).sqrt()
        sigma = (1 - alpha**2).sqrt()
        x = noise / (alpha + sigma)[0]
        times = sigma / (alpha + sigma)
    else:
        times = scheduler.sigmas

    ensemble = load_ensemble(manifest)
    with torch.no_grad():
        for t, following in itertools.pairwise(times):
            x = x + (following - t) * ensemble.velocity(x, t.expand(2), given, guidance_scale=guidance)

        if kind == DIT:
            x = pipeline.vae.decode(x / pipeline.vae.config.scaling_factor).sample.permute(0, 2, 3, 1)
            x = (x / 2 + 0.5).clamp(0, 1).numpy()
            assert np.std(x) > 0.01 and np.mean((x > 0) & (x < 1)) > 0.5

    tolerance = 1e-3 if network.path == "vp" else 1e-5
    np.testing.assert_allclose(x, expected, rtol=tolerance, atol=tolerance)


def test_a_configuration_of_prx_without_the_name_of_its_class_is_known():
    """Photoroom's converter writes it so."""
    params = EXPERTS.get("diffusers").params_of(MODELS[PRX])

    assert params["config"].items() >= ({"_class_name": PRX} | MODELS[PRX]).items()


def test_its_memory_is_counted_without_data():
    """Of the model with tables that are neither parameters nor buffers."""
    config = json.dumps({"_class_name": LUMINA} | MODELS[LUMINA])
    network = f"expert.network={{name: diffusers, params: {{config: {config}}}}}"
    experiment = load_experiment(TINY, [network, "condition.kind=tokens", "sample.prompts=[]"])
    cost = MemberCost(Member.resolve("expert-0", experiment, DataSizes(SHAPE, 6, (3, 6), 1)))
    assert cost.memory(experiment.island, "single").activations > 8 * 19 * 24 * 4


@pytest.mark.parametrize("kind", MODELS)
def test_a_member_becomes_a_folder_that_its_class_loads(kind, tmp_path):
    import diffusers

    condition = CLASSES if kind == DIT else TOKENS
    state = saved(kind, tmp_path / "given").state_dict()
    network = built(condition, folder=tmp_path / "given")
    manifest = handed_over(network, tmp_path, condition, path=network.path)

    lost = export_member(manifest, tmp_path / "out", "CC0")
    build = getattr(diffusers, kind)
    again = build.from_pretrained(tmp_path / "out", low_cpu_mem_usage=False).state_dict()
    if hasattr(build, "from_single_file"):
        file = tmp_path / "out" / "diffusion_pytorch_model.safetensors"
        from_file = build.from_single_file(str(file), config=str(tmp_path / "out")).state_dict()
        assert from_file.keys() == state.keys() and all(torch.equal(from_file[name], state[name]) for name in state)

    assert lost == {DIT: [], SD3: ["null", "pooled.weight", "pooled.bias"]}.get(kind, ["null"])
    assert again.keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in again.items())
    assert params_of(tmp_path / "out") == params_of(tmp_path / "given")
    card = (tmp_path / "out" / "README.md").read_text()
    assert f"{kind}.from_pretrained" in card
    assert "CC0" in card
    assert ("`null`" in card) == (tmp_path / "out" / "condition.safetensors").exists() == bool(lost)
    refused(lambda: export_member(manifest, tmp_path / "out"), "exists already")


@pytest.mark.parametrize("kind", MODELS)
def test_it_keeps_the_contract_of_experts(kind):
    def factory(**context):
        config = {"_class_name": kind} | MODELS[kind]
        if vector := context["condition"].vector_size:
            config["pooled_projection_dim"] = vector

        network = EXPERTS.get("diffusers")(**context, config=config)
        if kind == SD3:  # whose last block computes queries of the text for nothing
            network.blocks[-1].attn.add_q_proj.requires_grad_(False)

        return network

    kinds = {DIT: ("none", "class"), SD3: ("tokens", "tokens+text")}.get(kind, ("tokens",))
    check_expert(factory, x_shape=SHAPE, kinds=kinds)


@pytest.mark.slow
def test_a_pretrained_one_trains_and_its_artifact_does_not_need_the_folder(tmp_path, capsys):
    folder = tmp_path / "pretrained"
    run = tmp_path / "run"
    out = tmp_path / "exported"
    model = saved(PRX, folder, in_channels=3)
    words = "prepare.caption_encoder={name: hashed-words, params: {size: 6, max_tokens: 3}}"
    overrides = [f"run_dir={run}", words, "condition.kind=tokens"]
    assert main(["prepare", "-c", str(TINY), *overrides]) == 0
    expert = ["expert.network.name=diffusers", f"expert.init_from={folder}"]
    expert += ["expert.train.max_steps=2", "expert.train.learning_rate=1e-4", "sample.prompts=[]"]
    fit = ["fit", "-c", str(TINY), *overrides, "member=expert-0", *expert]
    assert main(fit) == 0
    assert main(fit) == 0  # finished: its artifact is recognised
    shutil.rmtree(folder)
    meta, network = load_network(run / "members" / "expert-0" / "artifact")
    assert list(meta.params) == ["config"] and str(tmp_path) not in json.dumps(meta.params)
    assert (meta.path, meta.prediction) == ("linear", "velocity")
    state = network.model.state_dict()
    distances = [float((state[name] - value).abs().max()) for name, value in model.state_dict().items()]
    assert 0 < max(distances) < 1e-3
    capsys.readouterr()
    export = ["export", "-c", str(run), "sample.member=expert-0", "--to", "diffusers", "--out", str(out)]
    assert main(export) == 0
    (note,) = capsys.readouterr().err.splitlines()
    assert note.startswith(f"note: diffusers has no place for null; {out / 'condition.safetensors'} keeps it")
    again = type(model).from_pretrained(out, low_cpu_mem_usage=False).state_dict()
    assert all(torch.equal(again[name], value) for name, value in state.items())


def test_an_adapter_is_written_merged_with_its_base(tmp_path):
    import diffusers

    saved(PRX, tmp_path / "given")
    network = built(TOKENS, folder=tmp_path / "given")
    base = {name: value.clone() for name, value in network.model.state_dict(prefix="model.").items()}
    sha256 = save_weights(tmp_path / "model.safetensors", base, "base")
    (tmp_path / "initial" / sha256).mkdir(parents=True)
    (tmp_path / "model.safetensors").rename(tmp_path / "initial" / sha256 / "model.safetensors")
    lora = LoraConfig(rank=2, target_modules=["img_qkv_proj"])
    adapt(network, lora, base)
    for parameter in network.parameters():
        torch.nn.init.normal_(parameter, std=0.3)

    manifest = handed_over(network, tmp_path, TOKENS, lora=lora, init_from="base", init_sha256=sha256)

    export_member(manifest, tmp_path / "out")
    again = diffusers.PRXTransformer2DModel.from_pretrained(tmp_path / "out", low_cpu_mem_usage=False)
    x_t = torch.randn(3, *SHAPE)
    t = torch.tensor([0.1, 0.5, 1.0])
    tokens = torch.randn(3, 3, 6)
    with torch.no_grad():
        expected = network.eval()(x_t, t, Condition.of(tokens))
        torch.testing.assert_close(again(x_t, t, tokens).sample, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", MODELS)
def test_the_count_with_weights_is_that_without(kind):
    condition = CLASSES if kind == DIT else TOKENS
    network = built(condition, config={"_class_name": kind} | MODELS[kind])
    assert forward_flops(network, SHAPE, condition) == flops_per_sample(network, SHAPE, condition, backward=False)


@pytest.mark.parametrize("kind", MODELS)
def test_another_shape_is_that_of_a_network_built_for_it_or_refused(kind):
    """A square of DiT's would be made of 2 x 8 patches without an error, and is another size than the table's."""
    condition = CLASSES if kind == DIT else TOKENS
    config = {"_class_name": kind} | MODELS[kind]
    network = built(condition, config=config).eval()
    x_t = torch.randn(2, 4, 4, 12)
    t = torch.tensor([0.2, 0.7])
    if kind == DIT:
        for shape in ((4, 16), (16, 16)):
            with pytest.raises(ValueError, match=r"divisible by 8 and at most 8, not \(4, "):
                network(torch.randn(2, 4, *shape), t, None)

        return

    with torch.no_grad():
        found = network(x_t, t, None)
        if kind != PIXART:  # whose class has one number for height and width
            own = built(condition, x_shape=(4, 4, 12), config=config).eval()
            own.load_state_dict(network.state_dict())
            assert torch.equal(own(x_t, t, None), found)

    with pytest.raises(ValueError, match="divisible by 2"):
        network(x_t[..., :11], t, None)


def test_pixart_stretches_its_positions_over_an_image():
    """Each axis runs from 0 to the table's size, however many patches it has; by the formula."""
    network = built(TOKENS, config={"_class_name": PIXART} | MODELS[PIXART])
    embed = network.model.pos_embed
    torch.nn.init.zeros_(embed.proj.weight)
    torch.nn.init.zeros_(embed.proj.bias)

    found = embed(torch.randn(1, 4, 4, 16))[0]

    for patch in range(16):
        row, column = divmod(patch, 8)
        angles = [coordinate / 10**i for coordinate in (column / 2, row * 2) for i in range(4)]
        waves = [wave(angle) for half in (angles[:4], angles[4:]) for wave in (math.sin, math.cos) for angle in half]
        torch.testing.assert_close(found[patch], torch.tensor(waves), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "changes", "problem"),
    [
        (
            DIT,
            {"x_shape": (3, 8, 8)},
            r"shape \(4, height, width\), both divisible by 8 and at most 8, not \(3",
        ),
        (PIXART, {"condition": TOKENS, "x_shape": (4, 16, 16)}, "divisible by 8 and at most 8, not"),
        (SD3, {"condition": TOKENS, "x_shape": (4, 14, 14)}, "divisible by 2 and at most 12"),
        (PRX, {"condition": TOKENS, "x_shape": (4, 8, 7)}, "divisible by 2 and at most"),
        (LUMINA, {"condition": TOKENS, "x_shape": (4, 18, 8)}, "divisible by 2 and at most 16"),
        (LUMINA, {"condition": ConditionSpec("tokens", 6, 6)}, "of size 6, at most 5, not .* length 6"),
        (DIT, {"condition": TOKENS}, "kind 'class' of at most 5, or 'none', not kind 'tokens', size 6"),
        (DIT, {"condition": ConditionSpec("class", 6)}, "at most 5"),
        (PIXART, {}, "kind 'tokens' of size 6, at most .*, not kind 'class', size 5"),
        (SD3, {"condition": ConditionSpec("tokens", 7, length=3)}, "'tokens' of size 6"),
        (DIT, {"config": None}, "set expert.init_from to the folder"),
        (PIXART, {"condition": TOKENS, "also": {"use_additional_conditions": True}}, "resolution and aspect ratio"),
        (PIXART, {"also": {"_class_name": "os.system"}}, "_class_name is 'os.system', not one of DiT"),
        (LUMINA, {"condition": TOKENS, "also": {"axes_lens": [6, 8, 10**8]}}, "axes_lens is more than 65536"),
        (DIT, {"also": {"num_layers": "many"}}, "config: TypeError"),
    ],
)
def test_what_does_not_match_is_refused_in_one_line(kind, changes, problem):
    config = {"_class_name": kind} | MODELS[kind] | changes.pop("also", {})
    with pytest.raises(UserError, match=problem) as refusal:
        built(**{"config": config} | changes)

    assert "\n" not in str(refusal.value)


def test_folders_that_cannot_be_read_are_refused(tmp_path):
    def resolved(name, path="vp"):
        of_model = [f"expert.init_from={tmp_path / name}", "expert.network.name=diffusers", f"expert.path={path}"]
        others = [f"run_dir={tmp_path / 'run'}", "condition.kind=class", "sample.prompts=[]"]
        run = Run(load_experiment(TINY, [*of_model, *others]))
        return run.resolve("expert-0", DataSizes(SHAPE, 16, None, 4))

    saved(DIT, tmp_path / "whole")
    saved(DIT, tmp_path / "pickled", safe=False)
    saved(DIT, tmp_path / "other")
    file = tmp_path / "other" / "config.json"
    # Of before diffusers 0.30, and with another depth.
    file.write_text(json.dumps(json.loads(file.read_text()) | {"_class_name": "Transformer2DModel", "num_layers": 3}))

    refused(lambda: resolved("nowhere"), tmp_path / "nowhere/config.json", "the model's configuration is missing")
    refused(lambda: resolved("pickled").initial.path, "pickled: ", "no folder of diffusers", "never unpickled")
    refused(lambda: resolved("whole", "linear").build_network(), "on the path 'vp', not 'linear'; set expert.path=vp")
    other = resolved("other")
    refused(lambda: other.initial.check(other.plan_network()), "do not fit: 'model.transformer_blocks.2.", "is missing")


@pytest.mark.parametrize(
    ("kind", "condition", "changes", "path", "words"),
    [(DIT, CLASSES, {}, "linear", "'vp'"), (SD3, TOKENS, {"pos_embed_max_size": 10**6}, "linear", "of memory")],
)
def test_an_artifact_of_another_path_or_of_a_huge_model_is_refused(kind, condition, changes, path, words):
    config = {"_class_name": kind} | MODELS[kind]
    network = built(condition, config=config)
    description = {"network": "diffusers", "x_shape": SHAPE, "condition": condition, "prediction": network.prediction}
    right = make_meta(**description, params={"config": config}, path=network.path)
    wrong = make_meta(**description, params={"config": config | changes}, path=path)

    build_network(right, network.state_dict())
    refused(lambda: build_network(wrong, network.state_dict()), "expert-0", words)
