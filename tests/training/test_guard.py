import json
import math
import weakref
from collections import OrderedDict

import pytest
import torch
from torch import nn

from ddm_lightning.config.experiment import TrainConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.members.skipped import SkippedStep, read_skipped
from ddm_lightning.training.ema import ema_tensors, track_ema
from ddm_lightning.training.guard import FiniteGuard
from ddm_lightning.training.optimizer import build_optimizer, clip_in_step

NAN = float("nan")


def network():
    torch.manual_seed(0)
    layers = {"first": nn.Linear(3, 4), "blocks": nn.Sequential(nn.Linear(4, 4)), "last": nn.Linear(4, 2)}
    return nn.Sequential(OrderedDict(layers))


def state_of(module, optimizer):
    moments = [value for state in optimizer.state.values() for name, value in state.items() if name != "ema"]
    return [*(p.detach().clone() for p in module.parameters()), *(torch.as_tensor(m).clone() for m in moments)]


def take(module, optimizer, guard, step, spoil=False, gradient=None, rank=0):
    """One step as the module takes it; ``gradient`` takes the place of one number of each gradient."""
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(5, 3, generator=generator)
    if spoil:
        x[3, 1] = NAN

    losses = module(x).square().mean(1)
    guard.record(torch.arange(5) + 10 * step, torch.linspace(0.1, 0.9, 5), losses)
    optimizer.zero_grad()
    losses.mean().backward()
    if gradient is not None:
        for parameter in module.parameters():
            parameter.grad.view(-1)[0] = gradient

    guard.skip_unless_finite(step, rank, optimizer, clip_in_step(optimizer, module.parameters(), 1.0))
    optimizer.step()


@pytest.mark.parametrize("number", [NAN, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_a_skipped_step_changes_nothing(kind, at, number):
    """As if it had never been; also the first step, when there are no moments yet."""
    runs = []
    straight = [0, 1, 2, 3]
    for steps in ([*straight[:at], "bad", *straight[at:]], straight):
        module = network()
        train = TrainConfig(10, 5, optimizer=kind, learning_rate=0.1, weight_decay=0.1)
        optimizer = build_optimizer(module, train)
        track_ema(optimizer, 0.9)
        guard = FiniteGuard("expert-0", 3)
        for step in steps:
            before = state_of(module, optimizer)
            take(module, optimizer, guard, *((99, False, number) if step == "bad" else (step,)))
            changed = [not torch.equal(a, b) for a, b in zip(before, state_of(module, optimizer), strict=False)]
            assert not any(changed) if step == "bad" else all(changed[:6])
        assert all(bool(average.isfinite().all()) for average in ema_tensors(module, optimizer).values())
        runs.append(state_of(module, optimizer))
        guard.find_skipped()
        assert guard.num_skipped == steps.count("bad")

    for one, other in zip(*runs, strict=True):
        assert torch.equal(one, other)


def test_skipped_steps_are_known_once_the_host_looks(tmp_path):
    module = network()
    path = tmp_path / "skipped_steps.jsonl"
    optimizer = build_optimizer(module, TrainConfig(10, 5))
    guard = FiniteGuard("expert-0", 3)
    for step in range(7, 12):
        take(module, optimizer, guard, step, spoil=step in (8, 11), rank=1)

    guard.write(path)

    assert not path.exists() and guard.num_skipped == 0, "nobody has looked yet"

    guard.find_skipped()
    guard.write(path)

    assert guard.num_skipped == 2

    first, second = read_skipped(path)
    assert (first.step, second.step, first.rank) == (8, 11, 1)
    assert first.sample_ids == [80, 81, 82, 83, 84]
    assert first.t == pytest.approx([0.1, 0.3, 0.5, 0.7, 0.9])
    assert [math.isfinite(loss) for loss in first.losses] == [True, True, True, False, True]

    # A resumed training takes step 11 once more.
    again = FiniteGuard("expert-0", 3)
    for step in (11, 12):
        take(module, optimizer, again, step, spoil=True, rank=1)

    again.find_skipped()
    again.write(path)

    assert [skipped.step for skipped in read_skipped(path)] == [8, 11, 12]


class Activation:
    """What autograd keeps in place of a tensor; of this one can be told when it is let go."""

    def __init__(self, value):
        self.value = value


def test_a_remembered_step_holds_no_activations():
    kept = []
    guard = FiniteGuard("expert-0", 3)

    def keep(value):
        activation = Activation(value)
        kept.append(weakref.ref(activation))
        return activation

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda activation: activation.value):
        losses = network()(torch.ones(5, 3)).square().mean(1)

    guard.record(torch.arange(5), torch.linspace(0.1, 0.9, 5), losses)

    assert all(activation() is not None for activation in kept) and len(kept) > 1

    del losses
    assert all(activation() is None for activation in kept)


def test_too_many_consecutive_skipped_steps_end_the_training():
    module = network()
    optimizer = build_optimizer(module, TrainConfig(10, 5))
    guard = FiniteGuard("expert-0", 2)
    for step in range(12):
        take(module, optimizer, guard, step, spoil=step % 3 != 0)

    guard.find_skipped()

    assert guard.num_skipped == 8

    for step in (12, 13):
        take(module, optimizer, guard, step, spoil=step == 13)

    guard.find_skipped()
    take(module, optimizer, guard, 14, spoil=True)
    guard.find_skipped()  # succession is counted over looks
    take(module, optimizer, guard, 15, spoil=True)
    take(module, optimizer, guard, 16, spoil=False)  # behind them, before anybody looks
    with pytest.raises(UserError, match=r"expert-0: .*3 consecutive steps, up to step 15.* lower its train."):
        guard.find_skipped()

    assert all(bool(p.isfinite().all()) for p in module.parameters())


def test_losses_that_are_not_finite_survive_json():
    step = SkippedStep(3, 0, [1, 2, 3], [0.5, 0.25, 1.0], [1.0, math.inf, -math.inf])
    json.loads(step.line(), parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))

    assert SkippedStep.of(step.line()) == step
