import json
from argparse import Namespace
from dataclasses import replace
from pathlib import Path

import flop_matched
import pytest
import torch
from flop_report import Results, loss_table
from flop_scores import BEST, HEADLINE, OTHER, Point, equal_score_share, figures_of, ratio
from flop_training import Study, Variant, variants_of

from ddm_lightning.core.errors import UserError
from ddm_lightning.evaluation.metrics.features import KernelDistance, kernel_distance
from ddm_lightning.members.meta import read_meta
from ddm_lightning.members.roles import batch_size_of
from ddm_lightning.members.run_folder import RunFolder

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
TINY = str(EXPERIMENTS / "tiny_2x.yaml")


def study_of(folder, *variants, main=(0.5, 1.0), seed=0, override="seed=0"):
    options = Namespace(config=TINY, overrides=[f"run_dir={folder}", override])
    return Study(options, [Variant("main", budgets=main, seeds=(seed,)), *variants])


def test_every_side_costs_the_same_flops(tiny_run):
    """Within half a step, at every budget and for a monolith of another size and batch."""
    wide = ("expert.network.params.width=64", "expert.train.global_batch_size=4")
    four = Variant("four", ("prepare.partition.num_clusters=4",), "ensemble")

    study = study_of(tiny_run, Variant("wide", wide, "monolith"), four)

    jobs = {(job.variant.name, job.member): job for job in study.jobs()}
    assert len([name for name, _ in jobs if name == "four"]) == 5
    for name, index, share in (("main", 0, 0.5), ("main", 1, 1.0), ("wide", 0, 1.0)):
        monolith = jobs[name, "monolith"]
        of_step = monolith.flops / monolith.steps[-1]
        assert abs(monolith.steps[index] * of_step - study.budget(share)) <= of_step / 2
    members = [jobs["main", name] for name in ("expert-0", "expert-1", "router")]
    assert sum(job.flops for job in members) + study.costs.partition == pytest.approx(study.budget(1.0))
    assert members[0].steps[-1] == study.experiment.expert.train.max_steps
    per_step = batch_size_of("expert-0", study.experiment) * study.costs.expert
    assert members[0].flops == members[0].steps[-1] * per_step


def test_branched_experts_pay_for_the_monolith_that_they_start_from(tiny_run):
    """Within half a step of all experts; its seed is the main comparison's."""
    study = study_of(tiny_run, Variant("branched", train="ensemble", branch_at=0.25), main=(0.25, 1.0), seed=3)

    jobs = [job for job in study.jobs() if job.variant.name == "branched"]

    assert {job.seed for job in jobs} == {3}
    of_step = sum(job.flops / job.steps[-1] for job in jobs if job.member != "router")
    spent = sum(job.flops for job in jobs) + study.costs.partition + study.budget(0.25)
    assert abs(spent - study.budget(1.0)) <= of_step / 2


@pytest.mark.parametrize(
    ("override", "variant", "message"),
    [
        (
            "seed=0",
            {"branch_at": 0.25},
            r"branch_at = 0.25 must be below its own budgets and one of the main comparison's \(0.5 1\)",
        ),
        ("seed=0", {"branch_at": 0.5, "budgets": (0.5,)}, "branch_at = 0.5 must be below its own"),
        ("seed=0", {"branch_at": 0.5, "seeds": (0, 2)}, "lacks seed 2"),
        ("expert.train.schedule=cosine", {}, "2 budgets of one training need a constant"),
        ("expert.overrides={expert-1: {path: cosine}}", {}, "FLOPs are matched for equal experts"),
    ],
)
def test_trainings_that_cannot_be_compared_are_refused(tmp_path, override, variant, message):
    with pytest.raises(UserError, match=message):
        study_of(tmp_path, Variant("other", **variant), override=override)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: {train: nothing}", "key 'a.train' = 'nothing': must be one of both, ensemble, monolith"),
        ("a: {colour: red}", "unknown key 'a.colour'"),
        ("b: {}", "no variant 'a'; known: b"),
        ("a: {budgets: [2]}", r"budgets = \[2.0\]: give shares above 0 and at most 1"),
    ],
)
def test_bad_variants_are_refused(tmp_path, text, words):
    path = tmp_path / "variants.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=words):
        variants_of([str(path), *(["a"] if text == "b: {}" else [])])


