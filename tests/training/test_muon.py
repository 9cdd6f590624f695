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

    torch.testing.assert_close(values(network), values(reference), rtol=1e-5, atol=1e-6)


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

    torch.testing.assert_close(values(resumed), values(straight), rtol=0, atol=0)
    averages = unsharded_ema(resumed, optimizer)
    torch.testing.assert_close(averages, unsharded_ema(straight, its), rtol=0, atol=0)
