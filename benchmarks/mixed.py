"""An ensemble of different experts against one of equal experts: KID by strategy, and held-out error of the velocity.

Trains the experiment as it is, and without ``expert.overrides``: same data, clusters, steps and batches (six minutes).

    python benchmarks/mixed.py --json benchmarks/results/mixed.json
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from common import REPOSITORY, Report, call, load, parse, parser, run
from split import Split, noised, read_split, trained
from torch.nn import functional as F

from ddm_lightning.config.load import to_yaml
from ddm_lightning.core.files import atomic_write_text, read_json
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.members.member import expert_name
from ddm_lightning.shards.manifest import HELD_OUT

METHODS = {"full": ("full", "euler"), "full_ancestral": ("full", "ancestral"), "bayes": ("bayes", "ancestral")}
ENDS = {"value": "", "low": "_low", "high": "_high"}
TIMES = (0.1, 0.3, 0.5, 0.7, 0.9)
NUM_DRAWS = 4
QUICK = ("expert.train.max_steps=100", "router.train.max_steps=100", "evaluate.num_images=64")


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    cli = parser(__doc__ or "", config=str(REPOSITORY / "experiments" / "mixed_4x.yaml"))
    options = parse(cli, arguments)
    mixed = load(options, *(QUICK if options.quick else ()))
    if options.quick:
        mixed = replace(mixed, run_dir=f"{mixed.run_dir}-quick")
    equal = replace(mixed, run_dir=f"{mixed.run_dir}-equal", expert=replace(mixed.expert, overrides={}))
    headings = ["experts", *(f"KID {method}" for method in METHODS), "error of full"]
    num_clusters = mixed.prepare.partition.num_clusters
    report = Report(
        f"Different against equal experts: {mixed.name}", [*headings, *map(expert_name, range(num_clusters))]
    )
    for name, experiment in (("different", mixed), ("equal", equal)):
        file = Path(experiment.run_dir).with_suffix(".yaml")
        atomic_write_text(file, to_yaml(experiment))
        settings = Namespace(config=file, overrides=[])
        trained_run, ensemble = trained(settings)
        cells = []
        for method, (strategy, solver) in METHODS.items():
            out = trained_run.folder.root / "evaluation" / f"mixed-{method}"
            call("evaluate", settings, f"sample.strategy={strategy}", f"sample.solver={solver}", f"--out={out}")
            (score,) = read_json(out / "evaluation.json", "the scores", "run again")["scores"].values()
            report.figures |= {f"kid_{method}_{name}{end}": score[key] for key, end in ENDS.items()}
            cells.append(f"{1e3 * score['value']:.2f} ({1e3 * score['low']:.2f} to {1e3 * score['high']:.2f})")
        errors = velocity_errors(ensemble, read_split(trained_run, HELD_OUT), experiment.seed)
        report.figures |= {f"{of}_error_{name}": error for of, error in errors.items()}
        report.row(name, *cells, *(f"{error:.4f}" for error in errors.values()))
    report.note(
        "KID: times 1000, with its 95 % interval. Errors: mean squared difference to noise - x_0 over held-out images,"
    )
    report.note("t = 0.1 … 0.9; of the mixture (full), and of each expert alone on its own cluster.")
    report.finish(options.json)


def velocity_errors(ensemble: Ensemble, split: Split, seed: int) -> dict[str, float]:
    """Mean squared error of the ensemble's velocity (``full``), and of each expert's on its own cluster."""
    errors = {"full": 0.0} | {f"expert_{k}": 0.0 for k in range(ensemble.num_clusters)}
    for t in TIMES:
        for draw in range(NUM_DRAWS):
            x_t, time = noised(split.x_0, t, draw, seed, purpose="mixed"), torch.full((len(split),), t)
            target = (x_t - (1 - t) * split.x_0) / t - split.x_0
            found = {"full": (ensemble.velocity(x_t, time), target)}
            own = F.one_hot(split.clusters, ensemble.num_clusters).bool()
            experts = ensemble.expert_velocities(x_t, time, None, own)
            for k in range(ensemble.num_clusters):
                found[f"expert_{k}"] = (experts[own[:, k], k], target[own[:, k]])
            for name, (velocity, wanted) in found.items():
                errors[name] += float((velocity - wanted).square().mean()) / (len(TIMES) * NUM_DRAWS)
    return errors


if __name__ == "__main__":
    run(main)
