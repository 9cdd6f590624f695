"""What a member costs, and what is said of it."""

from types import SimpleNamespace

import pytest
from tiny_runs import TINY

from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.config.load import load_experiment
from ddm_lightning.members import cost
from ddm_lightning.members.cost import State, chosen_strategy
from ddm_lightning.members.run import Run
from ddm_lightning.shards.manifest import DataSizes


@pytest.mark.parametrize(
    ("island", "peak", "line"),
    [
        (IslandConfig("cpu", 2), None, "the peak of this CPU is not known, so no MFU is shown"),
        (
            IslandConfig("gpu", 4, nodes=2, precision="bf16-mixed"),
            8 * 989.4e12,
            "MFU against 8 x 989.4 TFLOP/s of NVIDIA H200 in bf16-mixed",
        ),
    ],
)
def test_the_line_of_the_cost_names_the_device_and_sums_the_peaks(monkeypatch, island, peak, line):
    monkeypatch.setattr(cost, "flops_per_sample", lambda *_, **__: 2.5e9)
    if island.accelerator == "gpu":
        monkeypatch.setattr(cost, "peak_of_this_device", lambda *_: ("NVIDIA H200", 989.4))
    member = SimpleNamespace(x_shape=None, condition=None)
    found = cost.step_cost(member, island, None)
    assert (found.flops, found.recomputed_flops, found.peak_flops) == (2.5e9, 0, pytest.approx(peak) if peak else None)
    assert found.line == f"2.5 GFLOP per sample; {line}"


@pytest.mark.parametrize(
    ("num_bytes", "strategy"),
    [(1601, "fsdp-shard-grad-op"), (1600, "fsdp"), (6400, "fsdp-shard-grad-op"), (6401, "ddp")],
)
@pytest.mark.parametrize("nodes", [1, 4])
def test_weights_are_sharded_over_the_devices_of_one_node(num_bytes, strategy, nodes):
    """Of 3,200 bytes a device of 8 holds 400, beside 400 of gathered weights; half of it is for activations."""
    state = State(weights=400, gradients=400, optimizer=1600, ema=800)
    assert chosen_strategy(IslandConfig("gpu", 8, nodes=nodes, precision="32-true"), state, num_bytes) == strategy


def test_the_longest_training_is_that_of_most_parameters_times_samples():
    run = Run(load_experiment(TINY, ["router.train.max_steps=7", "expert.train.max_steps=5"]))
    sizes = DataSizes((3, 8, 8), 4, None, 0)
    for name, batch_size, steps in (("expert-0", 8, 5), ("router", 16, 7), ("monolith", 16, 5)):
        member = run.resolve(name, sizes)
        num = sum(parameter.numel() for parameter in member.build_network().parameters())
        assert (member.batch_size, cost.relative_cost(member)) == (batch_size, num * batch_size * steps)


@pytest.mark.parametrize(("size", "expected"), [(None, (3, 1)), (3, (3, 1)), (2, (2, 2)), (1, (1, 3))])
def test_a_device_computes_its_share_of_all_nodes_in_parts_of_about_one_size(size, expected):
    """Of 16 samples on 6 devices, three at most."""
    island = IslandConfig("gpu", 2, nodes=3, micro_batch_size=size)
    assert cost.micro_batch_of(SimpleNamespace(batch_size=16), island) == expected
