"""AdamW with moments in eight bits and weights in bfloat16, against torch's and torchao's."""

import copy
import math
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from training.saved import load, save, writer_of
from training.two_processes import WORLD, in_two_processes

from ddm_lightning.config.experiment import TrainConfig
from ddm_lightning.core.sharded import local
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.networks.blocks import moment_block
from ddm_lightning.training.checkpoint import load_tensors, tensors_of
from ddm_lightning.training.compact import CompactAdamW, EightBits, round_stochastically
from ddm_lightning.training.ema import ema_weights, track_ema, unsharded_ema
from ddm_lightning.training.optimizer import build_optimizer, clip_in_step
from ddm_lightning.training.parallel import halve_weights, shard_blocks

SETTINGS = [("adamw-8bit", False), ("adamw", True), ("adamw-8bit", True)]
"""Optimizer, and whether weights are in bfloat16."""


class Network(nn.Module):
    """Rows of one block and of several, in odd numbers: two ranks hold unequal parts."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(64, 65), nn.Linear(65, 576)])
        self.head = nn.Linear(576, 9)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x.to(block.weight.dtype)))

        return self.head(x)


def built(kind="adamw-8bit", half=False):
    network = Network()
    if half:
        halve_weights(network)

    return network, optimizer_of(network, kind)


def optimizer_of(network, kind):
    train = TrainConfig(10, 4, optimizer=kind, learning_rate=0.01, weight_decay=0.1, ema_decay=0.9)
    optimizer = build_optimizer(network, train, (7, "expert-0"))
    track_ema(optimizer, train.ema_decay)
    return optimizer


def inputs(number):
    return torch.randn(8, 64, generator=torch.Generator().manual_seed(number))


def step(network, optimizer, number, spoil=False, x=None):
    network.zero_grad()
    network(inputs(number) if x is None else x).square().mean().backward()
    parameters = [*network.parameters()]
    if spoil:
        parameters[0].grad[0, 0] = math.nan

    norm = clip_in_step(optimizer, parameters, 0.05)
    optimizer.found_inf = (~norm.isfinite()).float()
    optimizer.step()
    return norm


def copied(network, optimizer):
    return {name: value.clone() for name, value in tensors_of(network, optimizer).items()}


def same(ours, expected):
    assert ours.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(ours[name], value), name


def test_in_float32_it_is_torchs_adamw_to_the_bit():
    network = Network()
    reference = Network()
    groups = [{"params": [*network.parameters()], "weight_decay": 0.1}]
    optimizer = CompactAdamW(groups, 0.01, eight_bits=False)
    expected = torch.optim.AdamW(reference.parameters(), 0.01, weight_decay=0.1, fused=True)
    for number in range(6):
        for one, its in ((network, optimizer), (reference, expected)):
            step(one, its, number, spoil=number in (0, 3))

    same(dict(network.named_parameters()), dict(reference.named_parameters()))


def test_the_first_step_with_eight_bits_is_torchaos():
    """As torchao's function of one step without its compiler, but for rounding; weights of rows that 256 divides."""
    adam = pytest.importorskip("torchao.optim.adam")
    states = pytest.importorskip("torchao.optim.subclass_8bit")
    weight = nn.Parameter(torch.randn(6, 1024, generator=torch.Generator().manual_seed(0)))
    theirs = weight.detach().clone()
    optimizer = CompactAdamW([{"params": [weight], "weight_decay": 0.1}], 0.01, eight_bits=True)
    moments = [states.OptimState8bit.zeros(theirs.shape, signed) for signed in (True, False)]
    weight.grad = torch.randn(weight.shape, generator=torch.Generator().manual_seed(1))
    optimizer.step()
    settings = (torch.tensor(1.0), *moments, None, torch.tensor(0.01), 0.9, 0.999, 0.1, 1e-8, True, False)
    adam.single_param_adam(theirs, weight.grad, *settings)

    torch.testing.assert_close(weight.detach(), theirs, rtol=0, atol=1e-6)
    for name, expected in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
        state = optimizer.state[weight]
        assert (state[f"{name}_codes"].int() - expected.codes.int()).abs().max() == 1
        torch.testing.assert_close(state[f"{name}_scales"].flatten(), expected.scale, rtol=1e-6, atol=0)


