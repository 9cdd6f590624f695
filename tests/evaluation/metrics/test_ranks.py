"""Metrics reduce over ranks: two processes, each with half of the features, compute what one computes."""

import pytest
import torch
from training.two_processes import WORLD, in_two_processes

from ddm_lightning.core.registry import METRICS


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_two_ranks_are_one():
    generator = torch.Generator().manual_seed(0)
    features = [torch.randn(num, 6, generator=generator) + shift for num, shift in ((41, 0.3), (30, 0.0))]

    def scores(rank=None):
        found = {}
        for name in ("fid", "kid", "precision-recall"):
            metric = METRICS.build(name, {})
            for real, rows in enumerate(features):
                metric.update(rows if rank is None else rows.tensor_split(WORLD)[rank], real=bool(real))
            found |= {name: list(score) for name, score in metric.scores().items()}
        return found

    expected = scores()
    for found in in_two_processes(scores).values():
        assert found.keys() == expected.keys()
        for name, score in expected.items():
            assert found[name] == pytest.approx(score, rel=1e-9)
