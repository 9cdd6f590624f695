import pytest
import torch

from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members.cost import flops_per_sample
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
