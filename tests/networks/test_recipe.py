import math

import pytest
import torch
from torch import nn

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.networks.dit import DiT, RouterDiT

SMALL = {"width": 16, "depth": 2, "num_heads": 2, "patch_size": 2}
CLASSES = ConditionSpec("class", 1000)
CLIP = ConditionSpec("tokens", 768, length=77)
LATENT = (4, 32, 32)


def count(network):
    return sum(parameter.numel() for parameter in network.parameters())


def built(size, patch_size, condition=CLASSES, **options):
    with torch.device("meta"):
        return DiT(x_shape=LATENT, condition=condition, size=size, patch_size=patch_size, **options)


def learned_variances(width, patch_size):
    """The original's second half of the output, which nothing here learns."""
    return 4 * patch_size**2 * (width + 1)


@pytest.mark.parametrize(
    ("size", "width", "millions"),
    [("S", 384, (33,)), ("B", 768, (130, 131)), ("L", 1024, (458, 459)), ("XL", 1152, (675, 676))],
)
@pytest.mark.parametrize("patch_size", [2, 8])
def test_parameter_counts_are_the_published_ones(size, width, millions, patch_size):
    """The rounded ones of Peebles and Xie; the fixed positions are no parameters to them either."""
    total = count(built(size, patch_size)) + learned_variances(width, patch_size)

    assert round(total / 1e6) in millions


def test_the_released_network_has_as_many_parameters():
    """DiT-XL/2 is reported with 675,129,632, its 16 x 16 fixed positions among them."""
    ours = built("XL", 2)
    assert count(ours) + learned_variances(1152, 2) + 256 * 1152 == 675_129_632
    assert len(ours.blocks) == 28 and ours.blocks[0].attention.num_heads == 16


def test_the_expert_of_paris_has_as_many_parameters():
    """605 million with adaLN-single (2510.03434)."""
    assert count(built("XL", 2, CLIP, modulation="single")) == pytest.approx(605e6, rel=0.01)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"size": "S", "depth": 3}, "either size .* given are size = S, width = None, depth = 3"),
        ({"size": "XXL"}, r"needs either size \(S, B, L, XL\) or all of .*; given are size = XXL"),
        ({}, "or all of width, depth and num_heads"),
        ({"width": 8, "num_heads": 2}, "or all of width, depth and num_heads; .* width = 8, depth = None"),
        ({"size": 3}, "key 'params.size': must be a string"),
    ],
)
def test_a_size_and_numbers_exclude_each_other(params, message):
    with pytest.raises(UserError, match=f"^expert 'dit'.*{message}"):
        EXPERTS.build("dit", {"patch_size": 2, **params}, x_shape=LATENT, condition=CLASSES)


def keys(*parts):
    """Names of the weights of layers, each of which has a bias unless it is a norm."""
    names = []
    for part in parts:
        names.append(f"{part}.weight")
        if not part.endswith("norm"):
            names.append(f"{part}.bias")

    return names


def block_keys(index, *norms):
    parts = ["modulation", "attention.qkv", "attention.out", *norms, "mlp.0", "mlp.2"]
    return keys(*(f"blocks.{index}.{part}" for part in parts))


def expert():
    network = DiT(x_shape=(3, 8, 8), condition=ConditionSpec("text", 6), **SMALL)
    names = ["condition_embedding.null", *keys("condition_embedding.embed.1"), *block_keys(0), *block_keys(1)]
    linear = network.condition_embedding.embed[1]
    network.condition_embedding.embed[0] = nn.Identity()  # the scaling of text has come since then
    linear.weight.data /= math.sqrt(6)
    return network, names, torch.linspace(-1, 1, 12).reshape(2, 6)


def router():
    spec = ConditionSpec("class", 5)
    network = RouterDiT(x_shape=(3, 8, 8), condition=spec, num_clusters=3, qk_norm=True, **SMALL)
    norms = ("attention.query_norm", "attention.key_norm")
    names = ["condition_embedding.null", "condition_embedding.embed.weight"]
    return network, [*names, *block_keys(0, *norms), *block_keys(1, *norms)], torch.tensor([1, 4])


@pytest.mark.parametrize(
    ("build", "first", "weights", "expected"),
    [
        (
            expert,
            [],
            1017.0570942178165,
            [
                [3.8978524208068848, 3.101238250732422, 3.897925853729248, 3.101278066635132],
                [2.941588878631592, 2.3516993522644043, 2.9417080879211426, 2.3517725467681885],
            ],
        ),
        (
            router,
            ["class_token"],
            1054.1799034536948,
            [
                [7.771871089935303, 4.542479515075684, 1.2289882898330688],
                [5.874666690826416, 3.5332186222076416, 1.1263560056686401],
            ],
        ),
    ],
)
def test_without_options_networks_are_what_they_were_before_there_were_any(build, first, weights, expected):
    """Recorded then: names and order of the weights, their initial size, and the answer of others, by a formula."""
    torch.manual_seed(0)
    network, names, values = build()
    ends = keys("final.modulation", "final.out")
    first = first + keys("patch_embedding", "time_embedding.hidden", "time_embedding.out")
    assert list(network.state_dict()) == [*first, *names, *ends]
    assert sum(value.double().abs().sum().item() for value in network.state_dict().values()) == pytest.approx(weights)

    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(torch.linspace(-0.2, 0.2, parameter.numel()).sin().reshape(parameter.shape))

        x = torch.linspace(-2, 2, 2 * 3 * 64).cos().reshape(2, 3, 8, 8)
        out = network(x, torch.tensor([0.2, 0.7]), Condition(values, torch.tensor([True, False])))

    if out.ndim == 4:
        out = out[:, 0, 3, 2:6]

    torch.testing.assert_close(out, torch.tensor(expected), rtol=1e-5, atol=0)
