"""Linear probe as the router's baseline: multinomial logistic regression on noisy pixels averaged to 16×16.

Each time t has its own classifier on standardised features. Cross-validation inside the training split chooses its
settings. All noisy versions of a sample are in one fold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from router_scores import noised
from sklearn.linear_model import LogisticRegression
from sklearn.preprocessing import StandardScaler
from torch import Tensor
from torch.nn import functional

GRID = 16
STRENGTHS = (1e-4, 1e-3, 1e-2, 1e-1, 1.0)
DRAWS = (1, 4)
NUM_FOLDS = 5
_VALIDATION_DRAWS = 4
_MAX_ITERATIONS = 2000
# After so many consecutive strengths without an improvement, skip the larger ones, which take ever longer to fit.
_PATIENCE = 2


@dataclass(frozen=True)
class Choice:
    """Settings chosen by cross-validation."""

    strength: float
    """scikit-learn's C."""
    num_draws: int
    """Noisy versions of each training sample."""
    mirrored: bool
    """Whether mirrored images are added, as a router may train on them."""


@dataclass(frozen=True, eq=False)
class Training:
    """Training split and the settings to try."""

    x_0: Float[Tensor, "n c h w"]
    clusters: Int[Tensor, " n"]
    seed: int
    num_folds: int = NUM_FOLDS
    strengths: Sequence[float] = STRENGTHS
    draws: Sequence[int] = DRAWS
    mirrors: Sequence[bool] = (False,)


class Probe:
    """Classifier for one time t."""

    def __init__(self, features: Float[np.ndarray, "m d"], clusters: Int[np.ndarray, "m"]) -> None:
        self._scaler = StandardScaler().fit(features)
        self._features, self._clusters = self._scaler.transform(features), clusters
        # Warm start: along rising strengths, each fit starts from the previous solution.
        self._model = LogisticRegression(max_iter=_MAX_ITERATIONS, warm_start=True)

    def fit(self, strength: float) -> Probe:
        """Fit with C = ``strength``."""
        self._model.set_params(C=strength).fit(self._features, self._clusters)
        return self

    def log_probabilities(self, features: Float[np.ndarray, "m d"]) -> Float[Tensor, "m K"]:
        """Predict log-probabilities of the clusters, in order; each must occur in the fitted samples."""
        return torch.from_numpy(self._model.predict_log_proba(self._scaler.transform(features)))


def features(x_t: Float[Tensor, "n c h w"]) -> Float[np.ndarray, "n d"]:
    """Average pixels to ``GRID`` × ``GRID``, float64."""
    return functional.adaptive_avg_pool2d(x_t, GRID).flatten(1).double().numpy()


def fit_probe(training: Training, t: float, tick: Callable[[int], object]) -> tuple[Probe, Probe, Choice, Choice]:
    """Fit the best probe at time ``t`` by accuracy, and the best by NLL, on the whole training split.

    Two probes, because the router is compared with the best value of each figure.

    Args:
        training: the training split and the settings to try.
        t: the time.
        tick: called with the number of fits finished or skipped since the last call.

    Returns:
        The probe for accuracy, the probe for NLL, and the settings of each.
    """
    results: dict[Choice, tuple[float, float]] = {}
    for num_draws in _draws(training, t):
        for mirrored in training.mirrors:
            results.update(_path(training, t, num_draws, mirrored, tick))
    by_accuracy = max(results, key=lambda choice: (results[choice][0], -results[choice][1]))
    by_nll = min(results, key=lambda choice: results[choice][1])
    fitted = {choice: _fit_all(training, t, choice) for choice in {by_accuracy, by_nll}}
    return fitted[by_accuracy], fitted[by_nll], by_accuracy, by_nll


def num_fits(training: Training, times: Sequence[float]) -> int:
    """Total of the numbers passed to ``tick`` over all ``times``."""
    paths = sum(len(_draws(training, t)) for t in times) * len(training.mirrors)
    return paths * training.num_folds * len(training.strengths)


def _draws(training: Training, t: float) -> Sequence[int]:
    # Without noise, all draws are equal.
    return training.draws if t > 0 else training.draws[:1]


def _rows(
    training: Training, t: float, chosen: Int[Tensor, " m"], num_draws: int, mirrored: bool
) -> tuple[Float[np.ndarray, "r d"], Int[np.ndarray, "r"]]:
    images = [
        noised(x_0, t, draw, training.seed, purpose="probe")[chosen]
        for x_0 in ([training.x_0, training.x_0.flip(3)] if mirrored else [training.x_0])
        for draw in range(num_draws)
    ]
    return np.concatenate([features(x_t) for x_t in images]), training.clusters[chosen].repeat(len(images)).numpy()


def _folds(training: Training) -> Int[Tensor, " n"]:
    """Fold of each sample, stratified by cluster."""
    num = len(training.clusters)
    order = torch.randperm(num, generator=torch.Generator().manual_seed(training.seed))
    fold_of = torch.empty(num, dtype=torch.int64)
    fold_of[order[training.clusters[order].argsort(stable=True)]] = torch.arange(num) % training.num_folds
    return fold_of


def _path(
    training: Training, t: float, num_draws: int, mirrored: bool, tick: Callable[[int], object]
) -> dict[Choice, tuple[float, float]]:
    """Validation accuracy and NLL along rising strengths; stop after ``_PATIENCE`` without an improvement of either."""
    fold_of = _folds(training)
    folds = []
    for fold in range(training.num_folds):
        inside, outside = (fold_of == fold).nonzero()[:, 0], (fold_of != fold).nonzero()[:, 0]
        probe = Probe(*_rows(training, t, outside, num_draws, mirrored))
        folds.append((probe, *_rows(training, t, inside, _VALIDATION_DRAWS if t > 0 else 1, False)))
    results: dict[Choice, tuple[float, float]] = {}
    best_accuracy, best_nll, worse = 0.0, float("inf"), 0
    for strength in training.strengths:
        if worse == _PATIENCE:
            tick(training.num_folds)
            continue
        hits, losses = [], []
        for probe, validated, truth in folds:
            predicted = probe.fit(strength).log_probabilities(validated).numpy()
            hits.append(predicted.argmax(1) == truth)
            losses.append(-predicted[np.arange(len(truth)), truth])
            tick(1)
        accuracy, nll = float(np.concatenate(hits).mean()), float(np.concatenate(losses).mean())
        results[Choice(strength, num_draws, mirrored)] = accuracy, nll
        worse = 0 if accuracy > best_accuracy or nll < best_nll else worse + 1
        best_accuracy, best_nll = max(best_accuracy, accuracy), min(best_nll, nll)
    return results


def _fit_all(training: Training, t: float, choice: Choice) -> Probe:
    everything = torch.arange(len(training.clusters))
    return Probe(*_rows(training, t, everything, choice.num_draws, choice.mirrored)).fit(choice.strength)
