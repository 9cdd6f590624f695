"""The partition of a data set into K clusters, as data: how a sample is assigned, and how many each cluster holds.

``kmeans`` is balanced k-means of the features in two stages, ``random`` the ablation of the DDM paper
(arXiv 2501.05450), ``labels`` packs whole classes, ``existing`` takes another run's partition for new data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int, Int32, Int64, Shaped
from safetensors import SafetensorError, safe_open
from safetensors.torch import save, save_file
from torch import Tensor

from ddm_lightning.config import PartitionConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write
from ddm_lightning.partition.kmeans import capacity
from ddm_lightning.partition.nearest import Tick, nearest, nearest_of_rows, no_tick
from ddm_lightning.partition.rows import Rows
from ddm_lightning.partition.rules import ClusterOfLabel, KeyHash, NearestCentroid, Rule, rule_of
from ddm_lightning.partition.two_stage import fit_fine, group_fine, num_fitted

FORMAT_VERSION = 2
_MOST_COMPARED = 30_000


@dataclass(frozen=True)
class Partition:
    """How samples are assigned, and how many of the data set's samples each cluster holds."""

    rule: Rule
    counts: Int64[Tensor, "k"]

    @property
    def kind(self) -> str:
        """``kmeans``, ``random`` or ``labels``."""
        return self.rule.kind

    @property
    def num_clusters(self) -> int:
        """K."""
        return len(self.counts)

    @property
    def priors(self) -> Float[Tensor, "k"]:
        """Each cluster's share of the samples, float64."""
        return self.counts.double() / self.counts.sum()

    def assign(
        self,
        features: Shaped[np.ndarray, "n d"],
        labels: Int[np.ndarray, "n"],
        keys: Sequence[str],
        device: str = "cpu",
    ) -> Int32[np.ndarray, "n"]:
        """The cluster of each sample. It hangs on the sample alone, not on the block that it comes in.

        Raises:
            UserError: features of another size or not finite, or a class without a cluster.
        """
        return self.rule.assign(features, labels, keys, device).astype(np.int32)

    def save(self, path: Path) -> None:
        """Write a safetensors file, whole or not at all; the same partition gives the same bytes."""
        tensors = {**self.rule.tensors(), "counts": self.counts}
        header = {
            "kind": "partition",
            "format_version": FORMAT_VERSION,
            "rule": self.kind,
            "settings": self.rule.settings(),
        }
        # One metadata key only: safetensors writes several in no fixed order.
        data = save(
            {name: tensor.contiguous() for name, tensor in tensors.items()}, {"ddm_lightning": json.dumps(header)}
        )
        atomic_write(path, lambda temporary: temporary.write_bytes(data))

    @classmethod
    def load(cls, path: Path) -> Partition:
        """Read what ``save`` wrote.

        Raises:
            UserError: the file is missing, is no safetensors file, or no partition of this format.
        """
        remedy = "run prepare again"
        try:
            with safe_open(path, framework="pt") as stored:
                header = json.loads((stored.metadata() or {}).get("ddm_lightning", "{}"))
                if header.get("kind") != "partition" or header.get("format_version") != FORMAT_VERSION:
                    raise UserError(f"{path}: is no partition of format {FORMAT_VERSION}; {remedy}")
                tensors = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
            counts = tensors["counts"]
            return cls(rule_of(header["rule"], tensors, header["settings"], len(counts)), counts)
        except FileNotFoundError:
            raise UserError(f"{path}: the partition is missing; {remedy}") from None
        except KeyError as error:
            raise UserError(f"{path}: the partition lacks {error}; {remedy}") from None
        except (SafetensorError, ValueError, OSError) as error:
            raise UserError(f"{path}: the partition cannot be read ({error}); {remedy}") from None


def check_sizes(config: PartitionConfig, num_samples: int) -> None:
    """Refuse a partition that has more parts than there are samples.

    Raises:
        UserError: too many clusters or fine centroids, or too small a part to fit them on.
    """
    prefix = "prepare.partition"
    if config.num_clusters > num_samples:
        raise UserError(
            f"key '{prefix}.num_clusters' = {config.num_clusters}: the source has only {num_samples} samples; "
            "use fewer clusters or more samples"
        )
    if config.kind != "kmeans":
        return
    if config.num_fine_centroids > num_samples:
        raise UserError(
            f"key '{prefix}.num_fine_centroids' = {config.num_fine_centroids}: "
            f"the source has only {num_samples} samples; use fewer fine centroids"
        )
    if config.num_fine_centroids > num_fitted(config, num_samples):
        raise UserError(
            f"key '{prefix}.fit_fraction' = {config.fit_fraction}: leaves {num_fitted(config, num_samples)} of "
            f"{num_samples} samples for {config.num_fine_centroids} fine centroids; raise it"
        )


