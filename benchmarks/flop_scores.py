"""Scores of the compared methods: distances to held-out images, shares of clusters, ratios with intervals."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flop_sampling import METHODS, Images, features_of
from flop_training import Variant
from jaxtyping import Float, UInt8
from split import encoder_of, read_split
from torch import Tensor

from ddm_lightning.config.experiment import PluginConfig
from ddm_lightning.evaluation.metrics.features import KernelDistance, kernel_distance, precision_recall
from ddm_lightning.evaluation.shares import ClusterShares, total_variation
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.members.run import Run
from ddm_lightning.shards.manifest import HELD_OUT, TRAIN

OTHER = PluginConfig("squeezenet", {"resolution": 112})
"""Feature network that takes no part in the clustering."""
PLAIN = PluginConfig("random-convolutions")
"""Features for the clusters' shares, precision and recall."""
BEST, BASELINE = "bayes", "monolith_ancestral"
"""The methods of the headline, chosen before the results."""
HEADLINE = (BEST, BASELINE, "top1", "monolith")
"""Methods without which there are no figures."""
# Training images on which the classifier of clusters is fitted.
NUM_CLASSIFIED = 8000
NUM_RESAMPLES = 2000
_OWN = ("variant", "seed", "share", "branch_at", "train_tflop", "method", "shares_tv")
CONFIDENCE = 95.0


@dataclass(frozen=True, eq=False)
class Point:
    """Scores of one method, trained under one variant, seed and budget."""

    variant: str
    seed: int
    share: float
    """Share of the full budget."""
    train_tflop: float
    """Training TFLOPs: those of the ensemble for all methods, router and partition included."""
    method: str
    kid: dict[str, KernelDistance]
    """KID to the held-out images, by feature network."""
    shares_tv: float
    """Total variation between the clusters' shares among the images and the priors."""
    scores: dict[str, float] = field(default_factory=dict)
    """Further scores, such as ``precision`` and ``gflop_per_image``."""
    branch_at: float = 0.0
    """See ``Variant``."""

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        kid = {
            name: {
                "value": found.value,
                "spread": found.spread,
                "halves": " ".join(f"{half:.4g}" for half in found.halves.tolist()),
            }
            for name, found in self.kid.items()
        }
        return {**{key: getattr(self, key) for key in _OWN}, "kid": kid, **self.scores}

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Point:
        """Read what ``to_dict`` returned."""
        kid = {
            name: KernelDistance(found["value"], torch.tensor([float(half) for half in found["halves"].split()]))
            for name, found in stored["kid"].items()
        }
        scores = {key: value for key, value in stored.items() if key not in (*_OWN, "kid")}
        return cls(**{key: stored[key] for key in _OWN if key in stored}, kid=kid, scores=scores)


@dataclass(frozen=True, order=True)
class Interval:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float

    def figures(self, name: str) -> dict[str, float]:
        """The three numbers as figures ``name``, ``name_low`` and ``name_high``."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}


def ratio(ours: Sequence[KernelDistance], theirs: Sequence[KernelDistance], *, seed: int = 0) -> Interval:
    """Ratio of the mean KIDs of two methods over seeds, with a hierarchical bootstrap interval.

    Seeds are resampled with replacement, and the images of each by its random halves. All sets share their real
    images and the seed of the halves, so that the variance of the real images largely cancels.

    Args:
        ours: one per training seed.
        theirs: the same seeds in the same order.
        seed: of the bootstrap.
    """
    random = np.random.default_rng(seed)
    halves = [np.stack([one.halves.numpy() for one in side]) for side in (ours, theirs)]
    num_seeds, num_halves = halves[0].shape
    seeds = random.integers(num_seeds, size=(NUM_RESAMPLES, num_seeds))
    drawn = random.integers(num_halves, size=(NUM_RESAMPLES, num_seeds))
    means = [side[seeds, drawn].mean(1) for side in halves]
    tail = (100 - CONFIDENCE) / 2
    low, high = np.percentile(means[0] / means[1], [tail, 100 - tail])
    value = np.mean([one.value for one in ours]) / np.mean([one.value for one in theirs])
    return Interval(float(value), float(low), float(high))


def equal_score_share(flops: Sequence[float], scores: Sequence[float], wanted: float) -> float:
    """Share of the largest budget at which a falling curve of scores reaches ``wanted``.

    Interpolates linearly in log FLOPs and score. A curve that starts below ``wanted`` gives its first budget, an
    upper bound; one that ends above it gives infinity.
    """
    pairs = sorted(zip(flops, scores, strict=True))
    largest = pairs[-1][0]
    if pairs[0][1] <= wanted:
        return pairs[0][0] / largest
    for (low, before), (high, after) in itertools.pairwise(pairs):
        if after <= wanted:
            part = (before - wanted) / (before - after)
            return float(np.exp(np.log(low) + part * (np.log(high) - np.log(low)))) / largest
    return float("inf")


def of_method(points: Iterable[Point], method: str, share: float, variant: str = "main") -> list[Point]:
    """Points of one method at one budget, by seed."""
    found = [p for p in points if (p.variant, p.method, p.share) == (variant, method, share)]
    return sorted(found, key=lambda point: point.seed)


def over(ours: Sequence[Point], theirs: Sequence[Point], network: str) -> Interval | None:
    """Ratio of KIDs over the seeds of ``ours``; None if there are none, or if a seed of theirs or a KID is missing."""
    theirs = [one for one in theirs if one.seed in {point.seed for point in ours}]
    if not ours or len(ours) != len(theirs) or any(network not in point.kid for point in (*ours, *theirs)):
        return None
    return ratio([point.kid[network] for point in ours], [point.kid[network] for point in theirs])


class Judge:
    """Score images against the held-out ones of a run.

    Args:
        run: prepared, with held-out samples.
        networks: feature networks; ``PLAIN`` is one of them.
        stored: folder in which features are kept.
    """

    def __init__(self, run: Run, networks: Sequence[PluginConfig], stored: Path) -> None:
        self.networks, self.stored = networks, stored
        encoder = encoder_of(run)
        self.held_out, train = (read_split(run, side) for side in (HELD_OUT, TRAIN))
        self.held_out_images = encoder.decode(self.held_out.x_0)
        self.real = self.features(self.held_out_images)
        rows = torch.randperm(len(train), generator=keyed_generator(0, "classifier"))[:NUM_CLASSIFIED]
        self.some_train = self.features(encoder.decode(train.x_0[rows]))
        half = len(rows) // 2
        inputs, clusters = self.some_train[PLAIN.name], train.clusters[rows]
        self.classifier = ClusterShares(
            inputs[:half], clusters[:half], inputs[half:], clusters[half:], run.manifest.num_clusters
        )
        self.priors = torch.tensor(run.manifest.priors)

    def features(self, images: UInt8[np.ndarray, "n h w 3"]) -> dict[str, Float[Tensor, "n d"]]:
        """Features of images, by network."""
        return {network.name: features_of(images, network, self.stored) for network in self.networks}

    def point(
        self,
        variant: Variant,
        seed: int,
        share: float,
        train_flops: float,
        method: str,
        found: Images,
        losses: Mapping[str, float],
    ) -> Point:
        """Score the images of one method, beside the held-out ``losses`` of its weights."""
        features = self.features(found.images)
        shares = precision_recall(features[PLAIN.name], self.real[PLAIN.name])
        scores = {**{name: score.value for name, score in shares.items()}, **losses}
        for cost in ("experts_per_step", "gflop_per_image", "seconds_per_image"):
            scores[cost] = getattr(found, cost)
        distances = {name: kernel_distance(found, self.real[name]) for name, found in features.items()}
        variation = self.variation(features[PLAIN.name])
        tflop, at = train_flops / 1e12, variant.branch_at
        return Point(variant.name, seed, share, tflop, method, distances, variation, scores, branch_at=at)

    def variation(self, features: Float[Tensor, "n d"]) -> float:
        """Total variation between the clusters' shares among images and the priors."""
        return total_variation(self.classifier.shares(features), self.priors)

    def floors(self) -> dict[str, float]:
        """Scores of real images: what a perfect model would reach."""
        found = {
            f"kid_floor_{name}": kernel_distance(self.some_train[name], real).value for name, real in self.real.items()
        }
        return found | {"shares_tv_floor": self.variation(self.real[PLAIN.name])}


