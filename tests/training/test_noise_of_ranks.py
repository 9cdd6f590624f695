"""Two real ranks of one training draw times and noise of their own, whatever shares the work among them."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from training.members import SCALE, SHIFT, Recorder, batch, build
from training.two_processes import WORLD, in_two_processes, trainer_of

from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.training.roles import ExpertModule

NUM_STEPS = 2

pytestmark = pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")


def training(strategy):
    """Two steps of an expert that is given the same samples in each step and rank; what its network sees of them."""

    def task(rank):
        network = Recorder()
        network.gain = nn.Parameter(torch.ones(1))  # FSDP2 shares no number without a dimension
        trainer = trainer_of(rank, strategy, max_steps=NUM_STEPS, limit_val_batches=0)
        batches = DataLoader([batch()] * NUM_STEPS, batch_size=None)
        trainer.fit(build(ExpertModule, network), batches, batches)
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
    seen = in_two_processes(training(strategy))
    assert {rank: len(steps) for rank, steps in seen.items()} == {0: NUM_STEPS, 1: NUM_STEPS}
    for rank, steps in seen.items():
        for step, found in enumerate(steps):
            for one, expected in zip(found, drawn(rank, step), strict=True):
                torch.testing.assert_close(torch.tensor(one), expected, rtol=1e-5, atol=1e-5)
    times = [tuple(t) for steps in seen.values() for t, _ in steps]
    assert len(set(times)) == WORLD * NUM_STEPS
