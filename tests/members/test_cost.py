"""What a member costs, and what is said of it."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from tiny_runs import TINY

from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.buckets import Bucket
from ddm_lightning.members import cost
from ddm_lightning.members.cost import MemberCost, State, chosen_strategy
from ddm_lightning.members.run import Run
from ddm_lightning.shards.manifest import ClusterSamples, DataSizes, Manifest
from ddm_lightning.training.ema import HOST_STEPS, averages_of, track_ema
from ddm_lightning.training.optimizer import build_optimizer
from ddm_lightning.training.parallel import halve_weights

CHECKPOINTED = IslandConfig("cpu", 1, activation_checkpointing=True)


def test_the_cost_names_the_device_sums_the_peaks_and_adds_a_forward_pass_for_checkpointing(monkeypatch):
    made = planned()
    monkeypatch.setattr(cost, "peak_of_this_device", lambda *_: ("NVIDIA H200", 989.4))
    island = IslandConfig("gpu", 4, nodes=2, precision="bf16-mixed", activation_checkpointing=True)

    found = cost.step_cost(made.member, island, made.network)

    assert (found.flops, found.recomputed_flops) == (made.flops(), made.flops(backward=False))
    assert found.peak_flops == pytest.approx(8 * 989.4e12)
    figure = f"{made.flops() / 1e9:.4g} GFLOP per sample"
    assert found.line == f"{figure}; MFU against 8 x 989.4 TFLOP/s of NVIDIA H200 in bf16-mixed"

    monkeypatch.undo()
    unknown = cost.step_cost(made.member, IslandConfig("cpu", 2), made.network)

    assert (unknown.flops, unknown.recomputed_flops, unknown.peak_flops) == (made.flops(), 0, None)
    assert unknown.line == f"{figure}; the peak of this CPU is not known, so no MFU is shown"


@pytest.mark.parametrize(
    ("num_bytes", "strategy"),
    [(1601, "fsdp-shard-grad-op"), (1600, "fsdp"), (6400, "fsdp-shard-grad-op"), (6401, "ddp")],
)
@pytest.mark.parametrize("nodes", [1, 4])
def test_weights_are_sharded_over_the_devices_of_one_node(num_bytes, strategy, nodes):
    """Of 3,200 bytes a device of 8 holds 400, beside 400 of gathered weights; half of it is for activations."""
    state = State(weights=400, gradients=400, optimizer=1600, ema=800)

    assert chosen_strategy(IslandConfig("gpu", 8, nodes=nodes, precision="32-true"), state, num_bytes) == strategy
    assert chosen_strategy(IslandConfig("gpu", 1, nodes=1), state, num_bytes) == "single"
    assert chosen_strategy(IslandConfig("gpu", 1, nodes=2), state, 6401) == "ddp"


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


def planned(*overrides):
    """Cost of an expert of five blocks and no condition."""
    network = "expert.network={name: dit, params: {width: 32, depth: 5, num_heads: 2, patch_size: 4}}"
    experiment = load_experiment(TINY, ["condition.kind=none", "sample.prompts=[]", network, *overrides])
    member = Run(experiment).resolve("expert-0", DataSizes((3, 8, 8), 0, None, 0))
    return MemberCost(member)


@pytest.mark.parametrize(
    ("strategy", "precision", "nodes", "share", "gathered"),
    [
        ("fsdp-shard-grad-op", "32-true", 1, 4, 1),
        ("fsdp-shard-grad-op", "bf16-mixed", 2, 4, 1 / 2),
        ("fsdp", "32-true", 2, 4, 2 / 5),
        ("fsdp", "bf16-mixed", 1, 4, 1 / 5),
        ("ddp", "bf16-mixed", 2, 1, 0),
    ],
)
def test_a_device_holds_its_share_and_all_gathered_weights_or_those_of_two_blocks(
    strategy, precision, nodes, share, gathered
):
    """A training of one sample a device, whose weights take more than its activations."""
    made = planned("expert.train.ema_widths=[0.05, 0.1]", f"expert.train.global_batch_size={8 * nodes}")
    weights = 4 * made.num_parameters
    buffers = sum(one.nbytes for one in made.network.buffers())

    found = made.memory(IslandConfig("gpu", 4, nodes=nodes, precision=precision), strategy)

    each = weights // share
    assert buffers > 0
    assert found.weights == each + int(weights * gathered) + buffers
    assert (found.gradients, found.optimizer, found.ema) == (each, 2 * each, 3 * each)
    kept = max(found.activations, found.gradients)
    if gathered:  # sharded gradients outlast the backward pass; others come as the activations go
        kept = found.activations + found.gradients

    assert found.peak == found.weights + found.optimizer + found.ema + kept + found.temporary
    assert found.temporary >= 0


def test_an_average_a_copy_of_the_best_and_each_width_are_counted():
    each = 4 * planned().num_parameters
    for overrides, num in (((), 1), (("expert.train.ema_widths=[0.1]",), 2), (("expert.train.keep=best",), 2)):
        state = planned(*overrides).state(IslandConfig("cpu", 1))
        assert (state.ema, state.checkpoint, state.training) == (num * each, (3 + num) * each, (4 + num) * each)


def test_bytes_of_each_setting_are_those_of_the_closed_form():
    """Of a DiT of width 64 without condition: all its matrices but the last have blocks of 64, 128 or 256 in a row."""
    d, depth, patch = 64, 3, 4 * 4 * 3
    wide = "expert.network={name: dit, params: {width: 64, depth: 3, num_heads: 2, patch_size: 4}}"
    float32 = planned(wide).state(IslandConfig("cpu", 1))
    num = planned(wide).num_parameters
    assert (float32.weights, float32.gradients, float32.optimizer) == (4 * num, 4 * num, 8 * num)
    assert (float32.ema, float32.host, float32.step) == (4 * num, 0, 0)

    # Time's two layers, modulation, queries to values, output and both of the MLP, and the last modulation: rows of
    # 256 share one scale, rows of 64 another each.
    rows_of_64 = d * d + depth * (6 + 3 + 1 + 4) * d * d + 2 * d * d
    rows_of_256 = d * 256 + depth * 4 * d * d
    others = num - rows_of_64 - rows_of_256
    eight = planned(wide, "expert.train.optimizer=adamw-8bit").state(IslandConfig("cpu", 1))
    assert eight.optimizer == 8 * others + 2 * (rows_of_64 + rows_of_256) + 8 * (rows_of_64 // 64 + rows_of_256 // 256)
    assert others == patch * d + d + d * patch + patch + 2 * d + 2 * d + depth * (6 + 3 + 1 + 4 + 1) * d

    half = planned(wide, "expert.train.ema_widths=[0.1]").state(
        IslandConfig("cpu", 1, precision="bf16-true", ema="host")
    )
    assert (half.weights, half.gradients, half.optimizer, half.ema) == (2 * num, 2 * num, 8 * num, 0)
    assert (half.host, half.training, half.checkpoint) == (8 * num, 12 * num, 18 * num)
    assert str(half).endswith(f"EMA in the host's memory {8 * num / 1e6:.1f} MB")


@pytest.mark.parametrize(("strategy", "copies"), [("single", 1), ("ddp", 4), ("fsdp", 1)])
def test_each_replica_of_a_node_keeps_averages_in_the_hosts_memory(strategy, copies):
    """With the copy of the weights that they take in."""
    made = planned("expert.train.global_batch_size=8")
    devices = 1 if strategy == "single" else 4
    island = IslandConfig("gpu", devices, precision="bf16-true", ema="host")

    found = made.memory(island, strategy)

    assert (found.ema, found.host) == (0, copies * (4 + 2) * made.num_parameters)


def test_bfloat16_weights_take_half_of_the_bytes_and_no_copies_in_half_precision():
    made = planned()
    mixed, half = (
        made.memory(IslandConfig("gpu", 1, precision=name), "single") for name in ("bf16-mixed", "bf16-true")
    )
    copied = sum(
        2 * p.numel() for name, p in made.network.named_parameters() if name.endswith(".weight") and p.ndim > 1
    )
    assert half.gradients == mixed.gradients // 2 == 2 * made.num_parameters
    assert mixed.weights - half.weights == 2 * made.num_parameters
    assert mixed.activations - half.activations >= 0.9 * copied


def test_adapters_alone_are_trained_but_their_base_is_held():
    """Of rank 2 on five projections of 32 to 96 features."""
    made = planned("expert.network.lora={rank: 2, target_modules: [qkv]}", "expert.init_from=base")

    found = made.memory(IslandConfig("gpu", 1), "single")

    assert made.num_parameters == 5 * 2 * (32 + 96)
    assert found.optimizer == 8 * made.num_parameters
    assert found.weights > 4 * planned().num_parameters


def test_flops_are_the_mean_over_the_shapes_and_memory_is_that_of_the_largest(tiny_prepared):
    """Of the shares of its own clusters' training samples."""
    manifest = Manifest.read(tiny_prepared.parent)
    small, large = Bucket(32, 96, (3, 4, 12)), Bucket(64, 128, (3, 8, 16))
    mixed = replace(
        manifest,
        buckets=(small, large),
        columns=manifest.columns | {"x_0": "ndarray:uint8:3,4,12"},
        bucket_samples=((ClusterSamples(30, 9), ClusterSamples(1, 9)), (ClusterSamples(10, 9), ClusterSamples(4, 9))),
    )
    run = Run(load_experiment(TINY))
    members = [run.resolve(name, mixed) for name in ("expert-0", "expert-1", "router")]
    assert [member.bucket_shares for member in members] == [(0.75, 0.25), (0.2, 0.8), (31 / 45, 14 / 45)]

    found, one, other = (
        MemberCost(run.resolve("expert-0", sizes))
        for sizes in (mixed, *(DataSizes(bucket.x_shape, 16, None, 4) for bucket in mixed.buckets))
    )
    assert found.flops() == pytest.approx(0.75 * one.flops() + 0.25 * other.flops())
    assert found.flops(member=members[1]) == pytest.approx(0.2 * one.flops() + 0.8 * other.flops())
    assert found.flops(backward=False) == cost.step_cost(members[0], CHECKPOINTED, found.network).recomputed_flops
    tables = sum(buffer.nbytes for buffer in other.network.buffers())
    memory = found.memory(IslandConfig("cpu", 1), "single")
    assert memory.activations - other.memory(IslandConfig("cpu", 1), "single").activations == tables

    unknown = DataSizes(manifest.x_shape, 16, None, 4, mixed.buckets)
    assert run.resolve("expert-0", unknown).bucket_shares == (0.5, 0.5)
    assert run.resolve("expert-0", manifest).largest_shape == (3, 8, 8)


