"""Member modules around networks whose output is known, without a Trainer."""

import dataclasses
from types import SimpleNamespace

import torch
from torch import nn

from ddm_lightning.config.experiment import IslandConfig, PluginConfig, TimestepsConfig, TrainConfig
from ddm_lightning.encoders.stored import StoredForm
from ddm_lightning.flow.condition import ConditionSpec
from ddm_lightning.members.member import Member
from ddm_lightning.members.roles import ROLES
from ddm_lightning.training.roles import ExpertModule, RouterModule

SCALE, SHIFT = 1 / 127.5, 127.5


MEMBER = Member(
    name="expert-0",
    role=ROLES["expert"],
    clusters=(0,),
    num_clusters=3,
    seed=7,
    network=PluginConfig("dit"),
    train=TrainConfig(10, 4),
    timesteps=TimestepsConfig(),
    batch_size=16,
    x_shape=(3, 4, 4),
    condition=ConditionSpec("text", 6),
    condition_dropout=0.1,
    path="linear",
    loss="prediction",
    image_encoder=PluginConfig("pixels"),
    caption_encoder=None,
)


def build(kind, network, **changes):
    """A module of ``kind`` whose member, island or own arguments are changed."""
    own = {name: changes.pop(name) for name in ("stored", "caption_encoder", "num_held_out") if name in changes}
    fields = {field.name for field in dataclasses.fields(Member)}
    member = dataclasses.replace(MEMBER, **{name: changes.pop(name) for name in [*changes] if name in fields})
    stored = own.pop("stored", StoredForm("x_0", {"scale": SCALE, "shift": SHIFT}))
    return kind(network, member, stored, island=IslandConfig(**changes), **own)


class Recorder(nn.Module):
    """Answers with what it is told, or by a linear map of x_t; remembers what it was given."""

    def __init__(self, prediction="velocity", answer=None):
        super().__init__()
        self.prediction = prediction
        self.answer = answer
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.calls = []

    def forward(self, x_t, t, condition):
        self.calls.append((x_t, t, condition))
        return self.gain * x_t if self.answer is None else self.gain * self.answer(x_t, t)


def expert(network=None, step=0, rank=0, num_ranks=1, **changes):
    return at(build(ExpertModule, network or Recorder(), **changes), step, rank, num_ranks)


def router(network, step=0, rank=0, **changes):
    return at(build(RouterModule, network, **{"name": "router", **changes}), step, rank)


def at(module, step, rank=0, num_ranks=1):
    """As a Trainer would number it."""
    module._trainer = SimpleNamespace(global_step=step, global_rank=rank, world_size=num_ranks, scaler=None)
    return module


def batch(num=6, seed=0, num_clusters=3):
    generator = torch.Generator().manual_seed(seed)
    return {
        "sample_id": torch.arange(num),
        "cluster": torch.randint(num_clusters, (num,), generator=generator),
        "label": torch.randint(5, (num,), generator=generator),
        "x_0": torch.randint(256, (num, 3, 4, 4), generator=generator, dtype=torch.uint8),
        "text": torch.randn(num, 6, generator=generator),
    }
