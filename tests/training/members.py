"""Objectives around networks whose output is known."""

import dataclasses

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from ddm_lightning.config.experiment import PluginConfig, TimestepsConfig, TrainConfig
from ddm_lightning.encoders.interfaces import StoredForm
from ddm_lightning.flow.spec import ConditionSpec
from ddm_lightning.members.member import Member
from ddm_lightning.members.roles import ROLES
from ddm_lightning.training.module import MemberModule
from ddm_lightning.training.objective import Classification, Position, Regression

SCALE = 1 / 127.5
SHIFT = 127.5


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
    """An objective of ``kind`` whose member or own arguments are changed."""
    names = ("stored", "caption_encoder", "caption_weights", "num_held_out", "held_out_ends")
    own = {name: changes.pop(name) for name in names if name in changes}
    stored = own.pop("stored", StoredForm("x_0", {"scale": SCALE, "shift": SHIFT}))
    return kind(network, dataclasses.replace(MEMBER, **changes), stored, **own)


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


def expert(network=None, **changes):
    return build(Regression, network or Recorder(), **changes)


def router(network, **changes):
    return build(Classification, network, **{"name": "router", **changes})


def noisy(objective, given=None, step=0, rank=0):
    """A noisy batch as rank ``rank`` trains on it in ``step``."""
    return objective.noisy_batch(batch() if given is None else given, Position(step, rank))


def held_out(objective, given, batch_idx, index, rank=0, num_ranks=1):
    """A noisy batch of a validation."""
    return objective.noisy_validation_batch(given, batch_idx, index, Position(0, rank, num_ranks))


def losses_of(objective, given):
    """Losses of a batch in step 0, and their weighted mean, with its graph."""
    noised = noisy(objective, given)
    losses = objective.compute_losses(noised, given)
    return losses, objective.weighted(losses, noised.t).mean()


def figures(objective, *batches):
    """Held-out figures of a validation."""
    objective.start_validation()
    for index, given in enumerate(batches):
        objective.validate(given, index, Position(0))

    return objective.held_out_figures()


def fitted(objective, *batches, **settings):
    """The module after a step per batch by a bare Trainer, and the Trainer."""
    island = settings.pop("island", None)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    defaults = {"accelerator": "cpu", "max_steps": len(batches), "limit_val_batches": 0}
    trainer = L.Trainer(**quiet, **{**defaults, **settings})
    module = MemberModule(objective, island)
    loader = DataLoader(list(batches), batch_size=None)
    trainer.fit(module, loader, loader)
    return module, trainer


def batch(num=6, seed=0, num_clusters=3):
    generator = torch.Generator().manual_seed(seed)
    return {
        "sample_id": torch.arange(num),
        "cluster": torch.randint(num_clusters, (num,), generator=generator),
        "label": torch.randint(5, (num,), generator=generator),
        "x_0": torch.randint(256, (num, 3, 4, 4), generator=generator, dtype=torch.uint8),
        "text": torch.randn(num, 6, generator=generator),
    }
