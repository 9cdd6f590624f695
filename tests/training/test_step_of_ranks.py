"""A step of two real ranks: what each draws, and what is left out of questions, buffers, copies and sums."""

from types import SimpleNamespace

import lightning as L
import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard import _fsdp_param_group
from torch.utils.data import DataLoader
from training.members import SCALE, SHIFT, Recorder, batch, expert
from training.two_processes import WORLD, in_two_processes, trainer_of

from ddm_lightning.config.experiment import IslandConfig
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.training.callbacks import StopOnRequest
from ddm_lightning.training.module import MemberModule

NUM_STEPS = 3

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


class TwoWeights(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("positions", torch.zeros(8))
        self.gain = nn.Parameter(torch.ones(8))
        self.shift = nn.Parameter(torch.zeros(8))

    def forward(self, x_t, t, condition):
        return self.gain.mean() * x_t + self.shift.mean()


class Watch(L.Callback):
    """Counts broadcasts of whole steps, and memories that gradients lie in."""

    def __init__(self, monkeypatch):
        self.num_broadcasts = 0
        self.num_memories = []
        self.monkeypatch = monkeypatch

    def on_train_start(self, trainer, module):
        self.sends_buffers = trainer.strategy.model.will_sync_module_buffers()
        broadcast = torch.distributed.broadcast

        def counted(*arguments, **named):
            self.num_broadcasts += 1
            return broadcast(*arguments, **named)

        self.monkeypatch.setattr(torch.distributed, "broadcast", counted)

    def on_before_optimizer_step(self, trainer, module, optimizer):
        gradients = [parameter.grad for parameter in module.network.parameters()]
        self.num_memories.append(len({one.untyped_storage().data_ptr() for one in gradients}))


def test_hosts_do_not_ask_their_devices_and_gradients_lie_where_they_are_sent_from(monkeypatch):
    def task(rank):
        watch = Watch(monkeypatch)
        trainer = trainer_of(
            rank,
            "ddp",
            callbacks=[StopOnRequest(SimpleNamespace(on_train_end=lambda *_: None)), watch],
            max_steps=NUM_STEPS,
            limit_val_batches=0,
        )
        batches = DataLoader([batch()] * NUM_STEPS, batch_size=None)
        trainer.fit(MemberModule(expert(TwoWeights())), batches, batches)
        return watch.num_broadcasts, watch.num_memories, watch.sends_buffers

    assert in_two_processes(task) == dict.fromkeys(range(WORLD), (0, [1] * NUM_STEPS, False))


def test_fsdp2_reduces_gradients_once_a_step_of_several_parts(monkeypatch):
    reduced = []
    reduce = _fsdp_param_group.foreach_reduce
    monkeypatch.setattr(_fsdp_param_group, "foreach_reduce", lambda *call: reduced.append(1) or reduce(*call))

    def training(size):
        def task(rank):
            network = TwoWeights()
            trainer = trainer_of(rank, "fsdp", max_steps=NUM_STEPS, limit_val_batches=0)
            batches = DataLoader([batch()] * NUM_STEPS, batch_size=None)
            trainer.fit(MemberModule(expert(network), IslandConfig(micro_batch_size=size)), batches, batches)
            return len(reduced), [weight.full_tensor().tolist() for weight in network.parameters()]

        return in_two_processes(task)

    whole = training(None)
    parts = training(2)
    for rank in range(WORLD):
        assert parts[rank][0] == whole[rank][0] == NUM_STEPS
        assert parts[rank][1] == [pytest.approx(weight, rel=1e-5) for weight in whole[rank][1]]


def seen_by(strategy):
    """Two steps of an expert that is given the same samples in each step and rank; what its network sees of them."""

    def task(rank):
        network = Recorder()
        network.gain = nn.Parameter(torch.ones(1))  # FSDP2 shares no number without a dimension
        trainer = trainer_of(rank, strategy, max_steps=2, limit_val_batches=0)
        batches = DataLoader([batch()] * 2, batch_size=None)
        trainer.fit(MemberModule(expert(network)), batches, batches)
        return [(t.tolist(), x_t.tolist()) for x_t, t, _ in network.calls]

    return task


def drawn(rank, step):
    """Times of a logit-normal density and what lies there between the samples and the noise, by the keyed draws."""
    generator = keyed_generator(7, "expert-0", "noise", rank, step)
    x_0 = (batch()["x_0"].float() - SHIFT) * SCALE
    t = torch.sigmoid(torch.randn(len(x_0), generator=generator))
    noise = torch.randn(x_0.shape, generator=generator)
    at = t[:, None, None, None]
    return t, (1 - at) * x_0 + at * noise


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_each_rank_draws_by_its_own_number_and_no_draw_comes_twice(strategy):
    seen = in_two_processes(seen_by(strategy))

    assert {rank: len(steps) for rank, steps in seen.items()} == {0: 2, 1: 2}

    for rank, steps in seen.items():
        for step, found in enumerate(steps):
            for one, expected in zip(found, drawn(rank, step), strict=True):
                torch.testing.assert_close(torch.tensor(one), expected, rtol=1e-5, atol=1e-5)

    times = [tuple(t) for steps in seen.values() for t, _ in steps]

    assert len(set(times)) == WORLD * 2
