"""Every experiment file loads, says what it is, and names only plug-ins that exist or admits that they do not."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from ddm_lightning.cli.check_plugins import check_plugins
from ddm_lightning.config.experiment import Experiment
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.registry import CAPTION_ENCODERS, EXPERTS, FEATURES, IMAGE_ENCODERS, ROUTERS, SOURCES
from ddm_lightning.members.member import Member
from ddm_lightning.networks.flops import flops_per_sample
from ddm_lightning.shards.manifest import DataSizes

FOLDER = Path(__file__).parents[2] / "experiments"
FILES = sorted(FOLDER.glob("*.yaml"))


def header(path: Path) -> str:
    lines = path.read_text(encoding="utf-8").splitlines()
    return "\n".join(lines[: next(index for index, line in enumerate(lines) if not line.startswith("#"))])


def not_built_in(experiment: Experiment) -> set[str]:
    prepare = experiment.prepare
    named = [
        (SOURCES, prepare.source),
        (IMAGE_ENCODERS, prepare.image_encoder),
        (CAPTION_ENCODERS, prepare.caption_encoder),
        (FEATURES, prepare.features),
        (EXPERTS, experiment.expert.network),
        (ROUTERS, experiment.router.network),
    ]
    return {plugin.name for registry, plugin in named if plugin and plugin.name not in registry.names()}


def test_the_files_are_there() -> None:
    assert {path.stem for path in FILES} >= {"emoji_4x", "tiny_2x", "imagenet_8x", "laion_8x", "paris_8x", "laion_24b"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_loads_under_its_own_name(path: Path) -> None:
    experiment = load_experiment(path)
    assert experiment.name == path.stem
    assert experiment.run_dir == f"runs/{path.stem}"


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
@pytest.mark.parametrize("word", ["What it does", "Hardware, time", "Expected", "Command"])
def test_a_header_says_what_how_long_how_good_and_how(path: Path, word: str) -> None:
    assert re.search(rf"^# {word}\s+\S", header(path), re.MULTILINE)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_header_holds_the_exact_command(path: Path) -> None:
    assert f"python -m ddm_lightning fit -c experiments/{path.name}" in header(path)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_plug_ins_are_built_in_or_the_header_says_that_they_are_not(path: Path) -> None:
    experiment = load_experiment(path)
    absent = not_built_in(experiment)
    if absent:
        listed = re.search(r"^# Not built in yet\s+(.+?)\n# [A-Z]", header(path), re.MULTILINE | re.DOTALL)
        assert listed is not None
        names = set(re.findall(r"`([\w-]+)`", listed.group(1))) - {"config", "prepare", "fit"}
        assert names == absent
    else:
        assert "Not built in yet" not in header(path)
        check_plugins(experiment, str(path))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_the_data_folder_has_a_recipe_for_every_source(path: Path) -> None:
    recipes = (FOLDER.parent / "data" / "README.md").read_text(encoding="utf-8")
    assert f"experiments/{path.name}" in recipes
    assert f"`{load_experiment(path).prepare.source.name}`" in recipes


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_experts_that_read_tokens_are_given_some(path: Path) -> None:
    experiment = load_experiment(path)
    if experiment.condition.kind == "tokens":  # `prepare` refuses other captions, but weights are not at hand here
        captions = experiment.prepare.caption_encoder
        assert captions is not None and captions.params["store"] in ("tokens", "ids")


@pytest.mark.parametrize(("stem", "batch_of_an_expert"), [("imagenet_8x", 32), ("laion_8x", 128)])
def test_the_papers_settings_are_the_papers(stem: str, batch_of_an_expert: int) -> None:
    experiment = load_experiment(FOLDER / f"{stem}.yaml")
    partition, train = experiment.prepare.partition, experiment.expert.train
    assert partition.num_clusters == 8
    assert (partition.num_fine_centroids, partition.fit_fraction) == (1024, 0.05)
    assert train.global_batch_size // partition.num_clusters == batch_of_an_expert
    assert train.max_steps == 800_000
    assert experiment.expert.network.params == {"size": "XL", "patch_size": 2}
    assert not experiment.router.conditional
    assert experiment.sample.strategy == "top-1"


# What the header says by arithmetic: parameters in millions, GFLOP a sample forward and backward, FLOP an expert.
LARGE = {
    "imagenet_8x": (675, 712, 1.8e19),
    "laion_8x": (675, 712, 7.3e19),
    "paris_8x": (608.3, 867, 7.8e19),
    "laion_24b": (2980, 2055, 2.1e20),
}


@pytest.mark.parametrize("stem", LARGE)
def test_the_arithmetic_of_a_header_is_right(stem: str) -> None:
    millions, gflop, in_all = LARGE[stem]
    experiment = load_experiment(FOLDER / f"{stem}.yaml")
    sizes = DataSizes((4, 32, 32), 768, (77, 768), 1000)
    with torch.device("meta"):
        network = Member.resolve("expert-0", experiment, sizes).build_network()
    condition = Member.resolve("expert-0", experiment, sizes).condition
    assert sum(p.numel() for p in network.parameters()) / 1e6 == pytest.approx(millions, rel=2e-3)
    per_sample = flops_per_sample(network, sizes.x_shape, condition, backward=True)
    assert per_sample / 1e9 == pytest.approx(gflop, rel=2e-3)
    train = experiment.expert.train
    samples = train.max_steps * train.global_batch_size / experiment.prepare.partition.num_clusters
    assert samples * per_sample == pytest.approx(in_all, rel=0.03)
    text = " ".join(header(FOLDER / f"{stem}.yaml").replace("#", " ").split())
    assert f"{gflop:,} GFLOP per sample" in text and f"{in_all:.1e}".replace("e+", "e") in text
