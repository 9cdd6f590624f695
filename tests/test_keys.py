"""Keys of random streams, caches and records: each component counts, and no two changes give one key."""

import json
from dataclasses import asdict, fields, is_dataclass, replace

import numpy as np
import pytest
import torch
from artifact_files import PARAMS, TEXT, make_meta, put
from PIL import Image
from prepare.tiny_experiment import tiny_experiment
from tiny_runs import TINY, copy_run, light_prepare, settings
from torch import nn
from toy_ensemble import Linear
from training.members import MEMBER, Recorder, batch, expert, held_out

from ddm_lightning.config.experiment import (
    CaptionConfig,
    ImagesConfig,
    InitConfig,
    IslandConfig,
    LoraConfig,
    PluginConfig,
    SampleConfig,
    ShardsConfig,
    TimestepsConfig,
)
from ddm_lightning.config.load import changeable_keys, fingerprint, load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import FEATURES, IMAGE_ENCODERS, METRICS
from ddm_lightning.core.weights import read_header, save_weights
from ddm_lightning.ensemble.routing import Batch
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.evaluation.image_sets import FileImages, Generated, ShardImages
from ddm_lightning.flow.randomness import keyed_seed
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.islands import plan, shared
from ddm_lightning.islands.plan_data import data_of
from ddm_lightning.members.artifact import described, write_artifact
from ddm_lightning.members.cost import MemberCost
from ddm_lightning.members.load import Bases
from ddm_lightning.members.roles import ROLES
from ddm_lightning.members.run import Run
from ddm_lightning.members.run_folder import changes
from ddm_lightning.networks.lora import adapt, frozen
from ddm_lightning.prepare import stages
from ddm_lightning.prepare.engine import Reporter
from ddm_lightning.prepare.stages import Preparation, prepare
from ddm_lightning.shards.manifest import HELD_OUT, TRAIN, Manifest
from ddm_lightning.training.objective import Position
from ddm_lightning.training.previews import sample_like
from ddm_lightning.use.rows import built_encoder

SMALL = SampleConfig(num_steps=1)


def all_differ(key, given, *changes):
    """Check that ``key`` of what is given, and of what each change makes of it, are all different."""
    keys = [key(**given | change) for change in ({}, *changes)]
    assert key(**given) == keys[0], "not even repeatable"
    assert len(set(keys)) == len(keys), keys


def numbers(*tensors):
    return tuple(torch.cat([tensor.double().flatten() for tensor in tensors]).tolist())


# Random streams.


def test_a_stream_has_a_seed_and_every_part_of_its_key():
    keys = [("noise", "0"), ("noise", 1), ("image", 0), (0, "noise"), ("noise",), ("noise", 0, 0), ("nois", "e", 0)]
    changes = [{"seed": 4}, *({"key": key} for key in keys)]
    all_differ(lambda seed, key: keyed_seed(seed, *key), {"seed": 3, "key": ("noise", 0)}, *changes)


AT = {"seed": 7, "name": "expert-0", "step": 5, "rank": 1, "part": 0}
PLACES = ({"seed": 8}, {"name": "expert-1"}, {"step": 6}, {"part": 1}, {"part": 2})


@pytest.mark.parametrize("of", ["noise", "times", "dropped", "flipped", "network"])
def test_training_draws_anew_for_each_seed_member_step_rank_and_part(of):
    def key(seed, name, step, rank, part):
        train = replace(MEMBER.train, horizontal_flip=True)
        objective = expert(seed=seed, name=name, condition_dropout=0.5, train=train)
        at = Position(step, rank, 4, part)
        if of == "network":
            objective.seed_network(at, torch.device("cpu"))
            return torch.initial_seed()
        found = objective.noisy_batch(batch(64), at)
        return numbers(
            {"noise": found.noise, "times": found.t, "dropped": found.condition.keep, "flipped": found.x_0}[of]
        )

    all_differ(key, AT, *PLACES, {"rank": 0})


