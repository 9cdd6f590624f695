import hashlib
import json

import numpy as np
import pytest
import torch
from safetensors.torch import save

from ddm_lightning.config.experiment import PartitionConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.partition import build
from ddm_lightning.partition.build import displaced_fractions, fit_partition
from ddm_lightning.partition.columns import Rows
from ddm_lightning.partition.partition import Partition, Samples, hashes


def config(num_clusters, num_fine_centroids=1024, **options):
    return PartitionConfig(num_clusters=num_clusters, num_fine_centroids=num_fine_centroids, **options)


def directions(sizes, dims=16, spread=0.05, seed=0):
    """Features around one random direction per entry of ``sizes``, of random length; and their origin."""
    generator = torch.Generator().manual_seed(seed)
    origin = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    origin = origin[torch.randperm(len(origin), generator=generator)]
    centres = torch.nn.functional.normalize(torch.randn(len(sizes), dims, generator=generator), dim=1)
    points = centres[origin] + spread * torch.randn(len(origin), dims, generator=generator)
    lengths = 0.1 + 5 * torch.rand(len(origin), 1, generator=generator)
    return (points * lengths).numpy(), origin.numpy()


def keys_of(num):
    return [f"sample-{number}" for number in range(num)]


def fit(*arguments, **options):
    return fit_and_assign(*arguments, **options)[0]


def fit_and_assign(x, wanted, seed=0, labels=None, keys=None, **options):
    return fit_partition(samples(x, labels, keys), wanted, seed, **options)


def assign(partition, x, labels=None, keys=None):
    return partition.rule.assign(samples(x, labels, keys))


def samples(x, labels=None, keys=None):
    """Samples with these features, of class 0 unless others are given."""
    if labels is None:
        labels = np.zeros(len(x), np.int64)

    rows = x if isinstance(x, Rows) else Rows([x])
    return Samples(rows, labels, keys or keys_of(len(x)))


def on_sphere(features, metric):
    """Features in float64; unit vectors if the metric is spherical."""
    points = features.astype(np.float64)
    if metric == "spherical":
        points /= np.linalg.norm(points, axis=1, keepdims=True)

    return points


@pytest.fixture(params=["small", "large"])
def either_way(request, monkeypatch):
    """The fine stage by prices, and the one for data too large for it."""
    if request.param == "large":
        monkeypatch.setattr(build, "_PRICED_DISTANCES", 0)


@pytest.mark.usefixtures("either_way")
def test_clusters_are_balanced_when_the_data_is_not():
    features, _ = directions([500, 60, 50, 40, 30, 20])

    partition = fit(features, config(4, 70))

    assert partition.counts.max() <= 1.05 * 700 / 4
    assert partition.counts.tolist() == np.bincount(assign(partition, features)).tolist()
    assert torch.equal(partition.counts, partition.counts.sort(descending=True).values)
    torch.testing.assert_close(partition.priors, partition.counts.double() / 700)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("metric", ["spherical", "euclidean"])
