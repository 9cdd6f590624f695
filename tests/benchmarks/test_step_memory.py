"""Memory of a step: what is planned, by hand and beside torch's own count of its allocations."""

import pytest
from step_memory import peak_bytes
from tiny_runs import TINY

from ddm_lightning.config.load import load_experiment
from ddm_lightning.members.cost import MemberCost
from ddm_lightning.members.member import Member
from ddm_lightning.shards.manifest import DataSizes
from ddm_lightning.training import measure

LATENTS = DataSizes((4, 16, 16), 0, (12, 16), 10)
DIT = "expert.network={name: dit, params: {width: 96, depth: 5, num_heads: 4, patch_size: 2}}"
MMDIT = "expert.network={name: mmdit, params: {width: 64, depth: 5, num_heads: 4, patch_size: 2}}"


def planned(*overrides):
    """The member, its island, and the memory that is planned."""
    settings = ("condition.kind=tokens", "sample.prompts=[]", "expert.train.global_batch_size=16")
    experiment = load_experiment(TINY, (*settings, "island.accelerator=cpu", *overrides))
    member = Member.resolve("expert-0", experiment, LATENTS)
    return member, experiment.island, MemberCost(member).memory(experiment.island, "single")


def test_a_block_that_is_computed_twice_keeps_its_input_alone():
    """4 bytes a feature of the residual stream, which is float32 under autocast, too."""
    settings = ("island.activation_checkpointing=true", "island.precision=bf16-mixed", "condition.kind=class")

    kept = [planned(DIT.replace("depth: 5", depth), *settings)[-1].activations for depth in ("depth: 2", "depth: 5")]

    assert kept[1] - kept[0] == 3 * 4 * 8 * 64 * 96


@pytest.mark.parametrize(
    "overrides",
    [
        (DIT, "island.precision=bf16-mixed"),
        (DIT, "island.activation_checkpointing=true"),
        (DIT, "island.micro_batch_size=4", "expert.train.ema_widths=[0.05, 0.1]"),
        (DIT, "expert.train.optimizer=muon", "expert.train.global_batch_size=2"),
        (MMDIT,),
    ],
    ids=["bf16", "checkpointing", "parts", "muon", "mmdit"],
)
def test_the_plan_comes_true(overrides, monkeypatch):
    monkeypatch.setattr(measure, "_SECONDS", 0.0)
    member, island, memory = planned(*overrides)
    assert peak_bytes(member, island) == pytest.approx(memory.peak, rel=0.02)
