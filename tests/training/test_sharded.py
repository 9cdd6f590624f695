"""FSDP2 on two processes against one process that is given the same gradients."""

from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from networks.small import moved
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from training.saved import load, save
from training.two_processes import WORLD, in_two_processes

from ddm_lightning.config.experiment import TrainConfig
from ddm_lightning.flow.condition import Condition, ConditionSpec
from ddm_lightning.networks.dit import DiT
from ddm_lightning.networks.mmdit import MMDiT
from ddm_lightning.training.checkpoint import damage_of, tensors_of
from ddm_lightning.training.ema import KEY, ema_tensors, ema_weights, track_ema, unsharded_ema, width_key
from ddm_lightning.training.optimizer import build_optimizer, clip_in_step
from ddm_lightning.training.parallel import shard_blocks

TRAIN = TrainConfig(10, 4, learning_rate=0.1, weight_decay=0.05, ema_decay=0.9, ema_widths=[0.1])


class Uneven(nn.Module):
    """Every first dimension is odd, one is 1: two ranks hold unequal parts, or nothing."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList([nn.Linear(3, 5), nn.Linear(5, 7)])
        self.head = nn.Linear(7, 1)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


def optimizer_of(network):
    optimizer = build_optimizer(network, TRAIN)
    track_ema(optimizer, TRAIN.ema_decay, TRAIN.ema_widths)
    return optimizer


def inputs(step):
    return torch.randn(8, 3, generator=torch.Generator().manual_seed(step))


def gathered(value):
    return (value.full_tensor() if isinstance(value, DTensor) else value).detach().clone()


def step(network, optimizer, x, clip):
    optimizer.zero_grad()
    network(x).square().mean().backward()
    gradients = {name: gathered(p.grad) for name, p in network.named_parameters()}
    norm = clipped(network, optimizer, clip)
    optimizer.step()
    return norm, gradients


def clipped(network, optimizer, limit):
    """As in training on several ranks; by torch's function in one process."""
    if isinstance(network, FSDPModule | DistributedDataParallel):
        return clip_in_step(optimizer, network.parameters(), limit)
    return nn.utils.clip_grad_norm_(network.parameters(), limit)


def close(sharded, single):
    assert sharded.keys() == single.keys()
    for name, value in single.items():
        torch.testing.assert_close(
            sharded[name], value, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}"
        )


def shard(network, reshard_after_forward=True):
    shard_blocks(network, init_device_mesh("cpu", (WORLD,)), reshard_after_forward=reshard_after_forward)
    return network


def averages_and_clipping(rank):
    sharded, single = shard(Uneven()), Uneven()
    optimizer, reference = optimizer_of(sharded), optimizer_of(single)
    sizes = {name: p.to_local().shape[0] for name, p in sharded.named_parameters()}
    for number in range(6):
        x = inputs(number)
        # The mean of two halves' gradients is the whole batch's; the limit is well below the norm.
        norm, gradients = step(sharded, optimizer, x.chunk(WORLD)[rank], clip=0.05)
        expected_norm, expected = step(single, reference, x, clip=0.05)
        torch.testing.assert_close(norm, expected_norm, rtol=1e-5, atol=0)
        assert norm > 0.05
        close(gradients, expected)
    for key in (KEY, width_key(0.1)):
        for name, value in ema_tensors(sharded, optimizer, key).items():
            assert isinstance(value, DTensor)
            assert value.to_local().shape[0] == sizes[name]
        close(unsharded_ema(sharded, optimizer, key), unsharded_ema(single, reference, key))
    return sizes


def lending_after_a_forward(rank):
    """A forward without a backward, as in validation, leaves whole parameters behind."""
    network = shard(Uneven())
    optimizer = optimizer_of(network)
    for number in range(3):
        step(network, optimizer, inputs(number).chunk(WORLD)[rank], clip=1.0)
    own = {name: gathered(p) for name, p in network.named_parameters()}
    averages = unsharded_ema(network, optimizer)
    with torch.no_grad():
        network(inputs(9))
    single = Uneven()
    with ema_weights(network, optimizer), torch.no_grad():
        lent = network(inputs(9))
        single.load_state_dict(averages)
        torch.testing.assert_close(lent, single(inputs(9)))
    after = {name: gathered(p) for name, p in network.named_parameters()}
    assert all(torch.equal(after[name], value) for name, value in own.items())
    assert not torch.equal(own["head.weight"], averages["head.weight"])
    step(network, optimizer, inputs(4).chunk(WORLD)[rank], clip=1.0)