def test_every_sample_follows_its_nearest_fine_centroid(metric):
    features, _ = directions([80, 90, 70])

    partition = fit(features, config(3, 30, metric=metric, max_largest_over_mean=1.3), seed=1)

    rule = partition.rule
    found = torch.cdist(torch.from_numpy(on_sphere(features, metric)), rule.fine_centroids.double()).argmin(1)
    assert assign(partition, features).tolist() == rule.cluster_of_fine[found].tolist()
    # The clusters' centroids are weighted by samples, so they lie near the samples' own means.
    per_fine = found.bincount(minlength=30)
    for k in range(3):
        mine = rule.cluster_of_fine == k
        mean = np.average(rule.fine_centroids[mine], axis=0, weights=per_fine[mine])
        np.testing.assert_allclose(rule.centroids[k], mean, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("metric", ["spherical", "euclidean"])
def test_flat_clusters_balance_single_samples_by_a_stored_price(tmp_path, metric):
    features, _ = directions([500, 60, 50, 40, 30, 20], spread=0.3)
    wanted = config(4, 70, kind="flat", metric=metric, num_iterations=6)

    partition, clusters = fit_and_assign(Rows([features[:99], features[99:]]), wanted, features="A")

    assert partition.counts.max() <= 1.05 * 700 / 4
    assert partition.counts.tolist() == np.bincount(clusters).tolist()
    # The oracle: squared distance plus price, in float64.
    centroids = partition.rule.centroids.double().numpy()
    squares = np.square(on_sphere(features, metric)[:, None] - centroids).sum(2)
    np.testing.assert_array_equal((squares + partition.rule.prices.numpy()).argmin(1), clusters)
    displaced, by_balance = displaced_fractions(partition, Rows([features]), clusters)
    assert displaced == by_balance == pytest.approx((squares.argmin(1) != clusters).mean())

    partition.save(tmp_path / "a")
    fit(features, wanted, features="A").save(tmp_path / "b")
    again = fit(features[:300], config(4, kind="existing", path=str(tmp_path / "a")), features="A")

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert again.counts.tolist() == np.bincount(clusters[:300]).tolist()


def test_flat_clusters_of_a_sample_leave_room_for_the_others():
    """A share of 1/4, known from 900 samples, has a standard error of sqrt(3)/2 · sqrt(4/900) of itself at most."""
    features, _ = directions([2000, 300, 250, 200, 150, 100], spread=0.3)
    wanted = config(4, kind="flat", fit_fraction=0.3, max_largest_over_mean=1.3)
    sample = np.random.default_rng(0).permutation(features)[:900]

    counts = fit(sample, wanted).counts

    assert 1.05 < counts.max() / 225 <= 1.3 - 3 * (4 / 900) ** 0.5 + 1 / 225


@pytest.mark.parametrize(("kind", "free", "needed"), [("kmeans", 1600, 1.3), ("flat", 3600, 5.4)])
def test_a_sample_larger_than_the_memory_is_refused(monkeypatch, kind, free, needed):
    monkeypatch.setattr(build, "free_bytes", lambda: free)

    with pytest.raises(
        UserError, match=rf"fit_fraction' = 1\.0: takes {needed} kB of memory, and {free / 1000} kB are"
    ):
        fit(directions([10, 10])[0], config(2, 4, kind=kind))


def test_counts_beyond_the_sample_may_differ_from_the_limit_by_its_error():
    """Of a share of 1/4, known from 400 samples, four standard errors of at most a quarter each are 40 %."""
    wanted = config(4, max_largest_over_mean=1.4)

    build.check_balance(torch.tensor([1469, 1, 1, 4]) + 1000, wanted, 400)
    with pytest.raises(UserError, match="largest cluster has 2000"):
        build.check_balance(torch.tensor([2000, 600, 700, 700]), wanted, 400)
    with pytest.raises(UserError, match="stays empty"):
        build.check_balance(torch.tensor([9, 0, 8, 9]), wanted, 400)


@pytest.mark.usefixtures("either_way")
def test_seed_and_features_decide_every_byte_however_they_are_split(tmp_path):
    features, _ = directions([60, 50, 40, 30])
    in_pieces = Rows([features[:7], features[7:100], features[100:]])
    for name, seed, rows in (("a", 3, features), ("b", 3, in_pieces), ("c", 4, features)):
        fit(rows, config(3, 20), seed=seed, features="a network").save(tmp_path / name)

    read = Partition.load(tmp_path / "a")
    read.save(tmp_path / "again")

    written = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert written["a"] == written["b"] == written["again"] != written["c"]
    assert (read.rule.kind, read.rule.metric, read.rule.features) == ("kmeans", "spherical", "a network")


def test_displaced_samples_are_counted():
    features, _ = directions([300, 100, 60, 40], spread=0.4)
    rows = Rows([features[:123], features[123:]])

    partition, clusters = fit_and_assign(rows, config(4, 60))
    found, by_balance = displaced_fractions(partition, rows, clusters)

    assert clusters.tolist() == assign(partition, features).tolist()
    distances = np.linalg.norm(on_sphere(features, "spherical")[:, None] - partition.rule.centroids.numpy(), axis=2)
    expected = (distances.argmin(1) != clusters).mean()
    assert found == pytest.approx(expected)
    assert 0 < by_balance < expected < 0.5

    # Without a limit each fine cell is in the cluster whose mean is nearest, and only the two stages displace.
    free, clusters = fit_and_assign(rows, config(4, 60, max_largest_over_mean=4.0))
    found, by_balance = displaced_fractions(free, rows, clusters)
    assert by_balance == 0 < found


def test_random_clusters_are_equal_and_depend_on_seed_and_key_alone(tmp_path):
    features = np.full((1003, 2), np.nan, np.float32)
    wanted = config(4, kind="random")
    partition, clusters = fit_and_assign(features, wanted, seed=5)
    partition.save(tmp_path / "p")
    read = Partition.load(tmp_path / "p")

    backwards = assign(read, features, keys=keys_of(1003)[::-1])
    _, other = fit_and_assign(features, wanted, seed=6)
    new = assign(read, np.empty((4000, 0)), keys=[f"new-{number}" for number in range(4000)])

    assert sorted(partition.counts.tolist()) == [250, 251, 251, 251]
    assert np.bincount(clusters).tolist() == partition.counts.tolist()
    assert backwards[::-1].tolist() == clusters.tolist()
    assert (clusters == other).mean() == pytest.approx(0.25, abs=0.06), "another seed is independent"
    assert np.bincount(new).min() > 900
    assert fit(features, config(1, kind="random")).counts.tolist() == [1003]
    assert fit(features[:1000], wanted).counts.tolist() == [250] * 4


def test_random_clusters_are_independent_of_the_held_out_samples():
    keys = keys_of(4000)
    held_out = [hashlib.blake2b(key.encode(), digest_size=8).digest()[0] < 128 for key in keys]
    ours = hashes(keys, 0) < 2**62
    assert np.mean(ours == held_out) == pytest.approx(0.5, abs=0.03)


def test_whole_classes_are_packed_evenly():
    sizes = [40, 35, 30, 25, 20, 15, 15]
    labels = np.repeat([0, 2, 3, 4, 5, 6, 9], sizes)
    features = np.full((180, 2), np.nan, np.float32)

    _, found = fit_and_assign(features, config(3, kind="labels", max_largest_over_mean=1.0), labels=labels)

    assert np.bincount(found).tolist() == [60, 60, 60]
    assert len({*zip(labels.tolist(), found.tolist(), strict=True)}) == 7


@pytest.mark.parametrize("label", [1, 3, -1])
def test_an_unknown_class_is_refused(tmp_path, label):
    partition = fit(np.zeros((20, 2), np.float32), config(2, kind="labels"), labels=np.repeat([0, 2], 10))
    partition.save(tmp_path / "p")

    with pytest.raises(UserError, match=rf"sample 'b': .* no cluster for its class {label}; raise .*fit_fraction"):
        assign(Partition.load(tmp_path / "p"), np.zeros((2, 2), np.float32), np.array([0, label]), ["a", "b"])


@pytest.mark.parametrize(
    ("labels", "problem"),
    [
        ([0] * 10 + [7] * 10, "num_clusters' = 3: the source has only 2 classes"),
        ([0] * 10 + [1] * 5 + [2] * 5, "max_largest_over_mean' = 1.05: the largest cluster has 10 samples, 1.500"),
    ],
)
def test_classes_that_cannot_be_packed_are_refused(labels, problem):
    with pytest.raises(UserError, match=problem) as refusal:
        fit(np.zeros((20, 2), np.float32), config(3, kind="labels"), labels=np.array(labels))

    assert "kind = kmeans" in str(refusal.value)


def test_an_existing_partition_assigns_new_data(tmp_path):
    features, origin = directions([200, 200, 200])
    path = tmp_path / "partition.safetensors"
    fit(features, config(3, 30), features="A").save(path)
    # Unevenly drawn: an existing partition is taken as it is.
    chosen = np.concatenate([np.flatnonzero(origin == k)[:count] for k, count in enumerate((90, 20, 10))])
    wanted = config(3, kind="existing", path=str(path), metric="euclidean")

    partition, clusters = fit_and_assign(features[chosen], wanted, features="A")

    assert sorted(partition.counts.tolist()) == [10, 20, 90]
    assert clusters.tolist() == assign(Partition.load(path), features[chosen]).tolist()


@pytest.mark.parametrize(
    ("num_clusters", "dims", "name", "problem"),
    [
        (2, 16, "A", "has 3 clusters; set prepare.partition.num_clusters"),
        (3, 15, "A", "features 'A' with 16 entries, these are 'A' with 15"),
        (3, 16, "B", "made from features 'A' .* these are 'B'"),
    ],
)
def test_a_partition_that_does_not_fit_is_refused(tmp_path, num_clusters, dims, name, problem):
    features, _ = directions([30, 30, 30])
    path = tmp_path / "partition.safetensors"
    fit(features, config(3, 12), features="A").save(path)
    with pytest.raises(UserError, match=problem) as refusal:
        fit(features[:, :dims], config(num_clusters, kind="existing", path=str(path)), features=name)

    assert str(refusal.value).startswith("key 'prepare.partition.path'")


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        (config(2, 11, fit_fraction=0.5), "num_fine_centroids' = 11: fitted are only 10 of 20 samples; use fewer, or"),
        (config(11, kind="flat", fit_fraction=0.5), "num_clusters' = 11: fitted are only 10 of 20 samples"),
        (config(11, kind="random"), "num_clusters' = 11: fitted are only 10 of 10 samples"),
    ],
)
def test_more_parts_than_samples_are_refused(wanted, problem):
    with pytest.raises(UserError, match=problem):
        fit(directions([5, 5])[0], wanted)