def test_captions_are_drawn_anew_for_each_seed_member_step_and_part():
    def key(seed, name, step, part):
        given = {**batch(64), "has_caption": torch.ones(64, 2, dtype=torch.uint8), "text_2": torch.zeros(64, 6)}
        objective = expert(seed=seed, name=name, caption_weights=(0.5, 0.5), condition_dropout=0.0)
        return numbers(objective.noisy_batch(given, Position(step, part=part)).condition.values)

    all_differ(key, {name: value for name, value in AT.items() if name != "rank"}, *PLACES)


def test_held_out_noise_is_of_the_seed_the_batch_and_the_timestep():
    def key(seed, batch_idx, index):
        return numbers(held_out(expert(seed=seed), batch(), batch_idx, index).noise)

    all_differ(key, {"seed": 7, "batch_idx": 0, "index": 0}, {"seed": 8}, {"batch_idx": 1}, {"index": 1})


def test_images_of_a_validation_are_of_the_seed():
    def key(seed):
        return numbers(sample_like(expert(seed=seed), Recorder(answer=lambda x_t, _: x_t), batch(), SMALL))

    all_differ(key, {"seed": 7}, {"seed": 8})


def test_initial_weights_are_of_the_seed_and_the_section():
    """All experts start alike, and so does the monolith."""

    class Seen(nn.Module):
        def __init__(self, **_):
            super().__init__()
            self.seed = torch.initial_seed()

    def key(seed, role, **own):
        build = {"build": lambda *_: Seen()}
        kind = type("Role", (type(ROLES[role]),), build)(**vars(ROLES[role]))
        return replace(MEMBER, seed=seed, role=kind, **own).build_network().seed

    given = {"seed": 7, "role": "expert"}
    all_differ(key, given, {"seed": 8}, {"role": "router"})
    assert key(7, "expert") == key(7, "expert", name="expert-1", clusters=(1,)) == key(7, "monolith", name="monolith")


def test_adapters_start_anew_for_each_seed():
    def key(seed):
        member = replace(MEMBER, seed=seed, lora=LoraConfig(2, target_modules=["0"]))
        return numbers(*member.add_adapters(nn.Sequential(nn.Linear(3, 3))).state_dict().values())

    all_differ(key, {"seed": 7}, {"seed": 8})


@pytest.mark.parametrize("of", ["x_1", "noise", "uniform"])
def test_the_noise_of_an_image_is_of_the_seed_its_key_and_the_step(of):
    ensemble = Ensemble([Linear(0.0, 1.0)], None, [1.0])

    def key(seed, own, step):
        made = Batch(ensemble, None, [own], (1, 2, 2), seed, SMALL)
        return numbers(made.x_1 if of == "x_1" else getattr(made, of)(step))

    keys = [{"own": own} for own in (("apple", 1), ("apple", "0"), ("pear", 0), ("apple",))]
    steps = [] if of == "x_1" else [{"step": 1}, {"step": 2}]
    all_differ(key, {"seed": 0, "own": ("apple", 0), "step": 0}, {"seed": 1}, *keys, *steps)


# Evaluation.


