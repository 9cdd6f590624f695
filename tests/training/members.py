"""Member modules around networks whose output is known, without a Trainer."""

from types import SimpleNamespace

import torch
from torch import nn

from ddm_lightning.config import TimestepsConfig, TrainConfig
from ddm_lightning.flow.condition import ConditionSpec
from ddm_lightning.shards.manifest import StoredForm
from ddm_lightning.training.expert import ExpertModule
from ddm_lightning.training.module import MemberSpec
from ddm_lightning.training.router import RouterModule

SCALE, SHIFT = 1 / 127.5, 127.5


def spec(**changes):
    settings = {
        "member": "expert-0",
        "batch_size": 16,
        "seed": 7,
        "train": TrainConfig(10, 4),
        "timesteps": TimestepsConfig(),
        "condition": ConditionSpec("text", 6),
        "dropout": 0.1,
        "stored": StoredForm("x_0", {"scale": SCALE, "shift": SHIFT}),
        **changes,
    }
    return MemberSpec(**settings)


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
    return at(ExpertModule(network or Recorder(), spec(**changes)), step, rank, num_ranks)


def router(network, step=0, rank=0, **changes):
    return at(RouterModule(network, spec(**{"member": "router", **changes})), step, rank)


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