@pytest.mark.parametrize(
    ("device", "num_gpus", "problem"),
    [
        ("gpu", 2, "must be cpu or cuda or cuda:0 or cuda:1 on this machine"),
        ("cuda", 0, "must be cpu on this machine"),
        ("cuda:2", 2, "must be cpu or cuda or cuda:0 or cuda:1 on this machine"),
    ],
)
def test_a_device_that_is_missing_is_refused_though_the_samples_are_not_counted(monkeypatch, device, num_gpus, problem):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    with pytest.raises(UserError, match=rf"'prepare.partition.device' = '{device}': .*{problem}"):
        build.check_partition(config(2, device=device), None)

    for known in ("cpu", *["cuda", "cuda:1"][:num_gpus]):
        build.check_partition(config(2, device=known), None)


def test_as_many_parts_as_samples_have_one_each():
    features, _ = directions([5, 5])
    assert fit(features, config(10, 10)).counts.tolist() == [1] * 10


@pytest.mark.usefixtures("either_way")
def test_more_fine_centroids_than_distinct_samples_are_refused():
    features = np.tile(np.eye(3, dtype=np.float32), (10, 1))
    with pytest.raises(UserError, match=r"num_fine_centroids' = 4: only 3 distinct samples"):
        fit(features, config(2, 4))


