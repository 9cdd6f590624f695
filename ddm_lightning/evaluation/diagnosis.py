"""Diagnose an ensemble: experts by cluster, the router by time, and the clusters' shares among samples."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table
from torch import Tensor, nn
from torch.nn import functional as F

from ddm_lightning.core.devices import device_of
from ddm_lightning.core.files import atomic_write, atomic_write_json
from ddm_lightning.core.formatting import Bars, table
from ddm_lightning.core.grids import heat_map
from ddm_lightning.ensemble.routing import choose, strategy_of
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.evaluation.image_sets import open_side
from ddm_lightning.evaluation.shares import ClusterShares, total_variation
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import interpolate
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.flow.timesteps import stratified_timesteps
from ddm_lightning.members.member import MONOLITH
from ddm_lightning.members.run import Run
from ddm_lightning.networks.calibration import calibration_error, is_fitted, reliability
from ddm_lightning.shards.manifest import HELD_OUT, TRAIN
from ddm_lightning.training.objective import build_objective
from ddm_lightning.use.ensemble import DecentralizedEnsemble
from ddm_lightning.use.saved import manifest_with_about
from ddm_lightning.use.settings import resolve

STRATEGIES_SHOWN = ("full", "top-1", "sample-1", "bayes")
MAX_HELD_OUT = 2048
MAX_TRAIN = 20_000
# A smaller set is repeated with other noise.
MIN_ROWS = 512
MAX_DRAWS = 8
BATCH_SIZE = 64
# Share of the priors' NLL from which on a router tells nothing; above this t it need not.
MOST_UNTOLD = 0.98
HIGHEST_BLIND = 0.85
# Side of the images whose pixels the classifier of clusters sees.
CLASSIFIER_SIDE = 12

Figures = dict[str, Any]
"""Figures as JSON."""


@dataclass(frozen=True, eq=False)
class Samples:
    """Samples of all clusters, in memory."""

    x_0: Float[Tensor, "n c h w"]
    clusters: Int[Tensor, " n"]
    sample_ids: Int[Tensor, " n"]
    condition: Condition | None

    def rows(self, rows: Int[Tensor, " m"]) -> Samples:
        """The chosen samples."""
        return Samples(
            self.x_0[rows], self.clusters[rows], self.sample_ids[rows], self.condition and self.condition.rows(rows)
        )

    def to(self, device: torch.device) -> Samples:
        """The same samples on ``device``."""
        return Samples(
            self.x_0.to(device),
            self.clusters.to(device),
            self.sample_ids.to(device),
            self.condition and self.condition.to(device),
        )


def diagnose(
    run: Run,
    strategies: Sequence[str] | None,
    num: int,
    overrides: Sequence[str] = (),
    *,
    show_progress: bool = False,
) -> Figures:
    """Diagnose a run's ensemble; write ``diagnosis.json`` and figures to the run's folder ``diagnosis``.

    Args:
        run: a finished run with its shards; the experiment's ``sample`` section says how to sample.
        strategies: strategies whose samples are classified; None for ``STRATEGIES_SHOWN``.
        num: images per strategy.
        overrides: those of the experiment; its ``sample.strategy_params`` go to the given strategies.
        show_progress: whether to show a progress bar on stderr.

    Raises:
        UserError: no ensemble or no held-out samples, or an unknown strategy.
    """
    experiment = run.experiment
    names = strategies or dict.fromkeys([*STRATEGIES_SHOWN, experiment.sample.strategy])
    params = []
    for text in overrides:
        if strategies and text.startswith("sample.strategy_params."):
            params.append(text)

    chosen = {name: resolve(experiment, params, f"--strategy {name}", strategy=name) for name in names}
    device = device_of(experiment.island.accelerator)
    whole = DecentralizedEnsemble(manifest_with_about(run.folder.root, experiment), experiment, device)
    ensemble = whole.field
    priors = ensemble.priors
    ensemble.precision = experiment.sample.precision
    if ensemble.router is None and ensemble.num_clusters > 1 and not strategies:
        chosen = {name: own for name, own in chosen.items() if not strategy_of(own.sample).needs_router}

    train = _read(run, TRAIN, MAX_TRAIN, device)
    held_out = _read(run, HELD_OUT, MAX_HELD_OUT, device)
    with Bars(show=show_progress) as bars:
        task = bars.add_task("experts", total=len(stratified_timesteps()))
        draws = min(MAX_DRAWS, -(-MIN_ROWS // len(held_out.x_0)))  # of noise
        noisy = held_out.rows(torch.arange(len(held_out.x_0)).repeat(draws)).to(device)
        figures: Figures = {
            "num_held_out": len(held_out.x_0),
            "num_judged": int((~is_fitted(held_out.sample_ids)).sum()),
            "num_train": sum(cluster.train for cluster in run.manifest.clusters),
            "num_images": num,
            "seed": experiment.seed,
            "sample": asdict(experiment.sample),
            "priors": priors.tolist(),
            "times": stratified_timesteps().tolist(),
            "experts": expert_figures(ensemble, noisy, experiment.seed, lambda: bars.advance(task)),
            "router": router_figures(ensemble, noisy, experiment.seed),
        }
        classifier = ClusterShares(
            _pixels(train.x_0), train.clusters, _pixels(held_out.x_0), held_out.clusters, ensemble.num_clusters
        )
        given = held_out.rows(torch.arange(num) * len(held_out.x_0) // num)
        # Conditions are those of held-out samples, whose shares differ a little from the priors.
        if given.condition is not None:
            shares = given.clusters.bincount(minlength=len(priors)) / num
        else:
            shares = priors

        found = {}
        for name, settings in chosen.items():
            task = bars.add_task(name, total=num)
            x_0 = whole.with_settings(settings).latents(
                given.condition,
                num,
                batch_size=BATCH_SIZE,
                progress=lambda done, task=task: bars.update(task, completed=done),
                clusters=None if given.condition is None else given.clusters,
            )
            own = classifier.shares(_pixels(x_0))
            found[name] = {
                "solver": settings.sample.solver,
                "shares": own.tolist(),
                "total_variation": total_variation(own, shares),
            }

    by_chance = classifier.by_chance(num, experiment.seed)
    figures["shares"] = {
        "expected": shares.tolist(),
        "by_chance": float(by_chance.mean()),
        "by_chance_95": float(by_chance.quantile(0.95)),
        "classifier_accuracy": classifier.accuracy,
        "strategies": found,
    }
    folder = run.folder.root / "diagnosis"
    folder.mkdir(exist_ok=True)
    write_figures(folder, figures)
    atomic_write_json(folder / "diagnosis.json", figures)
    return figures


@torch.no_grad()
def expert_figures(
    ensemble: Ensemble, held_out: Samples, seed: int, advance: Callable[[], object] = lambda: None
) -> Figures:
    """Measure each cluster's experts on each cluster at 8 fixed times, with the same noise for all.

    Returns:
        ``names`` of each cluster's experts; their ``loss_by_time`` [t][experts][cluster] and its mean ``loss``;
        ``in_cluster`` and ``out_of_cluster`` loss; ``disagreement`` [t], the velocities' variance under the
        router's weights, relative to the square of their mean (empty without a router).
    """
    num_clusters = ensemble.num_clusters
    times = stratified_timesteps()
    counts = held_out.clusters.bincount(minlength=num_clusters).clamp(min=1)
    losses = torch.zeros(len(times), num_clusters, num_clusters, device=held_out.x_0.device)
    disagreement = []
    for index, (x_t, t) in enumerate(_noisy(held_out.x_0, seed)):
        variance = square = 0.0
        for part in torch.arange(len(x_t), device=x_t.device).split(BATCH_SIZE):
            own = held_out.rows(part)
            noisy = x_t[part]
            time = t[part]
            every = torch.ones(len(part), num_clusters, dtype=torch.bool, device=x_t.device)
            found = ensemble.expert_velocities(noisy, time, own.condition, every).transpose(0, 1)
            target = (noisy - own.x_0) / times[index]  # noise - x_0
            losses[index].index_add_(1, own.clusters, (found - target).square().flatten(2).mean(2))
            if ensemble.router is not None:
                weights = ensemble.probabilities(noisy, time, own.condition).T[..., None]
                mean = (weights * found.flatten(2)).sum(0)
                variance += float((weights * (found.flatten(2) - mean).square()).sum())
                square += float(mean.square().sum())

        disagreement += [variance / square] if square else []
        advance()

    losses = (losses / counts).cpu()
    loss = losses.mean(0)
    others = counts.cpu() * (1 - torch.eye(num_clusters))
    return {
        "names": ensemble.cluster_names,
        "loss_by_time": losses.tolist(),
        "loss": loss.tolist(),
        "in_cluster": loss.diagonal().tolist(),
        "out_of_cluster": ((loss * others).sum(1) / others.sum(1).clamp(min=1)).tolist(),
        "disagreement": disagreement,
    }


@torch.no_grad()
def router_figures(ensemble: Ensemble, held_out: Samples, seed: int) -> Figures:
    """Score the router at 8 fixed times, ``unconditional`` and ``conditional``.

    Returns:
        For each branch and time: ``accuracy``; ``nll`` and ``calibration_error`` (ECE), as trained and ``_calibrated``,
        of the samples that did not fit the temperatures; ``nll_of_priors``, the NLL of a router that always answers the
        priors; ``calibration_error_by_chance``, the ECE of a perfectly calibrated router on as many samples, which is
        large on few. Empty without a router.
    """
    if ensemble.router is None:
        return {}

    plain = copy(ensemble)
    plain.temperatures = ((), ())
    is_conditional = ensemble.router_conditional and held_out.condition is not None
    branches = {"unconditional": None, **({"conditional": held_out.condition} if is_conditional else {})}
    judged = ~is_fitted(held_out.sample_ids)
    clusters = held_out.clusters[judged]
    figures: dict[str, dict[str, list[float]]] = {branch: defaultdict(list) for branch in branches}
    for index, (x_t, t) in enumerate(_noisy(held_out.x_0, seed)):
        parts = torch.arange(len(x_t), device=x_t.device).split(BATCH_SIZE)
        # One number for all draws of a sample, because they are not independent.
        uniform = torch.rand(len(x_t), generator=keyed_generator(seed, "chance", index)).to(x_t.device)
        _, first = held_out.sample_ids.unique(return_inverse=True)
        for branch, condition in branches.items():
            own = figures[branch]
            found = {}
            for suffix, of in (("", plain), ("_calibrated", ensemble)):
                probabilities = []
                for part in parts:
                    probabilities.append(
                        of.probabilities(x_t[part], t[part], None if condition is None else condition.rows(part))
                    )

                found[suffix] = torch.cat(probabilities).clamp_min(1e-30).log()
                half = found[suffix][judged].double()
                own[f"nll{suffix}"].append(-float(half.gather(1, clusters[:, None]).mean()))
                own[f"calibration_error{suffix}"].append(float(calibration_error(reliability(half, clusters))))

            own["nll_of_priors"].append(-float(ensemble.priors.to(clusters.device)[clusters].log().mean()))
            own["accuracy"].append(float((found[""].argmax(1) == held_out.clusters).double().mean()))
            perfect = found["_calibrated"][judged]
            sums = reliability(perfect.double(), choose(perfect.exp(), uniform[first][judged]))
            own["calibration_error_by_chance"].append(float(calibration_error(sums)))

    return {branch: dict(own) for branch, own in figures.items()}


def _pixels(x_0: Float[Tensor, "n c h w"]) -> Float[Tensor, "n d"]:
    size = min(x_0.shape[2], CLASSIFIER_SIDE), min(x_0.shape[3], CLASSIFIER_SIDE)
    return F.adaptive_avg_pool2d(x_0.float(), size).flatten(1)


def _noisy(x_0: Float[Tensor, "n c h w"], seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield ``x_t`` and ``t`` at each of the fixed times."""
    for index, t in enumerate(stratified_timesteps().to(x_0.device)):
        noise = torch.randn(x_0.shape, generator=keyed_generator(seed, "diagnosis", index)).to(x_0.device)
        yield interpolate(x_0, noise, t.expand(len(x_0))), t.expand(len(x_0))


