import pytest
import torch

from ddm_lightning.config import PartitionConfig
from ddm_lightning.errors import UserError
from ddm_lightning.prepare.partition import Partition, fit_partition


def config(num_clusters, num_fine_centroids, **options):
    return PartitionConfig(num_clusters=num_clusters, num_fine_centroids=num_fine_centroids, **options)


def directions(sizes, dims=16, spread=0.05, seed=0):
    """Features around one random direction per entry of ``sizes``, of random length; and their origin."""
    generator = torch.Generator().manual_seed(seed)
    origin = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    origin = origin[torch.randperm(len(origin), generator=generator)]
    centres = torch.nn.functional.normalize(torch.randn(len(sizes), dims, generator=generator), dim=1)
    points = centres[origin] + spread * torch.randn(len(origin), dims, generator=generator)
    return points * (0.1 + 5 * torch.rand(len(origin), 1, generator=generator)), origin


def test_planted_clusters_are_found_whatever_the_features_lengths():
    features, origin = directions([100, 100, 100, 100])
    partition = fit_partition(features, config(4, 24), seed=0)
    found = partition.assign(features)
    assert partition.counts.tolist() == [100] * 4
    assert len({(a, b) for a, b in zip(origin.tolist(), found.tolist(), strict=True)}) == 4


def test_samples_are_balanced_though_kinds_are_not():
    features, _ = directions([500, 60, 50, 40, 30, 20])
    partition = fit_partition(features, config(4, 70), seed=0)
    found = partition.assign(features)
    assert partition.counts.sum() == len(features)
    assert partition.counts.max() <= 1.05 * len(features) / 4
    assert torch.equal(partition.counts, found.bincount(minlength=4)), "counts are those of the samples"
    assert torch.equal(partition.counts, partition.counts.sort(descending=True).values)
    torch.testing.assert_close(partition.priors, partition.counts.double() / 700)


def test_every_sample_follows_its_nearest_fine_centroid():
    features, _ = directions([80, 90, 70])
    partition = fit_partition(features, config(3, 20), seed=1)
    unit = features / features.norm(dim=1, keepdim=True)
    nearest = torch.cdist(unit.double(), partition.fine_centroids.double()).argmin(1)
    assert torch.equal(partition.assign(features), partition.cluster_of_fine[nearest])


def test_fitting_on_a_part_still_counts_all_samples():
    features, _ = directions([400, 400, 400, 400])
    partition = fit_partition(features, config(4, 32, fit_fraction=0.1, max_largest_over_mean=1.2), seed=0)
    assert int(partition.counts.sum()) == 1600
    assert partition.counts.max() <= 1.2 * 400


def test_seed_and_features_decide_every_byte(tmp_path):
    features, _ = directions([60, 50, 40, 30])
    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        fit_partition(features, config(3, 20), seed=seed).save(tmp_path / name)
    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written["a"] == written["b"] != written["c"]
    read = Partition.load(tmp_path / "a")
    assert torch.equal(read.assign(features), fit_partition(features, config(3, 20), seed=3).assign(features))
    assert read.num_clusters == 3


@pytest.mark.parametrize(
    ("options", "key", "problem"),
    [
        ({"num_clusters": 11, "num_fine_centroids": 12}, "prepare.partition.num_clusters", "only 10 samples"),
        ({"num_clusters": 2, "num_fine_centroids": 12}, "prepare.partition.num_fine_centroids", "only 10 samples"),
        (
            {"num_clusters": 2, "num_fine_centroids": 6, "fit_fraction": 0.5},
            "prepare.partition.fit_fraction",
            "leaves 5 of 10",
        ),
    ],
)
def test_more_parts_than_samples_are_refused(options, key, problem):
    features, _ = directions([5, 5])
    with pytest.raises(UserError, match=problem) as refusal:
        fit_partition(features, PartitionConfig(**options), seed=0)
    assert key in str(refusal.value) and "\n" not in str(refusal.value)


def test_more_fine_centroids_than_distinct_samples_are_refused():
    features = torch.eye(3).repeat(10, 1)
    with pytest.raises(UserError, match=r"num_fine_centroids' = 4: only 3 distinct samples"):
        fit_partition(features, config(2, 4), seed=0)


def test_a_partition_over_the_limit_is_refused_with_the_figure():
    # Nine tenths of the samples are one point: no grouping of fine centroids can divide it.
    features, _ = directions([10, 10])
    features = torch.cat([features, torch.eye(16)[:1].repeat(180, 1)])
    with pytest.raises(UserError, match=r"max_largest_over_mean' = 1.05: the largest cluster has 18\d samples, 1\.8"):
        fit_partition(features, config(2, 8), seed=0)


@pytest.mark.parametrize("damage", ["missing", "no safetensors", "other safetensors"])
def test_a_file_that_is_no_partition_is_named(tmp_path, damage):
    from safetensors.torch import save_file

    path = tmp_path / "partition.safetensors"
    if damage == "no safetensors":
        path.write_bytes(b"not at all")
    elif damage == "other safetensors":
        save_file({"weight": torch.ones(2)}, path)
    with pytest.raises(UserError, match=r"partition\.safetensors: .*run prepare again"):
        Partition.load(path)
