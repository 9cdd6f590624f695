r"""Choose the expert anew at each step: does the error fall as theory says, and what makes it large?

2606.15835 proves that per-step switching converges to the exact flow in Wasserstein distance at O(N^-1/2 + ε), with
N steps and experts and a router that are wrong by ε. Here ``sample-each-step`` and ``full`` start from the same noise.
The error is the RMS distance, per number, to the end of ``full`` after 2,560 steps; it bounds the Wasserstein distance.
Three ensembles: four Gaussian clusters in closed form; the training digits of ``digits_2x`` in closed form, whose flow
ends in single points; and the trained ``digits_2x``.

    python benchmarks/switching.py --json benchmarks/results/switching.json
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from common import REPOSITORY, Report, parse, parser, run
from finite_set import FiniteSetOracle
from matplotlib.figure import Figure
from split import encoder_of, read_split, trained
from torch import Tensor, nn

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.core.registry import FEATURES
from ddm_lightning.ensemble.sampler import sample
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.evaluation.metrics.features import kernel_distance
from ddm_lightning.flow.condition import Condition
from ddm_lightning.shards.manifest import TRAIN

STEPS, REFERENCE_STEPS = tuple(10 * 2**i for i in range(8)), 2560
ROUTER_STEPS, NUM_IMAGES = 160, 200
STRATEGIES = {"switching": "sample-each-step", "full": "full"}
TEMPERATURES = (0.25, 1.0, 4.0, 1000.0)
"""Divisors of the router's logits; the last one makes all experts equally probable."""
CORNERS = torch.tensor([[2.0, 2.0], [-2.0, 2.0], [-2.0, -2.0], [2.0, -2.0]])


class Exact(nn.Module):
    """Expert ``k``, or the router for None, of the points of an oracle, each widened to N(point, std²I)."""

    prediction = "velocity"

    def __init__(self, oracle: FiniteSetOracle, k: int | None, std: float = 0.0) -> None:
        super().__init__()
        self.oracle, self.k, self.std = oracle, k, std

    def forward(self, x_t: Tensor, t: Tensor, _: Condition | None) -> Tensor:
        """The exact velocity at ``x_t`` [b, c, h, w], or the logits of the exact posterior [b, K]."""
        time = t.reshape(-1, 1, 1, 1)
        # x_t is (1-t)·point + noise of this size: the oracle's x_t at another time, scaled.
        size = ((1 - time) ** 2 * self.std**2 + time**2).sqrt()
        x, share = x_t / (1 - time + size), size / (1 - time + size)
        if self.k is None:
            return self.oracle.cluster_posterior(x, share.flatten()).log()
        point = x - share * self.oracle.velocity(x, share.flatten(), self.k)
        return (time - (1 - time) * self.std**2) / size**2 * (x_t - (1 - time) * point) - point


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    options = parse(parser(__doc__ or "", config=str(REPOSITORY / "experiments" / "digits_2x.yaml")), arguments)
    steps, reference = (STEPS[:4], ROUTER_STEPS) if options.quick else (STEPS, REFERENCE_STEPS)
    trained_run, ours = trained(options)
    split = read_split(trained_run, TRAIN)
    clusters = torch.tensor([0, 1, 1, 2, 2, 2, 3, 3, 3, 3])  # priors 0.1 to 0.4
    corners, digits = (
        FiniteSetOracle(CORNERS[clusters].reshape(-1, 1, 1, 2), clusters, 4),
        FiniteSetOracle(split.x_0, split.clusters, 2),
    )
    ensembles = {
        "gaussians": exact_ensemble(corners, clusters, 0.4),
        "digits": exact_ensemble(digits, split.clusters, 0.0),
        "digits_2x": ours,
    }
    report = Report("Error of the end after N steps", ["ensemble, strategy", *map(str, steps), "slope"])
    figure = Figure((6, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, ensemble in ensembles.items():
        num, shape = (1000, (1, 1, 2)) if name == "gaussians" else (32, (3, 8, 8))
        end = ends(ensemble, num, shape, "full", reference)
        for way, strategy in STRATEGIES.items():
            found = [ends(ensemble, num, shape, strategy, n) for n in steps]
            errors = [rms(one - end) for one in found]
            laws = [rms(one.sort(0).values - end.sort(0).values) for one in found]
            slope = float(np.polyfit(np.log(steps), np.log(errors), 1)[0])
            report.row(f"{name}, {way}", *(f"{error:.4f}" for error in errors), f"{slope:.2f}")
            axes.loglog(steps, errors, "s-" if way == "full" else "o-", lw=1, label=f"{name}, {way}: slope {slope:.2f}")
            report.figures[f"slope_{name}_{way}"] = slope
            for n, error, law in zip(steps, errors, laws, strict=True):
                report.figures |= {f"{name}_{way}_{n}": error, f"{name}_{way}_law_{n}": law}
            for temperature in TEMPERATURES:
                x_0 = ends(ensemble, num, shape, strategy, min(ROUTER_STEPS, *steps[-2:]), temperature)
                report.figures[f"{name}_{way}_temperature_{temperature:g}"] = rms(x_0 - end)
    images, features = encoder_of(trained_run), FEATURES.build("random-convolutions", {})
    real = torch.from_numpy(features.encode(images.decode(split.x_0)))
    for way, strategy in STRATEGIES.items():
        for n in steps[:4]:
            made = images.decode(ends(ours, NUM_IMAGES, (3, 8, 8), strategy, n))
            report.figures[f"kid_{way}_{n}"] = kernel_distance(torch.from_numpy(features.encode(made)), real).value
    axes.loglog(steps, [(n / steps[0]) ** -0.5 for n in steps], "k:", lw=1, label="slope -0.5")
    axes.set(xlabel="steps", ylabel="RMS distance to the exact end")
    axes.legend(fontsize=7)
    report.note(f"RMS distance per number to the end of `full` after {reference:,} steps, from the same noise.")
    report.finish(options.json, figure)


def exact_ensemble(oracle: FiniteSetOracle, clusters: Tensor, std: float) -> Ensemble:
    """The exact ensemble of widened points, with the clusters' shares as priors."""
    priors = (clusters.bincount() / len(clusters)).tolist()
    return Ensemble([Exact(oracle, k, std) for k in range(len(priors))], Exact(oracle, None, std), priors)


def ends(
    ensemble: Ensemble, num: int, shape: tuple[int, int, int], strategy: str, num_steps: int, temperature: float = 1.0
) -> Tensor:
    """x_0 of ``num`` samples by Euler steps."""
    settings = SampleConfig(strategy=strategy, solver="euler", num_steps=num_steps, router_temperature=temperature)
    return sample(ensemble, None, num, shape, settings, shift=1.0, seed=0, batch_size=num)


def rms(differences: Tensor) -> float:
    """Root of the mean square of all numbers."""
    return float(differences.square().mean().sqrt())


if __name__ == "__main__":
    run(main)