def fit_partition(
    rows: Rows,
    config: PartitionConfig,
    seed: int,
    *,
    labels: Int[np.ndarray, "n"],
    keys: Sequence[str],
    features: str = "",
    tick: Tick = no_tick,
    kept_fine: tuple[Path, str] | None = None,
) -> tuple[Partition, Int32[np.ndarray, "n"]]:
    """Split the data set; the same samples, config and seed give the same partition.

    Args:
        rows: features, one row a sample, float16 or float32. ``random`` and ``labels`` do not look at them.
        config: kind, sizes, iterations and the limit of the largest cluster.
        seed: of all that is drawn.
        labels: classes.
        keys: names that stay the same; ``random`` hangs on them.
        features: what made the features; ``existing`` refuses a partition that was made of others.
        tick: hears of progress.
        kept_fine: a file and a key: fine centroids in it are used if they have the key, and kept there otherwise.

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
    """Share of the samples nearer to the mean of another cluster, and the part of it that balance costs.

    Balance costs those whose whole fine cell is nearer to another mean; the others are displaced because a cell is
    assigned as one. Measured on about 30,000 samples; None for rules other than ``kmeans``.
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


def _two_stages(
    rows: Rows, config: PartitionConfig, seed: int, features: str, tick: Tick, kept_in: tuple[Path, str] | None
) -> tuple[NearestCentroid, Int32[np.ndarray, "n"]]:
    """The rule, and the fine centroid that is nearest to each sample."""
    generator = torch.Generator().manual_seed(seed)
    num_read, size = 0, num_fitted(config, len(rows))
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

    found = fit() if kept_in is None else _kept(*kept_in, fit)
    generator.set_state(found["generator"])
    fine, nearest_fine = found["fine"], found["nearest"].numpy()
    per_fine = torch.from_numpy(np.bincount(nearest_fine, minlength=len(fine)))
    return group_fine(fine, per_fine, config, generator, features), nearest_fine


def _kept(path: Path, key: str, make: Callable[[], dict[str, Tensor]]) -> dict[str, Tensor]:
    """The tensors in a file if they were made under this key; otherwise they are made and kept there."""
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
    rows: Rows,
    config: PartitionConfig,
    seed: int,
    labels: Int[np.ndarray, "n"],
    keys: Sequence[str],
    features: str,
) -> Rule:
    if config.kind == "random":
        return KeyHash.equal(keys, config.num_clusters, seed)
    if config.kind == "existing":
        return _existing(config, rows, features)
    limit = capacity(float(len(labels)), config.num_clusters, config.max_largest_over_mean)
    try:
        return ClusterOfLabel.packed(labels, config.num_clusters, limit)
    except ValueError as error:
        raise UserError(
            f"key 'prepare.partition.num_clusters' = {config.num_clusters}: {error}; "
            "use fewer clusters or prepare.partition.kind = kmeans"
        ) from None


def _existing(config: PartitionConfig, rows: Rows, features: str) -> Rule:
    """The rule of another run's partition, if it fits this data set."""
    assert config.path is not None, "check_experiment asks for it"
    key = f"key 'prepare.partition.path' = {config.path!r}"
    found = Partition.load(Path(config.path))
    rule = found.rule
    if found.num_clusters != config.num_clusters:
        raise UserError(f"{key}: has {found.num_clusters} clusters; set prepare.partition.num_clusters to that")
    if isinstance(rule, NearestCentroid):
        size = rule.fine_centroids.shape[1]
        remedy = "set prepare.features to those of the other run"
        if (size,) != rows.row_shape:
            raise UserError(
                f"{key}: was made of features with {size} entries, these have {rows.row_shape[0]}; {remedy}"
            )
        if features and rule.features and features != rule.features:
            raise UserError(f"{key}: was made of features {rule.features!r}, these are {features!r}; {remedy}")
    return rule


def _check_balance(counts: Int64[Tensor, "k"], config: PartitionConfig) -> None:
    """Refuse empty clusters and, unless another run made them, too large ones."""
    total, largest = int(counts.sum()), int(counts.max())
    if int(counts.min()) == 0:
        remedy = {
            "existing": "add samples of the kind that it holds",
            "random": "use fewer clusters, or give the samples different keys",
        }.get(config.kind, "use fewer clusters or raise prepare.partition.num_fine_centroids")
        raise UserError(
            f"key 'prepare.partition.num_clusters' = {config.num_clusters}: a cluster stays empty; {remedy}"
        )
    # Whole samples cannot be split more evenly than the mean rounded up.
    limit = capacity(float(total), config.num_clusters, config.max_largest_over_mean)
    if config.kind != "existing" and largest > limit:
        remedy = {
            "labels": "or use prepare.partition.kind = kmeans, because whole classes divide no better",
            "random": "or give the samples different keys",
        }.get(config.kind, "or prepare.partition.num_fine_centroids for finer pieces")
        raise UserError(
            f"key 'prepare.partition.max_largest_over_mean' = {config.max_largest_over_mean}: the largest cluster has "
            f"{largest} samples, {largest / (total / config.num_clusters):.3f} times the mean; raise this key, {remedy}"
        )
