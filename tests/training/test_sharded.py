"""FSDP2 on two processes against one process that is given the same gradients."""

from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from networks.small import moved
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from training.saved import load, save, writer_of
from training.two_processes import WORLD, in_two_processes

from ddm_lightning.config.experiment import TrainConfig
from ddm_lightning.core.sharded import local
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members.checkpoints import damage_of
from ddm_lightning.networks.mmdit import MMDiT
from ddm_lightning.training.checkpoint import tensors_of
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


def optimizer_of(network, every=0):
    optimizer = build_optimizer(network, TRAIN)
    track_ema(optimizer, TRAIN.ema_decay, TRAIN.ema_widths, every=every)
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
        torch.testing.assert_close(sharded[name], value, rtol=1e-5, atol=1e-6)


def shard(network, reshard_after_forward=True):
    shard_blocks(network, init_device_mesh("cpu", (WORLD,)), reshard_after_forward=reshard_after_forward)
    return network


def built(kind):
    if kind == "ddp":
        return DistributedDataParallel(Uneven())

    return shard(Uneven(), reshard_after_forward=kind == "fsdp")


def averages_and_clipping(kind, every, rank):
    """Steps beside those of one process; returns how many rows this rank has of each weight."""
    ours = built(kind)
    network = ours.module if kind == "ddp" else ours
    single = Uneven()
    optimizer = optimizer_of(network, every)
    reference = optimizer_of(single, every)
    sizes = {name: local(p).shape[0] for name, p in network.named_parameters()}
    for number in range(6):
        x = inputs(number)
        # The mean of two halves' gradients is the whole batch's; the limit is well below the norm.
        norm, gradients = step(ours, optimizer, x.chunk(WORLD)[rank], clip=0.05)
        expected_norm, expected = step(single, reference, x, clip=0.05)
        torch.testing.assert_close(norm, expected_norm, rtol=1e-5, atol=0)
        assert norm > 0.05
        close({name.removeprefix("module."): value for name, value in gradients.items()}, expected)

    for key in (KEY, width_key(0.1)):
        averages = ema_tensors(network, optimizer, key)
        assert {name: local(value).shape[0] for name, value in averages.items()} == sizes
        close(unsharded_ema(network, optimizer, key), unsharded_ema(single, reference, key))

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


