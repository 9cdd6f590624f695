"""Options of a training recipe: for each setting besides data and size, the alternatives to the experiment's value."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.members.member import Member
from ddm_lightning.members.roles import batch_size
from ddm_lightning.networks.recipe import Recipe
from ddm_lightning.shards.manifest import DataSizes, Manifest
from ddm_lightning.training.optimizer import has_muon_matrices

MEMBER = "expert-0"
PARAMS, TRAIN, ISLAND = "expert.network.params", "expert.train", "island"
DECAY, CLIP, WIDTHS, SHIFT, DROPOUT = 0.1, 1.0, [0.05, 0.1], 2.0, 0.1
"""Values to try where the experiment has none."""
WARMUP_SHARE = 40
"""Steps of a training over the steps of its warm-up, where the experiment has none."""


@dataclass(frozen=True)
class Option:
    """One setting with another value than the experiment's."""

    key: str
    value: Any
    is_timed: bool
    """Whether it may change the time of a step."""
    is_trained: bool
    """Whether it may change the trained weights by more than rounding."""

    @property
    def name(self) -> str:
        """Name for folders and figures, such as ``rope``, ``no_rope`` or ``mlp_swiglu``."""
        last = self.key.rpartition(".")[2]
        if self.value is True:
            return last
        if self.value in (False, None, []):
            return f"no_{last}"
        return last if isinstance(self.value, list) else f"{last}_{self.value}"

    @property
    def setting(self) -> str:
        """Override for the command line, ``key=value``."""
        return f"{self.key}={self.value if isinstance(self.value, str) else json.dumps(self.value)}"


def options_of(
    experiment: Experiment, sizes: Manifest | DataSizes, *, on_gpu: bool = False, compiles: bool = False
) -> list[Option]:
    """List the alternatives to each choice of ``experiment`` that its network accepts.

    Args:
        experiment: the experiment to compare with.
        sizes: sizes of its data.
        on_gpu: whether to include another attention back end.
        compiles: whether to include compiled blocks, which take long to compile.
    """
    found = [*_network(experiment), *_training(experiment, sizes), *_island(experiment)]
    if on_gpu:
        other = "sdpa" if experiment.island.attention == "xformers" else "xformers"
        found.append(Option(f"{ISLAND}.attention", other, is_timed=True, is_trained=False))
    if compiles:
        found.append(Option(f"{ISLAND}.compile", not experiment.island.compile, is_timed=True, is_trained=False))
    return found


def chosen(names: Sequence[str] | None, *lists: Sequence[Option]) -> list[list[Option]]:
    """Select the options called ``names`` from each list; None selects all.

    Raises:
        UserError: a name is in none of the lists.
    """
    known = list(dict.fromkeys(option.name for options in lists for option in options))
    for name in names or ():
        if name not in known:
            raise UserError(f"--only {name}: no such option here; known: {', '.join(known)}")
    return [[option for option in options if names is None or option.name in names] for options in lists]


def _network(experiment: Experiment) -> Iterator[Option]:
    """Yield the switches and choices of ``Recipe``; its only number, ``mlp_ratio``, counts as a size."""
    network = experiment.expert.network
    for choice in fields(Recipe):
        values = (False, True) if isinstance(choice.default, bool) else choice.metadata.get("choices", ())
        own = network.params.get(choice.name, choice.default)
        for value in values:
            if value != own and _takes(experiment, choice.name, value):
                yield Option(f"{PARAMS}.{choice.name}", value, is_timed=True, is_trained=True)


def _takes(experiment: Experiment, param: str, value: bool | str) -> bool:
    network = experiment.expert.network
    try:
        EXPERTS.check(network.name, {**network.params, param: value}, x_shape=None, condition=None)
    except UserError:
        return False
    return True


def _training(experiment: Experiment, sizes: Manifest | DataSizes) -> Iterator[Option]:
    """Yield training options. Schedules, decays and limits are not timed: the gradient norm is measured in any case."""
    expert = experiment.expert
    train = expert.train
    for optimizer in _choices(f"{TRAIN}.optimizer"):
        # Muon needs matrices in blocks.
        if optimizer != train.optimizer and has_muon_matrices(Member.resolve(MEMBER, experiment, sizes).plan_network()):
            yield Option(f"{TRAIN}.optimizer", optimizer, is_timed=True, is_trained=True)
    yield Option(f"{TRAIN}.ema_widths", [] if train.ema_widths else WIDTHS, is_timed=True, is_trained=False)
    others: dict[str, list[Any]] = {
        "expert.timesteps.density": _words("expert.timesteps.density", expert.timesteps.density),
        "expert.timesteps.shift": [SHIFT if expert.timesteps.shift == 1 else 1.0],
        "condition.dropout": _other_dropout(experiment),
        f"{TRAIN}.schedule": _words(f"{TRAIN}.schedule", train.schedule),
        f"{TRAIN}.warmup_steps": [0 if train.warmup_steps else max(1, train.max_steps // WARMUP_SHARE)],
        f"{TRAIN}.weight_decay": [0.0 if train.weight_decay else DECAY],
        f"{TRAIN}.gradient_clip_norm": [CLIP if train.gradient_clip_norm is None else None],
        f"{TRAIN}.horizontal_flip": [not train.horizontal_flip] if _can_flip(sizes) else [],
    }
    for key, values in others.items():
        for value in values:
            yield Option(key, value, is_timed=False, is_trained=True)


def _can_flip(sizes: Manifest | DataSizes) -> bool:
    """Whether training can mirror samples; shards of posteriors must also hold those of mirrored images."""
    return not isinstance(sizes, Manifest) or sizes.stores != "posterior" or "x_0_flipped" in sizes.columns


def _other_dropout(experiment: Experiment) -> list[float]:
    if experiment.condition.kind == "none":
        return []
    # Not 0: guidance needs dropout.
    return [2 * experiment.condition.dropout if 0 < experiment.condition.dropout <= 0.5 else DROPOUT]


def _choices(key: str) -> Sequence[str]:
    """Values that the experiment's ``key`` accepts."""
    section, _, name = key.rpartition(".")
    kind = type(functools.reduce(getattr, section.split("."), Experiment()))
    return next(field.metadata["choices"] for field in fields(kind) if field.name == name)


def _words(key: str, own: str) -> list[str]:
    return [word for word in _choices(key) if word != own]


def _island(experiment: Experiment) -> Iterator[Option]:
    """Yield settings of the island. They change only rounding; of these, only half precision may matter."""
    island, batch = experiment.island, batch_size(MEMBER, experiment)
    checkpointing = not island.activation_checkpointing
    yield Option(f"{ISLAND}.activation_checkpointing", checkpointing, is_timed=True, is_trained=False)
    precision = "32-true" if island.precision == "bf16-mixed" else "bf16-mixed"
    yield Option(f"{ISLAND}.precision", precision, is_timed=True, is_trained=True)
    if island.micro_batch_size is not None or batch > 1:
        half = batch // 2 if island.micro_batch_size is None else None
        yield Option(f"{ISLAND}.micro_batch_size", half, is_timed=True, is_trained=False)