@pytest.mark.parametrize("signed", [True, False])
def test_codes_are_those_of_the_two_nearest_numbers_and_right_in_the_mean(signed):
    eight = EightBits(signed, torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    values = eight.values[0 if signed else 1 :]  # no second moment becomes 0
    shares = torch.rand(len(values) - 1, generator=generator)
    numbers = values[:-1] + shares * values.diff()
    found = eight.decode(eight.encode(numbers.expand(4000, -1).contiguous(), generator))
    assert ((found == values[:-1]) | (found == values[1:])).all()

    error = (found.double().mean(0) - numbers) / values.diff()
    assert error.abs().max() < 5 * 0.5 / math.sqrt(4000)
    assert torch.equal(eight.decode(eight.encode(values, generator)), values)


def test_second_moments_follow_gradients_that_grow():
    """Their relative sizes change after 2,000 steps; torchao's moments are then half of those in float32."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(16, 256))
    optimizer = CompactAdamW([{"params": [weight], "weight_decay": 0.0}], 0.0, eight_bits=True)
    exact = torch.zeros_like(weight)
    sizes = torch.randn(weight.shape, generator=generator).div(2).exp()
    for number in range(5000):
        if number == 2000:
            sizes = 0.3 * sizes.roll(7, 1)

        weight.grad = sizes * torch.randn(weight.shape, generator=generator)
        optimizer.step()
        exact.lerp_(weight.grad**2, 0.001)

    state = optimizer.state[weight]
    scales = state["exp_avg_sq_scales"].repeat_interleave(256, 1)
    ratio = EightBits(False, weight.device).decode(state["exp_avg_sq_codes"]) * scales / exact
    assert ratio.mean().item() == pytest.approx(1, abs=0.03)


def test_small_gradients_beside_large_ones_take_no_large_steps():
    """Six decades in each block: torchao's steps are 50 times the rate here, by second moments of 0."""
    generator = torch.Generator().manual_seed(0)
    weight = nn.Parameter(torch.zeros(16, 256))
    sizes = 10 ** (-6 * torch.rand(weight.shape, generator=generator))
    optimizer = CompactAdamW([{"params": [weight], "weight_decay": 0.0}], 1e-3, eight_bits=True)
    for _ in range(100):
        before = weight.detach().clone()
        weight.grad = sizes * torch.randn(weight.shape, generator=generator)
        optimizer.step()

        assert (weight.detach() - before).abs().max() < 3e-3


@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((16, 256), 256),
        ((4, 1152), 192),
        ((128, 64), 64),
        ((64, 3, 3, 16), 144),
        ((5000,), None),
        ((63, 64), None),
        ((2048, 2), None),
        ((20, 257), None),
    ],
)
def test_blocks_are_parts_of_rows(shape, block):
    assert moment_block(torch.empty(shape)) == block


@pytest.mark.parametrize(("kind", "half"), SETTINGS)
@pytest.mark.parametrize("at", [0, 3])
def test_a_skipped_step_changes_nothing(kind, half, at):
    network, optimizer = built(kind, half)
    for number in range(at):
        step(network, optimizer, number)

    before = copied(network, optimizer)
    step(network, optimizer, 9, spoil=True)
    after = copied(network, optimizer)
    averages = [name for name in after if "/ema/" in name or "moment" in name]
    if at == 0:
        before |= {name: value for name, value in after.items() if name.startswith("optimizer/")}
        assert all(not after[name].any() for name in after if "/exp_avg" in name or "/step/" in name)

    for name in averages:
        del before[name], after[name]

    same(after, before)


