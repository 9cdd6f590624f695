import pytest
import torch
from torch import nn

from ddm_lightning.training.ema import KEY, ema_tensors, ema_weights, track_ema, unsharded_ema, width_key


def network(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


def optimizer_of(module, decay=0.9, **settings):
    matrices = [p for p in module.parameters() if p.ndim == 2]
    vectors = [p for p in module.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW([{"params": matrices}, {"params": vectors}], lr=0.1)
    track_ema(optimizer, decay, **settings)
    return optimizer


def take_step(module, optimizer, seed):
    generator = torch.Generator().manual_seed(seed)
    optimizer.zero_grad()
    module(torch.randn(5, 3, generator=generator)).square().mean().backward()
    optimizer.step()


@pytest.mark.parametrize("from_initial", [False, True])
@pytest.mark.parametrize("decay", [0.0, 0.05, 0.999])
def test_ema_matches_its_recursion(decay, from_initial):
    """In float64, with d_j = min(decay, (1 + j) / (10 + j)), from the weights after the first step or before it."""
    module = network()
    optimizer = optimizer_of(module, decay, from_initial=from_initial)
    expected = {name: value.detach().double() for name, value in module.named_parameters()}

    for step in range(40):
        take_step(module, optimizer, step)
        kept = min(decay, (1 + step) / (10 + step)) if step or from_initial else 0.0
        for name, value in module.named_parameters():
            expected[name] = kept * expected[name] + (1 - kept) * value.detach().double()

        if step in (2, 39):  # later the warm-up has forgotten the first weights
            averages = unsharded_ema(module, optimizer)
            found = {name: value.double() for name, value in averages.items()}
            torch.testing.assert_close(found, expected, rtol=2e-6, atol=2e-7)


def test_power_function_averages_match_their_recursion():
    """By the recursion in float64 with exponents that were solved for elsewhere; the exponential one is as without."""
    module = network()
    plain = network()
    without = optimizer_of(plain)
    optimizer = optimizer_of(module, widths=[0.2, 0.1])
    expected = {width: dict.fromkeys(dict(module.named_parameters()), 0.0) for width in (0.2, 0.1)}

    for step in range(60):
        take_step(module, optimizer, step)
        take_step(plain, without, step)
        for exponent, width in ((1.826214, 0.2), (6.937204, 0.1)):
            kept = (1 - 1 / (step + 1)) ** (exponent + 1)
            for name, value in module.named_parameters():
                expected[width][name] = kept * expected[width][name] + (1 - kept) * value.detach().double()

    for width, averages in expected.items():
        found = unsharded_ema(module, optimizer, width_key(width))
        for name, average in averages.items():
            torch.testing.assert_close(found[name].double(), average, rtol=1e-4, atol=1e-5)

    undisturbed = unsharded_ema(plain, without)

    assert all(torch.equal(value, undisturbed[name]) for name, value in unsharded_ema(module, optimizer).items())


def test_a_parameter_without_gradients_is_its_own_average():
    module = network()
    optimizer = optimizer_of(module)
    module[1].weight.requires_grad_(False)
    take_step(module, optimizer, 0)
    averages = ema_tensors(module, optimizer)

    assert torch.equal(averages["1.weight"], module[1].weight)
    assert KEY not in optimizer.state[module[1].weight]


def test_ema_weights_restores_the_weights_bit_for_bit():
    module = network()
    optimizer = optimizer_of(module)
    for step in range(5):
        take_step(module, optimizer, step)

    own = {name: value.clone() for name, value in module.state_dict().items()}
    averages = unsharded_ema(module, optimizer)  # a copy
    with pytest.raises(KeyError), ema_weights(module, optimizer):
        for name, value in module.state_dict().items():
            assert torch.equal(value, averages[name])
            assert not torch.equal(value, own[name])
        raise KeyError

    for name, value in module.state_dict().items():
        assert torch.equal(value, own[name])

    assert all(torch.equal(value, averages[name]) for name, value in unsharded_ema(module, optimizer).items())
