"""Two exact experts of Gaussians with a router that reads brightness, and every way to sample from them."""

from dataclasses import fields, replace

import torch
from torch import nn

from ddm_lightning.config.experiment import SampleConfig
from ddm_lightning.ensemble import sampler
from ddm_lightning.ensemble.velocity import Ensemble

SHAPE = (2, 3, 3)
WAYS = [
    ("full", "euler"),
    ("full", "ancestral"),
    ("top-1", "heun"),
    ("top-1", "midpoint"),
    ("top-1", "dpm++2m"),
    ("top-1", "dormand-prince"),
    ("top-k", "ancestral"),
    ("sample-1", "euler"),
    ("sample-1", "heun"),
    ("bayes", "ancestral"),
]
"""Each strategy and each solver, with some of the others."""


class Linear(nn.Module):
    """The exact expert of x_0 ~ N(mean, std²I)."""

    prediction = "velocity"

    def __init__(self, mean, std):
        super().__init__()
        self.mean, self.std = mean, std

    def forward(self, x_t, t, _):
        time = t.reshape(-1, 1, 1, 1)
        gain = 1 / ((1 - time) ** 2 * self.std**2 + time**2)
        return (time - (1 - time) * self.std**2) * gain * (x_t - (1 - time) * self.mean) - self.mean


class ByBrightness(nn.Module):
    """A router that reads x_t: two clusters, bright and dark."""

    def forward(self, x_t, *_):
        bright = 4 * x_t.mean((1, 2, 3))
        return torch.stack([bright, -bright], dim=1)


def two():
    return Ensemble([Linear(1.0, 0.3), Linear(-1.0, 0.2)], ByBrightness(), [0.25, 0.75])


def sample(
    ensemble,
    condition,
    num,
    shape,
    settings=None,
    **options,
):
    """``sampler.sample``; keys of the section ``sample`` are options, too."""
    keys = {field.name for field in fields(SampleConfig)}
    changes = {key: options.pop(key) for key in [*options] if key in keys}
    settings = replace(settings or SampleConfig(), **changes)
    return sampler.sample(ensemble, condition, num, shape, settings, **{"shift": 1.0, "seed": 0, **options})


def draw(ensemble, num=7, condition=None, **changes):
    options = {"strategy": "full", "num_steps": 8, "shift": 1.5, "seed": 0, "batch_size": 64}
    return sample(ensemble, condition, num, SHAPE, **{**options, **changes})
