import pytest
import torch
from torch import nn
from training.checkpoint_folders import stored
from training.saved import load, save

from ddm_lightning.config.experiment import TrainConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.training.checkpoint import tensors_of
from ddm_lightning.training.ema import track_ema
from ddm_lightning.training.optimizer import build_optimizer

TRAIN = TrainConfig(10, 4, learning_rate=0.1, weight_decay=0.05, ema_decay=0.9, ema_widths=[0.1])


def network(seed=0, width=3):
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(3, width), nn.LayerNorm(width), nn.Linear(width, 2))
    made.register_buffer("table", torch.full((4,), float(seed)))
    return made


def optimizer_of(module, train=TRAIN):
    optimizer = build_optimizer(module, train)
    track_ema(optimizer, train.ema_decay, train.ema_widths)
    return optimizer


def step(module, optimizer, number):
    optimizer.zero_grad()
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(number))
    module(x).square().mean().backward()
    optimizer.step()


def trained(steps, module=None, train=TRAIN):
    module = network() if module is None else module
    optimizer = optimizer_of(module, train)
    for number in range(steps):
        step(module, optimizer, number)

    return module, optimizer


def test_resuming_is_bit_identical(tmp_path):
    straight, optimizer = trained(9)
    stopped, its = trained(4)
    # What comes after the copy, while files are written, is in none of them.
    save(tmp_path / "step", stopped, its, meanwhile=lambda: [step(stopped, its, number) for number in range(4, 7)])
    resumed = network(seed=1)
    new = optimizer_of(resumed)
    load(tmp_path / "step", resumed, new)

    assert {group["ema_steps"] for group in new.param_groups} == {4}

    for number in range(4, 9):
        step(resumed, new, number)

    expected = tensors_of(straight, optimizer)
    found = tensors_of(resumed, new)

    assert found.keys() == expected.keys()
    assert {name.split("/")[1] for name in found if name.startswith("optimizer")} == {
        *("step", "exp_avg", "exp_avg_sq", "ema", "ema_0.1")
    }

    for name, value in expected.items():
        assert torch.equal(found[name], value), name


def test_each_moment_is_stored_under_the_name_of_its_parameter(tmp_path):
    """Groups put matrices first, so that numbers in the order of groups are not those of the module."""
    module, optimizer = trained(3)
    save(tmp_path / "step", module, optimizer)
    tensors, rest = stored(tmp_path / "step")
    for name, parameter in module.named_parameters():
        assert torch.equal(tensors[f"model/{name}"], parameter)
        assert torch.equal(tensors[f"optimizer/exp_avg/{name}"], optimizer.state[parameter]["exp_avg"])

    assert torch.equal(tensors["model/table"], module.table)

    decays = {name: group["weight_decay"] for group in rest["groups"] for name in group["params"]}
    assert decays == {name: 0.05 if p.ndim >= 2 else 0.0 for name, p in module.named_parameters()}


@pytest.mark.parametrize(
    ("other", "differs"),
    [(lambda: network(width=4), "0.bias"), (lambda: nn.Linear(3, 3), "0.bias"), (lambda: network()[:2], "2.bias")],
    ids=["shape", "names", "fewer"],
)
def test_a_checkpoint_of_another_network_is_refused_and_changes_nothing(tmp_path, other, differs):
    save(tmp_path / "step", *trained(3))
    module = other()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with pytest.raises(UserError, match=rf"step: is the checkpoint of another network, which differs in {differs};"):
        load(tmp_path / "step", module, optimizer_of(module))

    assert all(torch.equal(module.state_dict()[name], value) for name, value in before.items())


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path):
    def tied(seed):
        made = network(seed)
        made.append(nn.Linear(2, 3))
        made.append(nn.Linear(3, 2, bias=False))
        made[4].weight = made[2].weight
        return made

    module, optimizer = trained(3, tied(0))
    save(tmp_path / "step", module, optimizer)

    assert "model/2.weight" in stored(tmp_path / "step")[0] and "model/4.weight" not in stored(tmp_path / "step")[0]

    other = tied(1)
    load(tmp_path / "step", other, optimizer_of(other))

    assert other[4].weight is other[2].weight
    assert torch.equal(other[4].weight, module[2].weight)


def test_empty_shards_are_not_tied_weights():
    """As of two of one shape with fewer rows than ranks: all of their parts lie at the same address, which is none."""
    module = nn.Module()
    module.first, module.second = (nn.Parameter(torch.empty(0, 3)) for _ in range(2))

    assert module.first.data_ptr() == module.second.data_ptr()
    assert list(tensors_of(module)) == ["model/first", "model/second"]


def test_a_part_of_a_weight_is_no_tied_weight():
    """It begins where the weight does."""
    module = nn.Linear(4, 2)
    module.register_buffer("part", module.weight.detach()[:1])

    assert list(tensors_of(module)) == ["model/weight", "model/bias", "model/part"]


def test_state_that_is_not_a_tensor_is_refused():
    class Counting(nn.Linear):
        def get_extra_state(self):
            return {"count": 3}

    with pytest.raises(UserError, match=r"state_dict has 0\._extra_state, a dict: it may hold tensors only"):
        tensors_of(nn.Sequential(Counting(2, 2)))


def test_a_setting_that_torch_adds_later_keeps_its_default(tmp_path):
    module, optimizer = trained(3)
    for group in optimizer.param_groups:
        del group["decoupled_weight_decay"]

    save(tmp_path / "step", module, optimizer)
    other = network(seed=1)
    new = optimizer_of(other)
    load(tmp_path / "step", other, new)

    assert all(group["decoupled_weight_decay"] for group in new.param_groups)
