"""Time of sampling from an ensemble: over a monolith's, with experts that take turns, over a plain loop.

On a CPU the monolith and top-1 are timed with one thread, too: few rows per expert occupy many threads badly.
The networks have random weights, which do not change the time; the router spreads the rows evenly over the experts.
All ways sample the same batch in turns, in one process; ratios are medians over the rounds.

    python benchmarks/sampling.py --json benchmarks/results/sampling.json
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from functools import partial
from pathlib import Path

import torch
from common import Report, device_of, load, parse, parser, run
from safetensors.torch import load_file, save_file
from step_clock import HEADINGS, Seconds, add_ratio, in_turn
from torch import Tensor, nn

from ddm_lightning.config.experiment import Experiment, SampleConfig
from ddm_lightning.ensemble.residency import ResidentExperts
from ddm_lightning.ensemble.sampler import sample
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.path import expand_rows
from ddm_lightning.flow.timesteps import sampling_times
from ddm_lightning.members.member import Member
from ddm_lightning.members.roles import MONOLITH, ROUTER
from ddm_lightning.shards.manifest import DataSizes

# A network large enough that its products, not Python, take the time on a CPU.
SIZES = tuple(f"expert.network.params.{size}" for size in ("width=256", "depth=8", "num_heads=4"))
BATCH_SIZE = 64
NUM_STEPS = 2
ROUNDS = (7, 2)
"""In all, and with ``--quick``."""
ONE_THREAD = ", one thread"
RATIOS = {
    "top1_over_monolith": ("top-1", "monolith"),
    "top1_over_monolith_one_thread": (f"top-1{ONE_THREAD}", f"monolith{ONE_THREAD}"),
    "residency_over_resident": ("full, two experts at a time", "full"),
    "ours_over_paper_loop": ("top-1", "top-1, plain loop"),
}
"""Figure: two ways that are compared."""


def main(arguments: Sequence[str] | None) -> None:
    """Run the benchmark."""
    options = parse(parser(__doc__ or "", config="experiments/mix_8x.yaml", device=True), arguments)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
    options.overrides = options.overrides or SIZES
    experiment = load(options)
    device = device_of(options)
    num_rounds = ROUNDS[options.quick]
    with tempfile.TemporaryDirectory() as folder:
        ways = ways_of(experiment, device, Path(folder))
        times = in_turn(ways, device, num_rounds)
        if device.type == "cpu":
            torch.set_num_threads(1)
            few = {f"{name}{ONE_THREAD}": ways[name] for name in ("monolith", "top-1")}
            times |= in_turn(few, device, num_rounds)

    report_of(times, experiment).finish(options.json)


class EvenRouter(nn.Module):
    """A router that computes what it costs and then spreads the rows evenly; an untrained one knows no cluster."""

    def __init__(self, router: nn.Module) -> None:
        super().__init__()
        self.router = router
        self.blocks = router.blocks

    def forward(self, *inputs: Tensor | None) -> Tensor:
        """Logits that make row i surest of cluster i mod K."""
        logits: Tensor = self.router(*inputs)
        num_rows, num_clusters = logits.shape
        return torch.eye(num_clusters).to(logits).repeat(num_rows, 1)[:num_rows]


def ways_of(experiment: Experiment, device: torch.device, folder: Path) -> dict[str, Callable[[], object]]:
    """Ways to sample one batch, by name."""
    edge = experiment.prepare.images.size or 32
    sizes = DataSizes((3, edge, edge), 768, (77, 768), 1000)
    num_clusters = experiment.prepare.partition.num_clusters
    torch.manual_seed(0)
    router = EvenRouter(Member.resolve(ROUTER, experiment, sizes).build_network()).to(device)
    experts = []
    hosts = []
    for k in range(num_clusters):
        expert = Member.resolve(MONOLITH, experiment, sizes).build_network().eval()
        for parameter in expert.parameters():
            nn.init.normal_(parameter, std=0.02)  # networks begin as 0

        save_file(expert.state_dict(), folder / f"{k}.safetensors")
        hosts.append(deepcopy(expert))
        hosts[k].load_state_dict(load_file(folder / f"{k}.safetensors"), assign=True)  # pages of the file
        experts.append(expert.to(device))

    priors = [1 / num_clusters] * num_clusters
    ensemble = Ensemble(experts, router, priors)
    in_turns = Ensemble(ResidentExperts(hosts, device, 2), router, priors)

    def way(ensemble: Ensemble, strategy: str) -> Callable[[], object]:
        settings = SampleConfig(strategy=strategy, solver="euler", num_steps=NUM_STEPS)
        given = (ensemble, None, BATCH_SIZE, sizes.x_shape, settings)
        return partial(sample, *given, shift=1.0, seed=0, batch_size=BATCH_SIZE)

    ways = {"monolith": way(Ensemble(experts[:1], None, [1.0]), "full")}
    ways["top-1"] = way(ensemble, "top-1")
    ways["top-1, plain loop"] = partial(plain_loop, experts, router, sizes.x_shape, device)
    ways["full"] = way(ensemble, "full")
    ways["full, two experts at a time"] = way(in_turns, "full")
    return ways


@torch.no_grad()
def plain_loop(
    experts: Sequence[nn.Module], router: nn.Module, x_shape: tuple[int, int, int], device: torch.device
) -> Tensor:
    """Top-1 sampling as the paper's sum is usually written: all experts on all rows, then their weights."""
    x = torch.randn(BATCH_SIZE, *x_shape).to(device)
    times = sampling_times(NUM_STEPS, 1.0).tolist()
    for t, s in itertools.pairwise(times):
        rows = torch.full((BATCH_SIZE,), t, device=device)
        chosen = router(x, rows, None).argmax(1)
        velocity = torch.zeros_like(x)
        for k, expert in enumerate(experts):
            velocity += expand_rows((chosen == k).to(x), x) * expert(x, rows, None)

        x = x + (s - t) * velocity

    return x


def report_of(times: Mapping[str, list[Seconds]], experiment: Experiment) -> Report:
    """The table and the figures."""
    experts = f"K = {experiment.prepare.partition.num_clusters} experts of {experiment.expert.network.params}"
    title = f"Sampling {BATCH_SIZE} images in {NUM_STEPS} steps: {experts}"
    report = Report(title, HEADINGS)
    for figure, (way, other) in RATIOS.items():
        if way in times:
            add_ratio(report, figure, f"{way} (ours), {other} (other)", times[way], times[other])

    return report


if __name__ == "__main__":
    run(main)
