"""What an experiment chooses besides its data and its size, and the other things that it could choose."""

from __future__ import annotations

import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import EXPERTS
from ddm_lightning.members.member import Member, batch_size
from ddm_lightning.networks.recipe import Recipe
from ddm_lightning.shards.manifest import DataSizes, Manifest
from ddm_lightning.training.optimizer import has_muon_matrices

MEMBER = "expert-0"
PARAMS, TRAIN, ISLAND = "expert.network.params", "expert.train", "island"
DECAY, CLIP, MIN_SNR, WIDTHS, SHIFT, DROPOUT = 0.1, 1.0, 5.0, [0.05, 0.1], 2.0, 0.1
"""What an experiment that has none is given."""
WARMUP_SHARE = 40
"""Of how many parts of such an experiment's steps the first one becomes a warm-up."""


@dataclass(frozen=True)
class Option:
    """One setting other than the experiment's."""

    key: str
    value: Any
    costs: bool
    """Whether a step may take longer or shorter with it."""
    brings: bool
    """Whether a training may end in other weights with it, rounding aside."""

    @property
    def name(self) -> str:
        """Of its folder and figures, such as ``rope``, ``no_rope`` and ``mlp_swiglu``."""
        last = self.key.rpartition(".")[2]
        if self.value is True:
            return last
        if self.value in (False, None, []):
            return f"no_{last}"
        return last if isinstance(self.value, list) else f"{last}_{self.value}"

    @property
    def setting(self) -> str:
        """As it is typed."""
        return f"{self.key}={self.value if isinstance(self.value, str) else json.dumps(self.value)}"


def options_of(
    experiment: Experiment, sizes: Manifest | DataSizes, *, on_gpu: bool = False, compiles: bool = False
) -> list[Option]:
    """Each choice that ``experiment`` could make otherwise, and its network takes.

    Args:
        experiment: what is compared with.
        sizes: of its data.
        on_gpu: whether there is more than one attention back end.
        compiles: whether compiled blocks are among them, for which one has to wait.
    """
    found = [*_network(experiment), *_training(experiment, sizes), *_island(experiment)]
    if on_gpu:
        other = "sdpa" if experiment.island.attention == "xformers" else "xformers"
        found.append(Option(f"{ISLAND}.attention", other, costs=True, brings=False))
    if compiles:
        found.append(Option(f"{ISLAND}.compile", not experiment.island.compile, costs=True, brings=False))
    return found


def chosen(names: Sequence[str] | None, *lists: Sequence[Option]) -> list[list[Option]]:
    """Of each list those of ``names``; None: all.

    Raises:
        UserError: a name that is in none of them.
    """
    known = list(dict.fromkeys(option.name for options in lists for option in options))
    for name in names or ():
        if name not in known:
            raise UserError(f"--only {name}: not among the options here, which are: {', '.join(known)}")
    return [[option for option in options if names is None or option.name in names] for options in lists]


def _network(experiment: Experiment) -> Iterator[Option]:
    """Switches and words of ``Recipe``; its one number, ``mlp_ratio``, is a size."""
    network = experiment.expert.network
    for choice in fields(Recipe):
        values = (False, True) if isinstance(choice.default, bool) else choice.metadata.get("choices", ())
        own = network.params.get(choice.name, choice.default)
        for value in values:
            if value != own and _takes(experiment, choice.name, value):
                yield Option(f"{PARAMS}.{choice.name}", value, costs=True, brings=True)


def _takes(experiment: Experiment, param: str, value: bool | str) -> bool:
    network = experiment.expert.network
    try:
        EXPERTS.check(network.name, {**network.params, param: value}, x_shape=None, condition=None)
    except UserError:
        return False
    return True


def _training(experiment: Experiment, sizes: Manifest | DataSizes) -> Iterator[Option]:
    """No schedule, decay or limit is timed: the gradient's norm is measured at each step, also where none is set."""
    expert = experiment.expert
    train = expert.train
    for optimizer in _choices(f"{TRAIN}.optimizer"):
        # What refuses Muon.
        if optimizer != train.optimizer and has_muon_matrices(Member.resolve(MEMBER, experiment, sizes).plan_network()):
            yield Option(f"{TRAIN}.optimizer", optimizer, costs=True, brings=True)
    yield Option(f"{TRAIN}.ema_widths", [] if train.ema_widths else WIDTHS, costs=True, brings=False)
    others: dict[str, list[Any]] = {
        "expert.timesteps.density": _words("expert.timesteps.density", expert.timesteps.density),
        "expert.timesteps.shift": [SHIFT if expert.timesteps.shift == 1 else 1.0],
        "condition.dropout": _other_dropout(experiment),
        "expert.min_snr_gamma": [MIN_SNR if expert.min_snr_gamma is None else None],
        f"{TRAIN}.schedule": _words(f"{TRAIN}.schedule", train.schedule),
        f"{TRAIN}.warmup_steps": [0 if train.warmup_steps else max(1, train.max_steps // WARMUP_SHARE)],
        f"{TRAIN}.weight_decay": [0.0 if train.weight_decay else DECAY],
        f"{TRAIN}.gradient_clip_norm": [CLIP if train.gradient_clip_norm is None else None],
        f"{TRAIN}.horizontal_flip": [not train.horizontal_flip] if _can_flip(sizes) else [],
    }
    for key, values in others.items():
        for value in values:
            yield Option(key, value, costs=False, brings=True)


def _can_flip(sizes: Manifest | DataSizes) -> bool:
    """Where the shards hold posteriors, only with those of mirrored images."""
    return not isinstance(sizes, Manifest) or sizes.stores != "posterior" or "x_0_flipped" in sizes.columns


def _other_dropout(experiment: Experiment) -> list[float]:
    if experiment.condition.kind == "none":
        return []
    # Not none: whoever guides needs some.
    return [2 * experiment.condition.dropout if 0 < experiment.condition.dropout <= 0.5 else DROPOUT]


def _choices(key: str) -> Sequence[str]:
    """Words that the experiment's ``key`` may have."""
    section, _, name = key.rpartition(".")
    kind = type(functools.reduce(getattr, section.split("."), Experiment()))
    return next(field.metadata["choices"] for field in fields(kind) if field.name == name)


def _words(key: str, own: str) -> list[str]:
    return [word for word in _choices(key) if word != own]


def _island(experiment: Experiment) -> Iterator[Option]:
    """What is computed by it is the same but for rounding, of which only half precision does more than a little."""
    island, batch = experiment.island, batch_size(MEMBER, experiment)
    checkpointing = not island.activation_checkpointing
    yield Option(f"{ISLAND}.activation_checkpointing", checkpointing, costs=True, brings=False)
    precision = "32-true" if island.precision == "bf16-mixed" else "bf16-mixed"
    yield Option(f"{ISLAND}.precision", precision, costs=True, brings=True)
    if island.micro_batch_size is not None or batch > 1:
        half = batch // 2 if island.micro_batch_size is None else None
        yield Option(f"{ISLAND}.micro_batch_size", half, costs=True, brings=False)
