"""Metrics reduce over ranks: two processes, each with half of the features, compute what one computes."""

import json
import os
import subprocess
import sys

import pytest
import torch
from tiny_runs import RANK_VARIABLES, ROOT

from ddm_lightning.core.registry import METRICS

NAMES = ("fid", "kid", "precision-recall")
PROGRAM = """
import json, sys
import torch
from torch import distributed
from ddm_lightning.core.registry import METRICS

file, rank, features = sys.argv[1], int(sys.argv[2]), torch.load(sys.argv[3])
distributed.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
found = {}
for name in json.loads(sys.argv[4]):
    metric = METRICS.build(name, {})
    for real, rows in enumerate(features):
        metric.update(rows.tensor_split(2)[rank], real=bool(real))
    found |= metric.scores()
print(json.dumps(found))
"""


@pytest.mark.slow
def test_two_ranks_are_one(tmp_path):
    generator = torch.Generator().manual_seed(0)
    features = [torch.randn(num, 6, generator=generator) + shift for num, shift in ((41, 0.3), (30, 0.0))]
    torch.save(features, tmp_path / "features.pt")
    environment = {name: value for name, value in os.environ.items() if name not in RANK_VARIABLES}
    more = [str(tmp_path / "features.pt"), json.dumps(NAMES)]
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(tmp_path / "store"), str(rank), *more],
            cwd=ROOT,
            env={**environment, "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    found = [json.loads(rank.communicate(timeout=200)[0]) for rank in ranks]
    expected = {}
    for name in NAMES:
        metric = METRICS.build(name, {})
        for real, rows in enumerate(features):
            metric.update(rows, real=bool(real))
        expected |= metric.scores()
    for one in found:
        assert one.keys() == expected.keys()
        for name, score in expected.items():
            assert one[name] == pytest.approx(list(score), rel=1e-9)
