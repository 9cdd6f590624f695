"""Experts that are adapters on one frozen base: they sample what full experts would, in the memory of one."""

import inspect
import shutil
from dataclasses import asdict, replace
from pathlib import Path

import peft
import pytest
import torch
from artifact_files import PARAMS, SHAPE, TEXT, edit, make_meta, make_network, refused
from networks.test_diffusers import LUMINA, MODELS, PIXART, SD3, TOKENS, vp_time
from networks.test_diffusers import SHAPE as DIFFUSERS_SHAPE
from networks.test_diffusers import saved as save_diffusers
from safetensors.torch import load_file
from saved_ensembles import ABOUT
from torch import nn
from toy_ensemble import sample

from ddm_lightning.config.experiment import LoraConfig, SampleConfig
from ddm_lightning.core.files import sha256_file
from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.core.weights import prefixed, save_weights
from ddm_lightning.ensemble.changes import added
from ddm_lightning.ensemble.load import load_ensemble
from ddm_lightning.ensemble.manifest import read_ensemble, single, write_ensemble
from ddm_lightning.ensemble.residency import ResidentExperts
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members.artifact import write_artifact
from ddm_lightning.members.cost import _Held
from ddm_lightning.members.load import load_network
from ddm_lightning.networks.embeddings import ConditionEmbedding
from ddm_lightning.networks.lora import adapt, merged
from ddm_lightning.use.export import export_member, export_peft
from ddm_lightning.use.saved import save_ensemble

LORA = LoraConfig(rank=2, target_modules=["attention.qkv", "mlp.0"])
WIDE = {**PARAMS, "width": 256, "depth": 4}


def write_adapters(root, num, params=PARAMS, base_seed=0):
    """Artifacts of ``num`` random adapters on one random base, and the base itself, in the folder of a run."""
    folders = []
    torch.manual_seed(base_seed)
    base = EXPERTS.build("dit", params, x_shape=SHAPE, condition=TEXT)
    for parameter in base.parameters():
        nn.init.normal_(parameter, std=0.05)

    sha256 = save_weights(root / "new.safetensors", base.state_dict(), "base")
    (root / "initial" / sha256).mkdir(parents=True)
    (root / "new.safetensors").rename(root / "initial" / sha256 / "model.safetensors")
    of_base = {"lora": asdict(LORA), "init_from": "base", "init_sha256": sha256}
    for k in range(num):
        network = EXPERTS.build("dit", params, x_shape=SHAPE, condition=TEXT)
        adapt(network, LORA, base.state_dict())
        for parameter in network.parameters():
            nn.init.normal_(parameter, std=0.2)

        meta = replace(make_meta(f"expert-{k}"), num_clusters=num, params=params, **of_base)
        folders.append(root / "members" / meta.member / "artifact")
        write_artifact(folders[-1], network.state_dict(), meta)

    write_ensemble(root, folders, [1 / num] * num)
    return root


def of_full_experts(manifest):
    """The same ensemble of separate networks with the merged weights."""
    networks = []
    for folder in manifest.folders.values():
        meta, network = load_network(folder)
        networks.append(EXPERTS.build("dit", meta.params, x_shape=SHAPE, condition=TEXT))
        networks[-1].load_state_dict(merged(network))

    return Ensemble(networks, None, manifest.priors)


def held_bytes(networks):
    """Bytes of all different tensors of some networks."""
    storages = [one.untyped_storage() for net in networks for one in (*net.parameters(), *net.buffers())]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize(("strategy", "solver", "guidance"), [("full", "heun", 2.0), ("bayes", "ancestral", 1.5)])
