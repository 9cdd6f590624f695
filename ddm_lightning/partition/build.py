"""Build the partition of a data set.

``kmeans`` is balanced k-means of the features in two stages, as in MoDE (2404.16030), whose code the DDM paper
(2501.05450) used. Both stages see a sample of the data set, in memory. K-means gives fine centroids; balanced k-means
groups these into K clusters, weighting each by its samples, because clusters must balance samples, not centroids.
In small data sets, prices balance the fine cells (``kmeans.py``), which needs all distances in memory. In large ones,
plain k-means splits crowded cells (``lloyd.py``).

``flat`` is balanced k-means of the samples themselves: a price per cluster balances single samples instead of cells.

``random`` is the ablation of the DDM paper, ``labels`` packs whole classes, ``existing`` reuses the partition of
another run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, Int32, Int64, Shaped
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from ddm_lightning.config.experiment import PartitionConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write
from ddm_lightning.core.formatting import format_bytes
from ddm_lightning.core.weights import free_bytes
from ddm_lightning.partition.columns import Rows
from ddm_lightning.partition.kmeans import balanced_kmeans, balanced_prices, capacity, squared_distances, weighted_means
from ddm_lightning.partition.lloyd import LARGEST_OVER_MEAN, lloyd_kmeans
from ddm_lightning.partition.nearest import OnProgress, nearest, nearest_of_rows, one_thread, prepared
from ddm_lightning.partition.partition import (
    CentroidRule,
    ClusterOfLabel,
    KeyHash,
    NearestCentroid,
    Partition,
    PricedCentroid,
    Rule,
    Samples,
    largest_first,
)

_CLUSTER_RESTARTS = 10
# Largest problem that prices balance, in distances and in entries of the features: seconds on a CPU.
_PRICED_DISTANCES = 1 << 22
_PRICED_ENTRIES = 1 << 26
# Samples that ``displaced_fractions`` compares, about.
_MOST_COMPARED = 30_000


def check_partition(config: PartitionConfig, num_samples: int | None) -> None:
    """Refuse a device that this machine lacks, and more centroids than samples, if their number is known.

    Raises:
        UserError: no such device, or too many clusters or fine centroids for the samples that are fitted.
    """
    devices = ["cpu"]
    num_gpus = torch.cuda.device_count()
    if num_gpus:
        devices += ["cuda", *(f"cuda:{number}" for number in range(num_gpus))]

    if config.device not in devices:
        raise _refusal(config, "device", f"must be {' or '.join(devices)} on this machine")
    if num_samples is None:
        return

    key = "num_clusters"
    if config.kind == "kmeans":
        key = "num_fine_centroids"  # at least as many as clusters

    num_fitted = max(1, round(config.fit_fraction * num_samples))
    if getattr(config, key) > num_fitted:
        problem = f"fitted are only {num_fitted} of {num_samples} samples; use fewer, or raise fit_fraction"
        raise _refusal(config, key, problem)


def fit_partition(
    samples: Samples,
    config: PartitionConfig,
    seed: int,
    *,
    features: str = "",
    on_progress: OnProgress = lambda *_: None,
    fine_cache: tuple[Path, str] | None = None,
) -> tuple[Partition, Int32[np.ndarray, "n"]]:
    """Fit the partition to a sample of the data set; the same samples, config and seed give the same partition.

    Args:
        samples: the fitted sample; ``kmeans`` and ``flat`` read its features into memory, ``random`` uses its keys.
        config: kind, sizes, iterations and the limit of the largest cluster.
        seed: seed of everything random.
        features: name of the feature network; ``existing`` refuses a partition made with another.
        on_progress: called with progress.
        fine_cache: a file that keeps the first stage of ``kmeans``, and the key under which it may be reused.

    Returns:
        The partition, and the cluster of each sample.

    Raises:
        UserError: more clusters than (distinct) samples or classes, features that are not finite, a largest cluster
            over the configured limit, or an existing partition that does not fit.
    """
    check_partition(config, round(len(samples.labels) / config.fit_fraction))
    if config.kind == "kmeans":
        rule, clusters = _fit_two_stages(samples.features, config, seed, features, on_progress, fine_cache)
    else:
        rule = _fit_rule(samples, config, seed, features)
        clusters = rule.assign(samples, config.device, on_progress)

    counts = torch.from_numpy(np.bincount(clusters, minlength=config.num_clusters))
    check_balance(counts, config)
    return Partition(rule, counts), clusters.astype(np.int32)


def _in_memory(rows: Rows, config: PartitionConfig) -> Shaped[np.ndarray, "n d"]:
    """Read all features; refuse them if the fit needs more memory than there is."""
    row_bytes = rows.row_shape[0] * rows.dtype.itemsize
    if config.kind == "flat":  # four copies in float32, and twice the distances from all centroids
        row_bytes = 16 * rows.row_shape[0] + 8 * config.num_clusters

    needed = len(rows) * row_bytes
    free = free_bytes()
    if needed > 0.7 * free:
        problem = f"takes {format_bytes(needed)} of memory, and {format_bytes(free)} are free; lower it"
        raise _refusal(config, "fit_fraction", problem)

    return rows[:]


def displaced_fractions(
    partition: Partition, rows: Rows, clusters: Int[np.ndarray, "n"], device: str = "cpu"
) -> tuple[float, float] | None:
    """Measure the share of displaced samples, and the share of samples that balancing displaces.

    A sample is displaced if the mean of another cluster is nearer. In ``kmeans``, balancing displaces it if that is
    also so for its fine cell; else it follows its cell, which is assigned as a whole. In ``flat``, balancing displaces
    them all. Measured on about 30,000 samples; None for other rules.
    """
    rule = partition.rule
    if not isinstance(rule, CentroidRule):
        return None

    some = np.arange(0, len(rows), max(1, len(rows) // _MOST_COMPARED))
    x = rows.take(some)
    displaced = nearest(x, rule.centroids, rule.metric, device).numpy() != clusters[some]
    by_balance = displaced
    if isinstance(rule, NearestCentroid):
        moved = nearest(rule.fine_centroids.numpy(), rule.centroids, rule.metric, device) != rule.cluster_of_fine
        cells = nearest(x, rule.fine_centroids, rule.metric, device)
        by_balance = displaced & moved[cells].numpy()

    return float(displaced.mean()), float(by_balance.mean())


def fit_fine(
    rows: Rows, config: PartitionConfig, generator: torch.Generator, on_progress: OnProgress
) -> Float[Tensor, "f d"]:
    """Fit the fine centroids (first stage), on the CPU; ``on_progress`` is called after each pass over large data.

    Raises:
        UserError: more fine centroids than distinct samples.
    """
    num_fine = config.num_fine_centroids
    num_entries = len(rows) * rows.row_shape[0]
    is_large = len(rows) * num_fine > _PRICED_DISTANCES or num_entries > _PRICED_ENTRIES
    with _refusing(config, "num_fine_centroids", "use fewer, or remove duplicates from the source"):
        if is_large:
            return lloyd_kmeans(rows, config, generator, on_progress)

        torch.randperm(len(rows), generator=generator)  # unused; keeps the clusters of earlier versions
        with one_thread():
            x = prepared(rows[:], config.metric)
            return balanced_kmeans(x, num_fine, generator, config.num_iterations, LARGEST_OVER_MEAN)[0]


def group_fine(
    fine: Float[Tensor, "f d"],
    per_fine: Int64[Tensor, "f"],
    config: PartitionConfig,
    generator: torch.Generator,
    features: str,
) -> NearestCentroid:
    """Group the fine centroids into K clusters (second stage), balancing their numbers of samples.

    Args:
        fine: fine centroids.
        per_fine: samples of each.
        config: K, iterations and the limit of the largest cluster.
        generator: random numbers of the start.
        features: name of the feature network, for the file.

    Raises:
        UserError: fewer distinct centroids than clusters.
    """
    x = fine.double()
    weights = per_fine.double()
    with one_thread(), _refusing(config, "num_clusters", "use fewer, or remove duplicates from the source"):
        _, cluster_of_fine = balanced_kmeans(
            x,
            config.num_clusters,
            generator,
            config.num_iterations,
            config.max_largest_over_mean,
            weights,
            _CLUSTER_RESTARTS,
        )

    cluster_of_fine = largest_first(cluster_of_fine, per_fine, config.num_clusters)
    centroids = weighted_means(x, weights, cluster_of_fine, x.new_zeros(config.num_clusters, x.shape[1]))
    return NearestCentroid(
        fine_centroids=fine,
        cluster_of_fine=cluster_of_fine,
        centroids=centroids.float(),
        metric=config.metric,
        features=features,
    )


def fit_flat(rows: Rows, config: PartitionConfig, generator: torch.Generator, features: str) -> PricedCentroid:
    """Fit K centroids and their prices to samples, all at once.

    Args:
        rows: features, read into memory.
        config: K, metric, iterations and the limit of the largest cluster.
        generator: random numbers of the start.
        features: name of the feature network, for the file.

    Raises:
        UserError: fewer distinct samples than clusters.
    """
    largest_over_mean = config.max_largest_over_mean
    if config.fit_fraction < 1:
        # Samples that are not fitted divide a little differently. The margin is three standard deviations of a share.
        largest_over_mean = max(1.0, largest_over_mean - 3 * (config.num_clusters / len(rows)) ** 0.5)

    with one_thread(), _refusing(config, "num_clusters", "use fewer, or remove duplicates from the source"):
        x = prepared(_in_memory(rows, config), config.metric)
        mean = x.mean(0)
        x -= mean
        centroids, clusters = balanced_kmeans(
            x,
            config.num_clusters,
            generator,
            config.num_iterations,
            largest_over_mean,
            num_restarts=_CLUSTER_RESTARTS,
        )

    limit = capacity(len(rows), config.num_clusters, largest_over_mean)
    prices = balanced_prices(squared_distances(x, centroids), limit)
    order = clusters.bincount(minlength=config.num_clusters).argsort(descending=True, stable=True)
    return PricedCentroid(
        centroids=(centroids + mean)[order], prices=prices[order], metric=config.metric, features=features
    )


def _refusal(config: PartitionConfig, key: str, problem: object) -> UserError:
    return UserError(f"key 'prepare.partition.{key}' = {getattr(config, key)!r}: {problem}")


@contextmanager
def _refusing(config: PartitionConfig, key: str, remedy: str) -> Iterator[None]:
    """Turn a ``ValueError`` into an error that names the key and the remedy."""
    try:
        yield
    except ValueError as error:
        raise _refusal(config, key, f"{error}; {remedy}") from None


def _fit_two_stages(
    rows: Rows,
    config: PartitionConfig,
    seed: int,
    features: str,
    on_progress: OnProgress,
    fine_cache: tuple[Path, str] | None,
) -> tuple[Rule, Int64[np.ndarray, "n"]]:
    """Fit the rule of ``kmeans``, and return the clusters of the rows with it.

    The cache also holds the generator's state: the second stage continues its numbers, even if the first is reused.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = Rows([_in_memory(rows, config)])

    def fit() -> dict[str, Tensor]:
        fine = fit_fine(rows, config, generator, on_progress).contiguous()
        nearest_fine = nearest_of_rows(rows, fine, config.metric, config.device)
        return {"fine": fine, "nearest": torch.from_numpy(nearest_fine), "generator": generator.get_state()}

    if fine_cache is None:
        found = fit()
    else:
        found = _cached(*fine_cache, fit)

    generator.set_state(found["generator"])
    fine = found["fine"]
    nearest_fine = found["nearest"].long()
    rule = group_fine(fine, nearest_fine.bincount(minlength=len(fine)), config, generator, features)
    return rule, rule.cluster_of_fine[nearest_fine].numpy()


