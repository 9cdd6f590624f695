"""Goodput of islands against one synchronous job on the same nodes, by simulation; ``faults.py --simulate``.

Eight nodes of eight GPUs. Each node fails after an exponentially distributed time and is back ``DOWN`` later, whatever
the others do. Islands: each node trains a member of its own. Synchronous: one job trains while all eight nodes are up,
and starts again from its newest checkpoint after each failure. A job needs ``START`` before its first step, loses
``PAUSE`` at each checkpoint, and loses what it did since the newest one, because its disk is gone. It writes one every
``INTERVAL``, or as often as is best at that rate (Young 1974: the root of twice the pause times the mean time between
failures), but never more often than one can be uploaded. Goodput: the time of the steps that are kept, over all time.

Goodput of a job on one node, with r failures per second (Daly 2006, but none while it is down):

    INTERVAL / ((1 / r + DOWN) * exp(r * START) * (exp(r * (INTERVAL + PAUSE)) - 1))

The rates are published. ``DOWN`` and ``UPLOAD`` are assumed. So is that nodes fail one by one, and that 64 GPUs step
together as fast as eight times 8 do, which favours the synchronous job.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

import numpy as np
from common import Report, save_figure
from matplotlib.figure import Figure

NODES = 8
HOUR = 3600.0
DOWN = 300.0
"""Seconds until a node is replaced, assumed."""
START = 60.0
"""Seconds from the start of a process to its first step: the 45 of a lease that nobody renews, and a start."""
PAUSE = 0.54
"""Seconds lost by a checkpoint of 0.52 GB that is written in the background (``results/checkpoints.json``)."""
INTERVAL = 600.0
"""Default of ``island.publish_every_n_minutes``."""
UPLOAD = 10.0
"""Seconds to publish a checkpoint, the shortest interval."""
RATES = {
    "Llama 3": 54 * 24 * 16384 / 419 / 8,
    "spot": 3065.9 / 600,
    "a fault a minute": 300 / 8 / 60,
}
"""Hours between two failures of a node with 8 GPUs. Llama 3: 419 in 54 days on 16,384 GPUs (arXiv 2407.21783). Spot:
600 losses in 3,066 hours of instances (SkyPilot's traces of V100 instances, four in each of three zones, August 2023).
A fault a minute: torchft's test on 300 GPUs."""


def up_times(hours: float, down: float, horizon: float, generator: np.random.Generator) -> np.ndarray:
    """Begin and end of each time that a node is up, in seconds, [n, 2].

    Args:
        hours: mean hours from its return to the next failure.
        down: seconds until it is back.
        horizon: seconds to cover.
        generator: of the failures.
    """
    lasting = generator.exponential(hours * HOUR, int(3 * horizon / (hours * HOUR + down)) + 100)
    ends = np.cumsum(lasting + down) - down
    times = np.stack([ends - lasting, ends], 1)
    return np.minimum(times[times[:, 0] < horizon], horizon)


def all_up(nodes: Sequence[np.ndarray]) -> np.ndarray:
    """Begin and end of each time that all nodes are up, [n, 2]; a failure of any ends it."""
    times = np.concatenate([node.T.ravel() for node in nodes])
    changes = np.concatenate([np.repeat([1, -1], len(node)) for node in nodes])
    order = np.lexsort((changes, times))
    (first,) = np.nonzero(np.cumsum(changes[order]) == len(nodes))
    return np.stack([times[order][first], times[order][first + 1]], 1)


def kept(times: np.ndarray, interval: float) -> float:
    """Seconds of training that are kept, of a job that may run at ``times``, [n, 2]."""
    lasting = (times[:, 1] - times[:, 0] - START).clip(0)
    return float((lasting // (interval + PAUSE)).sum() * interval)


def best_interval(hours: float) -> float:
    """Young's interval between checkpoints in seconds, but not below an upload's."""
    return float(max(np.sqrt(2 * PAUSE * hours * HOUR), UPLOAD))


def goodputs(hours: float, *, best: bool, failures: int = 4000) -> tuple[float, float]:
    """Goodput of the islands and of the synchronous job.

    Args:
        hours: mean hours between two failures of a node.
        best: whether each writes checkpoints as often as is best for it, not every ``INTERVAL``.
        failures: number of each node's failures to simulate.
    """
    horizon = failures * (hours * HOUR + DOWN)
    nodes = []
    for number in range(NODES):
        nodes.append(up_times(hours, DOWN, horizon, np.random.default_rng(number)))

    own = common = INTERVAL
    if best:
        own = best_interval(hours)
        common = best_interval(hours / NODES)

    islands = sum(kept(node, own) for node in nodes) / NODES
    return islands / horizon, kept(all_up(nodes), common) / horizon


def simulate(options: Namespace) -> None:
    """Print goodputs at the published rates, and draw them over all rates."""
    title = "Goodput of 8 islands of 8 GPUs and of one synchronous job on 64"
    report = Report(title, ["failures", "of a node every", "checkpoint", "islands", "one job"])
    failures = 400 if options.quick else 4000
    figure = Figure((7, 4), layout="constrained")
    axes = figure.add_subplot()
    times = np.geomspace(0.2, 20000, 40)
    for best, end, name, style in ((False, "", "every 10 minutes", "-"), (True, "_best", "as often as is best", "--")):
        for rate, hours in RATES.items():
            islands, common = goodputs(hours, best=best, failures=failures)
            report.row(rate, f"{hours:,.1f} h", name, f"{islands:.3f}", f"{common:.3f}")
            key = rate.lower().replace(" ", "_") + end
            report.figures |= {f"islands_{key}": islands, f"synchronous_{key}": common}

        curves = np.array([goodputs(hours, best=best, failures=failures) for hours in times])
        axes.semilogx(times, curves[:, 0], style, color="C0", label=f"8 islands, checkpoint {name}")
        axes.semilogx(times, curves[:, 1], style, color="C3", label=f"one synchronous job, checkpoint {name}")

    for rate, hours in RATES.items():
        axes.axvline(hours, color="0.7", zorder=0)
        axes.annotate(rate, (hours, 1.02), ha="center", annotation_clip=False)

    axes.set(xlabel="hours between two failures of a node of 8 GPUs", ylabel="goodput", ylim=(0, 1))
    axes.legend(loc="lower right", fontsize=8)
    report.finish(options.json)
    if options.json is not None:
        save_figure(options.json.with_suffix(".png"), figure)