def checkpoints_of_either_kind(folder):
    """What two ranks saved, unevenly, one reads, and the other way round; a save goes on while steps are taken."""

    def task(rank):
        hosts = dist.new_group(backend="gloo")
        sharded, single = shard(Uneven()), Uneven()
        optimizer, reference = optimizer_of(sharded), optimizer_of(single)
        for number in range(3):
            step(sharded, optimizer, inputs(number).chunk(WORLD)[rank], clip=0.05)
            step(single, reference, inputs(number + 5), clip=0.05)
        by_two = {name: gathered(value) for name, value in tensors_of(sharded, optimizer).items()}
        by_one = {name: value.clone() for name, value in tensors_of(single, reference).items()}

        def meanwhile():
            step(sharded, optimizer, inputs(3).chunk(WORLD)[rank], clip=0.05)

        save(folder / "two", sharded, optimizer, hosts, is_rank_zero=rank == 0, meanwhile=meanwhile)
        if rank == 0:
            save(folder / "one", single, reference)
        dist.barrier()
        assert damage_of(folder / "two") is None
        other = Uneven()
        others = optimizer_of(other)
        load(folder / "two", other, others)
        found = tensors_of(other, others)
        load(folder / "one", sharded, optimizer, hosts)
        resharded = {name: gathered(value) for name, value in tensors_of(sharded, optimizer).items()}
        for loaded, expected in ((found, by_two), (resharded, by_one)):
            assert loaded.keys() == expected.keys()
            assert all(torch.equal(loaded[name], value) for name, value in expected.items())
        assert {group["ema_steps"] for group in others.param_groups} == {3}
        # Both go on alike: what was loaded is sharded as it has to be.
        x = inputs(9)
        step(sharded, optimizer, x.chunk(WORLD)[rank], clip=0.05)
        step(single, reference, x, clip=0.05)
        close(unsharded_ema(sharded, optimizer), unsharded_ema(single, reference))
        return sorted(path.name for path in (folder / "two").iterdir())

    return task


def what_is_whole_after_a_forward(rank):
    found = {}
    for gathered in (False, True):
        network = shard(Uneven(), reshard_after_forward=not gathered)
        loss = network(inputs(0).chunk(WORLD)[rank]).square().mean()
        found[gathered] = sorted(name for name, p in network.named_parameters() if not isinstance(p, DTensor))
        loss.backward()
        assert all(isinstance(p, DTensor) for p in network.parameters())
    return found


def losses_of_twenty_steps(rank):
    """Of FSDP2, DDP and one process on the same 20 batches; no dimension is shared equally."""
    networks = {
        "fsdp": shard(Uneven()),
        "gathered": shard(Uneven(), reshard_after_forward=False),
        "ddp": DistributedDataParallel(Uneven()),
        "one": Uneven(),
    }
    optimizers = {name: optimizer_of(network) for name, network in networks.items()}
    losses = {name: [] for name in networks}
    for number in range(20):
        x = inputs(number)
        for name, network in networks.items():
            optimizers[name].zero_grad()
            loss = network(x if name == "one" else x.chunk(WORLD)[rank]).square().mean()
            loss.backward()
            clipped(network, optimizers[name], 0.05)
            optimizers[name].step()
            mean = loss.detach().clone()
            if name != "one":
                dist.all_reduce(mean)
                mean /= WORLD
            losses[name].append(float(mean))
    return losses