def _read(run: Run, side: str, most: int, device: torch.device) -> Samples:
    """Read at most this many samples of all clusters, evenly spaced; training samples without conditions.

    Captions are encoded on ``device``; the samples are on the CPU.

    Raises:
        UserError: there are none, or shards are damaged.
    """
    shards, _ = open_side(run.folder.shards, run.manifest, side)
    num = min(len(shards), most)
    names = None
    if side == TRAIN:
        names = ("x_0", "cluster", "sample_id")

    batch = shards.take(np.arange(num) * len(shards) // num, names)
    objective = build_objective(run.member(MONOLITH), run, nn.Identity())
    condition = None
    if side != TRAIN and objective.member.condition.kind != "none":
        parts = (
            objective.condition({name: values[rows].to(device) for name, values in batch.items()})
            for rows in torch.arange(num).split(BATCH_SIZE)
        )
        condition = Condition.cat(list(filter(None, parts))).to("cpu")

    return Samples(objective.x_0(batch), batch["cluster"], batch["sample_id"], condition)


def write_figures(folder: Path, figures: Mapping[str, Any]) -> None:
    """Draw ``experts.png``, ``router.png`` (with a router) and ``shares.png``."""
    charts = {"experts": _experts(figures), "shares": _shares(figures)}
    if figures["router"]:
        charts["router"] = _router(figures)

    for name, figure in charts.items():
        atomic_write(folder / f"{name}.png", partial(figure.savefig, format="png", dpi=120))


def diagnosis_table(figures: Mapping[str, Any]) -> Table:
    """Loss of each expert on each cluster; the last columns average inside and outside of its own."""
    experts = figures["experts"]
    num = len(experts["loss"])
    parts = zip(experts["names"], experts["loss"], experts["in_cluster"], experts["out_of_cluster"], strict=True)
    rows = []
    for name, losses, own, others in parts:
        rows.append([name, *(f"{loss:.4f}" for loss in (*losses, own)), f"{others:.4f}" if num > 1 else "–"])

    return table(["", *map(str, range(num)), "own", "others"], rows, "held-out loss by cluster")


def diagnosis_lines(figures: Mapping[str, Any]) -> list[str]:
    """One line for each branch of the router and for each strategy, and a warning for what they lack."""
    lines = []
    for branch, scores in figures["router"].items():
        accuracy, nll = (float(np.mean(scores[name])) for name in ("accuracy", "nll_calibrated"))
        before, after = (max(scores[f"calibration_error{suffix}"]) for suffix in ("", "_calibrated"))
        lines.append(
            f"router, {branch}, {figures['num_judged']:,} images: accuracy {accuracy:.3f}, NLL {nll:.3f}, largest ECE "
            f"{before:.3f}, calibrated {after:.3f}, by chance {max(scores['calibration_error_by_chance']):.3f}"
        )
        is_blind = np.array(scores["nll_calibrated"]) > MOST_UNTOLD * np.array(scores["nll_of_priors"])
        blind = [t for t, found in zip(figures["times"], is_blind, strict=True) if found]
        if blind and blind[0] < HIGHEST_BLIND:
            lines.append(
                f"warning: at t = {', '.join(f'{t:.2f}' for t in blind)} this router tells no more than the priors. If "
                "clusters differ there, rare ones lose images under every strategy that asks it there; train it "
                "longer, or at more noise (router.timesteps)"
            )

    shares = figures["shares"]
    expected = ", ".join(f"{share:.3f}" for share in shares["expected"])
    lines.append(f"shares by a classifier of accuracy {shares['classifier_accuracy']:.3f}; expected {expected}:")
    for name, found in shares["strategies"].items():
        own = ", ".join(f"{share:.3f}" for share in found["shares"])
        if found["total_variation"] <= shares["by_chance_95"]:
            verdict = "within chance"
        else:
            verdict = "more than chance"

        lines.append(f"{name} ({found['solver']}): {own}; total variation {found['total_variation']:.3f}, {verdict}")

    return [
        *lines,
        f"{figures['num_images']:,} real images have a total variation of {shares['by_chance']:.3f} by chance, below "
        f"{shares['by_chance_95']:.3f} in 19 of 20 cases; --num takes more",
    ]


def _experts(figures: Mapping[str, Any]) -> Figure:
    experts = figures["experts"]
    times = figures["times"]
    loss = np.array(experts["loss"])
    by_time = np.array(experts["loss_by_time"])
    figure = Figure(figsize=(13, 4), layout="constrained")
    matrix, by_cluster, disagreement = figure.subplots(1, 3)
    # Colours show the excess over the best expert of the cluster.
    heat_map(matrix, loss / loss.min(0) - 1, loss, ".3f", cmap="Blues", vmin=0)
    matrix.set(title="held-out loss (darker is worse)", xlabel="cluster", ylabel="expert")
    own = np.eye(len(loss), dtype=bool)
    curves = {"own cluster": by_time[:, own].mean(1)}
    if len(loss) > 1:
        curves["other clusters"] = by_time[:, ~own].mean(1)

    _curves(by_cluster, "held-out loss by time", times, curves)
    if experts["disagreement"]:
        curves = {"variance / mean²": experts["disagreement"]}
    else:
        curves = {}

    _curves(disagreement, "disagreement of routed experts", times, curves)
    return figure


def _router(figures: Mapping[str, Any]) -> Figure:
    times = figures["times"]
    charts: dict[str, dict[str, Any]] = {
        "held-out accuracy": {"largest cluster": [max(figures["priors"])] * len(times)}
    }
    for branch, scores in figures["router"].items():
        charts["held-out accuracy"][branch] = scores["accuracy"]
        for title, name in (("held-out NLL (nats)", "nll"), ("calibration error (ECE)", "calibration_error")):
            charts.setdefault(title, {})[branch] = scores[name]
            charts[title][f"{branch}, calibrated"] = scores[f"{name}_calibrated"]

        charts["calibration error (ECE)"][f"{branch}, by chance"] = scores["calibration_error_by_chance"]

    figure = Figure(figsize=(4 * len(charts), 5), layout="constrained")
    for axis, (title, curves) in zip(figure.subplots(1, len(charts)), charts.items(), strict=True):
        _curves(axis, title, times, curves)

    return figure


def _curves(axis: Axes, title: str, times: Sequence[float], curves: Mapping[str, Sequence[float]]) -> None:
    for label, values in curves.items():
        axis.plot(times, values, "o-", label=label)

    axis.set(title=title, xlabel="t (1 is noise)")
    axis.set_ylim(0, 1.05 * axis.get_ylim()[1])
    axis.grid(alpha=0.3)
    if curves:
        axis.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.16))


def _shares(figures: Mapping[str, Any]) -> Figure:
    shares = figures["shares"]
    rows = {"expected": shares["expected"]}
    for name, found in shares["strategies"].items():
        rows[f"{name} (TV {found['total_variation']:.3f})"] = found["shares"]

    values = np.array(list(rows.values()))
    figure = Figure(figsize=(4 + len(values[0]), 1 + len(rows) / 2), layout="constrained")
    axis = figure.subplots()
    heat_map(axis, values, values, ".3f", cmap="viridis", vmin=0, aspect="auto")
    axis.set(title="clusters' shares among samples", xlabel="cluster")
    axis.set_yticks(range(len(rows)), list(rows))
    return figure
