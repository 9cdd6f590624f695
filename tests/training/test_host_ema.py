"""Averages on the host take in every n-th step: against a loop in float64, across stops, and without a wait."""

import copy
import json
import threading

import pytest
import torch
from shards.mds import WARNINGS
from torch import nn
from training.saved import load, save
from training.short_fits import fit, member, trained, weights

from ddm_lightning.training.checkpoint import tensors_of
from ddm_lightning.training.ema import KEY, averages_of, averaging_of, ema_weights, track_ema, unsharded_ema, width_key

pytestmark = WARNINGS
EXPONENTS = {KEY: None, width_key(0.2): 1.826214}


def network():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def optimizer_of(module, every, **settings):
    matrices = [p for p in module.parameters() if p.ndim == 2]
    vectors = [p for p in module.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}], lr=0.1)
    track_ema(optimizer, 0.9, [0.2], every=every, **settings)
    return optimizer


def take_step(module, optimizer, seed):
    optimizer.zero_grad()
    module(torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))).square().mean().backward()
    optimizer.step()


def doubles(module):
    return {name: value.detach().double().clone() for name, value in module.named_parameters()}


class Loop:
    """What the averages are to be, by the decays of all steps one after the other, in float64."""

    def __init__(self, initial=None):
        self.step = self.taken_in = 0
        self.averages = dict.fromkeys(EXPONENTS, initial)

    def at(self, key, values):
        """The average with the weights of this moment taken in."""
        average = self.averages[key]
        kept = 1.0
        for step in range(self.taken_in + 1, self.step + 1):
            exponent = EXPONENTS[key]
            kept *= min(0.9, step / (9 + step)) if exponent is None else (1 - 1 / step) ** (exponent + 1)
        if average is None:
            return values

        return {name: kept * average[name] + (1 - kept) * value for name, value in values.items()}

    def add(self, values, every):
        self.step += 1
        if not every or self.step == 1 or self.step % every == 0:
            self.averages = {key: self.at(key, values) for key in self.averages}
            self.taken_in = self.step


