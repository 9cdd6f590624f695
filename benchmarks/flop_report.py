"""Scores of the compared methods, and their table, figures and page."""

from __future__ import annotations

import base64
import io
import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from common import Report, command, commit, device, save_figure
from jaxtyping import Float, UInt8
from jinja2 import Template
from matplotlib.figure import Figure
from scipy.optimize import nnls
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor

from ddm_lightning.core.files import atomic_write_json, atomic_write_text
from ddm_lightning.core.registry import METRICS
from ddm_lightning.evaluation.metrics.kid import KernelDistance

NUM_RESAMPLES = 2000
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

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON."""
        kid = {name: {"value": found.value, "spread": found.spread} for name, found in self.kid.items()}
        return {
            **{key: getattr(self, key) for key in ("variant", "seed", "share", "train_tflop", "method", "shares_tv")},
            "kid": kid,
            **self.scores,
        }


def kid(generated: Float[Tensor, "n d"], real: Float[Tensor, "m d"]) -> KernelDistance:
    """KID between two sets of features."""
    metric = METRICS.build("kid", {})
    metric.update(real, real=True)
    metric.update(generated, real=False)
    distance: KernelDistance = metric.compute()
    return distance


def precision_recall(generated: Float[Tensor, "n d"], real: Float[Tensor, "m d"]) -> dict[str, float]:
    """Improved precision and recall (1904.06991)."""
    metric = METRICS.build("precision-recall", {})
    metric.update(real, real=True)
    metric.update(generated, real=False)
    found = metric.compute()
    return {"precision": found.precision.value, "recall": found.recall.value}


class ClusterShares:
    """Estimate the shares of the clusters among images, by logistic regression on their features.

    The mean probabilities of a classifier that errs are no shares: they lean towards those it was fitted on. They are
    a mixture of its mean probabilities on each cluster, with the shares as weights, and are solved for them
    (probabilistic adjusted count; Bella et al., ICDM 2010).

    Args:
        features: features of real images.
        clusters: their clusters.
        priors: shares of the clusters in the data set.
    """

    def __init__(self, features: Float[Tensor, "n d"], clusters: Tensor, priors: Sequence[float]) -> None:
        rows, found = features.numpy(), clusters.numpy()
        half = len(rows) // 2
        self._scaler = StandardScaler().fit(rows[:half])
        # Strong regularisation: probabilities matter, not accuracy.
        self._model = LogisticRegression(C=0.01, max_iter=300).fit(self._scaler.transform(rows[:half]), found[:half])
        self._priors = np.asarray(priors)[self._model.classes_]
        probabilities, other = self._probabilities(rows[half:]), found[half:]
        self._on_cluster = np.stack([probabilities[other == k].mean(0) for k in self._model.classes_], axis=1)

    def _probabilities(self, rows: Float[np.ndarray, "n d"]) -> Float[np.ndarray, "n k"]:
        found: np.ndarray = self._model.predict_proba(self._scaler.transform(rows))
        return found

    def shares(self, features: Float[Tensor, "n d"]) -> Float[np.ndarray, " k"]:
        """Share of each cluster."""
        mean = self._probabilities(features.numpy()).mean(0)
        found = nnls(self._on_cluster, mean)[0]
        return found / found.sum()

    def total_variation(self, features: Float[Tensor, "n d"]) -> float:
        """Total variation between the shares and the priors."""
        return float(np.abs(self.shares(features) - self._priors).sum() / 2)


@dataclass(frozen=True)
class Interval:
    """An estimate with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} [{self.low:.3f}, {self.high:.3f}]"


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


