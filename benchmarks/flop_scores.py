"""Scores of the compared methods: distances to held-out images, shares of clusters, ratios with intervals."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from itertools import pairwise
from math import isnan, nan
from operator import attrgetter
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from flop_sampling import METHODS, features_of
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
BEST = "bayes"
BASELINE = "monolith_ancestral"
"""The methods of the headline, chosen before the results."""
LOSS = "held_out_loss"
HEADLINE = (BEST, BASELINE, "top1", "monolith")
"""Methods without which there are no figures."""
NUM_CLASSIFIED = 8000
"""Training images on which the classifier of clusters is fitted."""
NUM_RESAMPLES = 2000
INTERVAL = (2.5, 97.5)
"""Percentiles of the bootstrap."""


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
    scores: dict[str, float] = field(default_factory=dict)
    """Further scores, such as ``precision``, ``shares_tv`` and ``gflop_per_image``."""
    branch_at: float = 0.0
    """See ``Variant``."""

    @property
    def key(self) -> tuple[str, float, str, int]:
        """Variant, share of the budget, method and seed."""
        return self.variant, self.share, self.method, self.seed

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        kid = {}
        for name, found in self.kid.items():
            halves = " ".join(map("{:.4g}".format, found.halves.tolist()))
            kid[name] = {"value": found.value, "spread": found.spread, "halves": halves}

        document = {**vars(self), "kid": kid, **self.scores}
        del document["scores"]
        return document

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Point:
        """Read what ``to_dict`` returned; results that nobody continues may lack the halves."""
        kid = {}
        for name, found in stored["kid"].items():
            halves = found.get("halves", "").split()
            kid[name] = KernelDistance(found["value"], torch.tensor(list(map(float, halves))))

        scores = dict(stored)
        own = {}
        for one in fields(cls):
            if one.name in scores:
                own[one.name] = scores.pop(one.name)

        return cls(**{**own, "kid": kid, "scores": scores})


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval."""

    value: float
    low: float = nan
    high: float = nan
    """Bounds; NaN where they are unknown."""

    def figures(self, name: str) -> dict[str, float]:
        """The three numbers as figures ``name``, ``name_low`` and ``name_high``."""
        return {name: self.value, f"{name}_low": self.low, f"{name}_high": self.high}

    def __str__(self) -> str:
        if isnan(self.low):
            return f"{self.value:.3f}"

        if self.low <= 0:
            return "–"  # one of the two KIDs cannot be told from 0

        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio(ours: Sequence[KernelDistance], theirs: Sequence[KernelDistance]) -> Interval:
    """Ratio of the mean KIDs of two methods over seeds, with a hierarchical bootstrap interval.

    Seeds are resampled with replacement, and the images of each by its random halves. All sets share their real
    images and the seed of the halves, so that the variance of the real images largely cancels.

    Args:
        ours: one per training seed.
        theirs: the same seeds in the same order.
    """
    random = np.random.default_rng(0)
    our_halves = _halves(ours)
    their_halves = _halves(theirs)
    num_seeds, num_halves = our_halves.shape
    seeds = random.integers(num_seeds, size=(NUM_RESAMPLES, num_seeds))
    halves = random.integers(num_halves, size=(NUM_RESAMPLES, num_seeds))
    our_means = our_halves[seeds, halves].mean(1)
    their_means = their_halves[seeds, halves].mean(1)
    low, high = np.percentile(our_means / their_means, INTERVAL)
    return Interval(_mean(ours) / _mean(theirs), float(low), float(high))


def _halves(distances: Sequence[KernelDistance]) -> np.ndarray:
    return np.stack([distance.halves.numpy() for distance in distances])


def _mean(distances: Sequence[KernelDistance]) -> float:
    return mean(distance.value for distance in distances)


def equal_score_share(flops: Sequence[float], scores: Sequence[float], wanted: float) -> float:
    """Share of the largest budget at which a falling curve of scores reaches ``wanted``; -1 if it does not.

    Interpolates linearly in log FLOPs and score. A curve that starts below ``wanted`` gives its first budget, an
    upper bound.
    """
    if scores[0] <= wanted:
        return flops[0] / flops[-1]

    for (low, before), (high, after) in pairwise(zip(flops, scores, strict=True)):
        if after <= wanted:
            logarithm = np.interp(wanted, [after, before], np.log([high, low]))
            return float(np.exp(logarithm)) / flops[-1]

    return -1.0


Groups = dict[tuple[str, float, str], list[Point]]


def grouped(points: Iterable[Point]) -> Groups:
    """Points by variant, share of the budget and method, each in the order of the seeds."""
    groups: Groups = {}
    for point in sorted(points, key=attrgetter("seed")):
        groups.setdefault(point.key[:3], []).append(point)

    return groups


def shares_of(groups: Iterable[tuple[str, float, str]]) -> list[float]:
    """Shares of the budget at which the main comparison was made, ascending."""
    return sorted({share for variant, share, _ in groups if variant == "main"})


def kids_of(points: Sequence[Point], network: str) -> list[KernelDistance]:
    """KID of each point."""
    return [point.kid[network] for point in points]


def mean_kid(points: Sequence[Point], network: str) -> float:
    """Mean KID over seeds."""
    return _mean(kids_of(points, network))


def mean_score(points: Sequence[Point], name: str) -> float:
    """Mean of a score over seeds."""
    return mean(point.scores[name] for point in points)