def test_adapters_give_the_images_of_full_experts(tmp_path, strategy, solver, guidance):
    manifest = read_ensemble(write_adapters(tmp_path, 3) / "ensemble.json")
    condition = Condition.of(torch.randn(6, 5, generator=torch.Generator().manual_seed(1)))
    router = make_network("router", 4)
    found = []
    for ensemble in (load_ensemble(manifest), of_full_experts(manifest)):
        if strategy == "full":
            ensemble.router = nn.Module()
            ensemble.router.forward = lambda *given: torch.cat([router(*given), -router(*given)[:, :1]], 1)

        settings = SampleConfig(strategy=strategy, solver=solver, num_steps=5, guidance_scale=guidance)
        found.append(sample(ensemble, condition, 6, SHAPE, settings, batch_size=6))

    assert torch.allclose(*found, rtol=0, atol=1e-4)
    assert (found[0][0] - found[0][1]).abs().max() > 0.1


def memory(manifest):
    """Bytes of an ensemble's weights, and the most bytes of tensors at any moment while it samples."""
    ensemble = load_ensemble(manifest)
    weights = held_bytes(ensemble.experts)
    settings = SampleConfig(strategy="bayes", solver="ancestral", num_steps=2)
    with _Held([one for net in ensemble.experts for one in (*net.parameters(), *net.buffers())]) as made:
        sample(ensemble, None, 4, SHAPE, settings, batch_size=4)

    return weights, weights + made.most


def test_eight_adapters_are_sampled_in_the_memory_of_one_expert(tmp_path):
    eight = read_ensemble(write_adapters(tmp_path, 8, WIDE) / "ensemble.json")
    full = tmp_path / "full"
    weights = merged(load_network(eight.folders["expert-0"])[1])
    write_artifact(full, weights, replace(eight.meta, lora=None))
    one = memory(single(full))
    of_eight = memory(eight)
    base = sum(value.nbytes for value in weights.values())
    assert base < one[0] < one[1] and of_eight[0] < 1.3 * one[0] and of_eight[1] < 1.3 * one[1]
    assert all((folder / "model.safetensors").stat().st_size < 0.02 * base for folder in eight.folders.values())


def test_adapters_need_no_turns_on_a_small_device(tmp_path):
    manifest = read_ensemble(write_adapters(tmp_path, 3) / "ensemble.json")
    assert not isinstance(load_ensemble(manifest, resident_experts=2).experts, ResidentExperts)

    full = replace(manifest.metas["expert-1"], lora=None)
    write_artifact(manifest.folders["expert-1"], make_network("expert", 3).state_dict(), full)
    write_ensemble(tmp_path, list(manifest.folders.values()), manifest.priors)
    mixed = read_ensemble(tmp_path / "ensemble.json")
    way = {"strategy": "bayes", "solver": "ancestral", "num_steps": 3, "batch_size": 4}
    images = [sample(load_ensemble(mixed, resident_experts=n), None, 4, SHAPE, **way) for n in (None, 2)]
    assert torch.equal(*images)


def test_a_saved_copy_has_each_base_once(tmp_path):
    """A stranger's adapter, of other data, comes without its base; one on another base brings it along."""
    run = write_adapters(tmp_path / "run", 2)
    stranger = tmp_path / "mail" / "expert-0"
    shutil.copytree(run / "members" / "expert-0" / "artifact", stranger)
    edit(stranger / "member.json", partition_sha256="cd" * 32)
    others = write_adapters(tmp_path / "other", 1, base_seed=1) / "members" / "expert-0" / "artifact"
    edit(others / "member.json", partition_sha256="ef" * 32)
    manifest = replace(read_ensemble(run / "ensemble.json"), about=ABOUT)

    save_ensemble(added(added(manifest, stranger, 40), others, 40), tmp_path / "saved")

    assert len([*(tmp_path / "saved").rglob("*.safetensors")]) == 4 + 2
    assert "initial/" in (tmp_path / "saved" / "README.md").read_text()
    moved = shutil.move(tmp_path / "saved", tmp_path / "elsewhere")
    experts = list(load_ensemble(read_ensemble(Path(moved) / "ensemble.json")).experts)
    one, three, four = (held_bytes(experts[:num]) for num in (1, 3, 4))
    assert three < 1.7 * one and four - three > 0.8 * one


