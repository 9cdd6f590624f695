import numpy as np
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


def closed_form(weights, decay):
    """The average as one weighted sum, in float64: w_i · Π_{j>i} d_j, with d_j = min(decay, (1 + j) / (10 + j))."""
    decays = np.minimum(decay, (1 + np.arange(len(weights))) / (10 + np.arange(len(weights))))
    decays[0] = 0.0  # the average begins as the weights after the first step
    shares = (1 - decays) * np.append(np.cumprod(decays[::-1])[::-1][1:], 1.0)
    assert shares.sum() == pytest.approx(1)
    return np.tensordot(shares, np.stack(weights), axes=1)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.999])
def test_ema_matches_its_closed_form(decay):
    module = network()
    optimizer = optimizer_of(module, decay)
    history = {name: [] for name, _ in module.named_parameters()}
    for step in range(40):
        take_step(module, optimizer, step)
        for name, parameter in module.named_parameters():
            history[name].append(parameter.detach().double().numpy().copy())
    averages = unsharded_ema(module, optimizer)
    assert set(averages) == set(history)
    for name, weights in history.items():
        np.testing.assert_allclose(averages[name].double().numpy(), closed_form(weights, decay), rtol=2e-6, atol=2e-7)


@pytest.mark.parametrize("decay", [0.05, 0.999])
def test_the_average_starts_from_given_weights(decay):
    """By its recursion in float64, from the weights before the first step."""
    module = network()
    optimizer = optimizer_of(module, decay, from_initial=True)
    expected = {name: value.detach().double().numpy().copy() for name, value in module.named_parameters()}
    for step in range(3):  # later the warm-up has forgotten them
        take_step(module, optimizer, step)
        kept = min(decay, (1 + step) / (10 + step))
        for name, value in module.named_parameters():
            expected[name] = kept * expected[name] + (1 - kept) * value.detach().double().numpy()
    for name, average in unsharded_ema(module, optimizer).items():
        np.testing.assert_allclose(average.double().numpy(), expected[name], rtol=2e-6, atol=2e-7)


def test_power_function_averages_match_their_recursion():
    """By the recursion in float64 with exponents that were solved for elsewhere; the exponential one is as without."""
    module, plain = network(), network()
    without = optimizer_of(plain)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.1)
    track_ema(optimizer, 0.9, [0.2, 0.1])
    history = {name: [] for name, _ in module.named_parameters()}
    for step in range(60):
        take_step(module, optimizer, step)
        take_step(plain, without, step)
        for name, parameter in module.named_parameters():
            history[name].append(parameter.detach().double().numpy().copy())
    for exponent, width in ((1.826214, 0.2), (6.937204, 0.1)):
        expected = {name: np.zeros_like(weights[0]) for name, weights in history.items()}
        for name, weights in history.items():
            for step, value in enumerate(weights, start=1):
                kept = (1 - 1 / step) ** (exponent + 1)
                expected[name] = kept * expected[name] + (1 - kept) * value
        for name, average in unsharded_ema(module, optimizer, width_key(width)).items():
            np.testing.assert_allclose(average.double().numpy(), expected[name], rtol=1e-4, atol=1e-5)
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