def over(ours: Sequence[Point], theirs: Sequence[Point], network: str) -> Interval | None:
    """Ratio of KIDs over the seeds of ``ours``; None if ``theirs`` lacks one of them."""
    seeds = set(map(attrgetter("seed"), ours))
    theirs = [point for point in theirs if point.seed in seeds]
    if len(theirs) < len(ours):
        return None

    return ratio(kids_of(ours, network), kids_of(theirs, network))


class Judge:
    """Score images against the held-out ones of a run.

    Args:
        run: prepared, with held-out samples.
        networks: feature networks; ``PLAIN`` is one of them.
        stored: folder in which features are kept.
    """

    def __init__(self, run: Run, networks: Sequence[PluginConfig], stored: Path) -> None:
        self.networks = networks
        self.stored = stored
        encoder = encoder_of(run)
        self.held_out_images = encoder.decode(read_split(run, HELD_OUT).x_0)
        self.real = self.features(self.held_out_images)
        train = read_split(run, TRAIN)
        rows = torch.randperm(len(train), generator=keyed_generator(0, "classifier"))[:NUM_CLASSIFIED]
        self.some_train = self.features(encoder.decode(train.x_0[rows]))
        half = len(rows) // 2
        first, second = self.some_train[PLAIN.name].split([half, len(rows) - half])
        of_first, of_second = train.clusters[rows].split([half, len(rows) - half])
        self.classifier = ClusterShares(first, of_first, second, of_second, run.manifest.num_clusters)
        self.priors = torch.tensor(run.manifest.priors)

    def features(self, images: UInt8[np.ndarray, "n h w 3"]) -> dict[str, Float[Tensor, "n d"]]:
        """Features of images, by network."""
        return {network.name: features_of(images, network, self.stored) for network in self.networks}

    def distances(self, features: Mapping[str, Float[Tensor, "n d"]]) -> dict[str, KernelDistance]:
        """KID to the held-out images, by network."""
        return {name: kernel_distance(found, self.real[name]) for name, found in features.items()}

    def scores(self, features: Float[Tensor, "n d"]) -> dict[str, float]:
        """Precision, recall and error of the clusters' shares, from features of ``PLAIN``."""
        scores = {"shares_tv": self.variation(features)}
        for name, score in precision_recall(features, self.real[PLAIN.name]).items():
            scores[name] = score.value

        return scores

    def variation(self, features: Float[Tensor, "n d"]) -> float:
        """Total variation between the clusters' shares among images and the priors."""
        return total_variation(self.classifier.shares(features), self.priors)

    def floors(self) -> dict[str, float]:
        """Scores of real images: what a perfect model would reach."""
        floors = {"shares_tv_floor": self.variation(self.real[PLAIN.name])}
        for name, distance in self.distances(self.some_train).items():
            floors[f"kid_floor_{name}"] = distance.value

        return floors


def figures_of(points: Sequence[Point], network: str) -> dict[str, float]:
    """Named figures of the main comparison; ratios are of mean KIDs over seeds."""
    groups = grouped(points)
    shares = shares_of(groups)
    largest = shares[-1]
    figures: dict[str, float] = {"num_seeds": len(groups["main", largest, BEST]), "num_budgets": len(shares)}
    for (variant, share, method), ours in groups.items():
        is_main = variant == "main" and share == largest
        if is_main:
            figures[f"kid_{method}"] = mean_kid(ours, network)
            figures[f"shares_tv_{method}"] = mean_score(ours, "shares_tv")

        if method.startswith("monolith"):
            continue

        # A variant of the ensemble alone is compared with the main monolith of the same budget and seeds.
        baseline = baseline_of(method)
        theirs = groups.get((variant, share, baseline)) or groups.get(("main", share, baseline), [])
        for prefix, name in (("", network), ("other_features_", OTHER.name)):
            found = over(ours, theirs, name)
            if found is None:
                continue

            figures |= found.figures(f"{prefix}{variant}_{share:g}_{method}_over_monolith")
            if is_main:
                figures |= found.figures(f"{prefix}{method}_over_monolith")

        if ours[0].branch_at:
            scratch = over(ours, groups.get(("main", share, method), []), network)
            if scratch is not None:
                figures |= scratch.figures(f"{variant}_{share:g}_{method}_over_scratch")

    flops = []
    kids = []
    losses = []
    for share in shares:
        rows = groups["main", share, BEST]
        monolith = groups["main", share, BASELINE]
        flops.append(rows[0].train_tflop)
        kids.append(mean_kid(rows, network))
        if LOSS in rows[0].scores:
            losses.append(mean_score(rows, LOSS) / mean_score(monolith, LOSS))

    figures["flops_for_equal_score"] = equal_score_share(flops, kids, figures[f"kid_{BASELINE}"])
    if losses:
        figures["crossing_budget"] = equal_score_share(flops, losses, 1.0)

    for method in ("top1", BEST):
        ratios = [figures[f"main_{share:g}_{method}_over_monolith"] for share in shares]
        figures[f"crossing_budget_{method}"] = equal_score_share(flops, ratios, 1.0)

    return figures


def baseline_of(method: str) -> str:
    """The monolith's method with the same kind of solver."""
    solver = next(one.solver for one in METHODS if one.name == method)
    if solver == "ancestral":
        return BASELINE

    return "monolith"
