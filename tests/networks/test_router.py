import pytest
import torch
from networks.small import moved

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import ROUTERS
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.networks.dit import RouterDiT, sample_kept

SMALL = {"width": 16, "depth": 2, "num_heads": 2, "patch_size": 2}
NONE = ConditionSpec("none", 0)
TEXT = ConditionSpec("text", 6)
TOKENS = ConditionSpec("tokens", 6, length=3)
ALL_OPTIONS = {"rope": True, "mlp": "swiglu", "norm": "rms", "modulation": "single", "qk_norm": True}


def perturbed(**changes):
    """A small router that has left its zeros."""
    torch.manual_seed(0)
    return moved(RouterDiT(**({"x_shape": (3, 8, 8), "condition": NONE, "num_clusters": 4} | SMALL | changes)))


def batch(num):
    return torch.randn(num, 3, 8, 8, generator=torch.Generator().manual_seed(1)), torch.linspace(0.1, 0.9, num)


def test_initial_class_token_is_normal():
    torch.manual_seed(0)
    network = RouterDiT(x_shape=(3, 8, 8), condition=NONE, num_clusters=4, **(SMALL | {"width": 512}))
    assert network.class_token.std().item() == pytest.approx(0.02, rel=0.1)


def test_parameter_count_is_the_published_one():
    """DiT-B/2 as a router of 8 clusters: 129 million (Paris, 2510.03434)."""
    with torch.device("meta"):
        network = RouterDiT(x_shape=(4, 32, 32), condition=NONE, num_clusters=8, size="B", patch_size=2)

    assert sum(parameter.numel() for parameter in network.parameters()) == pytest.approx(129e6, rel=0.01)


@pytest.mark.parametrize("rope", [False, True])
def test_the_class_token_reads_a_set_of_tokens(rope):
    """It has no position, so the order in which embedded patches stand is nothing to it."""
    network = perturbed(dropout=0.01, rope=rope)  # rounds to none of 16 dropped, but the order is drawn
    x, t = batch(3)
    torch.testing.assert_close(network.train()(x, t, None), network.eval()(x, t, None))


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_the_class_token_is_not_rotated(dropout):
    network = perturbed(rope=True, dropout=dropout)
    seen = []
    network.blocks[0].attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[1]))
    network.train()(*batch(3), None)
    (rotation,) = seen
    assert torch.equal(rotation[:, 0, 0], torch.ones(len(rotation), 4))
    assert torch.equal(rotation[:, 0, 1], torch.zeros(len(rotation), 4))
    assert rotation.shape == ((3, 9, 2, 4) if dropout else (1, 17, 2, 4))
    assert rotation[:, 1:, 1].any()


@pytest.mark.parametrize("changes", [{"dropout": 0.5}, {"text_dropout": 0.5, "condition": TEXT}])
def test_dropout_acts_in_training_only(changes):
    network = perturbed(**changes)
    x, t = batch(3)
    condition = Condition.of(torch.ones(3, 6)) if "condition" in changes else None
    network.eval()
    assert torch.equal(network(x, t, condition), network(x, t, condition))
    network.train()
    torch.manual_seed(0)
    first = network(x, t, condition)
    other = network(x, t, condition)
    torch.manual_seed(0)
    assert torch.equal(network(x, t, condition), first)
    assert (first - other).abs().max() > 1e-3


@pytest.mark.parametrize(("dropout", "num_kept"), [(0.25, 6), (0.5, 4), (0.99, 1)])
def test_dropping_keeps_distinct_tokens_of_each_row_equally_often(dropout, num_kept):
    torch.manual_seed(0)

    kept = sample_kept(torch.zeros(4000, 8, 1), dropout)

    assert kept.shape == (4000, num_kept)
    assert all(len({*row}) == num_kept for row in kept.tolist())
    shares = kept.flatten().bincount(minlength=8) / 4000
    torch.testing.assert_close(shares, torch.full((8,), num_kept / 8), atol=0.03, rtol=0)  # 4 standard deviations


def test_mixed_precision_runs():
    network = perturbed(condition=TEXT)
    x, t = batch(2)
    condition = Condition.of(torch.randn(2, 6))
    with torch.autocast("cpu", torch.bfloat16):
        mixed = network(x, t, condition)

    torch.testing.assert_close(mixed.float(), network(x, t, condition), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("dropout", [-0.1, 1.0])
def test_dropout_out_of_range_is_one_clear_line(dropout):
    with pytest.raises(UserError, match=r"router 'router-dit'.*dropout = .* at least 0 and below 1"):
        ROUTERS.build("router-dit", SMALL | {"dropout": dropout}, x_shape=(3, 8, 8), condition=NONE, num_clusters=4)
