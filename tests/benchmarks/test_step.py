from argparse import Namespace

import pytest
import step
import step_networks
import torch
from common import REPOSITORY, Report
from step_clock import Seconds, ratio
from step_loops import Trained
from step_networks import Sizes

TINY = Sizes(width=16, depth=2, num_heads=2, patch_size=2, channels=3, edge=4, batch_size=2)
CPU = torch.device("cpu")
pytestmark = [
    # Of diffusers' imports.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def walls(*values):
    return [Seconds(value, 2 * value) for value in values]


def ended(ours=(), bare=(), weights=((1.0,), (1.0,))):
    return Trained(ours, bare, *([torch.tensor(side)] * 2 for side in weights))


def test_a_ratio_is_the_median_of_ratios_side_by_side_and_not_the_ratio_of_medians():
    assert ratio(walls(1, 2, 30), walls(1, 1, 10)) == 2
    assert ratio(walls(1, 8, 9), walls(10, 2, 3)) == 3
    assert ratio([Seconds(1, 6)], [Seconds(1, 2)], "cpu") == 3


def test_figures_of_the_loops_leave_the_first_group_out():
    a_group = step.TURNS_PER_GROUP
    ours, bare = walls(*[50.0] * a_group, *[3.0] * a_group), walls(*[1.0] * a_group, *[2.0] * a_group)
    report = Report("", step.HEADINGS)
    step.add_loop(report, step.LOOPS["cpu"], ended(ours, bare))
    assert report.figures["trainer_over_bare_loop"] == pytest.approx(1.5)
    assert report.figures["seconds_bare_loop"] == pytest.approx(2 / step.STEPS_PER_TURN)


def test_other_weights_are_told():
    assert step.same(ended())
    assert not step.same(ended(weights=((1.0,), (1.0001,))))


@pytest.mark.slow
def test_both_loops_end_in_the_same_weights(tmp_path):
    loop = step.Loop("", 16, 1, 2, 4, image_size=8, text_size=8, batch_size=4)
    overrides = loop.overrides(tmp_path / "run", 1, "cpu", 40)
    options = Namespace(config=str(REPOSITORY / "experiments" / "tiny_2x.yaml"), overrides=[])
    trained = step.trained(options, overrides)
    assert step.same(trained)
    assert len(trained.ours) == len(trained.bare) == step.TURNS_PER_GROUP
    # They moved: the average lags behind the weights.
    half = len(trained.our_weights) // 2
    assert not torch.equal(trained.our_weights[0], trained.our_weights[half])


def test_parameters_are_as_many_as_by_hand():
    d, depth, inputs = TINY.width, TINY.depth, TINY.channels * TINY.patch_size**2
    embedder = (256 * d + d) + (d * d + d) + (step_networks.NUM_CLASSES + 1) * d
    block = (6 * d * d + 6 * d) + (3 * d * d + 3 * d) + (d * d + d) + (4 * d * d + 4 * d) + (4 * d * d + d)
    whole = (inputs * d + d) + embedder + depth * block + (2 * d * d + 2 * d) + (inputs * d + inputs)
    assert step_networks.our_side(TINY).num_parameters == whole
    assert step_networks.diffusers_side(TINY, nearest=True).num_parameters == whole
    assert step_networks.diffusers_side(TINY, nearest=False).num_parameters == whole + (depth - 1) * embedder


def test_networks_are_compared_in_both_precisions_and_compiled(monkeypatch):
    compiled = []
    monkeypatch.setattr(step_networks, "compile_blocks", compiled.append)
    report = Report("", step.HEADINGS)
    step.add_networks(report, step.Networks("", TINY), CPU, num_rounds=2)
    assert not compiled
    step.add_networks(report, step.Networks("_bf16", TINY, half=True), CPU, num_rounds=2)
    step.add_networks(report, step.Networks("_bf16_compiled", TINY, half=True, compiled=True), CPU, num_rounds=2)
    assert len(compiled) == 1
    others = {f"ours_over_{name}" for name in ("diffusers", "diffusers_nearest")}
    assert {name for name in report.figures if name.startswith("ours_over") and not name.endswith("cpu_seconds")} == {
        f"{name}{end}" for name in others for end in ("", "_bf16", "_bf16_compiled")
    }
    assert {
        "parameters_ours",
        "parameters_diffusers",
        "seconds_ours",
        "seconds_ours_bf16_compiled",
    } <= report.figures.keys()


@pytest.mark.parametrize("half", [False, True])
def test_half_precision_is_that_of_the_products_in_a_step(half):
    taken = step_networks.Step(step_networks.our_side(TINY), TINY, CPU, half=half, compiled=False)
    seen = []
    product = next(module for module in taken.network.modules() if isinstance(module, torch.nn.Linear))
    product.register_forward_hook(lambda *called: seen.append(called[-1].dtype))
    assert taken.loss().dtype == torch.float32
    assert seen == [torch.bfloat16 if half else torch.float32]
