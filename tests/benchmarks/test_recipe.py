import json
from dataclasses import asdict
from types import SimpleNamespace

import common
import pytest
import recipe
import recipe_cost
import recipe_effect
import torch
from common import MEMBER, REPOSITORY
from recipe_cost import Cost, TrainingStep
from recipe_effect import BASE, difference
from recipe_results import Results
from step_clock import Seconds
from step_networks import Sizes
from tiny_runs import TINY

from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.shards.manifest import DataSizes

CPU = torch.device("cpu")
PICTURES = DataSizes((3, 8, 8), 16, None, 4)
SMALL = Sizes(width=16, depth=2, num_heads=2, patch_size=2, channels=4, edge=4, batch_size=4)


def experiment(*overrides, config=TINY):
    return load_experiment(config, overrides)


def options(run_dir, *overrides, **changes):
    settings = {
        "config": str(TINY),
        "overrides": [f"run_dir={run_dir}", *overrides],
        "compile": False,
        "only": None,
        "samples": None,
        "seeds": 1,
        "jobs": 1,
        "quick": True,
        "json": None,
    }
    return SimpleNamespace(**{**settings, **changes})


def test_every_option_is_one_setting_that_the_demo_does_not_have():
    file = REPOSITORY / "experiments" / "emoji_4x.yaml"
    base = asdict(experiment(config=file))
    found = common.read_variants([str(REPOSITORY / "benchmarks" / "variants_recipe.yaml")], recipe.Option)
    assert len(found) > 10
    for option in found:
        assert asdict(experiment(option.setting, config=file)) != base, option.name
        assert option.timed or option.trained


def step_of(*overrides, sizes=PICTURES):
    return TrainingStep(MEMBER, experiment(*overrides), sizes, CPU)


def weights_after(step, num_steps=3):
    for _ in range(num_steps):
        step.take()
    return torch.cat([parameter.detach().flatten() for parameter in step.parameters])


def test_a_step_trains_and_follows_its_settings():
    """What saves memory changes nothing but rounding; what is an option of its own changes the weights."""
    whole = weights_after(step_of())
    for key in ("island.micro_batch_size=3", "island.activation_checkpointing=true", "expert.train.ema_widths=[0.1]"):
        assert torch.allclose(weights_after(step_of(key)), whole, rtol=0, atol=1e-6), key
    for key in ("expert.train.optimizer=muon", "island.precision=bf16-mixed", "expert.train.weight_decay=10"):
        assert not torch.allclose(weights_after(step_of(key)), whole, rtol=0, atol=1e-6), key
    step = step_of("expert.train.ema_widths=[0.1]")
    step.take()
    assert {"ema", "ema_0.1"} <= step.optimizer.state[step.parameters[0]].keys()


def test_a_precision_that_takes_a_scaler_is_refused():
    with pytest.raises(UserError, match=r"'island.precision' = '16-mixed': .*32-true and bf16-mixed"):
        step_of("island.precision=16-mixed")


@pytest.mark.parametrize("config", ["emoji_4x", "paris_8x"])
def test_on_a_gpu_an_experiment_has_the_sizes_that_are_compared(config):
    """What it chooses besides stays, and what is typed wins."""
    file = REPOSITORY / "experiments" / f"{config}.yaml"
    own = experiment(config=file)
    settings, sizes = recipe_cost.large(SMALL, own.prepare.partition.num_clusters)
    typed = ["expert.network.params.qk_norm=true", "expert.network.params.depth=1", "island.compile=false"]
    large = experiment(*settings, *typed, config=file)
    assert large.expert.train.learning_rate == own.expert.train.learning_rate
    step = TrainingStep(MEMBER, large, sizes, CPU)
    assert step.half and step.x_t.shape == (4, 4, 4, 4) and len(step.network.blocks) == 1
    assert step.network.blocks[0].attention.query_norm is not None
    assert torch.isfinite(weights_after(step, 1)).all()


