"""An expert leaves an ensemble, and comes back as one that nobody knows: KID and shares.

``bayes`` starts from the priors and asks no router; nothing is trained. For ``full`` the router is extended by the
expert that comes back. Needs a finished run, which it trains if it is missing.

    python benchmarks/changes.py -c experiments/mix_4x.yaml --json benchmarks/results/changes.json
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import replace

import torch
from common import Report, call, load, parse, parser, run, use_all_threads
from flop_scores import PLAIN, Judge
from split import encoder_of

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.ensemble.changes import added, removed
from ddm_lightning.ensemble.manifest import EnsembleManifest
from ddm_lightning.evaluation.metrics.features import kernel_distance
from ddm_lightning.evaluation.shares import total_variation
from ddm_lightning.members.run import Run
from ddm_lightning.training.extension import extend_router
from ddm_lightning.use.ensemble import DecentralizedEnsemble
from ddm_lightning.use.saved import experiment_of, manifest_with_about

QUICK_NUM = 64


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    cli = parser(__doc__ or "")
    cli.add_argument("--expert", default="expert-0", metavar="NAME", help="the one that leaves (expert-0)")
    cli.add_argument("--num", type=int, default=2000, help=f"images per ensemble (2000; {QUICK_NUM} with --quick)")
    options = parse(cli, arguments)
    experiment, num = load(options), min(options.num, QUICK_NUM) if options.quick else options.num
    original = Run(experiment)
    folder = original.folder
    if not folder.ensemble.exists():
        call("fit", options)
    use_all_threads()
    manifest, encoder = original.manifest, encoder_of(original)
    judge = Judge(original, [PLAIN], folder.root / "benchmarks" / "features")
    real = judge.real[PLAIN.name]
    whole = manifest_with_about(folder.root, experiment)
    leaving = original.member(options.expert).clusters[0]
    without = removed(whole, options.expert)
    # As an expert of another partition, it gets a number of its own, and the router has to go.
    stranger = replace(without, partition_sha256="0" * 64)
    images = manifest.clusters[leaving].train + manifest.clusters[leaving].held_out
    back = added(stranger, folder.artifact(options.expert), images)
    router, share = folder.root / "benchmarks" / "extended-router", images / manifest.num_samples
    shutil.rmtree(router, ignore_errors=True)
    extend_router(stranger, folder.artifact(options.expert), share, folder, folder, router)
    known = added(stranger, folder.artifact(options.expert), images, router)
    report = Report(
        f"An expert leaves and comes back: {experiment.name}",
        ["ensemble", "experts", "KID × 1000, all kinds", "KID × 1000, kinds that stayed", "shares TV", "of the leaver"],
    )
    stays = judge.held_out.clusters != leaving
    bayes = replace(experiment.sample, strategy="bayes", strategy_params={"router_prior": False}, solver="ancestral")
    full = replace(bayes, strategy="full", strategy_params={})
    ways = [(bayes, "before", whole), (bayes, "removed", without), (bayes, "added", back)]
    ways += [(full, "before", whole), (full, "removed", without), (full, "added", known)]
    for settings, name, ensemble in ways:
        x_0 = sampled(ensemble, settings, num, experiment.seed)
        found, wanted = judge.features(encoder.decode(x_0))[PLAIN.name], judge.priors
        if name == "removed":
            wanted = wanted.index_fill(0, torch.tensor([leaving]), 0)
        own = judge.classifier.shares(found)
        figures = {
            "experts": float(len(ensemble.experts)),
            "kid_all": 1e3 * kernel_distance(found, real).value,
            "kid_stayed": 1e3 * kernel_distance(found, real[stays]).value,
            "shares_tv": total_variation(own, wanted / wanted.sum()),
            "share_of_leaver": float(own[leaving]),
        }
        suffix = f"{settings.strategy}_{name}"
        report.figures |= {f"{key}_{suffix}": value for key, value in figures.items()}
        experts, *scores = figures.values()
        report.row(f"{settings.strategy}, {name}", f"{experts:.0f}", *(f"{score:.3f}" for score in scores))
    report.note(
        f"{num} images each from the same noise. KID on random convolutions of the pixels, to held-out images of all "
        f"clusters and of all but that of {options.expert}. Shares by a classifier on the same features, against the "
        "priors of the clusters present."
    )
    report.finish(options.json)


def sampled(manifest: EnsembleManifest, settings: SampleConfig, num: int, seed: int) -> torch.Tensor:
    """Images of an ensemble without condition."""
    experiment = replace(experiment_of(manifest), sample=settings, seed=seed)
    return DecentralizedEnsemble(manifest, experiment).latents(None, num, batch_size=125)


if __name__ == "__main__":
    run(main)
