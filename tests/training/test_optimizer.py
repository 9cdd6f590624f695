import math
from functools import partial

import pytest
import torch
from torch import nn

from ddm_lightning.config.experiment import TrainConfig
from ddm_lightning.training.optimizer import build_optimizer, build_schedule, clip_in_step, learning_rate_factor


def network():
    module = nn.Sequential(nn.Conv2d(2, 3, 1), nn.Linear(3, 4), nn.LayerNorm(4), nn.Linear(4, 1, bias=False))
    module.register_parameter("frozen", nn.Parameter(torch.ones(2, 2), requires_grad=False))
    return module


def test_every_trained_parameter_is_in_one_group_and_only_matrices_decay():
    module = network()
    groups = build_optimizer(module, TrainConfig(1, 1, learning_rate=0.3, weight_decay=0.2)).param_groups
    grouped = [(id(p), group["weight_decay"], group["lr"]) for group in groups for p in group["params"]]
    expected = [(id(p), 0.2 if p.ndim >= 2 else 0.0, 0.3) for p in module.parameters() if p.requires_grad]

    assert sorted(grouped) == sorted(expected)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_clipping_in_the_step_is_clipping_before_it(kind):
    """As torch's ``clip_grad_norm_``; a step below the limit, and one with NaN, which changes nothing."""
    train = TrainConfig(10, 1, optimizer=kind, learning_rate=0.05, weight_decay=0.1)
    sides = []
    for in_step in (True, False):
        torch.manual_seed(0)
        module = nn.ModuleDict({"blocks": nn.Linear(30, 20), "head": nn.Linear(20, 7)})
        optimizer = build_optimizer(module, train)
        norms = []
        for step, size in enumerate((3.0, 1e-3, math.nan, 1.0, 10.0)):
            generator = torch.Generator().manual_seed(step)
            for parameter in module.parameters():
                parameter.grad = size * torch.randn(parameter.shape, generator=generator)
            if in_step:
                norms.append(clip_in_step(optimizer, module.parameters(), 1.0).item())
                optimizer.found_inf = torch.tensor(float(math.isnan(size)))
                optimizer.step()
            else:
                norms.append(nn.utils.clip_grad_norm_(module.parameters(), 1.0).item())
                if not math.isnan(size):
                    optimizer.step()
        assert norms[0] > 1 > norms[1]
        moments = [state.get("exp_avg", state.get("momentum_buffer")) for state in optimizer.state.values()]
        sides.append((norms, moments, list(module.parameters())))

    (ours, *found), (theirs, *expected) = sides

    assert ours == pytest.approx(theirs, rel=1e-6, nan_ok=True)

    # Muon orthogonalises in bfloat16, which turns a last digit into a thousandth of the update.
    for name, tolerance in (("moments", 2e-7), ("weights", 2e-7 if kind == "adamw" else 1e-3)):
        pairs = zip(found[name == "weights"], expected[name == "weights"], strict=True)
        assert all((a - b).norm() <= tolerance * b.norm() for a, b in pairs), name


def expected_factor(schedule, step, warmup, total):
    if step < warmup:
        return (step + 1) / warmup

    rest = (step - warmup) / (total - warmup)
    return {"constant": 1.0, "linear": 1 - rest, "cosine": math.cos(math.pi * rest / 2) ** 2}[schedule]


@pytest.mark.parametrize("warmup", [0, 1, 7])
@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_the_learning_rate_of_each_step(schedule, warmup):
    train = TrainConfig(20, 1, learning_rate=0.4, warmup_steps=warmup, schedule=schedule)
    parameter = nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([parameter], lr=train.learning_rate)
    scheduler = build_schedule(optimizer, train)
    used = []
    for _ in range(20):
        used.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()

    assert used == pytest.approx([0.4 * expected_factor(schedule, step, warmup, 20) for step in range(20)])
    assert all(rate > 0 for rate in used)


@pytest.mark.parametrize("schedule", ["constant", "linear", "cosine"])
def test_behind_the_last_step_and_in_a_run_of_warmup_alone_it_stays_in_range(schedule):
    factor = partial(learning_rate_factor, TrainConfig(20, 1, warmup_steps=5, schedule=schedule))
    for step in (20, 23, 1000):
        assert factor(step) == pytest.approx(1.0 if schedule == "constant" else 0.0, abs=1e-12)

    only_warmup = partial(learning_rate_factor, TrainConfig(5, 1, warmup_steps=5, schedule=schedule))

    assert [only_warmup(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert 0 <= only_warmup(5) <= 1
