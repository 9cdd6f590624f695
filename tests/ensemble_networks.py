"""Networks with known answers: exact experts and routers of finite sets, and experts that count their rows.

And small random ones of the built-in kinds, which have none.
"""

import torch
from torch import nn

from ddm_lightning.core.registry import EXPERTS, ROUTERS
from ddm_lightning.ensemble.velocity import Ensemble
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import expand_rows, x_0_from_velocity
from ddm_lightning.flow.spec import ConditionSpec

SHAPE = (3, 8, 8)
DIT = {"width": 16, "depth": 1, "num_heads": 2, "patch_size": 4}
NETWORKS = [
    ("dit", DIT, ConditionSpec("class", 4), "velocity", "linear"),
    ("dit", DIT, ConditionSpec("none", 0), "x_0", "cosine"),
    ("mmdit", DIT, ConditionSpec("tokens", 5, 3), "epsilon", "vp"),
    ("unet", {"width": 16}, ConditionSpec("text", 5), "velocity", "linear"),
]


class ExactExpert(nn.Module):
    """The velocity of one cluster of a finite set, told as any kind of prediction; counts the rows it sees."""

    def __init__(self, oracle, k, prediction="velocity"):
        super().__init__()
        self.oracle, self.k, self.prediction, self.num_rows = oracle, k, prediction, 0

    def forward(self, x_t, t, _):
        self.num_rows += len(x_t)
        velocity = self.oracle.velocity(x_t, t, self.k)
        if self.prediction == "epsilon":
            return x_t + (1 - expand_rows(t, x_t)) * velocity
        return x_0_from_velocity(x_t, velocity, t) if self.prediction == "x_0" else velocity


class ExactRouter(nn.Module):
    """Logits of the exact cluster posterior of a finite set."""

    def __init__(self, oracle):
        super().__init__()
        self.oracle = oracle

    def forward(self, x_t, t, _):
        return self.oracle.cluster_posterior(x_t, t).log()


class Aimed(nn.Module):
    """An expert whose samples all end at ``scale`` times their condition's value: v = (x_t - scale·c)/t; null is 0."""

    prediction = "velocity"

    def __init__(self, scale=1.0):
        super().__init__()
        self.scale, self.num_rows, self.times = scale, 0, set[float]()
        self.first = None

    def forward(self, x_t, t, condition):
        self.num_rows += len(x_t)
        self.times |= set(t.tolist())
        self.first = x_t if self.first is None else self.first
        aim = torch.zeros(len(x_t)) if condition is None else condition.values[:, 0] * condition.keep
        shape = (-1, *(1 for _ in x_t.shape[1:]))
        return (x_t - self.scale * aim.reshape(shape)) / t.reshape(shape)


class FixedRouter(nn.Module):
    """The same logits for every row; keeps the conditions that it is given."""

    def __init__(self, logits):
        super().__init__()
        self.logits = torch.tensor(logits)
        self.conditions = []

    def forward(self, x_t, _, condition):
        self.conditions.append(condition)
        return self.logits.expand(len(x_t), -1)


def finite_set(sizes, dim, seed, spread=2.0):
    """Points and labels of clusters of the given sizes around random centres, float64."""
    generator = torch.Generator().manual_seed(seed)
    centres = spread * torch.randn(len(sizes), dim, generator=generator, dtype=torch.float64)
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    return centres[labels] + 0.5 * torch.randn(len(labels), dim, generator=generator, dtype=torch.float64), labels


def randomised(network, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in network.parameters():
        parameter.data = 0.2 * torch.randn(parameter.shape, generator=generator)
    return network


def three(name, params, spec, prediction, path):
    experts = [randomised(EXPERTS.build(name, params, x_shape=SHAPE, condition=spec), k) for k in range(3)]
    for expert in experts:
        expert.prediction = prediction  # type: ignore[assignment]
    router = randomised(ROUTERS.build("router-dit", DIT, x_shape=SHAPE, condition=spec, num_clusters=3), 3)
    return Ensemble(experts, router, [0.2, 0.3, 0.5], paths=[path] * 3)


def conditions(spec, num):
    generator = torch.Generator().manual_seed(4)
    if spec.kind == "none":
        return None
    if spec.kind == "class":
        return Condition.of(torch.randint(spec.size, (num,), generator=generator))
    return Condition.of(torch.randn(num, *spec.row_shape, generator=generator))
