"""``expert.overrides``: what each expert gets, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from artifact_files import refused

from ddm_lightning.config.experiment import Experiment, NetworkConfig
from ddm_lightning.config.load import load_experiment, to_yaml
from ddm_lightning.config.merge import expert_section
from ddm_lightning.core.errors import UserError
from ddm_lightning.members.member import Member
from ddm_lightning.members.preflight import check_networks, check_plugins
from ddm_lightning.members.roles import all_members, batch_size_of, section_of
from ddm_lightning.members.run_folder import changes
from ddm_lightning.shards.manifest import DataSizes

TINY = Path(__file__).parents[2] / "experiments" / "tiny_2x.yaml"
SIZES = DataSizes((3, 8, 8), 16, None, 4)
UNET = "expert.overrides.expert-1={network: {name: unet, params: {width: 8, prediction: epsilon}}, path: cosine}"


def load(*overrides: str) -> Experiment:
    return load_experiment(TINY, list(overrides))


def test_an_expert_has_its_own_network_path_and_training_and_others_have_not() -> None:
    experiment = load(UNET, "expert.overrides.expert-1.train.learning_rate=0.5")
    base, own = (Member.resolve(name, experiment, SIZES) for name in ("expert-0", "expert-1"))
    assert own.network == NetworkConfig("unet", {"width": 8, "prediction": "epsilon"})  # none of dit's
    assert (own.path, base.path, own.train.learning_rate) == ("cosine", "linear", 0.5)
    assert own.train.max_steps == base.train.max_steps and own.batch_size == base.batch_size == 8
    assert type(own.build_network()).__name__ == "UNet" and type(base.build_network()).__name__ == "DiT"
    for name in ("monolith", "student", "router"):
        plain = Member.resolve(name, load(), SIZES)
        assert Member.resolve(name, experiment, SIZES) == plain and plain.path == "linear"
    assert expert_section("expert-0", experiment) is experiment.expert


def test_params_of_the_same_network_are_merged_and_so_are_overrides_on_the_command_line(tmp_path: Path) -> None:
    document = yaml.safe_load(TINY.read_text())
    document["expert"]["overrides"] = {"expert-0": {"network": {"params": {"depth": 3}}, "train": {"max_steps": 7}}}
    path = tmp_path / "e.yaml"
    path.write_text(yaml.safe_dump(document))
    experiment = load_experiment(path, ["expert.overrides.expert-0.train.global_batch_size=4"])
    assert Member.resolve("expert-0", experiment, SIZES).network.params == {
        **document["expert"]["network"]["params"],
        "depth": 3,
    }
    assert section_of("expert-0", experiment).train.max_steps == 7 and batch_size_of("expert-0", experiment) == 2
    assert section_of("expert-1", experiment).train.max_steps == 60 and batch_size_of("expert-1", experiment) == 8
    path.write_text(to_yaml(experiment))
    assert load_experiment(path) == experiment


def test_a_changed_override_is_a_changed_experiment() -> None:
    def changed(*overrides: str) -> str:
        plain: dict[str, Any] = yaml.safe_load(to_yaml(load()))
        return changes(plain, yaml.safe_load(to_yaml(load(*overrides))))

    assert changed() == ""
    assert changed("expert.overrides.expert-1.path=vp") == "expert.overrides.expert-1.path (was not set)"


@pytest.mark.parametrize(
    ("override", "words"),
    [
        (
            "expert-7.path=vp",
            ["'expert.overrides.expert-7': there is no such expert; experts are expert-0 to expert-1"],
        ),
        ("expert-1=vp", ["key 'expert.overrides.expert-1': must be a section of keys"]),
        ("expert-1.pth=vp", ["unknown key 'expert.overrides.expert-1.pth'; did you mean 'path'?"]),
        ("expert-1.path=sine", ["'expert.overrides.expert-1.path' = 'sine': must be one of linear, cosine, vp"]),
        ("expert-1.train.max_steps=1.5", ["'expert.overrides.expert-1.train.max_steps': must be a whole number"]),
        ("expert-1.timesteps.shift=2.0", ["timesteps.shift must be that of all experts"]),
        ("expert-1.timesteps.shift_by_tokens=true", ["timesteps.shift_by_tokens must be that of all experts"]),
        ("expert-1.overrides.expert-0={}", ["overrides cannot be overridden"]),
        ("expert-1.train.global_batch_size=5", ["'expert.overrides.expert-1'", "must be divisible by"]),
        (
            "expert-1.train.ema_widths=[0.5]",
            ["'expert.overrides.expert-1.train.ema_widths' = [0.5]: must be a list of widths from"],
        ),
    ],
)
def test_what_cannot_be_is_one_line(override: str, words: list[str]) -> None:
    line = refused(lambda: load(f"expert.overrides.{override}"))
    assert line.startswith(f"{TINY} with 'expert.overrides.{override}'")
    for word in words:
        assert word in line


FOUR = ["expert.num_experts=4", "expert.train.global_batch_size=16"]
INTERVALS = [
    f"expert.overrides.expert-{number}.interval={[0.5 * (number // 2), 0.5 + 0.5 * (number // 2)]}"
    for number in range(4)
]


def test_experts_of_one_cluster_share_its_noise_levels_and_its_batch() -> None:
    experiment = load(*FOUR, *INTERVALS)
    members = [Member.resolve(name, experiment, SIZES) for name in all_members(experiment)]
    found = [(member.name, member.clusters, member.interval, member.batch_size) for member in members]
    assert found == [
        ("expert-0", (0,), (0.0, 0.5), 4),
        ("expert-1", (1,), (0.0, 0.5), 4),
        ("expert-2", (0,), (0.5, 1.0), 4),
        ("expert-3", (1,), (0.5, 1.0), 4),
        ("router", (0, 1), (0.0, 1.0), experiment.router.train.global_batch_size),
        ("monolith", (0, 1), (0.0, 1.0), 16),
        ("student", (0, 1), (0.0, 1.0), 16),
    ]
    assert sum(batch for name, *_, batch in found if name.startswith("expert")) == 16
    moved = load(*FOUR, *INTERVALS, "expert.overrides.expert-2.cluster=1", "expert.overrides.expert-3.cluster=0")
    assert [Member.resolve(f"expert-{n}", moved, SIZES).clusters for n in range(4)] == [(0,), (1,), (1,), (0,)]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["expert-1.interval=[0.5,1.0]"], "cluster 1 has no expert for t from 0 to 0.5; change an expert's interval"),
        (["expert-0.interval=[0.0,0.6]"], "cluster 0 has two experts for t from 0.5 to 0.6"),
        (["expert-0.cluster=1"], "cluster 0 has no expert for t from 0 to 0.5"),
        (["expert-0.cluster=2"], "cluster 2 does not exist; give one from 0 to 1"),
        (["expert-0.interval=[0.0,1.5]"], "must be two times, 0 <= low < high <= 1"),
        (["expert-0.num_experts=2"], "num_experts cannot be overridden"),
    ],
)
def test_intervals_that_do_not_cover_all_noise_levels_once_are_one_line(overrides: list[str], words: str) -> None:
    whole = [] if "expert-1" in overrides[0] else [*FOUR, *INTERVALS]
    assert words in refused(lambda: load(*whole, *(f"expert.overrides.{text}" for text in overrides)))
    with pytest.raises(UserError, match=r"key 'expert\.interval'.*belongs in expert.overrides"):
        load("expert.interval=[0.5,1.0]")


def test_networks_of_single_experts_are_checked_before_anything_is_written() -> None:
    unknown = load("expert.overrides.expert-1.network.name=resnet")
    with pytest.raises(UserError, match=r"key 'expert\.overrides\.expert-1\.network': unknown expert 'resnet'"):
        check_plugins(unknown, str(TINY))
    unfit = load(UNET, "expert.overrides.expert-1.network.params.num_heads=3")
    check_plugins(unfit, str(TINY))
    with pytest.raises(UserError, match=r"key 'expert\.overrides\.expert-1\.network': .*num_heads = 3"):
        check_networks(unfit, SIZES, str(TINY))
    check_networks(load(UNET), SIZES, str(TINY))
    with pytest.raises(UserError, match=r"expert\.overrides\.expert-1\.train\.optimizer' = 'muon'"):
        no_matrices = load("expert.overrides.expert-1={network: {name: flat}, train: {optimizer: muon}}")
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(Member, "plan_network", lambda _: torch.nn.Linear(2, 2))
            check_networks(no_matrices, SIZES, str(TINY))
