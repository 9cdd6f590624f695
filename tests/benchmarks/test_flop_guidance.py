"""Guidance chosen for each seed by the other seeds."""

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


def points(scale, variant="main", factor=1.0, methods=KIDS):
    found = []
    for method in methods:
        for seed, kid in enumerate(KIDS[method][scale]):
            distance = KernelDistance(factor * kid, torch.full((200,), factor * kid))
            found.append(Point(variant, seed, 1.0, 2.0, method, dict.fromkeys(NETWORKS, distance)))
    return found


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
    given = {}
    for scale in (1, 2):
        given[scale] = [*points(scale), *points(scale, "own", 10.0), *points(scale, "without", methods=("bayes",))]

    figures = compare(given, *NETWORKS).figures

    for name in ("main", "own", "without"):
        assert figures[f"{name}_bayes_over_monolith"] == pytest.approx(0.75)


def test_one_seed_cannot_be_tuned():
    with pytest.raises(UserError, match="needs two seeds"):
        compare({scale: points(scale)[::3] for scale in (1, 2)}, *NETWORKS)


def test_two_files_of_one_scale_are_refused(tmp_path):
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file in files:
        file.write_text(json.dumps({"figures": {"guidance_scale": 1.0}, "features": ["n", "m"], "points": []}))

    with pytest.raises(UserError, match=r"b\.json: guidance 1 is in an earlier file"):
        flop_guidance.main(list(map(str, files)))
