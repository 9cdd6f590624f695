"""The trained router against a linear probe, on the same held-out samples with the same noise, by time.

Both see only the noisy sample and t. The router's figures with the condition are printed beside them.

    python benchmarks/router.py -c experiments/emoji_4x.yaml --json benchmarks/results/router.json
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence

import probe
import torch
from common import Report, by_time, call, console, load, parse, parser, progress, run, save_figure, use_all_threads
from jaxtyping import Float
from matplotlib.figure import Figure
from router_scores import (
    TIMES,
    Classifier,
    RoutingScore,
    router_classifier,
    score_by_time,
    standard_error,
)
from split import Split, read_split
from torch import Tensor, nn

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.members.artifact import load_network
from ddm_lightning.members.member import ROUTER
from ddm_lightning.members.run_folder import RunFolder, open_run
from ddm_lightning.shards.manifest import HELD_OUT, TRAIN, Manifest

NUM_DRAWS = 8
WINS_UP_TO = 0.9
ROUTER_NAME, CONDITIONAL_NAME, PROBE_NAME = "router", "router with condition", "linear probe"

Scores = Mapping[str, Sequence[RoutingScore]]


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    options = parse(parser(__doc__ or ""), arguments)
    experiment = load(options)
    folder = RunFolder.of(experiment)
    network = _trained_router(folder, experiment, options)
    use_all_threads()
    manifest = Manifest.read(folder.root)
    held_out = read_split(folder, manifest, HELD_OUT)
    training = _training(read_split(folder, manifest, TRAIN), experiment, quick=options.quick)

    def scores_of(classifier: Classifier) -> list[RoutingScore]:
        return score_by_time(classifier, held_out.x_0, held_out.clusters, num_draws=NUM_DRAWS, seed=experiment.seed)

    scores = {ROUTER_NAME: scores_of(router_classifier(network, None))}
    condition = held_out.condition(experiment.condition.kind)
    if experiment.router.conditional and condition is not None:
        scores[CONDITIONAL_NAME] = scores_of(router_classifier(network, condition))
    by_accuracy, by_nll = _probes(training)
    scores[PROBE_NAME] = scores_of(by_nll)

    report = _report(scores, scores_of(by_accuracy), held_out)
    path = folder.root / "benchmarks" / "router.png"
    save_figure(path, routing_figure(scores, report.figures["majority_share"], manifest.num_clusters))
    report.show(console())
    print(f"figure: {path}")
    report.write(options.json)


def routing_figure(scores: Mapping[str, Sequence[RoutingScore]], majority: float, num_clusters: int) -> Figure:
    """Plot accuracy and NLL by time, and confidence against accuracy over all times.

    Args:
        scores: scores of each classifier by time; the keys label the legend.
        majority: share of the largest cluster, which is the accuracy of always choosing it.
        num_clusters: K.
    """
    figure = Figure(figsize=(13, 4), layout="constrained")
    accuracy, nll, reliability = figure.subplots(1, 3)
    for name, at_times in scores.items():
        times = [at.t for at in at_times]
        accuracy.plot(times, [at.accuracy for at in at_times], "o-", label=name)
        nll.plot(times, [at.nll for at in at_times], "o-", label=name)
        share = torch.stack([at.share for at in at_times])
        filled = share.sum(0) > 0
        pooled = [
            ((share * torch.stack(parts)).sum(0) / share.sum(0).clamp_min(1e-12))[filled].numpy()
            for parts in ([at.confidence for at in at_times], [at.hits for at in at_times])
        ]
        reliability.plot(*pooled, "o-", label=name)
    accuracy.axhline(majority, color="0.6", linestyle=":", label="largest cluster")
    nll.axhline(float(torch.tensor(float(num_clusters)).log()), color="0.6", linestyle=":", label="uniform")
    reliability.plot([0, 1], [0, 1], color="0.6", linestyle=":", label="calibrated")
    accuracy.set(title="held-out accuracy", xlabel="t (1 is noise)", ylim=(0, 1))
    nll.set(title="held-out NLL (nats)", xlabel="t (1 is noise)", ylim=(0, None))
    reliability.set(title="reliability, all t", xlabel="confidence", ylabel="accuracy", xlim=(0, 1), ylim=(0, 1))
    for axis in (accuracy, nll, reliability):
        axis.legend(fontsize=8)
        axis.grid(alpha=0.3)
    return figure


def _trained_router(folder: RunFolder, experiment: Experiment, options: Namespace) -> nn.Module:
    if not folder.is_finished(ROUTER):
        call("prepare", options)
        call("fit", options, f"member={ROUTER}")
    open_run(experiment, create=False)
    meta, network = load_network(folder.artifact(ROUTER))
    if meta.partition_sha256 != Manifest.read(folder.root).partition_sha256:
        raise UserError(f"{folder.artifact(ROUTER)}: was trained on another partition than {folder.prepared} holds")
    return network


def _training(split: Split, experiment: Experiment, *, quick: bool) -> probe.Training:
    if quick:
        return probe.Training(
            split.x_0, split.clusters, experiment.seed, num_folds=3, strengths=(1e-3, 1e-2), draws=(1,)
        )
    # The probe may use mirrored images if the router did.
    mirrors = (False, True) if experiment.router.train.horizontal_flip else (False,)
    return probe.Training(split.x_0, split.clusters, experiment.seed, mirrors=mirrors)


def _probes(training: probe.Training) -> tuple[Classifier, Classifier]:
    """Classifiers that use the best probe of each time, by accuracy and by NLL."""
    fitted: dict[float, tuple[probe.Probe, probe.Probe]] = {}
    with progress(console()) as bars:
        task = bars.add_task("linear probes", total=probe.num_fits(training, TIMES))
        for t in TIMES:
            best, best_nll, *choices = probe.fit_probe(training, t, lambda fits: bars.advance(task, fits))
            fitted[t] = best, best_nll
            chosen = ", ".join(
                f"C {choice.strength:g}, {choice.num_draws} draws{', mirrored' if choice.mirrored else ''}"
                for choice in choices
            )
            bars.console.print(
                f"t = {t:g}: best probe by accuracy and by NLL: {chosen}", highlight=False, soft_wrap=True
            )

    def by_accuracy(x_t: Float[Tensor, "n c h w"], t: float) -> Float[Tensor, "n K"]:
        return fitted[t][0].log_probabilities(probe.features(x_t))

    def by_nll(x_t: Float[Tensor, "n c h w"], t: float) -> Float[Tensor, "n K"]:
        return fitted[t][1].log_probabilities(probe.features(x_t))

    return by_accuracy, by_nll


def _report(scores: Scores, probe_accuracy: Sequence[RoutingScore], held_out: Split) -> Report:
    """Make the table; ``probe_accuracy`` holds the scores of the probe chosen by accuracy."""
    router, of_probe = scores[ROUTER_NAME], scores[PROBE_NAME]
    conditional = scores.get(CONDITIONAL_NAME)
    report = Report(
        "Router and linear probe on held-out samples",
        ["t", "router acc.", "probe", "difference", "router NLL", "probe", "difference", "router ECE", "probe"]
        + (["acc. | condition", "NLL | condition"] if conditional else []),
    )
    wins = True
    for i, t in enumerate(TIMES):
        better_hits, worse_loss = router[i].hit - probe_accuracy[i].hit, router[i].loss - of_probe[i].loss
        if t <= WINS_UP_TO:
            wins = wins and float(better_hits.mean()) > 0 > float(worse_loss.mean())
        cells = [
            f"{t:.2f}",
            f"{router[i].accuracy:.3f}",
            f"{probe_accuracy[i].accuracy:.3f}",
            f"{float(better_hits.mean()):+.3f} ± {standard_error(better_hits, NUM_DRAWS):.3f}",
            f"{router[i].nll:.3f}",
            f"{of_probe[i].nll:.3f}",
            f"{float(worse_loss.mean()):+.3f} ± {standard_error(worse_loss, NUM_DRAWS):.3f}",
            f"{router[i].calibration_error:.3f}",
            f"{of_probe[i].calibration_error:.3f}",
        ]
        report.row(*cells, *([f"{conditional[i].accuracy:.3f}", f"{conditional[i].nll:.3f}"] if conditional else []))
    majority = float(held_out.clusters.bincount().max() / len(held_out))
    report.figures = {
        **by_time("router_accuracy", TIMES, [at.accuracy for at in router]),
        **by_time("probe_accuracy", TIMES, [at.accuracy for at in probe_accuracy]),
        **by_time("router_nll", TIMES, [at.nll for at in router]),
        **by_time("probe_nll", TIMES, [at.nll for at in of_probe]),
        **by_time("router_ece", TIMES, [at.calibration_error for at in router]),
        **by_time("probe_ece", TIMES, [at.calibration_error for at in of_probe]),
        **(by_time("router_accuracy_conditional", TIMES, [at.accuracy for at in conditional]) if conditional else {}),
        **(by_time("router_nll_conditional", TIMES, [at.nll for at in conditional]) if conditional else {}),
        f"router_wins_up_to_{WINS_UP_TO:g}": float(wins),
        "majority_share": majority,
        "num_held_out": len(held_out),
    }
    report.note(
        f"{len(held_out)} held-out samples with {NUM_DRAWS} noise draws each; ± is one standard error of the "
        f"difference over samples. Always choosing the largest cluster gives {majority:.3f}. Router and probe see only "
        "the noisy sample and t; cross-validation chose one probe for accuracy and one for NLL."
    )
    report.note(f"The router {'wins' if wins else 'does not win'} by accuracy and NLL at every t up to {WINS_UP_TO:g}.")
    return report


if __name__ == "__main__":
    sys.exit(run(main))