def check(loop, module, optimizer):
    for key in EXPONENTS:
        found = {name: value.double() for name, value in unsharded_ema(module, optimizer, key).items()}
        torch.testing.assert_close(found, loop.at(key, doubles(module)), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("from_initial", [False, True])
@pytest.mark.parametrize("every", [1, 4, 10])
def test_they_are_those_of_a_plain_loop_at_every_step(every, from_initial):
    module = network()
    loop = Loop(doubles(module) if from_initial else None)
    optimizer = optimizer_of(module, every, from_initial=from_initial)
    for step in range(23):
        take_step(module, optimizer, step)
        loop.add(doubles(module), every)
        check(loop, module, optimizer)


def test_with_each_step_they_are_those_of_the_device():
    """And of half-precision weights, there is an average in float32."""
    found = []
    for every in (0, 1):
        module = network()
        optimizer = optimizer_of(module, every)
        for step in range(7):
            take_step(module, optimizer, step)

        found.append(unsharded_ema(module, optimizer))

    torch.testing.assert_close(*found, rtol=0, atol=0)
    half = network().bfloat16()
    optimizer = optimizer_of(half, 3)
    for _ in range(4):
        optimizer.zero_grad()
        half(torch.ones(5, 3, dtype=torch.bfloat16)).square().mean().backward()
        optimizer.step()
        averaging_of(optimizer).wait()

    assert {average.dtype for average in averages_of(optimizer).values()} == {torch.float32}


@pytest.mark.parametrize("modes", [[4, 4, 4, 4], [0, 4, 0, 4], [4, 0, 10, 0]])
def test_a_checkpoint_at_any_step_goes_on_as_it_was_and_may_change_places(tmp_path, modes):
    """Resumed after 3, 6 and 9 steps: as a loop that is never interrupted, and to the same bits on the host."""
    straight = network()
    its = optimizer_of(straight, modes[0])
    loop = Loop()
    resumed = network()
    optimizer = optimizer_of(resumed, modes[0])
    for step in range(13):
        if step and step % 3 == 0 and step < 12:
            save(tmp_path / str(step), resumed, optimizer)
            resumed = network()
            optimizer = optimizer_of(resumed, modes[step // 3])
            load(tmp_path / str(step), resumed, optimizer)
            check(loop, resumed, optimizer)

        every = modes[min(step // 3, 3)]
        take_step(resumed, optimizer, step)
        take_step(straight, its, step)
        loop.add(doubles(resumed), every)
        check(loop, resumed, optimizer)
        if modes[0] == modes[1]:
            torch.testing.assert_close(tensors_of(resumed, optimizer), tensors_of(straight, its), rtol=0, atol=0)

    names = {name.split("/")[1] for name in tensors_of(resumed, optimizer) if name.startswith("optimizer")}

    assert names == {"step", "exp_avg", "exp_avg_sq", *EXPONENTS}


def lent(module, optimizer):
    with ema_weights(module, optimizer):
        return doubles(module)


READERS = {
    "a validation": lent,
    "a snapshot": lambda module, optimizer: unsharded_ema(module, optimizer),
    "the best one": lambda _, optimizer: averages_of(optimizer),
    "a checkpoint": tensors_of,
    "Lightning's": lambda _, optimizer: optimizer.state_dict(),
}


@pytest.mark.parametrize("reader", READERS)
def test_steps_do_not_wait_for_the_average_but_readers_do(monkeypatch, reader):
    module = network()
    optimizer = optimizer_of(module, 4)
    may_go = threading.Event()
    average = optimizer.averaging._take_in
    monkeypatch.setattr(optimizer.averaging, "_take_in", lambda *given: may_go.wait(30) and average(*given))
    for step in range(3):
        take_step(module, optimizer, step)  # the first step is averaged behind them

    assert not may_go.is_set()

    threading.Timer(0.1, may_go.set).start()
    READERS[reader](module, optimizer)

    assert optimizer.averaging._pending.done()


def test_a_validation_has_the_average_of_its_moment():
    module = network()
    optimizer = optimizer_of(module, 4)
    loop = Loop()
    for step in range(7):
        take_step(module, optimizer, step)
        loop.add(doubles(module), 4)

    own = doubles(module)
    torch.testing.assert_close(lent(module, optimizer), loop.at(KEY, own), rtol=2e-6, atol=2e-7)
    torch.testing.assert_close(doubles(module), own, rtol=0, atol=0)


def test_an_error_of_the_thread_ends_the_training(monkeypatch):
    module = network()
    optimizer = optimizer_of(module, 4)
    monkeypatch.setattr(optimizer.averaging, "_stager", type("Short", (), {"stage": lambda *_, **__: []})())
    with pytest.raises(ValueError, match="zip"):
        for step in range(4):
            take_step(module, optimizer, step)


def test_an_optimizer_s_own_state_is_saved_when_it_is_ready():
    """As Lightning's checkpoints of a Trainer that is not ours have it."""
    module = network()
    optimizer = optimizer_of(module, 2)
    for step in range(5):
        take_step(module, optimizer, step)

    other = network()
    other.load_state_dict(module.state_dict())
    resumed = optimizer_of(other, 2)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch would share the tensors
    for step in range(5, 8):
        take_step(module, optimizer, step)
        take_step(other, resumed, step)

    torch.testing.assert_close(unsharded_ema(other, resumed), unsharded_ema(module, optimizer), rtol=0, atol=0)


# A rate that rises until held-out losses do, so that the best validation is not the last one.
HOST = (
    *("island.ema=host", "expert.train.ema_widths=[0.1]", "expert.train.ema_snapshots=3", "expert.train.keep=best"),
    *("expert.train.learning_rate=2", "expert.train.warmup_steps=200", "expert.train.ema_decay=0.2"),
    "island.validate_every_n_steps=4",
)


def test_a_training_that_stops_between_two_averages_ends_with_the_same_bits(tiny_prepared, tmp_path):
    """At its best validation, whose average it hands over without the steps after it."""
    whole = trained(tiny_prepared, tmp_path / "whole", *HOST, "expert.train.max_steps=14")
    kept = int(json.loads(member(whole, "artifact", "member.json").read_text())["metrics"]["kept_step"])

    assert 0 < kept < 14 and kept % 10

    run = trained(tiny_prepared, tmp_path / "stopped", *HOST, f"expert.train.max_steps={kept}")

    assert weights(run) == weights(whole)
    assert fit(run, *HOST, "expert.train.max_steps=14") == 0
    assert weights(run) == weights(whole)

    last = "width-0.1-step-00000014.safetensors"
    assert member(run, "ema", last).read_bytes() == member(whole, "ema", last).read_bytes()