def _cached(path: Path, key: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """Return the tensors of a file with this key; if there is none, make them and write the file."""
    with suppress(FileNotFoundError), safe_open(path, framework="pt") as stored:
        if stored.metadata() == {"key": key}:
            return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118

    tensors = make()
    atomic_write(path, lambda temporary: save_file(tensors, temporary, {"key": key}))
    return tensors


def _fit_rule(samples: Samples, config: PartitionConfig, seed: int, features: str) -> Rule:
    """Fit the rule of any kind but ``kmeans``."""
    if config.kind == "random":
        return KeyHash.equal(samples.keys, config.num_clusters, seed)
    if config.kind == "flat":
        return fit_flat(samples.features, config, torch.Generator().manual_seed(seed), features)
    if config.kind == "existing":
        return _existing(config, samples.features, features)

    limit = capacity(float(len(samples.labels)), config.num_clusters, config.max_largest_over_mean)
    with _refusing(config, "num_clusters", "use fewer clusters or prepare.partition.kind = kmeans"):
        return ClusterOfLabel.packed(samples.labels, config.num_clusters, limit)


def _existing(config: PartitionConfig, rows: Rows, features: str) -> Rule:
    """Read the rule of another run's partition."""
    found = Partition.load(Path(str(config.path)).expanduser())
    if found.num_clusters != config.num_clusters:
        raise _refusal(config, "path", f"has {found.num_clusters} clusters; set prepare.partition.num_clusters to that")

    if isinstance(found.rule, CentroidRule):
        theirs = found.rule.features
        size = found.rule.centroids.shape[1]
        if (size,) != rows.row_shape or (features and theirs and features != theirs):
            problem = (
                f"was made from features {theirs!r} with {size} entries, these are {features!r} with "
                f"{rows.row_shape[0]}; set prepare.features to those of the other run"
            )
            raise _refusal(config, "path", problem)

    return found.rule


def check_balance(counts: Int64[Tensor, "k"], config: PartitionConfig, num_fitted: float = math.inf) -> None:
    """Refuse empty clusters and, unless the partition is another run's, too large ones.

    Args:
        counts: samples in each cluster.
        config: kind, and the limit of the largest cluster.
        num_fitted: size of the fitted sample, if ``counts`` are of all samples; four standard errors of a share are
            then allowed above the limit.

    Raises:
        UserError: a cluster is empty or too large.
    """
    total = float(counts.sum())
    largest = int(counts.max())
    remedy = {
        "kmeans": "raise prepare.partition.num_fine_centroids",
        "flat": "raise prepare.partition.fit_fraction",
        "random": "give the samples different keys",
        "labels": "use prepare.partition.kind = kmeans",
        "existing": "add samples of that kind",
    }[config.kind]
    if int(counts.min()) == 0:
        raise _refusal(config, "num_clusters", f"a cluster stays empty; use fewer clusters, or {remedy}")

    # ``capacity`` allows the mean rounded up: whole samples cannot be split more evenly.
    limit = capacity(total, config.num_clusters, config.max_largest_over_mean)
    limit *= 1 + 4 * math.sqrt(config.num_clusters / num_fitted)
    if config.kind != "existing" and largest > limit:
        raise _refusal(
            config,
            "max_largest_over_mean",
            f"the largest cluster has {largest} samples, {largest * config.num_clusters / total:.3f} times the mean; "
            f"raise this key, or {remedy}",
        )
