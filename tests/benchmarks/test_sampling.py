"""All ways that the benchmark of sampling times sample the same images."""

from pathlib import Path

import sampling
import torch
from step_clock import Seconds

from ddm_lightning.config.load import load_experiment

SMALL = [f"expert.network.params.{key}" for key in ("width=16", "depth=1", "num_heads=2")]


def test_the_ways_differ_in_time_alone(tmp_path: Path) -> None:
    experiment = load_experiment("experiments/mix_8x.yaml", ["prepare.images.size=8", *SMALL])
    ways = sampling.ways_of(experiment, torch.device("cpu"), tmp_path)
    images = {name: way() for name, way in ways.items()}
    assert torch.equal(images["full, two experts at a time"], images["full"])
    assert not torch.allclose(images["top-1"], images["full"])
    times = {name: [Seconds(k + 1.0, 1.0)] for k, name in enumerate(ways)}
    figures = sampling.report_of(times, experiment).figures
    assert figures["ours_over_paper_loop"] == 2 / 3 and figures["residency_over_resident"] == 5 / 4
