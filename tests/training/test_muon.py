import pytest
import torch
from torch import nn
from torch.optim import AdamW, Muon
from training.saved import load, save

from ddm_lightning.config.experiment import TrainConfig
from ddm_lightning.networks.blocks import is_muon_matrix
from ddm_lightning.training.ema import track_ema, unsharded_ema
from ddm_lightning.training.optimizer import MuonWithAdamW, build_optimizer, build_schedule

TRAIN = TrainConfig(20, 4, optimizer="muon", learning_rate=0.02, weight_decay=0.1, warmup_steps=5, schedule="cosine")


class Network(nn.Module):
    def __init__(self, seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(6, 8)
        self.blocks = nn.ModuleList([nn.Linear(8, 12), nn.Linear(12, 8)])
        self.last = nn.Linear(8, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))

        return self.last(x)


def backward(network, step):
    network.zero_grad()
    network(torch.randn(5, 6, generator=torch.Generator().manual_seed(step))).square().mean().backward()


def values(network):
    return {name: parameter.detach().clone() for name, parameter in network.named_parameters()}


def same(first, second):
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def moments(network, optimizer):
    return {
        f"{name}.{key}": value.clone()
        for name, parameter in network.named_parameters()
        for key, value in optimizer.state[parameter].items()
        if isinstance(value, torch.Tensor)
    }


def test_it_takes_the_steps_of_torchs_two_optimizers():
    network = Network()
    reference = Network()
    optimizer = build_optimizer(network, TRAIN)

    assert isinstance(optimizer, MuonWithAdamW)

    schedule = build_schedule(optimizer, TRAIN)
    hidden = [block.weight for block in reference.blocks]
    edges = [reference.first.weight, reference.last.weight]
    vectors = [parameter for parameter in reference.parameters() if parameter.ndim == 1]
    muon = Muon(hidden, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = AdamW([{"params": edges, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=0.02)
    schedules = [build_schedule(muon, TRAIN), build_schedule(adamw, TRAIN)]
    for step in range(12):
        backward(network, step)
        optimizer.step()
        schedule.step()
        backward(reference, step)
        for one in (muon, adamw, *schedules):
            one.step()

    for name, value in values(reference).items():
        torch.testing.assert_close(values(network)[name], value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("name", "shape", "expected"),
    [
        ("blocks.0.mlp.weight", (2, 3), True),
        ("blocks.0.mlp.weight", (1, 3), False),
        ("blocks.0.mlp.weight", (3, 1), False),
        ("blocks.0.mlp.weight", (2, 2, 2), False),
        ("blocks.0.mlp.table", (2, 3), False),
        ("blocks.0.modulation.weight", (2, 3), False),
        ("final.out.weight", (2, 3), False),
        ("blocks.1.attention.qkv.weight", (6, 2), True),
    ],
)
def test_which_parameters_are_its_matrices(name, shape, expected):
    assert is_muon_matrix(name, nn.Parameter(torch.zeros(shape))) is expected


@pytest.mark.parametrize(("name", "num"), [("qkv", 3), ("kv", 2), ("gate_up", 2)])
def test_each_layer_of_a_fused_matrix_is_orthogonalised_alone(name, num):
    """As torch's Muon on that many matrices."""
    torch.manual_seed(0)
    network = nn.Module()
    apart = [nn.Parameter(torch.randn(4, 5)) for _ in range(num)]
    network.blocks = nn.ModuleList([nn.ModuleDict({name: nn.Linear(5, 4 * num)})])
    fused = network.blocks[0][name].weight
    fused.data = torch.cat(apart).detach()
    optimizer = build_optimizer(network, TRAIN)
    reference = Muon(apart, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        fused.grad = torch.randn(fused.shape, generator=torch.Generator().manual_seed(step))
        for layer, rows in zip(apart, fused.grad.clone().chunk(num), strict=True):
            layer.grad = rows
        optimizer.found_inf = torch.tensor(0.0)
        optimizer.step()
        reference.step()

    torch.testing.assert_close(fused, torch.cat(apart), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bad_step", [0, 3])
def test_a_skipped_step_changes_nothing(bad_step):
    """As if it had never been, though its gradients are NaN; in the first step, when there are no moments yet."""
    network = Network()
    never = Network()
    optimizer = build_optimizer(network, TRAIN)
    undisturbed = build_optimizer(never, TRAIN)
    for step in range(6):
        if step == bad_step:
            backward(network, 99)
            for parameter in network.parameters():
                parameter.grad[..., 0] = float("nan")
            before = values(network)
            held = moments(network, optimizer)
            optimizer.found_inf = torch.tensor(1.0)
            optimizer.step()
            assert same(values(network), before)
            after = moments(network, optimizer)
            assert all(torch.equal(after[name], value) for name, value in held.items())
            assert all(bool(value.isfinite().all()) for value in after.values())
        for one, moved in ((network, optimizer), (never, undisturbed)):
            backward(one, step)
            moved.found_inf = torch.tensor(0.0)
            moved.step()

    assert same(values(network), values(never))


def trained(steps, start=0, network=None, optimizer=None):
    network = network or Network()
    if optimizer is None:
        optimizer = build_optimizer(network, TRAIN)
        track_ema(optimizer, 0.9)

    for step in range(start, steps):
        backward(network, step)
        optimizer.step()

    return network, optimizer


def test_it_is_resumed_to_the_bit_with_its_averages(tmp_path):
    straight, its = trained(10)
    save(tmp_path / "step", *trained(4))
    resumed, optimizer = trained(0, network=Network(seed=1))
    load(tmp_path / "step", resumed, optimizer)

    trained(10, 4, resumed, optimizer)

    assert same(values(resumed), values(straight))
    assert same(unsharded_ema(resumed, optimizer), unsharded_ema(straight, its))