def test_all_variants_for_the_mixtures_are_valid():
    variants = []
    for name in ("mix", "mixt", "when"):
        variants += variants_of([str(Path(flop_matched.__file__).with_name(f"variants_{name}.yaml"))])
    main = Variant("main", budgets=(0.125, 0.25, 0.5, 1.0), seeds=(0,))

    study = Study(Namespace(config=str(EXPERIMENTS / "mixt_4x.yaml"), overrides=[]), [main, *variants])

    assert len(study.variants) > 10


def test_a_ratio_of_equal_sets_is_one_and_its_interval_covers_the_truth():
    random = torch.Generator().manual_seed(0)
    real = torch.randn(200, 4, generator=random)
    near, far = ([torch.randn(200, 4, generator=random) + shift for _ in range(3)] for shift in (0.5, 1.0))
    ours, theirs = ([kernel_distance(one, real) for one in side] for side in (near, far))
    assert ratio(ours, ours).value == 1
    found = ratio(ours, theirs)
    # Closed form of the kernel distance between a shifted and a centred Gaussian, by many samples.
    many = torch.randn(4, 1500, 4, generator=random)
    truth = kernel_distance(many[0] + 0.5, many[1]).value / kernel_distance(many[2] + 1.0, many[3]).value
    assert found.low < truth < found.high


@pytest.mark.parametrize(("wanted", "share"), [(1.5, 0.5), (5.0, 1 / 16), (0.5, -1)])
def test_the_flops_for_an_equal_score_are_interpolated_by_hand(wanted, share):
    assert equal_score_share([1, 4, 16], [3.0, 2.0, 1.0], wanted) == pytest.approx(share)


def point(variant, seed, method, kid=1.0, branch_at=0.0, **scores):
    kids = dict.fromkeys(("n", OTHER.name), KernelDistance(kid, torch.full((200,), kid)))
    return Point(variant, seed, 1.0, 2.0, method, kids, {"shares_tv": 0.1, **scores}, branch_at)


def test_a_comparison_made_in_pieces_gives_the_figures_of_one_made_at_once(tmp_path):
    points = [point("main", seed, method, 1.0 + seed, precision=0.5) for seed in (0, 1) for method in HEADLINE]
    stored = json.loads(json.dumps([one.to_dict() for one in points[:4]]))
    out = tmp_path / "out.json"
    assert flop_matched.earlier(None, "a")["points"] == flop_matched.earlier(out, "a")["points"] == []

    read = [Point.from_dict(one) for one in stored]

    assert read[0].scores == {"precision": 0.5, "shares_tv": 0.1}
    whole = figures_of(points, "n")
    assert figures_of([*points[4:], *read], "n") == pytest.approx(whole, rel=1e-3)
    assert whole["num_seeds"] == 2
    out.write_text(json.dumps({"commit": "c", "points": [1], "settings": "a"}))
    assert flop_matched.earlier(out, "a")["points"] == [1]
    with pytest.raises(UserError, match="holds results of other settings"):
        flop_matched.earlier(out, "b")


def test_the_budget_at_which_experts_overtake_is_interpolated_by_hand():
    """Their loss and KID fall from 1.2 to 0.8 of the monolith's while FLOPs grow fourfold."""
    points = []
    for share, ours in ((0.25, 1.2), (1.0, 0.8)):
        for method in HEADLINE:
            value = 1.0 if method.startswith("monolith") else ours
            one = point("main", 0, method, value, held_out_loss=value)
            points.append(replace(one, share=share, train_tflop=share))

    figures = figures_of(points, "n")

    for name in ("crossing_budget", "crossing_budget_top1", "crossing_budget_bayes"):
        assert figures[name] == pytest.approx(0.5)