def curves_figure(points: Sequence[Point], network: str, islands: int) -> Figure:
    """KID against training FLOPs and against the time of ``islands`` islands, one line per method, means over seeds."""
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    main = [point for point in points if point.variant == "main"]
    budgets = sorted({point.share for point in main})
    methods = [m for m in dict.fromkeys(p.method for p in main) if len({p.share for p in main if p.method == m}) > 1]
    left, right = figure.subplots(1, 2, sharey=True)
    for method in methods:
        rows = [of_method(main, method, share) for share in budgets]
        values = np.array([[point.kid[network].value for point in row] for row in rows])
        flops = np.array([row[0].train_tflop for row in rows])
        is_monolith = method.startswith("monolith")
        style = {"marker": "o", "linestyle": "--" if is_monolith else "-", "label": method.replace("_", " ")}
        for axes, x in ((left, flops), (right, flops if is_monolith else flops / islands)):
            axes.errorbar(x, values.mean(1), yerr=values.std(1), capsize=3, **style)
    left.set(xscale="log", yscale="log", xlabel="training TFLOPs, router and partition included")
    left.set_ylabel(f"KID ({network}), lower is better")
    right.set(xscale="log", xlabel=f"TFLOPs of the busiest machine: {islands} islands, one for the monolith")
    for axes in (left, right):
        axes.grid(visible=True, which="both", alpha=0.3)
    left.legend(fontsize=8)
    return figure


def strips_figure(images: Mapping[str, UInt8[np.ndarray, "n h w 3"]], attribution: str, num: int = 16) -> Figure:
    """One strip of images per method, from the same noise."""
    names = list(images)
    _, height, _, _ = images[names[0]].shape
    figure = Figure(figsize=(2 + num * 0.6, len(names) * 0.62 + 0.5), layout="constrained")
    axes = figure.subplots()
    gap = ((1, 1), (1, 1), (0, 0))
    rows = [np.concatenate([np.pad(one, gap, constant_values=255) for one in images[n][:num]], 1) for n in names]
    axes.imshow(np.concatenate(rows), interpolation="nearest")
    centres = (np.arange(len(names)) + 0.5) * (height + 2)
    axes.set_yticks(centres, [name.replace("_", " ") for name in names])
    axes.set_xticks([])
    axes.set_xlabel(attribution, fontsize=4)
    for side in axes.spines.values():
        side.set_visible(False)
    return figure


_PAGE = Template(
    """<!doctype html><html lang="en"><meta charset="utf-8"><title>{{ title }}</title>
<style>body{font:16px/1.5 system-ui,sans-serif;max-width:70rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}td,th{padding:.2rem .8rem;border-bottom:1px solid #ddd;
text-align:right}td:first-child,th:first-child{text-align:left}img{max-width:100%}small{color:#666}</style>
<h1>{{ title }}</h1>
{% for table in tables %}<h2>{{ table.title }}</h2>
<table><tr>{% for heading in table.headings %}<th>{{ heading|e }}</th>{% endfor %}</tr>
{% for row in table.rows %}<tr>{% for cell in row %}<td>{{ cell|e }}</td>{% endfor %}</tr>{% endfor %}</table>
{% for note in table.notes %}<p>{{ note|e }}</p>{% endfor %}
{% endfor %}
{% for caption, source in figures %}<h2>{{ caption|e }}</h2><img alt="{{ caption|e }}" src="{{ source }}">{% endfor %}
<p><small>{{ attribution|e }}</small></p><p><small>{{ origin|e }}</small></p></html>
""",
    autoescape=False,
)


def page(title: str, tables: Sequence[Any], figures: Mapping[str, Figure], attribution: str, origin: str) -> str:
    """A self-contained HTML page of tables and figures."""
    sources = []
    for caption, figure in figures.items():
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=120)
        sources.append((caption, "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()))
    return _PAGE.render(title=title, tables=tables, figures=sources, attribution=attribution, origin=origin)


def write_figures(folder: Path, figures: Mapping[str, Figure]) -> list[Path]:
    """Write each figure as PNG, named after its caption."""
    paths = []
    for caption, figure in figures.items():
        path = folder / f"{caption.split(':')[0].lower().replace(' ', '_')}.png"
        save_figure(path, figure)
        paths.append(path)
    return paths


def write_results(path: Path, tables: Sequence[Report], points: Sequence[Point]) -> None:
    """Write figures and points to ``path``, and the tables to the Markdown file beside it."""
    origin = {"commit": commit(), "device": device(), "command": command()}
    document = {**origin, "figures": tables[0].figures, "points": [point.to_dict() for point in points]}
    atomic_write_json(path, document)
    shown = [table.markdown(origin if table is tables[-1] else {}) for table in tables]
    atomic_write_text(path.with_suffix(".md"), "\n".join(shown))
    print(f"results: {path}, {path.with_suffix('.md')}")
