import dataclasses
import json
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import recipe
import recipe_cost
import recipe_effect
import recipe_options
import torch
from common import REPOSITORY
from recipe_cost import Cost, TrainingStep
from recipe_effect import BASE, difference
from recipe_results import Results, plot
from step_clock import Seconds
from step_networks import Sizes
from tiny_runs import TINY

from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.networks.recipe import Recipe
from ddm_lightning.shards.manifest import DataSizes

MEMBER = recipe_options.MEMBER
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


def names(*overrides, sizes=PICTURES, **more):
    return {option.name: option for option in recipe_options.options_of(experiment(*overrides), sizes, **more)}


def flat(value, prefix=""):
    if not isinstance(value, dict):
        return {prefix: value}
    return {key: one for name, inner in value.items() for key, one in flat(inner, f"{prefix}.{name}").items()}


def test_each_option_changes_one_key_of_the_experiment():
    before = flat(asdict(experiment()))
    for option in names(on_gpu=True, compiles=True).values():
        after = flat(asdict(experiment(option.setting)))
        changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        assert changed == {f".{option.key}"}


@pytest.mark.parametrize(
    ("changed", "back"),
    [
        ("expert.network.params.rope=true", "no_rope"),
        ("expert.train.optimizer=muon", "optimizer_adamw"),
        ("expert.train.weight_decay=0.5", "no_weight_decay"),
        ("expert.train.gradient_clip_norm=null", "gradient_clip_norm_1.0"),
        ("island.micro_batch_size=2", "no_micro_batch_size"),
        ("island.attention=xformers", "attention_sdpa"),
        ("island.compile=true", "no_compile"),
    ],
)
def test_what_is_chosen_already_can_be_left_out(changed, back):
    more = {"on_gpu": True, "compiles": True}
    before, after = names(**more), names(changed, **more)
    key = changed.partition("=")[0]
    (gone,) = [name for name, option in before.items() if option.key == key]
    assert after.keys() == before.keys() - {gone} | {back}


def test_every_choice_of_a_recipe_is_an_option():
    """But the ratio of the MLP, which is a size."""
    found = {option.key.rpartition(".")[2] for option in names().values()}
    assert {field.name for field in dataclasses.fields(Recipe)} - found == {"mlp_ratio"}
    assert {"rope", "mlp_swiglu", "modulation_single", "no_gradient_clip_norm", "micro_batch_size_4"} <= names().keys()


def test_only_what_the_network_takes_and_the_data_allow():
    tokens = DataSizes((3, 8, 8), 16, (4, 16), 4)
    overrides = [
        "expert.network={name: mmdit, params: {width: 32, depth: 2, num_heads: 2, patch_size: 4}}",
        "condition.kind=tokens",
    ]
    found = names(*overrides, sizes=tokens).values()
    assert [option.name for option in found if option.key.startswith(recipe_options.PARAMS)] == ["qk_norm"]
    assert "micro_batch_size_1" not in names("expert.train.global_batch_size=2")


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
    found = {option.name: option for option in made.found}
    assert not found.keys() & {"micro_batch_size_4", "activation_checkpointing", "ema_widths"}
    base, rope = made.settings(None, 5), made.settings(found["rope"], 5)
    assert set(rope) - set(base) == {"expert.network.params.rope=true"}
    assert list(made.seeds) == [5, 6]
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
    found = names()
    rows = [found[name] for name in ("rope", "optimizer_muon", "density_uniform", "norm_rms")]
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
    left, right = plot(results, rows, "Title").get_axes()
    assert (len(left.patches), len(right.patches)) == (2, 2)
    only_costs = Results({"rope": (a_cost(1, peak=4), a_cost(1, peak=2))}, {}).report("Title", rows)
    assert only_costs.figures["peak_over_experiment_rope"] == 0.5
    assert {len(cells) for cells in only_costs.rows} == {len(only_costs.headings)} == {6}
    assert not [name for name in only_costs.figures if "loss" in name or "cpu" in name]


@pytest.mark.slow
@pytest.mark.long
def test_quick_times_and_trains(tmp_path):
    arguments = ["-c", str(TINY), f"run_dir={tmp_path / 'run'}", "--quick", "--train", "--samples", "160"]
    arguments += ["--json", str(tmp_path / "recipe.json"), "--only", "norm_rms", "schedule_cosine"]
    recipe.main(arguments)
    figures = json.loads((tmp_path / "recipe.json").read_text())["figures"]
    assert figures["seconds_over_experiment_norm_rms"] > 0
    assert len({figures["loss"], figures["loss_norm_rms"], figures["loss_schedule_cosine"]}) == 3
    assert list((tmp_path / "run").glob("benchmarks/recipe/expert-0-160-samples/recipe.png"))
    recipe.main(arguments)  # finds all of them trained
    again = json.loads((tmp_path / "recipe.json").read_text())["figures"]
    assert again["loss_norm_rms"] == figures["loss_norm_rms"]