def adapted(kind, lora, tmp_path, path, prediction):
    """A pretrained model of diffusers, random adapters on it, and the ensemble of their artifact."""
    model = save_diffusers(kind, tmp_path / "pretrained")
    file = tmp_path / "pretrained" / "diffusion_pytorch_model.safetensors"
    base = tmp_path / "run" / "initial"
    sha256 = sha256_file(file)
    (base / sha256).mkdir(parents=True)
    shutil.copyfile(file, base / sha256 / "model.safetensors")
    params = {"config": {"_class_name": kind} | MODELS[kind]}
    network = EXPERTS.build("diffusers", params, x_shape=DIFFUSERS_SHAPE, condition=TOKENS)
    adapt(network, lora, prefixed(load_file(file), network))
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.2)

    of_base = {"lora": asdict(lora), "init_from": "base", "init_sha256": sha256}
    meta = replace(make_meta(), network="diffusers", params=params, x_shape=DIFFUSERS_SHAPE, path=path, **of_base)
    write_artifact(
        tmp_path / "run" / "expert-0", network.state_dict(), replace(meta, condition=TOKENS, prediction=prediction)
    )
    return model, network.eval(), single(tmp_path / "run" / "expert-0")


def test_adapters_on_a_model_of_diffusers(tmp_path):
    lora = LoraConfig(rank=2, alpha=8, target_modules=["attn1.to_q", "attn2.to_v", "proj_out"])
    model, network, manifest = adapted(PIXART, lora, tmp_path, "vp", "epsilon")
    assert {name for name in network.state_dict() if ".lora_" not in name} == {"null"}  # which the base lacks
    (loaded,) = load_ensemble(manifest).experts
    x_t = torch.randn(3, *DIFFUSERS_SHAPE)
    t = torch.full((3,), vp_time(500))
    condition = Condition.of(torch.randn(3, 3, 6))
    with torch.no_grad():
        expected = network(x_t, t, condition)
        assert torch.equal(loaded(x_t, t, condition), expected)
        assert export_peft(manifest, tmp_path / "peft") == ["null"]
        kept = load_file(tmp_path / "peft" / "expert-0" / "condition.safetensors")
        assert torch.equal(kept["null"], network.null) and len(kept) == 1
        export_member(replace(manifest, about=ABOUT), tmp_path / "merged")
        with_adapter = peft.PeftModel.from_pretrained(model, tmp_path / "peft" / "expert-0")
        for theirs in (with_adapter, type(model).from_pretrained(tmp_path / "merged")):
            got = theirs(x_t, timestep=torch.full((3,), 500), encoder_hidden_states=condition.values).sample[:, :4]
            torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-3)

    assert expected.std() > 0.1


@pytest.mark.parametrize(
    ("kind", "pipeline", "layer"),
    [(SD3, "StableDiffusion3Pipeline", "proj_out"), (LUMINA, "Lumina2Pipeline", "x_embedder")],
)
def test_diffusers_applies_adapters_with_their_scale(kind, pipeline, layer, tmp_path):
    """By the model and by its pipeline, which asks for no names."""
    import diffusers

    lora = LoraConfig(rank=3, alpha=2, target_modules=["to_q", "to_out.0", layer])
    model, network, manifest = adapted(kind, lora, tmp_path, "linear", "velocity")
    export_peft(manifest, tmp_path / "peft")
    folder = tmp_path / "peft" / "expert-0"
    with_pipeline = type(model).from_pretrained(tmp_path / "pretrained")
    parts = dict.fromkeys(inspect.signature(getattr(diffusers, pipeline)).parameters)
    parts |= {"transformer": with_pipeline, "scheduler": diffusers.FlowMatchEulerDiscreteScheduler()}
    if kind == SD3:
        del parts["image_encoder"], parts["feature_extractor"]

    inputs = (torch.randn(3, *DIFFUSERS_SHAPE), torch.tensor([0.1, 0.5, 1.0]), Condition.of(torch.randn(3, 3, 6)))
    answers = []
    plain = EXPERTS.build("diffusers", manifest.meta.params, x_shape=DIFFUSERS_SHAPE, condition=TOKENS).eval()
    plain.load_state_dict(network.state_dict(), strict=False)
    with torch.no_grad():
        expected = network(*inputs)
        for theirs in (model, with_pipeline):
            plain.model = theirs
            answers.append(plain(*inputs))
            if theirs is model:
                theirs.load_lora_adapter(folder, weight_name="pytorch_lora_weights.safetensors")
            else:
                getattr(diffusers, pipeline)(**parts).load_lora_weights(folder)

            torch.testing.assert_close(plain(*inputs), expected, rtol=1e-4, atol=1e-4)

    assert (answers[0] - expected).abs().max() > 0.1 and torch.equal(*answers)