def a_dit_in_bfloat16(rank):
    """Losses of FSDP2, whose weights are gathered in bfloat16, and of one process, both under autocast."""

    def built():
        torch.manual_seed(0)
        sizes = {"x_shape": (3, 8, 8), "width": 32, "depth": 2, "num_heads": 2, "patch_size": 2}
        return moved(DiT(**sizes, condition=ConditionSpec("class", 5), qk_norm=True, rope=True))

    seen = set()
    sharded, single = built(), built()
    qkv = sharded.blocks[0].attention.qkv
    qkv.register_forward_hook(lambda part, inputs, _: seen.add((part.weight.dtype, inputs[0].dtype)))
    sharded.blocks[0].register_forward_hook(lambda *call: seen.add(call[-1].dtype))
    sharded.time_embedding.register_forward_hook(lambda _, inputs, __: seen.add(inputs[0].dtype))
    shard_blocks(sharded, init_device_mesh("cpu", (WORLD,)), reshard_after_forward=False, half=True)
    for part in (sharded, *sharded.blocks):
        assert part._get_fsdp_state()._mp_policy.reduce_dtype == torch.float32
    optimizers = [build_optimizer(network, replace(TRAIN, learning_rate=3e-3)) for network in (sharded, single)]
    losses = []
    for number in range(8):
        generator = torch.Generator().manual_seed(number)
        x, t = torch.randn(4, 3, 8, 8, generator=generator), torch.rand(4, generator=generator)
        classes = torch.randint(5, (4,), generator=generator)
        found = []
        for network, optimizer in zip((sharded, single), optimizers, strict=True):
            rows = slice(2 * rank, 2 * rank + 2) if network is sharded else slice(None)
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = (network(x[rows], t[rows], Condition.of(classes[rows])).float() - x[rows]).square().mean()
            loss.backward()
            clipped(network, optimizer, 1.0)
            assert {p.grad.dtype for p in network.parameters()} == {torch.float32}
            optimizer.step()
            mean = loss.detach().clone()
            if network is sharded:
                dist.all_reduce(mean)
                mean /= WORLD
            found.append(float(mean))
        losses.append(found)
    return losses, seen


def text_of_an_mmdit_in_bfloat16(rank):
    """Types of the text tokens that blocks are given, with a condition and without, sharded and not."""

    def built():
        torch.manual_seed(0)
        tokens = ConditionSpec("tokens", 6, length=3)
        network = moved(MMDiT(x_shape=(3, 8, 8), condition=tokens, width=32, depth=3, num_heads=2, patch_size=2))
        network.types = []
        for block in network.blocks:
            block.register_forward_pre_hook(lambda _, inputs: network.types.append(inputs[1].dtype))
        return network

    networks = [built(), built()]
    shard_blocks(networks[0], init_device_mesh("cpu", (WORLD,)), half=True)
    generator = torch.Generator().manual_seed(0)
    x, t = torch.randn(4, 3, 8, 8, generator=generator), torch.rand(4, generator=generator)
    for condition in (Condition.of(torch.randn(4, 3, 6, generator=generator)), None):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            ours, expected = (network(x, t, condition) for network in networks)
        torch.testing.assert_close(ours, expected, rtol=0.05, atol=0.05)
    return [network.types for network in networks]


pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def test_unevenly_sharded_averages_and_clipped_gradients_are_those_of_one_process():
    sizes = in_two_processes(averages_and_clipping)
    assert sizes[0]["blocks.0.weight"] == 3
    assert sizes[1]["blocks.0.weight"] == 2
    assert (sizes[0]["head.weight"], sizes[1]["head.weight"]) == (1, 0)


def test_losses_over_twenty_steps_are_those_of_one_process():
    for losses in in_two_processes(losses_of_twenty_steps).values():
        assert losses["one"][-1] < 0.5 * losses["one"][0]  # they do not agree for want of learning
        for name in ("fsdp", "gathered", "ddp"):
            assert losses[name] == pytest.approx(losses["one"], rel=1e-5, abs=1e-6), name


def test_under_autocast_weights_are_gathered_in_bfloat16_and_times_stay():
    for losses, seen in in_two_processes(a_dit_in_bfloat16).values():
        ours, expected = zip(*losses, strict=True)
        assert expected[-1] < 0.8 * expected[0]
        assert ours == pytest.approx(expected, rel=0.005)
        assert seen == {torch.float32, (torch.bfloat16, torch.float32)}


def test_the_text_stream_stays_in_float32():
    for sharded, single in in_two_processes(text_of_an_mmdit_in_bfloat16).values():
        assert single == [torch.float32] * 6
        assert sharded == single


def test_checkpoints_are_read_by_any_number_of_ranks(tmp_path):
    files = in_two_processes(checkpoints_of_either_kind(tmp_path))[0]
    assert [name for name in files if not name.startswith("shard-")] == ["files.json", "trainer.pt"]
    assert len(files) == 4  # each rank wrote its own
    assert not list(tmp_path.glob(".tmp*"))


def test_gathered_weights_stay_whole_until_the_backward_pass():
    for found in in_two_processes(what_is_whole_after_a_forward).values():
        assert found[False] == ["head.bias", "head.weight"]  # the backward pass begins with them
        assert found[True] == sorted(name for name, _ in Uneven().named_parameters())


def test_sharded_ema_weights_are_restored_after_a_validation():
    in_two_processes(lending_after_a_forward)