def test_features_are_kept_by_images_and_network(finished_run, tmp_path):
    manifest = Manifest.read(finished_run)
    shards = finished_run / "prepared" / "shards"
    other = replace(manifest, image_encoder=replace(manifest.image_encoder, params={"image_size": 8}))
    elsewhere = replace(manifest, provenance={**manifest.provenance, "image_encoder": {"weights_sha256": "ab"}})

    def key(manifest, side, max_num):
        return ShardImages(shards, manifest, side, max_num).sha256

    given = {"manifest": manifest, "side": TRAIN, "max_num": None}
    changes = [{"side": HELD_OUT}, {"max_num": 20}, {"max_num": 10}, {"manifest": other}, {"manifest": elsewhere}]
    all_differ(key, given, *changes)

    whole, some = (ShardImages(shards, manifest, TRAIN, num) for num in (None, 20))
    ids = whole.column(range(whole.num), "sample_id")
    assert some.column(range(20), "sample_id") == [ids[row * whole.num // 20] for row in range(20)], "evenly spaced"

    def of_files(names, value):
        folder = tmp_path / "-".join((*names, str(value)))
        folder.mkdir(exist_ok=True)
        for name in names:
            Image.fromarray(np.full((8, 8, 3), value, np.uint8)).save(folder / f"{name}.png")
        return FileImages(folder).sha256

    all_differ(of_files, {"names": ("a", "b"), "value": 1}, {"names": ("a", "c")}, {"names": ("a",)}, {"value": 2})

    def of_network(features, **params):
        metric = METRICS.build("kid", {"features": features, "features_params": params})
        return json.dumps(metric.provenance)

    all_differ(of_network, {"features": "pooled-pixels"}, {"grid": 2}, {"grid": 3}, {"features": "pixels"})


def test_generated_images_are_kept_by_all_that_shapes_them(finished_run, tmp_path):
    run = copy_run(finished_run, tmp_path / "run")

    def key(*more, **own):
        values = [f"{name.replace('__', '.')}={value}" for name, value in own.items()]
        experiment = load_experiment(TINY, [*settings(run)[2:], *values])
        return json.dumps(Generated(Run(experiment), Manifest.read(run)).settings)

    shaping = {"num_steps": 3, "strategy": "full", "solver": "heun", "guidance_scale": 3, "guidance": "mixture"}
    shaping |= {"guidance_interval": "[0.1,0.9]", "router_temperature": 2, "member": "expert-0"}
    changes = [{"seed": "1"}, {"evaluate__num_images": "12"}, {"name": "other"}]
    all_differ(key, {}, *changes, *({f"sample__{name}": str(value)} for name, value in shaping.items()))


def test_encoders_are_kept_by_registry_name_and_params():
    given = [(IMAGE_ENCODERS, {}), (FEATURES, {}), (IMAGE_ENCODERS, {"image_size": 4})]
    built = [built_encoder(registry, PluginConfig("pixels", params)) for registry, params in given]
    assert len({*map(id, built)}) == 3
    assert built_encoder(IMAGE_ENCODERS, PluginConfig("pixels", {"image_size": 4})) is built[2]


# What is built or counted once for several.


def answer(call):
    """What a call returns, or the line by which it refuses."""
    try:
        return call()
    except UserError as error:
        return str(error)


def test_adapters_share_a_base_only_if_they_build_alike(tmp_path):
    """What a network is after others were built is what it is alone, refusals included."""
    lora, meta = LoraConfig(2, alpha=2.0, target_modules=["attention.qkv"]), make_meta()
    network = ROLES["expert"].build(PluginConfig("dit", PARAMS), meta.x_shape, TEXT, 2)
    sha256 = save_weights(tmp_path / "base", network.state_dict(), "base")
    other = save_weights(tmp_path / "other", {k: v + 1 for k, v in network.state_dict().items()}, "base")
    for name, hashed in (("base", sha256), ("other", other)):
        (tmp_path / "initial" / hashed).mkdir(parents=True)
        (tmp_path / name).rename(tmp_path / "initial" / hashed / "model.safetensors")
    meta = replace(meta, lora=lora, init_from="base", init_sha256=sha256)
    adapted = adapt(network, lora, network.state_dict()) or network
    write_artifact(tmp_path / "artifact", adapted.state_dict(), meta)
    weights = read_header(tmp_path / "artifact" / "model.safetensors", "")
    changes = [
        {"lora": replace(lora, alpha=4.0)},
        {"init_sha256": other},
        {"prediction": "x_0"},
        {"path": "cosine"},
        {"network": "unet"},
        {"params": {**PARAMS, "num_heads": 1}},
        {"params": {**PARAMS, "width": 16}},
        {"x_shape": (3, 8, 8)},
        {"condition": replace(meta.condition, kind="class")},
    ]

    def key(bases, change):
        def described():
            made = bases.network(replace(meta, **change), weights, "artifact")
            heads = [part.num_heads for part in made.modules() if hasattr(part, "num_heads")]
            scales = [part.scaling["default"] for part in made.modules() if hasattr(part, "scaling")]
            return heads, scales, numbers(*frozen(made).values())

        return answer(described)

    used = Bases([tmp_path])
    for change in ({}, *changes, {}):
        assert key(used, change) == key(Bases([tmp_path]), change), change


def test_memory_that_was_counted_before_serves_equal_settings_alone():
    experiment = load_experiment(TINY)
    member = plan.Planner(experiment, ["expert-0"], data_of(experiment), plan.rates_of(None, ())).members[0]
    plain, used = IslandConfig("gpu", 2, strategy="fsdp"), MemberCost(member)
    changes = (
        {},
        {"micro_batch_size": 2},
        {"devices": 4},
        {"devices": 1},
        {"precision": "bf16-mixed"},
        {"strategy": "ddp"},
        {"activation_checkpointing": True},
        {},
    )
    for change in changes:
        island = replace(plain, **change)
        assert used.memory(island, island.strategy) == MemberCost(member).memory(island, island.strategy), change


@pytest.mark.parametrize("own", ["network.params.depth=3", "train.optimizer=muon"])
def test_a_plan_counts_members_that_differ_apart(own):
    def planned(*members):
        experiment = load_experiment(TINY, [f"expert.overrides.expert-1.{own}"])
        made = plan.Planner(experiment, members, data_of(experiment), plan.rates_of(None, ()))
        return made.on("L4").members[-1]

    assert planned("expert-0", "expert-1") == planned("expert-1")


# Records.


def test_an_artifact_counts_as_sent_by_url_and_content(tmp_path):
    run = Run(load_experiment(TINY, [f"run_dir={tmp_path}", "remote=s3://a"]))
    put(run.folder.artifact("expert-0"))
    shared.mark_published("expert-0", run)
    assert shared.is_published("expert-0", run)
    assert not shared.is_published("expert-0", Run(replace(run.experiment, remote="s3://b")))
    put(run.folder.artifact("expert-0"), step=8)
    assert not shared.is_published("expert-0", run)


OTHER = {
    "network": PluginConfig("dit", {"width": 8}),
    "lora": LoraConfig(2, target_modules=["0"]),
    "x_shape": (3, 8, 8),
    "condition": ConditionSpec("text", 7),
    "num_clusters": 4,
    "path": "cosine",
    "clusters": (1,),
    "interval": (0.0, 0.5),
    "timesteps": TimestepsConfig(shift=3.0),
    "image_encoder": PluginConfig("pixels", {"image_size": 4}),
    "caption_encoder": PluginConfig("hashed-words", {"size": 4}),
    "init_from": InitConfig("elsewhere"),
    "name": "expert-1",
}


def test_an_artifact_records_what_shaped_its_member(tiny_prepared):
    manifest = Manifest.read(tiny_prepared.parent)

    def key(manifest, **own):
        return repr(described(replace(MEMBER, **own), manifest))

    other = [replace(manifest, partition_sha256="cd" * 32), replace(manifest, normalisation={"scale": 2.0})]
    of_member = ({name: value} for name, value in OTHER.items())
    all_differ(key, {"manifest": manifest}, *of_member, *({"manifest": one} for one in other))


def leaves_of(value, key=""):
    """Every leaf of a dataclass: the object that holds it, its name, and its dotted key."""
    for field in fields(value):
        inner, name = getattr(value, field.name), f"{key}{field.name}"
        if is_dataclass(inner):
            yield from leaves_of(inner, f"{name}.")
        else:
            yield value, field.name, name


CHANGEABLE = ("prepare.engine", "prepare.num_processes")


def test_every_setting_but_those_of_places_and_lengths_is_in_the_fingerprint():
    free = {key for key in changeable_keys() if "." not in key}
    assert {"run_dir", "remote", "island", "islands"} <= free and not {"seed", "prepare", "expert"} & free
    experiment = load_experiment(TINY)
    plain, given, found = fingerprint(experiment), asdict(experiment), set()
    for holder, name, key in leaves_of(experiment):
        before = getattr(holder, name)
        setattr(holder, name, {"x": 1} if isinstance(before, dict) else "another")
        if fingerprint(experiment) == plain:
            found.add(key)
        is_free = key.partition(".")[0] in free or key in CHANGEABLE
        said = changes(given, asdict(experiment))
        assert not said if is_free else said.startswith(key)
        setattr(holder, name, before)
    inner = {key for key in found if key.partition(".")[0] not in free}
    assert inner == {"expert.train.max_steps", "router.train.max_steps", *CHANGEABLE}


BASE = {"features": PluginConfig("pooled-pixels"), "fit_fraction": 0.5, "near_duplicates": 1.0}
COLUMNS = {"records", "latents", "features", "captions", "sample", "codes"}


@pytest.mark.parametrize(
    ("change", "columns", "stages_of"),
    [
        ({"source": PluginConfig("blobs", {"num_samples": 60, "image_size": 8, "seed": 1})}, COLUMNS, "encode merge"),
        ({"images": ImagesConfig(size=8)}, COLUMNS, "encode merge"),
        ({"images": ImagesConfig(aspect="pad")}, COLUMNS, "encode merge"),
        ({"images": ImagesConfig(upscale=False)}, COLUMNS, "encode merge"),
        ({"images": ImagesConfig(size=8, buckets=[[8, 16]])}, COLUMNS, "encode merge"),
        ({"filters": {"min_side": 4}}, COLUMNS, "encode merge"),
        ({"keep": ["min_side"]}, COLUMNS, "encode shards merge"),
        ({"captions": [CaptionConfig("caption")]}, COLUMNS, "encode merge"),
        ({"image_encoder": PluginConfig("pixels", {"image_size": 4})}, {"latents"}, "encode merge"),
        ({"horizontal_flips": True}, {"latents"}, "encode merge"),
        ({"caption_encoder": PluginConfig("hashed-words", {"size": 4})}, {"captions"}, "encode merge"),
        (
            {"features": PluginConfig("pooled-pixels", {"grid": 2})},
            {"features", "sample", "codes"},
            "encode partition merge",
        ),
        ({"fit_fraction": 0.4}, {"sample"}, "encode partition merge fine"),
        ({"metric": "euclidean"}, set(), "partition merge fine"),
        ({"num_fine_centroids": 9}, set(), "partition merge fine"),
        ({"num_iterations": 3}, set(), "partition merge fine"),
        ({"device": "cuda"}, set(), "partition merge fine"),
        ({"seed": 1}, set(), "partition shards merge fine"),
        ({"num_clusters": 3}, set(), "partition merge"),
        ({"max_largest_over_mean": 2.0}, set(), "partition merge"),
        ({"kind": "flat"}, set(), "partition merge"),
        ({"held_out_fraction": 0.2}, set(), "partition shards merge"),
        ({"max_bad_fraction": 0.5}, set(), "index merge"),
        ({"near_duplicates": 0.9}, set(), "index merge"),
        ({"shards": ShardsConfig(max_bytes=4096)}, set(), "shards merge"),
        ({"shards": ShardsConfig(compression="zstd:3")}, set(), "shards merge"),
        ({"name": "other"}, set(), "merge"),
        ({"num_processes": 7}, set(), ""),
        ({"engine": "ray"}, set(), ""),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_setting_of_prepare_is_in_the_keys_of_what_it_shapes(blobs, monkeypatch, change, columns, stages_of):
    """In those alone, before anything runs; what they make decides over the rest."""
    before, after = keys_of(blobs, monkeypatch, BASE), keys_of(blobs, monkeypatch, BASE | change)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {*columns, *stages_of.split()}


@pytest.fixture(scope="module")
def blobs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("keys")
    with light_prepare():
        prepare(experiment_with(BASE), folder)
    return folder


def experiment_with(values):
    experiment = tiny_experiment()
    experiment.prepare.partition.max_largest_over_mean = 3.0
    places = (experiment.prepare, experiment.prepare.partition, experiment)
    for name, value in values.items():
        setattr(next(place for place in places if hasattr(place, name)), name, value)
    return experiment


def keys_of(folder, monkeypatch, values):
    """Keys of all stages, of the columns of one part, and of the fine centroids."""
    made = Preparation(experiment_with(values), folder, Reporter())
    made_stages = {stage.name: stage for stage in made._stages()}
    found = {name: stage.key for name, stage in made_stages.items()}
    found |= made.part_jobs()[0].keys
    told = []
    monkeypatch.setattr(
        stages, "fit_partition", lambda *_, fine_cache, **__: told.append(fine_cache[1]) or (None, np.zeros(0))
    )
    made_stages["partition"].begin()
    return found | {"fine": told[0]}