@pytest.mark.usefixtures("either_way")
def test_a_partition_over_the_limit_is_refused_with_the_figure():
    # Nine tenths of the samples are one point: no grouping of fine centroids can divide it.
    features, _ = directions([10, 10])
    features = np.concatenate([features, np.tile(np.eye(16, dtype=np.float32)[:1], (180, 1))])
    with pytest.raises(UserError, match=r"max_largest_over_mean' = 1.05: the largest cluster has 18\d samples, 1\.8"):
        fit(features, config(2, 8))


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("metric", ["spherical", "euclidean"])
def test_features_that_are_not_finite_are_not_assigned(value, metric):
    features, _ = directions([30, 30])
    partition = fit(features, config(2, 8, metric=metric))
    features[7, 5] = value
    with pytest.raises(UserError, match="features are not finite"):
        assign(partition, features)


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"not at all",
        save({"weight": torch.ones(2)}),
        save({"counts": torch.ones(2)}, {"ddm_lightning": json.dumps({"kind": "partition", "format_version": 1})}),
    ],
    ids=["missing", "no safetensors", "other safetensors", "format 1"],
)
def test_an_invalid_partition_file_is_refused(tmp_path, content):
    path = tmp_path / "partition.safetensors"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(UserError, match=r"partition\.safetensors: .*run prepare again"):
        Partition.load(path)
