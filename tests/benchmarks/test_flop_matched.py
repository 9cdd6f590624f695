import json
from pathlib import Path

import flop_matched
import monolith
import numpy as np
import pytest
import router
import torch

from ddm_lightning.core.errors import UserError
from ddm_lightning.evaluation.metrics.kid import kernel_distance
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.members.status import MemberStatus

TINY = str(Path(__file__).parents[2] / "experiments" / "tiny_2x.yaml")


def test_steps_of_the_monolith_match_within_half_a_step():
    spent = monolith.Budget({"expert-0": 300.0, "expert-1": 320.0, "router": 85.0}, monolith_step=10.0)
    assert spent.ensemble == 705
    assert abs(spent.monolith_steps * 10 - 705) <= 5


def test_a_monolith_of_another_length_is_refused_whether_finished_or_not(tmp_path):
    run = RunFolder(tmp_path)
    monolith.check_monolith(run, 30)  # none yet
    MemberStatus("monolith", max_steps=30).write(run.member("monolith"))
    monolith.check_monolith(run, 30)
    with pytest.raises(UserError, match=r"members/monolith: .* trains for 30 steps, equal FLOPs need 31"):
        monolith.check_monolith(run, 31)


def test_conditions_are_all_used_equally_often_in_one_order():
    held_out = range(7)
    settings = flop_matched.Settings(17, 4, 1.0, seed=0)
    rows = flop_matched._condition_rows(held_out, settings)
    assert len(rows) == 17
    assert set(torch.bincount(rows).tolist()) == {2, 3}
    assert torch.equal(rows[:7], rows[7:14])
    assert torch.equal(rows, flop_matched._condition_rows(held_out, settings))


def test_the_figure_has_a_bar_and_a_strip_for_each():
    features = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    names = ["real images", "top1", "monolith"]
    distances = {name: kernel_distance(features + i, features, num_halves=10) for i, name in enumerate(names)}
    images = {name: np.zeros((12, 8, 8, 3), np.uint8) for name in names}
    bars, strips = flop_matched.comparison_figure(distances, images, "credit").get_axes()
    assert [label.get_text() for label in bars.get_yticklabels()] == names
    assert [bar.get_width() for bar in bars.patches] == pytest.approx([distances[name].value for name in names])
    assert strips.images[0].get_array().shape == (3 * 10, 12 * 10, 3)
    assert strips.get_xlabel() == "credit"


def test_too_few_images_are_refused_before_anything_is_trained(tmp_path):
    with pytest.raises(UserError, match="--num 3"):
        flop_matched.main(["-c", TINY, f"run_dir={tmp_path / 'run'}", "--num", "3"])
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.long
def test_from_nothing_to_figures_and_nothing_is_trained_or_drawn_twice(tmp_path):
    run, out = tmp_path / "run", tmp_path / "out.json"
    arguments = ["-c", TINY, "--num", "16", "--json", str(out)]
    flop_matched.main([*arguments, f"run_dir={run}", "--quick"])
    assert not (run / "members").exists()  # what --quick trains is no run that somebody continues
    quick = run / "benchmarks" / "quick"
    first = json.loads(out.read_text())["figures"]
    assert 0.98 < first["ensemble_over_monolith_flops"] < 1.02
    assert first["experts_a_step_full"] == 2 * first["experts_a_step_top1"] == 2
    assert first["gflop_a_step_monolith"] < first["gflop_a_step_top1"] < first["gflop_a_step_full"]
    assert (quick / "benchmarks" / "flop_matched.png").stat().st_size > 10_000

    # The same run without --quick: everything is trained, so that only the controls have to be drawn.
    drawn = {path: path.stat().st_mtime_ns for path in quick.rglob("*.npz") if "half" not in path.name}
    sections = [f"{role}.train.{key}" for role in ("expert", "router") for key in ("max_steps=20", "warmup_steps=0")]
    settings = [f"run_dir={quick}", *sections]
    flop_matched.main([*arguments, *settings])
    second = json.loads(out.read_text())["figures"]
    assert {f"kid_{method.name}" for method in flop_matched.METHODS} <= second.keys()
    assert {path: path.stat().st_mtime_ns for path in drawn} == drawn
    assert {name: second[name] for name in first if "floor" not in name} == {
        name: value for name, value in first.items() if "floor" not in name
    }

    router.main(["-c", TINY, "--json", str(out), "--quick", *settings])
    figures = json.loads(out.read_text())["figures"]
    assert {"router_ece_t0.50", "probe_nll_t0.95", "router_nll_conditional_t0.00"} <= figures.keys()
    assert figures["majority_share"] == pytest.approx(12 / 21)
    wins = all(
        figures[f"router_accuracy_t{t}"] > figures[f"probe_accuracy_t{t}"]
        and figures[f"router_nll_t{t}"] < figures[f"probe_nll_t{t}"]
        for t in ("0.00", "0.25", "0.50", "0.75", "0.90")
    )
    assert figures["router_wins_up_to_0.9"] == wins
