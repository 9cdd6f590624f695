"""Guidance chosen for each seed by the other seeds."""

from __future__ import annotations

import json

import flop_guidance
import pytest
import torch
from flop_guidance import compare
from flop_scores import Point

from ddm_lightning.core.errors import UserError
from ddm_lightning.evaluation.metrics.features import KernelDistance

NETWORKS = ("n", "m")
# KID of three seeds at guidance 1 and 2. Seeds 1 and 2 choose 1 for seed 0, which would take 2; the others choose 2.
KIDS = {
    "monolith": {1: [3.0, 1.0, 2.0], 2: [1.0, 2.0, 2.0]},
    "monolith_ancestral": {1: [4.0, 4.0, 4.0], 2: [2.0, 2.0, 2.0]},
    "top1": {1: [1.0, 1.0, 1.0], 2: [0.5, 0.5, 0.5]},
    "bayes": {1: [1.5, 1.5, 1.5], 2: [3.0, 3.0, 3.0]},
}


def points(scale: int, num_seeds: int = 3, variant: str = "main", factor: float = 1.0) -> list[Point]:
    def scored(method: str, seed: int, kid: float) -> Point:
        kids = dict.fromkeys(NETWORKS, KernelDistance(kid, torch.full((200,), kid)))
        return Point(variant, seed, 1.0, 2.0, method, kids)

    return [
        scored(method, seed, factor * kid)
        for method, kids in KIDS.items()
        for seed, kid in enumerate(kids[scale][:num_seeds])
    ]


def test_each_seed_takes_the_scale_that_the_others_choose():
    report = compare({scale: points(scale) for scale in (1, 2)}, *NETWORKS)
    rows = {row[0]: row[1:] for row in report.rows}
    assert rows["monolith"][:4] == ["2.000", "1.667", "2.333", "1 2 2"]
    assert rows["top-1"][2:5] == ["0.500", "2 2 2", "0.214 [0.167, 0.250]"]
    # The better monolith: the ODE at 1 for seed 0, by 1.5 of the others, and at 2 for seeds 1 and 2.
    assert report.figures["kid_better_monolith"] == pytest.approx((3 + 2 + 2) / 3)
    assert report.figures["main_bayes_over_monolith"] == 0.75
    assert report.figures["main_bayes_over_better_monolith"] == pytest.approx(1.5 / (7 / 3))


def test_a_variant_is_compared_with_its_own_monolith_if_it_has_one():
    own = {scale: points(scale, variant="own", factor=10.0) for scale in (1, 2)}
    without = {scale: [one for one in points(scale, variant="without") if one.method == "bayes"] for scale in (1, 2)}
    report = compare({scale: points(scale) + own[scale] + without[scale] for scale in (1, 2)}, *NETWORKS)
    ratios = [report.figures[f"{name}_bayes_over_monolith"] for name in ("main", "own", "without")]
    assert ratios == pytest.approx([0.75] * 3)


def test_what_cannot_be_tuned_is_refused(tmp_path):
    with pytest.raises(UserError, match="needs two seeds"):
        compare({scale: points(scale, num_seeds=1) for scale in (1, 2)}, *NETWORKS)
    stored = {"figures": {"guidance_scale": 1.0}, "features": ["n", "m"], "points": []}
    for name in ("a.json", "b.json"):
        (tmp_path / name).write_text(json.dumps(stored))
    with pytest.raises(UserError, match=r"b\.json: guidance 1 is in an earlier file"):
        flop_guidance.main([str(tmp_path / name) for name in ("a.json", "b.json")])