def figures_of(points: Sequence[Point], network: str) -> dict[str, float]:
    """Named figures of the main comparison; ratios are of mean KIDs over seeds."""
    main = [point for point in points if point.variant == "main"]
    largest = max(point.share for point in main)
    figures: dict[str, float] = {
        "num_seeds": len({point.seed for point in main if point.share == largest}),
        "num_budgets": len({point.share for point in main}),
    }
    for method in dict.fromkeys(point.method for point in main):
        ours = of_method(main, method, largest)
        figures[f"kid_{method}"] = sum(p.kid[network].value for p in ours) / len(ours)
        figures[f"shares_tv_{method}"] = sum(p.shares_tv for p in ours) / len(ours)
        if method.startswith("monolith"):
            continue
        theirs = of_method(main, baseline_of(method), largest)
        for prefix, name in (("", network), ("other_features_", OTHER.name)):
            if found := over(ours, theirs, name):
                figures |= found.figures(f"{prefix}{method}_over_monolith")
    branched = []
    for variant, share, method in dict.fromkeys((point.variant, point.share, point.method) for point in points):
        if method.startswith("monolith"):
            continue
        ours, baseline = of_method(points, method, share, variant), baseline_of(method)
        # A variant of the ensemble alone is compared with the main monolith of the same budget and seeds.
        theirs = of_method(points, baseline, share, variant) or of_method(main, baseline, share)
        for prefix, name in (("", network), ("other_features_", OTHER.name)):
            if found := over(ours, theirs, name):
                figures |= found.figures(f"{prefix}{variant}_{share:g}_{method}_over_monolith")
        if ours[0].branch_at and (found := over(ours, of_method(main, method, share), network)):
            figures |= found.figures(f"{variant}_{share:g}_{method}_over_scratch")
            if method == BEST:
                branched.append((-len(ours), found))
    if branched:
        # The lowest ratio among those of most seeds.
        figures |= min(branched)[1].figures("branched_over_scratch")
    wanted = figures[f"kid_{BASELINE}"]
    curve = {share: of_method(main, BEST, share) for share in sorted({point.share for point in main})}
    flops = [row[0].train_tflop for row in curve.values()]
    scores = [sum(p.kid[network].value for p in row) / len(row) for row in curve.values()]
    share = equal_score_share(flops, scores, wanted)
    other = f"other_features_{BEST}_over_monolith"
    return figures | {
        "best_over_monolith": figures[f"{BEST}_over_monolith"],
        **({"best_over_monolith_other_features": figures[other]} if other in figures else {}),
        "flops_for_equal_score": share if share < float("inf") else -1.0,
        "shares_tv_best": figures[f"shares_tv_{BEST}"],
    }


def baseline_of(method: str) -> str:
    """The monolith's method with the same kind of solver."""
    solver = next(one.solver for one in METHODS if one.name == method)
    return "monolith_ancestral" if solver == "ancestral" else "monolith"
