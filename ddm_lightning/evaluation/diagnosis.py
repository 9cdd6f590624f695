"""Diagnose an ensemble: experts by cluster, the router by time, and the clusters' shares among samples."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from ddm_lightning.core.buckets import Bucket
from ddm_lightning.core.devices import device_of
from ddm_lightning.core.files import atomic_write_json
from ddm_lightning.core.formatting import Bars
from ddm_lightning.ensemble.routing import choose, strategy_of
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.evaluation.diagnosis_report import draw_charts
from ddm_lightning.evaluation.image_sets import lengths, open_side, sections
from ddm_lightning.evaluation.shares import ClusterShares, total_variation
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import interpolate
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.flow.timesteps import stratified_timesteps
from ddm_lightning.members.roles import MONOLITH
from ddm_lightning.members.run import Run
from ddm_lightning.networks.calibration import calibration_error, is_fitted, reliability
from ddm_lightning.shards.manifest import HELD_OUT, TRAIN
from ddm_lightning.training.objective import build_objective
from ddm_lightning.use.ensemble import DecentralizedEnsemble
from ddm_lightning.use.saved import manifest_with_about

STRATEGIES_SHOWN = ("full", "top-1", "sample-1", "bayes")
MAX_HELD_OUT = 2048
MAX_TRAIN = 20_000
# A smaller held-out set is repeated with other noise.
MIN_ROWS = 512
MAX_DRAWS = 8
BATCH_SIZE = 64
# Side to which images are shrunk for the classifier of clusters.
CLASSIFIER_SIDE = 12

Figures = dict[str, Any]
"""Figures as JSON."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples of all clusters and one shape, in memory."""

    x_0: Float[Tensor, "n c h w"]
    clusters: Int[Tensor, " n"]
    sample_ids: Int[Tensor, " n"]
    condition: Condition | None

    def __len__(self) -> int:
        return len(self.x_0)

    def rows(self, rows: Int[Tensor, " m"], device: torch.device | None = None) -> Samples:
        """The chosen samples, moved to ``device`` if one is given."""
        condition = self.condition and self.condition.rows(rows)
        if condition is not None and device is not None:
            condition = condition.to(device)

        return Samples(
            x_0=self.x_0[rows].to(device),
            clusters=self.clusters[rows].to(device),
            sample_ids=self.sample_ids[rows].to(device),
            condition=condition,
        )


Noisy: TypeAlias = tuple[Samples, Tensor, Tensor]
"""Samples of one batch, with their ``x_t`` and ``t``."""


def diagnose(
    run: Run,
    strategies: Sequence[str] | None,
    num: int,
    overrides: Sequence[str] = (),
) -> Figures:
    """Diagnose a run's ensemble; write ``diagnosis.json`` and charts to the run's folder ``diagnosis``.

    Args:
        run: a finished run with its shards; the experiment's ``sample`` section says how to sample.
        strategies: strategies whose samples are classified; None for ``STRATEGIES_SHOWN``.
        num: images per strategy.
        overrides: those of the experiment; its ``sample.strategy_params`` go to the given strategies.

    Raises:
        UserError: no ensemble or no held-out samples, or an unknown strategy.
    """
    experiment = run.experiment
    device = device_of(experiment.island.accelerator)
    whole = DecentralizedEnsemble(manifest_with_about(run.folder.root, experiment), device)
    ensemble = whole.field
    ensemble.precision = experiment.sample.precision
    params = [text for text in overrides if strategies and text.startswith("sample.strategy_params.")]
    chosen = {}
    for name in strategies or (*STRATEGIES_SHOWN, experiment.sample.strategy):
        own = whole.with_settings(params, f"--strategy {name}", strategy=name)
        lacks_router = ensemble.router is None and strategy_of(own.about.sample).needs_router
        # A default strategy that cannot run is skipped; one that was asked for is refused later.
        if strategies or ensemble.num_clusters == 1 or not lacks_router:
            chosen[name] = own

    train = [*_read(run, TRAIN, MAX_TRAIN, device).values()]
    by_bucket = _read(run, HELD_OUT, MAX_HELD_OUT, device)
    held_out = [*by_bucket.values()]
    sample_ids = _cat(held_out, "sample_ids")
    num_draws = min(MAX_DRAWS, math.ceil(MIN_ROWS / len(sample_ids)))  # of noise for each sample
    repeated = []
    for samples in held_out:
        rows = torch.arange(len(samples)).repeat(num_draws)
        repeated.append(samples.rows(rows, device))

    times = stratified_timesteps().tolist()
    figures: Figures = {
        "num_held_out": len(sample_ids),
        "num_judged": int((~is_fitted(sample_ids)).sum()),
        "num_train": sum(cluster.train for cluster in run.manifest.clusters),
        "num_images": num,
        "seed": experiment.seed,
        "sample": asdict(experiment.sample),
        "priors": ensemble.priors.tolist(),
        "times": times,
    }
    for bucket, samples in by_bucket.items():
        if bucket is not None:
            counts = samples.clusters.bincount(minlength=ensemble.num_clusters)
            figures.setdefault("buckets", {})[bucket.name] = counts.tolist()

    with Bars() as bars:
        task = bars.add_task("experts", total=len(times))
        figures["experts"] = expert_figures(ensemble, repeated, experiment.seed, lambda: bars.advance(task))
        figures["router"] = router_figures(ensemble, repeated, experiment.seed)
        figures["shares"] = _share_figures(whole, chosen, train, by_bucket, num, bars)

    folder = run.folder.root / "diagnosis"
    folder.mkdir(exist_ok=True)
    draw_charts(folder, figures)
    atomic_write_json(folder / "diagnosis.json", figures)
    return figures


