"""Memory of a step: what is planned, by hand and beside torch's own count of its allocations."""

import pytest
import torch
from recipe_cost import TrainingStep
from step_memory import held, peak_bytes, planned_bytes
from step_networks import Sizes, Step, our_side
from tiny_runs import TINY

from ddm_lightning.config.load import load_experiment
from ddm_lightning.members.cost import activation_bytes
from ddm_lightning.shards.manifest import DataSizes

CPU = torch.device("cpu")
WIDE = Sizes(width=96, depth=5, num_heads=4, patch_size=2, channels=4, edge=16, batch_size=8)
LATENTS = DataSizes((4, 16, 16), 0, (12, 16), 10)
DIT = "expert.network={name: dit, params: {width: 96, depth: 5, num_heads: 4, patch_size: 2}}"
MMDIT = "expert.network={name: mmdit, params: {width: 64, depth: 5, num_heads: 4, patch_size: 2}}"


def step_of(*overrides):
    settings = ("condition.kind=tokens", "sample.prompts=[]", "expert.train.global_batch_size=16", *overrides)
    step = TrainingStep("expert-0", load_experiment(TINY, settings), LATENTS, CPU)
    step.take()
    return step


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_a_block_that_is_computed_twice_keeps_its_input_alone(precision):
    """4 bytes a feature of the residual stream, which is float32 under autocast, too."""
    steps = {
        depth: step_of(
            DIT.replace("depth: 5", f"depth: {depth}"),
            "island.activation_checkpointing=true",
            f"island.precision={precision}",
            "condition.kind=class",
        )
        for depth in (2, 5)
    }
    kept = {depth: activation_bytes(step.network, step.loss) for depth, step in steps.items()}
    assert kept[5] - kept[2] == 3 * 4 * 8 * 64 * 96


def test_two_blocks_tell_of_all():
    """Whatever a block keeps, five of them keep five times."""
    step = Step(our_side(WIDE), WIDE, CPU, half=False, compiled=False)
    step.take()
    state = sum(tensor.nbytes for tensor in held(step))
    assert planned_bytes(step) == state + activation_bytes(step.network, step.loss)
    assert len(step.network.blocks) == WIDE.depth


@pytest.mark.parametrize(
    "overrides",
    [
        (DIT, "island.precision=bf16-mixed"),
        (DIT, "island.activation_checkpointing=true"),
        (DIT, "island.micro_batch_size=4", "expert.train.ema_widths=[0.05, 0.1]"),
        (MMDIT,),
    ],
    ids=["bf16", "checkpointing", "parts", "mmdit"],
)
def test_the_plan_comes_true(overrides):
    step = step_of(*overrides)
    planned = planned_bytes(step)
    assert peak_bytes(step) == pytest.approx(planned, rel=0.1)
