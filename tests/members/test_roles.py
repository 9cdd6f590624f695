"""The generalist: the monolith's data and network with an expert's batch."""

from pathlib import Path

from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment
from ddm_lightning.members.artifact import read_meta
from ddm_lightning.members.member import Member
from ddm_lightning.members.roles import all_members, ensemble_members, island_of
from ddm_lightning.shards.manifest import DataSizes

TINY = Path(__file__).parents[2] / "experiments" / "tiny_2x.yaml"
SIZES = DataSizes((3, 8, 8), 16, None, 4)


def test_it_trains_on_all_clusters_with_an_experts_batch() -> None:
    experiment = load_experiment(TINY, ["islands.generalist.num_workers=2"])
    own, expert, monolith = (Member.resolve(name, experiment, SIZES) for name in ("generalist", "expert-0", "monolith"))
    assert (own.clusters, own.network) == (monolith.clusters, monolith.network) == ((0, 1), expert.network)
    assert own.batch_size == expert.batch_size == monolith.batch_size // 2
    assert "generalist" in all_members(experiment) and "generalist" not in ensemble_members(experiment)
    assert island_of("generalist", experiment).num_workers == 2


def test_it_is_trained_and_sampled(tmp_path, quick_prepare) -> None:
    run = tmp_path / "run"
    settings = ["-c", str(TINY), f"run_dir={run}", "expert.train.max_steps=2"]
    assert main(["prepare", *settings]) == 0
    assert main(["fit", *settings, "member=generalist"]) == 0
    meta = read_meta(run / "members" / "generalist" / "artifact")
    assert (meta.role, meta.step, meta.num_samples) == ("generalist", 2, 2 * 8)
    assert main(["sample", *settings, "sample.member=generalist", "sample.num_steps=1", "--num", "1"]) == 0
    assert (run / "samples" / "generalist-001.png").exists()
