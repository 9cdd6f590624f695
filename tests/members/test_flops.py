import pytest
import torch
from torch import nn

from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members import flops
from ddm_lightning.members.flops import flops_per_sample, forward_flops
from ddm_lightning.networks.dit import DiT, RouterDiT
from ddm_lightning.networks.mmdit import MMDiT

SMALL = {"width": 16, "depth": 3, "num_heads": 2, "patch_size": 2}
SHAPE = (3, 8, 8)
N = 16
D = 16
L = 3  # sample, patches, width, depth
SPECS = [ConditionSpec("none", 0), ConditionSpec("class", 5), ConditionSpec("text", 6), ConditionSpec("tokens", 6, 7)]
ALL_OPTIONS = {"rope": True, "mlp": "swiglu", "norm": "rms", "modulation": "single", "qk_norm": True}


def dit(condition, **options):
    network = DiT(x_shape=SHAPE, condition=condition, **SMALL, **options)
    return flops_per_sample(network, SHAPE, condition, backward=False)


def by_hand(spec, *, single, gated):
    """Multiply-adds of a sample, twice; ``gated`` features of a SwiGLU, 0 for a plain MLP."""
    m = spec.length
    ends = N * 12 * D + 256 * D + D * D + 2 * D * D + N * D * 12  # patches, time, head
    ends += 6 * D if spec.kind == "text" else m * 6 * D
    block = N * 4 * D * D + 2 * N * N * D + N * (3 * D * gated if gated else 8 * D * D)
    if m:
        block += 2 * N * D * D + 2 * m * D * D + 2 * N * m * D

    return 2 * (ends + L * block + (1 if single else L) * 6 * D * D)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_a_forward_pass_is_counted(spec):
    assert dit(spec) == by_hand(spec, single=False, gated=0)
    assert dit(spec, **ALL_OPTIONS) == by_hand(spec, single=True, gated=48)
    assert dit(spec, rope=True, norm="rms", qk_norm=True) == dit(spec)


def test_a_forward_pass_of_two_streams_is_counted():
    spec = SPECS[3]
    m = 7
    network = MMDiT(x_shape=SHAPE, condition=spec, **SMALL)
    ends = N * 12 * D + 256 * D + D * D + 2 * D * D + N * D * 12 + m * 6 * D + 2 * D * D
    both = (N + m) * 12 * D * D + 2 * (N + m) ** 2 * D + 12 * D * D
    last = N * 12 * D * D + m * 2 * D * D + 2 * N * (N + m) * D + 8 * D * D
    assert flops_per_sample(network, SHAPE, spec, backward=False) == 2 * (ends + (L - 1) * both + last)


@pytest.mark.parametrize("spec", [SPECS[0], SPECS[3]], ids=lambda spec: spec.kind)
def test_a_backward_pass_costs_about_twice_as_much(spec):
    networks = [DiT(x_shape=SHAPE, condition=spec, **SMALL, **ALL_OPTIONS)]
    networks += [RouterDiT(x_shape=SHAPE, condition=spec, num_clusters=2, **SMALL, **ALL_OPTIONS)]
    networks += [MMDiT(x_shape=SHAPE, condition=spec, **SMALL)] if spec.kind == "tokens" else []
    for network in networks:
        both = flops_per_sample(network, SHAPE, spec, backward=True)
        assert 2.5 < both / flops_per_sample(network, SHAPE, spec, backward=False) < 3.5
        assert all(parameter.device == torch.device("cpu") for parameter in network.parameters())


def test_dit_xl_2_is_that_of_its_paper():
    """118.64 Gflops of multiply-adds at 256 x 256, so 237 GFLOP (Peebles and Xie, table 4)."""
    spec = ConditionSpec("class", 1000)
    with torch.device("meta"):
        network = DiT(x_shape=(4, 32, 32), condition=spec, size="XL", patch_size=2)

    assert flops_per_sample(network, (4, 32, 32), spec, backward=False) == pytest.approx(237.3e9, rel=0.02)


class Plugin(nn.Module):
    """Layers that torch fuses without gradients, convolutions of groups, and one that is transposed."""

    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose2d(3, 6, 2, 2, groups=3)
        self.down = nn.Conv2d(6, 16, 3, 2, 1, groups=2)
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 2)
        self.attention = nn.MultiheadAttention(16, 2, batch_first=True)
        self.memory = nn.GRU(16, 16, batch_first=True)

    def forward(self, x_t, t, condition):
        x = self.encoder(self.down(self.up(x_t)).flatten(2).mT)
        x, _ = self.attention(x, x, x, need_weights=False)
        x, _ = self.memory(x)
        return torch.einsum("bnc,bmc->bnm", x, x) + t.view(-1, 1, 1)


def networks():
    """Every expert that needs no other package, of every condition that it takes; a router and a plug-in."""
    for spec in SPECS:
        for name in ("dit", "mmdit", "unet"):
            if name != "mmdit" or spec.kind == "tokens":
                params = {"width": 16} if name == "unet" else SMALL
                yield spec, EXPERTS.build(name, params, x_shape=SHAPE, condition=spec)

    yield SPECS[1], DiT(x_shape=SHAPE, condition=SPECS[1], **SMALL, **ALL_OPTIONS)
    yield SPECS[0], RouterDiT(x_shape=SHAPE, condition=SPECS[0], num_clusters=2, **SMALL)
    yield SPECS[0], Plugin()


def test_the_count_with_weights_is_that_without():
    """On the CPU as on the meta device; nothing of the network is changed."""
    for spec, network in networks():
        with torch.no_grad():
            expected = flops_per_sample(network, SHAPE, spec, backward=False)

        assert forward_flops(network, SHAPE, spec) == expected > 0
        assert network.training


@pytest.mark.parametrize(("limit", "device"), [(1e9, "cpu"), (1, "meta")])
def test_a_large_network_is_counted_without_data(limit, device, monkeypatch):
    monkeypatch.setattr(flops, "_SMALL", limit)
    network = Plugin()
    devices = []
    network.down.register_forward_pre_hook(lambda _, inputs: devices.append(inputs[0].device.type))
    forward_flops(network, SHAPE, SPECS[0])
    assert devices == [device]


def test_a_compiled_network_is_counted_without_its_compiler():
    network = DiT(x_shape=SHAPE, condition=SPECS[1], **SMALL)
    expected = forward_flops(network, SHAPE, SPECS[1])
    network.compile(backend=lambda *_: pytest.fail("it was compiled"))
    with torch.inference_mode():
        assert forward_flops(network, SHAPE, SPECS[1]) == expected
