"""Experts of other packages: state besides parameters, tied weights, sizes that cannot be planned."""

import shutil

import pytest
import torch
from shards.mds import WARNINGS
from tiny_runs import TINY
from torch import nn
from training import short_fits
from training.short_fits import member

from ddm_lightning.cli.parser import main
from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.members.artifact import read_artifact
from ddm_lightning.members.load import load_network
from ddm_lightning.training.checkpoint import read_tensors

pytestmark = WARNINGS
WIDTHS = "expert.train.ema_widths=[0.1,0.2]"
NORMED = "expert.network={name: normed, params: {}}"


class Normed(nn.Module):
    """A batch norm's statistics, a buffer of whole numbers, and one weight by two names."""

    prediction = "velocity"

    def __init__(self, *, x_shape, condition):
        super().__init__()
        self.into = nn.Conv2d(x_shape[0], 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.first = nn.Conv2d(8, 8, 1)
        self.second = nn.Conv2d(8, 8, 1)
        self.second.weight = self.first.weight
        self.out = nn.Conv2d(8, x_shape[0], 3, padding=1)

    def forward(self, x_t, t, condition):
        return self.out(self.second(torch.tanh(self.first(self.norm(self.into(x_t))))))


@pytest.fixture(scope="module")
def trained(tiny_prepared, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patched:
        patched.setitem(EXPERTS._built_in, "normed", Normed)
        return short_fits.trained(tiny_prepared, tmp_path_factory.mktemp("plug-in"), NORMED, WIDTHS)


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setitem(EXPERTS._built_in, "normed", Normed)


def test_what_is_trained_can_be_loaded(trained):
    meta, network = load_network(member(trained, "artifact"))

    assert meta.network == "normed"

    state = network.state_dict()
    last = {f"model/network.{name}": torch.empty_like(value) for name, value in state.items() if "second.w" not in name}
    read_tensors(member(trained, "checkpoints", "step-00000020.ckpt"), last)
    kept = {name: last[f"model/network.{name}"] for name in ("norm.running_mean", "norm.num_batches_tracked")}

    assert kept["norm.num_batches_tracked"] == 20 and kept["norm.running_mean"].abs().sum() > 0

    for name, value in kept.items():
        assert torch.equal(state[name], value), name

    # Averages of parameters are not what they were at last; of a tied one both names have it.
    assert not torch.equal(state["first.weight"], last["model/network.first.weight"])
    assert torch.equal(state["second.weight"], state["first.weight"])


def test_another_width_leaves_the_buffers_as_they_are(trained, tmp_path, capsys):
    run = shutil.copytree(trained, tmp_path / "run")
    _, before = read_artifact(member(run, "artifact"))
    short = ["expert.train.max_steps=20", NORMED, WIDTHS, "member=expert-0"]

    assert main(["ema", "-c", str(TINY), f"run_dir={run}", *short]) == 0
    assert "width 0.1" in capsys.readouterr().out
    assert main(["ema", "-c", str(TINY), f"run_dir={run}", *short, "--use", "0.15"]) == 0

    meta, after = read_artifact(member(run, "artifact"))
    assert meta.metrics["held_out/step"] == 20

    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {name for name in before if not name.startswith("norm.running") and "tracked" not in name}
    assert torch.equal(after["second.weight"], after["first.weight"])

    load_network(member(run, "artifact"))
