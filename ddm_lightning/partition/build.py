"""Build the partition of a data set.

``kmeans`` is balanced k-means of the features in two stages, as in MoDE (2404.16030), whose code the DDM paper
(2501.05450) used: k-means of a part of the samples to fine centroids, then balanced k-means of the fine centroids to K
clusters. The second stage weighs a fine centroid by its samples, because clusters must balance samples, not centroids.
Small data sets get balanced fine cells by prices (``kmeans``), which needs all distances in memory; large ones get
them by plain k-means that splits crowded cells (``lloyd``).

``random`` is the ablation of the DDM paper, ``labels`` packs whole classes, ``existing`` reuses the partition of
another run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int, Int32, Int64
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ddm_lightning.config import PartitionConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write
from ddm_lightning.partition.kmeans import balanced_kmeans, capacity
from ddm_lightning.partition.lloyd import lloyd_kmeans
from ddm_lightning.partition.nearest import Tick, nearest, nearest_of_rows, one_thread, take_finite
from ddm_lightning.partition.partition import ClusterOfLabel, KeyHash, NearestCentroid, Partition, Rule, largest_first
from ddm_lightning.partition.rows import Rows

# Splits piles of near-duplicates, which would otherwise fill one cell that no grouping can balance.
_FINE_LARGEST_OVER_MEAN = 2.0
_CLUSTER_RESTARTS = 10
# Largest problem solved by prices, in distances and in numbers of features: seconds on a CPU.
_PRICED_DISTANCES, _PRICED_NUMBERS = 1 << 22, 1 << 26
_MOST_COMPARED = 30_000


def check_sizes(config: PartitionConfig, num_samples: int) -> None:
    """Refuse a partition with more parts than samples.

    Raises:
        UserError: too many clusters or fine centroids, or too small a part to fit them on.
    """
    have, num_fine = f"the source has only {num_samples} samples", config.num_fine_centroids
    if config.num_clusters > num_samples:
        raise _refusal(config, "num_clusters", f"{have}; use fewer clusters or more samples")
    if config.kind == "kmeans" and num_fine > num_samples:
        raise _refusal(config, "num_fine_centroids", f"{have}; use fewer fine centroids")
    fitted = _num_fitted(config, num_samples)
    if config.kind == "kmeans" and num_fine > fitted:
        leaves = f"leaves {fitted} of {num_samples} samples for {num_fine} fine centroids"
        raise _refusal(config, "fit_fraction", f"{leaves}; raise it")


def fit_partition(
    rows: Rows,
    config: PartitionConfig,
    seed: int,
    *,
    labels: Int[np.ndarray, "n"],
    keys: Sequence[str],
    features: str = "",
    tick: Tick = lambda *_: None,
    kept_fine: tuple[Path, str] | None = None,
) -> tuple[Partition, Int32[np.ndarray, "n"]]:
    """Split the data set; the same samples, config and seed give the same partition.

    Args:
        rows: features, one row per sample, float16 or float32; ignored by ``random`` and ``labels``.
        config: kind, sizes, iterations and the limit of the largest cluster.
        seed: seed of everything random.
        labels: class of each sample.
        keys: permanent name of each sample; ``random`` depends on them.
        features: name of the feature network; ``existing`` refuses a partition made with another.
        tick: called with progress.
        kept_fine: cache of the first stage: a file, and a key that it must carry to be reused.

    Returns:
        The partition, and the cluster of each sample.

    Raises:
        UserError: more parts than (distinct) samples or classes, features that are not finite, a largest cluster
            over the configured limit, or an existing partition that does not fit.
    """
    check_sizes(config, len(rows))
    rule: Rule
    if config.kind == "kmeans":
        rule, nearest_fine = _two_stages(rows, config, seed, features, tick, kept_fine)
        clusters = rule.cluster_of_fine[nearest_fine].numpy()
    else:
        rule = _rule(rows, config, seed, labels, keys, features)
        if isinstance(rule, NearestCentroid):
            nearest_fine = nearest_of_rows(rows, rule.fine_centroids, rule.metric, config.device, tick)
            clusters = rule.cluster_of_fine[nearest_fine].numpy()
        else:
            clusters = rule.assign(np.empty((len(rows), 0)), labels, keys, config.device)
    counts = torch.from_numpy(np.bincount(clusters, minlength=config.num_clusters))
    _check_balance(counts, config)
    return Partition(rule, counts), clusters.astype(np.int32)


def displaced_fractions(
    partition: Partition, rows: Rows, clusters: Int[np.ndarray, "n"], device: str = "cpu"
) -> tuple[float, float] | None:
    """Share of samples nearer to the mean of another cluster, and the part of it caused by balancing.

    Balancing displaces a sample if its whole fine cell is nearer to another mean. The other displaced samples follow
    their cell, which is assigned as one. Measured on about 30,000 samples; None unless the rule is ``kmeans``.
    """
    rule = partition.rule
    if not isinstance(rule, NearestCentroid):
        return None
    some = np.arange(0, len(rows), max(1, len(rows) // _MOST_COMPARED))
    x = rows.take(some)
    displaced = nearest(x, rule.centroids, rule.metric, device).numpy() != clusters[some]
    moved = nearest(rule.fine_centroids.numpy(), rule.centroids, rule.metric, device) != rule.cluster_of_fine
    by_balance = displaced & moved[nearest(x, rule.fine_centroids, rule.metric, device)].numpy()
    return float(displaced.mean()), float(by_balance.mean())


def fit_fine(
    rows: Rows, config: PartitionConfig, generator: torch.Generator, tick: Callable[[], None] = lambda: None
) -> Float[Tensor, "f d"]:
    """The fine centroids (first stage), on the CPU; ``tick`` is called after each pass over large data.

    Raises:
        UserError: more fine centroids than distinct samples, or features that are not finite.
    """
    num_fine, size = config.num_fine_centroids, _num_fitted(config, len(rows))
    try:
        if size * num_fine <= _PRICED_DISTANCES and size * rows.row_shape[0] <= _PRICED_NUMBERS:
            x = take_finite(rows, _random_rows(len(rows), size, generator), config.metric)
            with one_thread():
                centroids, _ = balanced_kmeans(
                    x,
                    num_fine,
                    generator=generator,
                    num_iterations=config.num_iterations,
                    max_largest_over_mean=_FINE_LARGEST_OVER_MEAN,
                )
            return centroids
        return lloyd_kmeans(
            rows,
            num_fine,
            metric=config.metric,
            generator=generator,
            num_iterations=config.num_iterations,
            chosen=None if size == len(rows) else _random_rows(len(rows), size, generator),
            device=config.device,
            max_largest_over_mean=_FINE_LARGEST_OVER_MEAN,
            tick=tick,
        )
    except ValueError as error:
        remedy = "use fewer, or remove duplicates from the source"
        raise _refusal(config, "num_fine_centroids", f"{error}; {remedy}") from None


def group_fine(
    fine: Float[Tensor, "f d"],
    per_fine: Int64[Tensor, "f"],
    config: PartitionConfig,
    generator: torch.Generator,
    features: str = "",
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
    weights = per_fine.double()
    try:
        with one_thread():
            _, cluster_of_fine = balanced_kmeans(
                fine.double(),
                config.num_clusters,
                generator=generator,
                weights=weights,
                num_iterations=config.num_iterations,
                max_largest_over_mean=config.max_largest_over_mean,
                num_restarts=_CLUSTER_RESTARTS,
            )
    except ValueError as error:
        remedy = "use fewer, or remove duplicates from the source"
        raise _refusal(config, "num_clusters", f"{error}; {remedy}") from None
    cluster_of_fine = largest_first(cluster_of_fine, per_fine, config.num_clusters)
    sums = torch.zeros(config.num_clusters, fine.shape[1], dtype=torch.float64)
    sums.index_add_(0, cluster_of_fine, fine.double() * weights.unsqueeze(1))
    total = weights.new_zeros(config.num_clusters).index_add_(0, cluster_of_fine, weights)
    means = (sums / total.clamp(min=1).unsqueeze(1)).float()
    return NearestCentroid(fine, cluster_of_fine, means, config.metric, features)


class PartitionCost(NamedTuple):
    """Cost of two-stage k-means and of the assignment of all samples."""

    seconds: float
    flops: float
    """Floating-point operations; a multiply-add is two."""
    bytes: int
    """Bytes read from the disk, in all passes."""


def partition_cost(
    num_samples: int,
    dim: int,
    num_fine: int,
    iterations: int,
    gflops: float,
    disk_gb_per_s: float,
    *,
    fit_fraction: float = 1.0,
    bytes_per_number: int = 4,
) -> PartitionCost:
    """Model the cost of ``iterations`` passes over the fitted samples, and one over all to assign them.

    A pass is one product of samples and fine centroids, 2 n d F floating-point operations, after reading its features.
    The second stage and the start depend on F alone and are not counted.

    Args:
        num_samples: n.
        dim: feature entries of a sample, d.
        num_fine: fine centroids, F.
        iterations: passes of the fine stage.
        gflops: 10^9 operations per second of a whole pass; ``benchmarks/partition.py`` measures it as ``gflops``.
        disk_gb_per_s: 10^9 bytes per second at which features are read.
        fit_fraction: part of the samples that is fitted.
        bytes_per_number: 4 for float32, as features are stored.
    """
    sample_passes = num_samples * (iterations * fit_fraction + 1)
    num_bytes = round(sample_passes * dim * bytes_per_number)
    flops = 2 * sample_passes * dim * num_fine
    return PartitionCost(flops / (gflops * 1e9) + num_bytes / (disk_gb_per_s * 1e9), flops, num_bytes)


def _refusal(config: PartitionConfig, key: str, problem: str) -> UserError:
    return UserError(f"key 'prepare.partition.{key}' = {getattr(config, key)!r}: {problem}")


def _num_fitted(config: PartitionConfig, num_samples: int) -> int:
    """Samples on which the fine centroids are fitted."""
    return max(1, round(config.fit_fraction * num_samples))


def _random_rows(num_samples: int, size: int, generator: torch.Generator) -> Int64[np.ndarray, "m"]:
    """Ascending numbers of ``size`` random rows."""
    return torch.randperm(num_samples, generator=generator)[:size].sort().values.numpy()


def _two_stages(
    rows: Rows, config: PartitionConfig, seed: int, features: str, tick: Tick, kept_fine: tuple[Path, str] | None
) -> tuple[NearestCentroid, Int32[np.ndarray, "n"]]:
    """The rule, and the nearest fine centroid of each sample."""
    generator = torch.Generator().manual_seed(seed)
    num_read, size = 0, _num_fitted(config, len(rows))
    total = config.num_iterations * size + len(rows)

    def advance() -> None:
        nonlocal num_read
        num_read += size
        tick(num_read, total)

    def fit() -> dict[str, Tensor]:
        fine = fit_fine(rows, config, generator, advance).contiguous()
        nearest_fine = nearest_of_rows(
            rows, fine, config.metric, config.device, lambda done, num: tick(total - num + done, total)
        )
        return {"fine": fine, "nearest": torch.from_numpy(nearest_fine), "generator": generator.get_state()}

    found = fit() if kept_fine is None else _cached(*kept_fine, fit)
    generator.set_state(found["generator"])
    fine, nearest_fine = found["fine"], found["nearest"].numpy()
    per_fine = torch.from_numpy(np.bincount(nearest_fine, minlength=len(fine)))
    return group_fine(fine, per_fine, config, generator, features), nearest_fine


def _cached(path: Path, key: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors of a file if it carries this key; otherwise make them and write the file."""
    try:
        with safe_open(path, framework="pt") as stored:
            if (stored.metadata() or {}).get("key") == key:
                return {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (FileNotFoundError, SafetensorError):
        pass
    tensors = make()
    atomic_write(path, lambda temporary: save_file(tensors, temporary, {"key": key}))
    return tensors


def _rule(
    rows: Rows, config: PartitionConfig, seed: int, labels: Int[np.ndarray, "n"], keys: Sequence[str], features: str
) -> Rule:
    if config.kind == "random":
        return KeyHash.equal(keys, config.num_clusters, seed)
    if config.kind == "existing":
        return _existing(config, rows, features)
    limit = capacity(float(len(labels)), config.num_clusters, config.max_largest_over_mean)
    try:
        return ClusterOfLabel.packed(labels, config.num_clusters, limit)
    except ValueError as error:
        remedy = "use fewer clusters or prepare.partition.kind = kmeans"
        raise _refusal(config, "num_clusters", f"{error}; {remedy}") from None


def _existing(config: PartitionConfig, rows: Rows, features: str) -> Rule:
    """The rule of another run's partition, if it fits this data set."""
    assert config.path is not None, "check_experiment requires it"
    found = Partition.load(Path(config.path))
    rule = found.rule
    if found.num_clusters != config.num_clusters:
        clusters = f"has {found.num_clusters} clusters"
        raise _refusal(config, "path", f"{clusters}; set prepare.partition.num_clusters to that")
    if isinstance(rule, NearestCentroid):
        size, remedy = rule.fine_centroids.shape[1], "set prepare.features to those of the other run"
        if (size,) != rows.row_shape:
            sizes = f"was made of features with {size} entries, these have {rows.row_shape[0]}"
            raise _refusal(config, "path", f"{sizes}; {remedy}")
        if features and rule.features and features != rule.features:
            names = f"was made of features {rule.features!r}, these are {features!r}"
            raise _refusal(config, "path", f"{names}; {remedy}")
    return rule


def _check_balance(counts: Int64[Tensor, "k"], config: PartitionConfig) -> None:
    """Refuse empty clusters and, unless the partition is another run's, too large ones."""
    total, largest = int(counts.sum()), int(counts.max())
    if int(counts.min()) == 0:
        remedy = {
            "existing": "add samples of the kind that it holds",
            "random": "use fewer clusters, or give the samples different keys",
        }.get(config.kind, "use fewer clusters or raise prepare.partition.num_fine_centroids")
        raise _refusal(config, "num_clusters", f"a cluster stays empty; {remedy}")
    # ``capacity`` allows the mean rounded up: whole samples cannot be split more evenly.
    if config.kind != "existing" and largest > capacity(
        float(total), config.num_clusters, config.max_largest_over_mean
    ):
        remedy = {
            "labels": "or use prepare.partition.kind = kmeans, because whole classes divide no better",
            "random": "or give the samples different keys",
        }.get(config.kind, "or raise prepare.partition.num_fine_centroids for finer pieces")
        ratio = largest / (total / config.num_clusters)
        size = f"the largest cluster has {largest} samples, {ratio:.3f} times the mean"
        raise _refusal(config, "max_largest_over_mean", f"{size}; raise this key, {remedy}")