def _share_figures(
    whole: DecentralizedEnsemble,
    chosen: Mapping[str, DecentralizedEnsemble],
    train: Sequence[Samples],
    by_bucket: Mapping[Bucket | None, Samples],
    num: int,
    bars: Bars,
) -> Figures:
    """Measure the clusters' shares among ``num`` samples of each strategy, as many of each shape as are held out."""
    num_clusters = whole.field.num_clusters
    held_out = [*by_bucket.values()]
    _, height, width = whole.meta.x_shape
    size = min(height, CLASSIFIER_SIDE), min(width, CLASSIFIER_SIDE)

    def pixels(images: Sequence[Tensor]) -> Float[Tensor, "n d"]:
        return torch.cat([F.adaptive_avg_pool2d(x_0.float(), size).flatten(1) for x_0 in images])

    classifier = ClusterShares(
        pixels([samples.x_0 for samples in train]),
        _cat(train, "clusters"),
        pixels([samples.x_0 for samples in held_out]),
        _cat(held_out, "clusters"),
        num_clusters,
    )
    # For the numbers of the images of each shape, the held-out samples whose conditions they take.
    given = {}
    for bucket, numbers in sections(lengths(by_bucket), num).items():
        samples = by_bucket[bucket]
        given[numbers] = samples.rows(torch.arange(len(numbers)) * len(samples) // len(numbers))

    is_conditional = held_out[0].condition is not None
    expected = whole.field.priors
    if is_conditional:
        # Conditions are those of held-out samples, whose shares differ a little from the priors.
        expected = _cat([*given.values()], "clusters").bincount(minlength=num_clusters) / num

    found = {}
    for name, own in chosen.items():
        task = bars.add_task(name, total=num)
        images = []
        for numbers, samples in given.items():
            x_0 = own.latents(
                samples.condition,
                len(numbers),
                (*samples.x_0.shape[1:],),
                batch_size=BATCH_SIZE,
                keys=[(number,) for number in numbers],
                progress=bars.from_here(task),
                clusters=samples.clusters if is_conditional else None,
            )
            images.append(x_0)

        shares = classifier.shares(pixels(images))
        found[name] = {
            "solver": own.about.sample.solver,
            "shares": shares.tolist(),
            "total_variation": total_variation(shares, expected),
        }

    by_chance = classifier.by_chance(num, whole.about.seed)
    return {
        "expected": expected.tolist(),
        "by_chance": float(by_chance.mean()),
        "by_chance_95": float(by_chance.quantile(0.95)),
        "classifier_accuracy": classifier.accuracy,
        "strategies": found,
    }


@torch.no_grad()
def expert_figures(
    ensemble: Ensemble, held_out: Sequence[Samples], seed: int, advance: Callable[[], object] = lambda: None
) -> Figures:
    """Measure each cluster's experts on each cluster at 8 fixed times, with the same noise for all.

    Args:
        ensemble: the experts.
        held_out: samples of each shape.
        seed: of the noise.
        advance: called after each time.

    Returns:
        ``names`` of each cluster's experts; their ``loss_by_time`` [t][experts][cluster] and its mean ``loss``;
        ``in_cluster`` and ``out_of_cluster`` loss; ``disagreement`` [t], the velocities' variance under the
        router's weights, relative to the square of their mean (empty without a router). With several shapes also
        ``in_cluster_by_bucket`` [shape][cluster].
    """
    num_clusters = ensemble.num_clusters
    times = stratified_timesteps()
    nums = torch.stack([samples.clusters.bincount(minlength=num_clusters) for samples in held_out])
    # Of the losses: [shape][t][experts][cluster].
    sums = torch.zeros(len(held_out), len(times), num_clusters, num_clusters, device=nums.device)
    disagreement = []
    for index in range(len(times)):
        variance = square = 0.0
        for samples, shape_sums in zip(held_out, sums, strict=True):
            for batch, x_t, t in _noisy(samples, seed, index):
                every = torch.ones(len(batch), num_clusters, dtype=torch.bool, device=x_t.device)
                velocities = ensemble.expert_velocities(x_t, t, batch.condition, every)
                velocities = velocities.transpose(0, 1).flatten(2)  # [experts, rows, values]
                target = (x_t - batch.x_0) / times[index]  # noise - x_0
                errors = (velocities - target.flatten(1)).square().mean(2)
                shape_sums[index].index_add_(1, batch.clusters, errors)
                if ensemble.router is not None:
                    weights = ensemble.probabilities(x_t, t, batch.condition).T[..., None]
                    mean = (weights * velocities).sum(0)
                    scatter = weights * (velocities - mean).square()
                    variance += float(scatter.sum())
                    square += float(mean.square().sum())

        if square:
            disagreement.append(variance / square)

        advance()

    counts = nums.sum(0).clamp(min=1)
    losses = (sums.sum(0) / counts).cpu()
    loss = losses.mean(0)
    more = {}
    if len(held_out) > 1:
        # Experts on their own cluster, averaged over the times.
        own_loss = sums.mean(1).diagonal(dim1=1, dim2=2) / nums.clamp(min=1)
        more["in_cluster_by_bucket"] = own_loss.tolist()

    others = counts.cpu() * (1 - torch.eye(num_clusters))
    out_of_cluster = (loss * others).sum(1) / others.sum(1).clamp(min=1)
    return {
        "names": ensemble.cluster_names,
        "loss_by_time": losses.tolist(),
        "loss": loss.tolist(),
        "in_cluster": loss.diagonal().tolist(),
        "out_of_cluster": out_of_cluster.tolist(),
        "disagreement": disagreement,
        **more,
    }


@torch.no_grad()
def router_figures(ensemble: Ensemble, held_out: Sequence[Samples], seed: int) -> Figures:
    """Score the router at 8 fixed times, ``unconditional`` and ``conditional``.

    Args:
        ensemble: has the router.
        held_out: samples of each shape.
        seed: of the noise.

    Returns:
        For each branch and time: ``accuracy``; ``nll`` and ``calibration_error`` (ECE), as trained and ``_calibrated``,
        of the samples that the temperatures were not fitted on; ``nll_of_priors``, the NLL of a router that always
        answers the priors; ``calibration_error_by_chance``, the ECE of a perfectly calibrated router on as many
        samples, which is large on few; with several shapes, ``accuracy_by_bucket`` of each. Empty without a router.
    """
    if ensemble.router is None:
        return {}

    plain = copy(ensemble)
    plain.temperatures = ((), ())
    branches = ["unconditional"]
    if ensemble.router_conditional and held_out[0].condition is not None:
        branches.append("conditional")

    truth = _cat(held_out, "clusters")
    sample_ids = _cat(held_out, "sample_ids")
    judged = ~is_fitted(sample_ids)
    clusters = truth[judged]
    log_priors = ensemble.priors.to(clusters.device).log()
    _, sample_number = sample_ids.unique(return_inverse=True)
    figures: Figures = defaultdict(lambda: defaultdict(list))
    for index in range(len(stratified_timesteps())):
        # One number for all draws of a sample, because they are not independent.
        uniform = torch.rand(len(truth), generator=keyed_generator(seed, "chance", index)).to(truth.device)
        noisy: list[Noisy] = []
        for samples in held_out:
            noisy += _noisy(samples, seed, index)

        for branch in branches:
            curves = figures[branch]
            as_trained = _log_probabilities(plain, noisy, branch)
            calibrated = _log_probabilities(ensemble, noisy, branch)
            for suffix, found in (("", as_trained), ("_calibrated", calibrated)):
                logs = found[judged].double()
                of_truth = logs.gather(1, clusters[:, None])
                curves[f"nll{suffix}"].append(-float(of_truth.mean()))
                curves[f"calibration_error{suffix}"].append(float(calibration_error(reliability(logs, clusters))))

            curves["nll_of_priors"].append(-float(log_priors[clusters].mean()))
            is_right = (as_trained.argmax(1) == truth).double()
            curves["accuracy"].append(float(is_right.mean()))
            if len(held_out) > 1:
                of_buckets = is_right.split([*map(len, held_out)])
                curves["accuracy_by_bucket"].append([float(found.mean()) for found in of_buckets])

            # If the clusters were drawn from the router's own probabilities, it would be perfectly calibrated.
            perfect = calibrated[judged]
            sums = reliability(perfect.double(), choose(perfect.exp(), uniform[sample_number][judged]))
            curves["calibration_error_by_chance"].append(float(calibration_error(sums)))

    return figures


def _log_probabilities(ensemble: Ensemble, noisy: Sequence[Noisy], branch: str) -> Tensor:
    found = []
    for samples, x_t, t in noisy:
        condition = samples.condition if branch == "conditional" else None
        found.append(ensemble.probabilities(x_t, t, condition))

    return torch.cat(found).clamp_min(1e-30).log()


def _cat(samples: Sequence[Samples], name: str) -> Int[Tensor, " n"]:
    return torch.cat([getattr(of_shape, name) for of_shape in samples])


def _noisy(samples: Samples, seed: int, index: int) -> Iterator[Noisy]:
    """Yield the samples in batches, each with its ``x_t`` and ``t`` at one of the fixed times."""
    x_0 = samples.x_0
    t = x_0.new_full((len(x_0),), float(stratified_timesteps()[index]))
    noise = torch.randn(x_0.shape, generator=keyed_generator(seed, "diagnosis", index))
    x_t = interpolate(x_0, noise.to(x_0.device), t)
    for rows in torch.arange(len(x_0), device=x_0.device).split(BATCH_SIZE):
        yield samples.rows(rows), x_t[rows], t[rows]


def _read(run: Run, side: str, max_num: int, device: torch.device) -> dict[Bucket | None, Samples]:
    """Read at most ``max_num`` samples of all clusters, evenly spaced, by bucket; training samples without conditions.

    Captions are encoded on ``device``; the samples are on the CPU.

    Raises:
        UserError: there are none, or shards are damaged.
    """
    shards, counts, _ = open_side(run.folder.shards, run.manifest, side)
    num = min(len(shards), max_num)
    names = None
    if side == TRAIN:
        names = ("x_0", "cluster", "sample_id")

    objective = build_objective(run.member(MONOLITH), run, nn.Identity())
    found = {}
    for bucket, chosen in sections(counts, num).items():
        columns = shards.take(np.array(chosen) * len(shards) // num, names)
        condition = None
        if side != TRAIN and objective.member.condition.kind != "none":
            parts = []
            for rows in torch.arange(len(chosen)).split(BATCH_SIZE):
                part = objective.condition({name: values[rows].to(device) for name, values in columns.items()})
                assert part is not None, "the member has a condition"
                parts.append(part)

            condition = Condition.cat(parts).to("cpu")

        found[bucket] = Samples(objective.x_0(columns), columns["cluster"], columns["sample_id"], condition)

    return found
