from dataclasses import replace

import pytest
import step
import step_loops
import step_networks
import torch
from common import GRIDS, TINY, Report
from step_clock import HEADINGS, Seconds, ratio
from step_loops import Trained
from step_networks import Sizes

from ddm_lightning.cli.parser import main
from ddm_lightning.config.load import load_experiment

SIZES = Sizes(width=16, depth=2, num_heads=2, channels=3, edge=4, batch_size=2)
CPU = torch.device("cpu")
pytestmark = [
    # Of diffusers' imports.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


def walls(*values):
    return [Seconds(value, 2 * value) for value in values]


@pytest.mark.parametrize(
    ("ours", "theirs", "kind", "expected"),
    [
        (walls(1, 8, 9), walls(10, 2, 3), "wall", 3),
        ([Seconds(1, 6)], [Seconds(1, 2)], "cpu", 3),
    ],
)
def test_a_ratio_is_the_median_of_ratios_side_by_side_and_not_the_ratio_of_medians(ours, theirs, kind, expected):
    assert ratio(ours, theirs, kind) == expected


def test_figures_of_the_loops_leave_the_first_group_out():
    a_group = step.TURNS_PER_GROUP
    ours = walls(*[50.0] * a_group, *[3.0] * a_group)
    bare = walls(*[1.0] * a_group, *[2.0] * a_group)
    report = Report("", HEADINGS)

    step.add_loop(report, "", step.LOOPS["cpu"], Trained(ours, bare, True))

    assert report.figures["trainer_over_bare_loop"] == pytest.approx(1.5)
    assert report.rows[0][1:4] == [f"{1000 * mean / step.STEPS_PER_TURN:.3f}" for mean in (3, 2)] + ["1.500"]
    assert report.figures["same_weights"] == 1


@pytest.mark.usefixtures("quick_prepare")
def test_both_loops_end_in_the_same_weights_and_others_are_told(tmp_path, monkeypatch):
    loop = step.Loop(width=16, depth=1, num_heads=2, patch_size=4, edge=8, text_size=8, batch_size=4)
    overrides = loop.overrides(tmp_path / "run", 1, "cpu", 40)
    assert main(["prepare", "-c", str(TINY), *overrides]) == 0
    experiment = load_experiment(TINY, overrides)

    trained = step.train(experiment, step.STEPS_PER_TURN)

    assert trained.same
    assert len(trained.ours) == len(trained.bare) == step.TURNS_PER_GROUP
    monkeypatch.setattr(step_loops, "interpolate", lambda x_0, *_: x_0)
    assert not step.train(experiment, step.STEPS_PER_TURN).same


def test_ours_has_as_many_parameters_as_diffusers_with_one_embedder():
    width = SIZES.width
    embedder = (256 * width + width) + (width * width + width) + (step_networks.NUM_CLASSES + 1) * width

    def size(side):
        return sum(parameter.numel() for parameter in side.network.parameters())

    ours = size(step_networks.our_side(SIZES))

    assert size(step_networks.diffusers_side(SIZES, nearest=True)) == ours
    assert size(step_networks.diffusers_side(SIZES, nearest=False)) == ours + (SIZES.depth - 1) * embedder


def test_networks_are_compared_in_float32_and_in_bfloat16_compiled(monkeypatch):
    compiled = []
    monkeypatch.setattr(step_networks, "compile_blocks", compiled.append)
    report = Report("", HEADINGS)

    step.add_networks(report, SIZES, step.FULL, CPU, num_rounds=2)
    assert not compiled
    step.add_networks(report, SIZES, step.HALF, CPU, num_rounds=2)

    assert len(compiled) == 1
    for end in ("", "_bf16_compiled"):
        names = {f"ours_over_diffusers{end}", f"ours_over_diffusers_nearest{end}"}
        assert names <= report.figures.keys()


def test_turns_of_nine_shapes_and_of_one_have_as_many_steps_and_tokens(monkeypatch):
    seen = []
    monkeypatch.setattr(step.Step, "take", lambda self: seen.append(tuple(self.x_t.shape[2:])))
    report = Report("", HEADINGS)

    step.add_shapes(report, replace(SIZES, edge=16), step.FULL, CPU, num_rounds=3)

    mixed = [(2 * rows, 2 * columns) for rows, columns in GRIDS]
    square = 9 * [(16, 16)]
    assert seen == [*mixed, *mixed, *square, *square, *mixed, *square]  # the first 36 warm up
    assert len({*mixed}) == 9 and sum(height * width for height, width in mixed) == 9 * 16 * 16
    assert report.figures.keys() == {"shapes_over_one", "shapes_over_one_cpu_seconds"}


@pytest.mark.parametrize(("precision", "dtype"), [(step.FULL, torch.float32), (step.HALF, torch.bfloat16)])
def test_half_precision_is_that_of_the_products_in_a_step(precision, dtype):
    taken = step_networks.Step(step_networks.our_side(SIZES), SIZES, CPU, precision, compiled=False)
    seen = []
    product = next(module for module in taken.network.modules() if isinstance(module, torch.nn.Linear))
    product.register_forward_hook(lambda *called: seen.append(called[-1].dtype))
    assert taken.loss().dtype == torch.float32
    assert seen == [dtype]