def test_an_adapted_layer_that_the_base_has_in_another_shape_is_loaded(tmp_path):
    run = write_adapters(tmp_path, 1)
    (path,) = run.glob("initial/*/model.safetensors")
    base = load_file(path)
    name = "blocks.0.mlp.0.weight"
    network = EXPERTS.build("dit", PARAMS, x_shape=SHAPE, condition=TEXT)
    adapt(network, LORA, {key: value for key, value in base.items() if key != name})
    sha256 = save_weights(tmp_path / "new.safetensors", base | {name: torch.zeros(2, 2)}, "base")
    (tmp_path / "initial" / sha256).mkdir()
    (tmp_path / "new.safetensors").rename(tmp_path / "initial" / sha256 / "model.safetensors")
    meta = replace(make_meta("expert-1"), lora=LORA, init_from="base", init_sha256=sha256)
    write_artifact(run / "members" / "expert-1" / "artifact", network.state_dict(), meta)
    _, loaded = load_network(run / "members" / "expert-1" / "artifact")
    assert all(torch.equal(value, loaded.state_dict()[key]) for key, value in network.state_dict().items())


def test_an_adapter_reads_tokens_as_they_are_stored():
    embedding = ConditionEmbedding(ConditionSpec("tokens", 6, length=3), 8, keep_tokens=True)
    adapt(embedding, LoraConfig(rank=2, target_modules=["embed"]), {})
    assert embedding(Condition.of(torch.randn(2, 3, 6).half()), 2).shape == (2, 3, 8)


def test_a_link_out_of_an_artifact_is_not_copied(tmp_path):
    manifest = replace(read_ensemble(write_adapters(tmp_path, 1) / "ensemble.json"), about=ABOUT)
    link = manifest.folders["expert-0"] / "model.sig"
    link.symlink_to("/etc/hostname")
    refused(lambda: save_ensemble(manifest, tmp_path / "saved"), link, "a link that leads out of its folder")
    assert not (tmp_path / "saved").exists()


def test_an_adapter_for_another_base_is_refused(tmp_path):
    run = write_adapters(tmp_path / "run", 2)
    other = write_adapters(tmp_path / "other", 2, base_seed=1)
    artifact = run / "members" / "expert-1" / "artifact"
    shutil.rmtree(artifact)
    shutil.copytree(other / "members" / "expert-1" / "artifact", artifact)
    refused(lambda: load_network(artifact), artifact / "member.json", "another base")
    (base,), (others,) = ([*root.glob("initial/*/model.safetensors")] for root in (run, other))
    shutil.copyfile(others, base)
    first = run / "members" / "expert-0" / "artifact"
    refused(lambda: load_network(first), base, "SHA-256")
    base.write_bytes(b"\x80\x04.")
    refused(lambda: load_network(first), base, "safetensors")
    edit(artifact / "member.json", lora={"rank": 1 << 24, "alpha": None, "target_modules": ["mlp.0"]})
    shutil.copytree(others.parent, run / "initial" / others.parent.name)
    refused(lambda: load_network(artifact), artifact / "member.json", "more weights")
    good = {"rank": 1, "alpha": 1.0, "target_modules": ["mlp.0"]}
    for bad in ({"rank": 0}, {"alpha": "1"}, {"target_modules": ".*"}, {"use_dora": True}):
        edit(artifact / "member.json", lora=good | bad)
        refused(lambda: load_network(artifact), artifact / "member.json", "lora")