def test_the_norm_of_bfloat16_gradients_is_computed_in_float32():
    network, optimizer = built(half=True)
    norm = step(network, optimizer, 0)
    exact = math.sqrt(sum(p.grad.double().square().sum().item() for p in network.parameters()))

    assert all(p.grad.dtype == torch.bfloat16 for p in network.parameters())
    assert norm.item() == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("number", [1.0, -1.0, 3e-3, -250.0])
def test_rounding_is_unbiased(number):
    """The frequencies of both neighbours are the distances to the other one."""
    low = torch.tensor(number, dtype=torch.bfloat16)
    high = (low.view(torch.int16) + 1).view(torch.bfloat16)
    for share in (0.0, 0.1, 0.5, 0.97):
        between = low.float() + share * (high.float() - low.float())
        num = 1 << 16
        rounded = round_stochastically(between.expand(num).contiguous(), keyed_generator(0, "test"))
        assert {*rounded.tolist()} <= {low.item(), high.item()}
        exact = ((between - low.float()) / (high.float() - low.float())).item()
        found = (rounded == high).float().mean().item()
        assert found == pytest.approx(exact, abs=4 * math.sqrt(exact * (1 - exact) / num))


def test_rounding_keeps_exact_and_special_numbers_and_carries():
    exact = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    rounded = round_stochastically(exact.float())
    finite = ~exact.isnan()
    assert torch.equal(rounded[finite].view(torch.int16), exact[finite].view(torch.int16))
    assert rounded[~finite].isnan().all()

    bits = torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32)  # NaN whose bits would carry
    assert round_stochastically(bits.view(torch.float32)).isnan().all()

    below_two = torch.full((1000,), 2 - 2**-8)
    assert {*round_stochastically(below_two).tolist()} == {2 - 2**-7, 2.0}


def test_rounding_follows_seed_member_and_step():
    def trained(*key):
        network = Network()
        halve_weights(network)
        train = TrainConfig(10, 4, learning_rate=0.01)
        optimizer = build_optimizer(network, train, key)
        for number in range(2):
            step(network, optimizer, number)

        return network.head.weight.detach()

    assert torch.equal(trained(7, "expert-0"), trained(7, "expert-0"))
    assert not torch.equal(trained(7, "expert-0"), trained(7, "expert-1"))
    assert not torch.equal(trained(7, "expert-0"), trained(8, "expert-0"))


def test_small_steps_in_bfloat16_are_taken_on_average():
    """Steps of a tenth of the distance between neighbours, which rounding to nearest would drop."""
    weight = nn.Parameter(torch.ones(100, 100, dtype=torch.bfloat16))
    optimizer = CompactAdamW([{"params": [weight], "weight_decay": 0.0}], 2**-8 / 10, eight_bits=True)
    for _ in range(20):
        weight.grad = torch.ones_like(weight)
        optimizer.step()

    assert weight.float().mean().item() == pytest.approx(1 - 20 * 2**-8 / 10, abs=2e-4)


@pytest.mark.parametrize(("kind", "half"), SETTINGS)
def test_it_is_resumed_to_the_bit(tmp_path, kind, half):
    straight, its = built(kind, half)
    for number in range(2):
        step(straight, its, number)

    save(tmp_path / "step", straight, its)
    resumed, optimizer = built(kind, half)
    load(tmp_path / "step", resumed, optimizer)
    for number in range(2, 5):
        step(straight, its, number)
        step(resumed, optimizer, number)

    same(copied(resumed, optimizer), copied(straight, its))
    dtypes = {value.dtype for value in tensors_of(resumed, optimizer).values()}
    codes = [torch.uint8] if kind == "adamw-8bit" else []
    assert dtypes == {torch.float32, *codes, *([torch.bfloat16] if half else [])}


@pytest.mark.parametrize(("kind", "half"), SETTINGS)
def test_torchs_state_dict_resumes_it_too(kind, half):
    """That of a Trainer of one's own."""
    network, optimizer = built(kind, half)
    step(network, optimizer, 0)
    resumed, its = built(kind, half)
    resumed.load_state_dict(network.state_dict())
    its.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number in (1, 2):
        step(network, optimizer, number)
        step(resumed, its, number)

    same(copied(resumed, its), copied(network, optimizer))