def test_branching_is_compared_with_the_same_seeds_from_scratch():
    main = [point("main", seed, method, 1.0 + seed) for seed in (0, 1) for method in HEADLINE]
    quarter = [point("quarter", seed, BEST, 0.5 + seed, 0.25) for seed in (0, 1)]

    figures = figures_of([*main, *quarter, point("half", 0, BEST, 0.2, 0.5)], "n")

    assert figures["half_1_bayes_over_scratch"] == 0.2
    assert figures["quarter_1_bayes_over_scratch"] == pytest.approx(2 / 3)
    assert figures["quarter_1_bayes_over_monolith"] == pytest.approx(2 / 3)
    assert [figures[f"quarter_1_bayes_over_scratch_{end}"] for end in ("low", "high")] == [0.5, 0.75]


def test_losses_of_members_are_compared_where_both_sides_have_the_same_seeds():
    def trained(variant, seed, method, loss):
        of_router = {"router_accuracy_at_high_noise": 0.3 + 0.2 * seed}
        return point(variant, seed, method, held_out_loss=loss, held_out_loss_at_high_noise=3 * loss, **of_router)

    points = [trained("alone", 0, "bayes", 0.4), point("older", 0, "monolith"), point("older", 0, "bayes")]
    for seed in (0, 1):
        points += [trained("main", seed, "monolith", 0.5 + seed), trained("main", seed, "bayes", 0.4 + 0.6 * seed)]

    table = loss_table(Results({"figures": {}, "points": map(Point.to_dict, points), "features": ["n", "m"]}))

    assert table.rows == [["main", "1", "2", "1.0000", "0.7000", "0.700", "0.700", "0.400", "–"]]


@pytest.mark.slow
@pytest.mark.long
def test_from_nothing_to_results_and_nothing_is_trained_twice(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out.json"
    variants = tmp_path / "variants.yaml"
    variants.write_text(
        "random: {train: ensemble, overrides: [prepare.partition.kind=random]}\n"
        "branched: {train: ensemble, branch_at: 0.5}\n"
    )
    arguments = ["-c", TINY, "--num", "16", "--json", str(out), f"run_dir={run}", "--quick", "--budgets", "0.5", "1"]
    arguments += ["--methods", "sample1", "--variants", str(variants)]
    flop_matched.main(arguments)
    assert not (run / "members").exists()
    found = json.loads(out.read_text())
    assert found["figures"]["num_budgets"] == 2
    assert {"bayes_over_monolith", "top1_over_monolith", "flops_for_equal_score"} <= found["figures"].keys()
    assert {point["variant"] for point in found["points"]} == {"main", "random", "branched"}
    methods = {"monolith", "monolith_ancestral", "bayes", "top1", "sample1"}
    assert {point["method"] for point in found["points"]} == methods
    assert found["figures"]["random_1_bayes_over_monolith"] > 0
    root = run / "quick" / "flop_matched"
    seed = RunFolder(root / "main" / "seed-0" / "budget-0.5").artifact("monolith")
    expert = RunFolder(root / "branched" / "seed-0" / "budget-1").artifact("expert-0")
    assert read_meta(expert).init_sha256 == read_meta(seed).model_sha256
    assert "over scratch" in out.with_suffix(".md").read_text()
    points = {(one["variant"], one["share"], one["method"]): one for one in found["points"]}
    whole = RunFolder(root / "main" / "seed-0" / "budget-1")
    losses = [read_meta(whole.artifact(name)).metrics["held_out/loss"] for name in ("expert-0", "expert-1")]
    assert min(losses) <= points["main", 1, "bayes"]["held_out_loss"] <= max(losses)
    levels = [value for name, value in points["main", 1, "bayes"].items() if name.startswith("held_out_loss_")]
    assert len(levels) == 8
    assert sum(levels) / 8 == pytest.approx(points["main", 1, "bayes"]["held_out_loss"], rel=1e-5)
    assert "router_accuracy_at_high_noise" in points["main", 1, "bayes"]
    assert "router_cross_entropy_t0.062" in points["main", 1, "bayes"]
    assert "router_accuracy_at_high_noise" not in points["main", 1, "monolith"]
    assert (root / "curves.png").stat().st_size > 10_000
    written = {path: path.stat().st_mtime_ns for path in root.rglob("*") if path.suffix in (".npz", ".safetensors")}
    flop_matched.main(arguments)
    assert {path: path.stat().st_mtime_ns for path in written} == written
    assert json.loads(out.read_text())["points"] == found["points"]