def checkpoints_of_either_kind(folder, every):
    """What two ranks saved, unevenly, one reads, and the other way round; a save goes on while steps are taken."""

    def task(rank):
        hosts = dist.new_group(backend="gloo")
        sharded = shard(Uneven())
        single = Uneven()
        optimizer = optimizer_of(sharded, every)
        reference = optimizer_of(single, every)
        for number in range(3):
            step(sharded, optimizer, inputs(number).chunk(WORLD)[rank], clip=0.05)
            step(single, reference, inputs(number + 5), clip=0.05)

        by_two = {name: gathered(value) for name, value in tensors_of(sharded, optimizer).items()}
        by_one = {name: value.clone() for name, value in tensors_of(single, reference).items()}

        def meanwhile():
            step(sharded, optimizer, inputs(3).chunk(WORLD)[rank], clip=0.05)

        save(folder / "two", sharded, optimizer, meanwhile, writer_of(hosts, is_rank_zero=rank == 0))
        if rank == 0:
            save(folder / "one", single, reference)

        dist.barrier()

        assert damage_of(folder / "two") is None

        other = Uneven()
        others = optimizer_of(other, every)
        load(folder / "two", other, others)
        found = tensors_of(other, others)
        load(folder / "one", sharded, optimizer, hosts)
        resharded = {name: gathered(value) for name, value in tensors_of(sharded, optimizer).items()}
        for loaded, expected in ((found, by_two), (resharded, by_one)):
            assert loaded.keys() == expected.keys()
            assert all(torch.equal(loaded[name], value) for name, value in expected.items())

        assert {(group["ema_steps"], group.get("ema_behind", 0)) for group in others.param_groups} == {(3, every // 2)}

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


def an_mmdit_in_bfloat16(rank):
    """Losses of FSDP2, whose weights are gathered in bfloat16, and of one process, both under autocast; and types."""

    def built():
        torch.manual_seed(0)
        tokens = ConditionSpec("tokens", 6, length=3)
        network = moved(MMDiT(x_shape=(3, 8, 8), condition=tokens, width=32, depth=3, num_heads=2, patch_size=2))
        network.texts = []
        for block in network.blocks:
            block.register_forward_pre_hook(lambda _, given: network.texts.append(given[1].dtype))

        return network

    seen = set()
    sharded = built()
    single = built()
    qkv = sharded.blocks[0].patches.qkv
    qkv.register_forward_hook(lambda part, given, _: seen.add((part.weight.dtype, given[0].dtype)))
    sharded.time_embedding.register_forward_hook(lambda _, given, __: seen.add(given[0].dtype))
    shard_blocks(sharded, init_device_mesh("cpu", (WORLD,)), reshard_after_forward=False, half=True)
    for part in (sharded, *sharded.blocks):
        assert part._get_fsdp_state()._mp_policy.reduce_dtype == torch.float32

    sides = []
    for network, rows in ((sharded, slice(2 * rank, 2 * rank + 2)), (single, slice(None))):
        optimizer = build_optimizer(network, replace(TRAIN, learning_rate=3e-3))
        losses = []
        for number in range(8):
            generator = torch.Generator().manual_seed(number)
            x = torch.randn(4, 3, 8, 8, generator=generator)[rows]
            t = torch.rand(4, generator=generator)[rows]
            condition = Condition.of(torch.randn(4, 3, 6, generator=generator)[rows])
            optimizer.zero_grad()
            with torch.autocast("cpu", torch.bfloat16):
                loss = (network(x, t, condition if number else None).float() - x).square().mean()

            loss.backward()
            clipped(network, optimizer, 1.0)
            assert {p.grad.dtype for p in network.parameters() if p.grad is not None} == {torch.float32}
            optimizer.step()
            losses.append(loss.detach().clone())

        sides.append((torch.stack(losses), network.texts))

    (ours, texts), (expected, others) = sides
    dist.all_reduce(ours)
    return (ours / WORLD).tolist(), expected.tolist(), seen, {*texts, *others}


pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


@pytest.mark.parametrize(("kind", "every"), [("fsdp", 0), ("fsdp", 4), ("gathered", 0), ("ddp", 0)])
def test_averages_and_clipped_gradients_are_those_of_one_process(kind, every):
    """Averages also on the host, each rank its shard of them, read two steps after the fourth."""
    sizes = in_two_processes(partial(averages_and_clipping, kind, every))
    rows = [(sizes[rank]["blocks.0.weight"], sizes[rank]["head.weight"]) for rank in range(WORLD)]

    assert rows == ([(5, 1), (5, 1)] if kind == "ddp" else [(3, 1), (2, 0)])


def test_under_autocast_weights_are_gathered_in_bfloat16_and_times_and_text_stay():
    for ours, expected, seen, texts in in_two_processes(an_mmdit_in_bfloat16).values():
        assert expected[-1] < 0.8 * expected[1]
        assert ours == pytest.approx(expected, rel=0.005)
        assert seen == {torch.float32, (torch.bfloat16, torch.float32)}
        assert texts == {torch.float32}


@pytest.mark.parametrize("every", [0, 2])
def test_checkpoints_are_read_by_any_number_of_ranks(tmp_path, every):
    files = in_two_processes(checkpoints_of_either_kind(tmp_path, every))[0]

    assert [name for name in files if not name.startswith("shard-")] == ["files.json", "trainer.pt"]
    assert len(files) == 4  # each rank wrote its own
    assert not list(tmp_path.glob(".tmp*"))


def test_gathered_weights_stay_whole_until_the_backward_pass():
    for found in in_two_processes(what_is_whole_after_a_forward).values():
        assert found[False] == ["head.bias", "head.weight"]  # the backward pass begins with them
        assert found[True] == sorted(name for name, _ in Uneven().named_parameters())


def test_sharded_ema_weights_are_restored_after_a_validation():
    in_two_processes(lending_after_a_forward)