def test_averages_are_float32_and_lent_to_a_validation():
    network, optimizer = built(half=True)
    for number in range(3):
        step(network, optimizer, number)

    own = {name: value.detach().clone() for name, value in network.named_parameters()}
    averages = unsharded_ema(network, optimizer)
    assert {value.dtype for value in averages.values()} == {torch.float32}
    assert any((value != value.bfloat16()).any() for value in averages.values())
    with ema_weights(network, optimizer):
        same(dict(network.named_parameters()), {name: value.bfloat16() for name, value in averages.items()})

    same(dict(network.named_parameters()), own)


@pytest.mark.parametrize("half", [True, False])
def test_another_precision_reads_the_checkpoint(tmp_path, half):
    network, optimizer = built(half=half)
    step(network, optimizer, 0)
    save(tmp_path / "step", network, optimizer)
    other = Network()
    if not half:
        halve_weights(other)

    load_tensors(tmp_path / "step", other)
    for name, value in network.named_parameters():
        expected = value.float() if half else value.bfloat16()
        assert torch.equal(other.get_parameter(name), expected)


def gathered(value):
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def all_gathered(network, optimizer):
    return {name: gathered(value) for name, value in tensors_of(network, optimizer).items()}


def sharded(kind, half):
    network = Network()
    if half:
        halve_weights(network)

    shard_blocks(network, init_device_mesh("cpu", (WORLD,)))
    return network, optimizer_of(network, kind)


def over_ranks(folder, kind, half, rank):
    """Two ranks beside one; what two saved, one reads, and two again."""
    hosts = dist.new_group(backend="gloo")
    ours, optimizer = sharded(kind, half)
    single, reference = built(kind, half)
    for number in range(4):
        step(ours, optimizer, number, x=inputs(number).chunk(WORLD)[rank])
        step(single, reference, number)

    found = all_gathered(ours, optimizer)
    expected = all_gathered(single, reference)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name].float().mean(), value.float().mean(), rtol=0.1, atol=0.3)
        if not half and name.startswith("model/"):  # after four steps of 0.01 whose moments were rounded otherwise
            torch.testing.assert_close(found[name], value, rtol=0, atol=4e-3)

    save(folder / "two", ours, optimizer, writer=writer_of(hosts, is_rank_zero=rank == 0))
    dist.barrier()
    load(folder / "two", single, reference)
    same(all_gathered(single, reference), found)
    if rank == 0:
        save(folder / "one", single, reference)

    dist.barrier()
    again, its = sharded(kind, half)
    load(folder / "one", again, its, hosts)
    same(all_gathered(again, its), found)
    shapes = {name: local(value).shape for name, value in tensors_of(ours, optimizer).items()}
    assert {name: local(value).shape for name, value in tensors_of(again, its).items()} == shapes
    for number in range(4, 6):
        for one, of_one in ((ours, optimizer), (again, its)):
            step(one, of_one, number, x=inputs(number).chunk(WORLD)[rank])

    same(all_gathered(again, its), all_gathered(ours, optimizer))
    return shapes["optimizer/exp_avg_codes/blocks.0.weight" if kind == "adamw-8bit" else "model/blocks.0.weight"][0]


pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.mark.parametrize(("kind", "half"), SETTINGS)
def test_shards_are_those_of_one_rank_and_are_read_by_any_number(tmp_path, kind, half):
    assert in_two_processes(partial(over_ranks, tmp_path, kind, half)) == {0: 33, 1: 32}


def of_replicas(rank):
    network = Network()
    halve_weights(network)
    replica = DistributedDataParallel(network)
    optimizer = optimizer_of(network, "adamw-8bit")
    for number in range(3):
        step(replica, optimizer, number, x=inputs(number).chunk(WORLD)[rank])

    return {name: value.float().tolist() for name, value in network.named_parameters()}


def test_replicas_stay_equal_to_the_bit():
    first, second = in_two_processes(of_replicas).values()

    assert first == second