def test_trainings_differ_in_one_option_and_see_as_many_samples(tiny_run):
    made = recipe_effect.Effect(options(tiny_run, "seed=5", samples=240, seeds=2))
    base, rope = made.settings(BASE, 5), made.settings("rope", 5, "expert.network.params.rope=true")
    assert set(rope[1:]) - set(base[1:]) == {"expert.network.params.rope=true"}
    # Half of 60 steps, and half of 10 of warm-up.
    assert {"expert.train.max_steps=30", "expert.train.warmup_steps=5", "seed=5"} <= set(base)
    with pytest.raises(UserError, match=f"--samples 7: a step of {MEMBER} takes 8"):
        recipe_effect.Effect(options(tiny_run, samples=7))


def test_differences_are_between_equal_seeds():
    assert difference([1.0, 3.0], [0.5, 2.5]) == (0.5, 0.0)
    assert difference([1.0, 2.0], [0.0, 2.0]) == pytest.approx((0.5, 0.5))
    assert difference([1.0], [3.0]) == (-2.0, None)


def a_cost(*walls, parameters=2_000_000, peak=None):
    return Cost([Seconds(wall, 2 * wall) for wall in walls], parameters, 3e9, peak)


def test_rows_and_figures_of_what_was_measured():
    rows = ["rope", "optimizer_muon", "density_uniform", "norm_rms"]
    costs = {
        "rope": (a_cost(1, 1, 10), a_cost(1, 2, 30)),
        "optimizer_muon": (a_cost(2, 2, 2), a_cost(3, 3, 3, parameters=1_000_000)),
    }
    losses = {BASE: [0.5, 0.7], "rope": [0.4, 0.4], "density_uniform": [0.5, 0.5]}
    results = Results(costs, losses)
    report = results.report("Title", rows)
    figures = report.figures
    assert figures["seconds_over_experiment_rope"] == 2  # not 30 / 10, nor 2 / 1 of medians
    assert figures["parameters_over_experiment_optimizer_muon"] == 0.5
    assert figures["seconds"] == 2  # in the middle of all its turns
    assert figures["loss_less_experiment_rope"] == pytest.approx(-0.2)
    assert figures["loss_less_experiment_error_rope"] == pytest.approx(0.1)
    assert not [name for name in figures if "peak" in name or "norm_rms" in name]
    assert [cells[0] for cells in report.rows] == ["the experiment", "rope", "optimizer_muon", "density_uniform"]
    assert {len(cells) for cells in report.rows} == {len(report.headings)} == {7}
    assert report.rows[2][-2:] == ["", ""] and report.rows[3][1:5] == [""] * 4
    only_costs = Results({"rope": (a_cost(1, peak=4), a_cost(1, peak=2))}, {}).report("Title", rows)
    assert only_costs.figures["peak_over_experiment_rope"] == 0.5
    assert {len(cells) for cells in only_costs.rows} == {len(only_costs.headings)} == {6}
    assert not [name for name in only_costs.figures if "loss" in name or "cpu" in name]


@pytest.mark.slow
@pytest.mark.long
def test_quick_times_and_trains(tmp_path):
    arguments = ["-c", str(TINY), f"run_dir={tmp_path / 'run'}", "--quick", "--train", "--samples", "160"]
    variants = str(REPOSITORY / "benchmarks" / "variants_recipe.yaml")
    arguments += ["--json", str(tmp_path / "recipe.json"), "--variants", variants, "norm_rms", "schedule_cosine"]
    recipe.main(arguments)
    figures = json.loads((tmp_path / "recipe.json").read_text())["figures"]
    assert figures["seconds_over_experiment_norm_rms"] > 0
    assert len({figures["loss"], figures["loss_norm_rms"], figures["loss_schedule_cosine"]}) == 3
    (folder,) = (tmp_path / "run").glob("benchmarks/recipe/expert-0-160-samples/norm_rms-seed-0")
    assert not (folder / "prepared" / "shards").exists()
    recipe.main(arguments)  # finds all of them trained
    again = json.loads((tmp_path / "recipe.json").read_text())["figures"]
    assert again["loss_norm_rms"] == figures["loss_norm_rms"]