def test_float16_computes_in_as_much_memory_as_bfloat16():
    kept = {
        precision: planned().memory(IslandConfig("gpu", 1, precision=precision), "single").activations
        for precision in ("32-true", "bf16-mixed", "16-mixed")
    }
    assert kept["16-mixed"] == kept["bf16-mixed"] < kept["32-true"]


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("ema", ["device", "host"])
def test_a_training_holds_the_bytes_that_are_predicted(optimizer, precision, ema):
    """Weights, gradients, moments and averages after a step; steps are counted in another 4 bytes a parameter."""
    made = planned(f"expert.train.optimizer={optimizer}", "expert.train.ema_widths=[0.1]")
    state = made.state(IslandConfig("cpu", 1, precision=precision, ema=ema))
    network = made.member.build_network()
    if precision == "bf16-true":
        halve_weights(network)

    trained = build_optimizer(network, made.member.train)
    track_ema(trained, 0.9, made.member.train.ema_widths, every=HOST_STEPS if ema == "host" else 0)
    for parameter in network.parameters():
        parameter.grad = torch.ones_like(parameter)

    trained.step()
    averages_of(trained)  # waits for the thread
    kept = {"weights": [*network.parameters()], "gradients": [p.grad for p in network.parameters()]}
    for parameter in network.parameters():
        for key, value in trained.state[parameter].items():
            kind = "averages" if key.startswith("ema") else "steps" if key == "step" else "optimizer"
            kept.setdefault(kind, []).append(value)

    held = {kind: sum(tensor.nbytes for tensor in tensors) for kind, tensors in kept.items() if kind != "steps"}
    expected = {"weights": state.weights, "gradients": state.gradients, "optimizer": state.optimizer}
    assert held == expected | {"averages": state.ema + state.host}
    assert (state.host > 0) == (ema == "host") and state.ema * state.host == 0
