"""Contradictions between the fields of an experiment; ``core.checks`` checks each field alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ddm_lightning.config.experiment import Experiment, ExpertConfig
from ddm_lightning.config.merge import expert_section
from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOLVERS, STRATEGIES

LOGGERS = ("tensorboard", "csv", "wandb")

TRAINER_FLAGS = (
    "benchmark",
    "detect_anomaly",
    "deterministic",
    "enable_model_summary",
    "inference_mode",
    "profiler",
    "sync_batchnorm",
)
"""Flags of Lightning's Trainer that ``island.trainer`` takes; other keys set the rest."""
# All of Streaming's except gz, which writes the time into the shards.
_COMPRESSIONS = r"br(:(\d|1[01]))?|bz2(:[1-9])?|snappy|zstd(:([1-9]|1\d|2[0-2]))?"


def blamed(source: str | Path, overrides: Sequence[str], key: str, problem: str = "") -> str:
    """Name ``source``, such as a file, and the override that caused the ``problem`` of ``key``, if there is one."""
    typed = {text: text.partition("=")[0] for text in overrides}
    # The override sets the key, a section around it, or a key below it.
    own = [text for text, at in typed.items() if f"{key}.".startswith(f"{at}.") or at.startswith(f"{key}.")]
    # If two keys contradict each other, ``key`` may be in the file, and ``problem`` names the overridden one.
    other = [text for text, at in typed.items() if "." in at and at in problem]
    return f"{source} with {(own or other)[-1]!r}" if own or other else str(source)


def check_experiment(
    experiment: Experiment, source: str | Path, overrides: Sequence[str] = (), *, sampling_only: bool = False
) -> None:
    """Refuse fields out of their limits, and fields that contradict each other.

    Args:
        experiment: the resolved experiment.
        source: begins the error line, such as the file's name.
        overrides: ``key=value`` pairs; the error line names the one that caused it.
        sampling_only: whether to check sampling alone, because a saved ensemble has no settings of training.

    Raises:
        UserError: the line names ``source``, key and remedy.
    """
    checks.check(asdict(experiment), Experiment, "", str(source), references=False)
    num_clusters = experiment.prepare.partition.num_clusters
    for name, change in experiment.expert.overrides.items():
        key = f"expert.overrides.{name}"
        where = blamed(source, overrides, key)
        if name not in (f"expert-{k}" for k in range(num_clusters)):
            experts = f"there are {num_clusters} experts, expert-0 to expert-{num_clusters - 1}"
            raise UserError(f"{where}: key {key!r}: {experts}; rename or remove it")
        checks.check(change, ExpertConfig, key, where, references=False)
    for key, problem in (_contradictions_of_sampling if sampling_only else _contradictions)(experiment):
        value: Any = experiment
        for part in key.split("."):
            value = value[part] if isinstance(value, dict) else getattr(value, part)
        raise UserError(f"{blamed(source, overrides, key, problem)}: key {key!r} = {value!r}: {problem}")


def _contradictions(experiment: Experiment) -> Iterator[tuple[str, str]]:
    """Key and problem of each contradiction."""
    if not re.fullmatch(r"[A-Za-z0-9_][\w.-]*", experiment.name):
        yield "name", "names a folder: use letters, digits, '_', '-' and '.' only"
    if not experiment.run_dir:
        yield "run_dir", "must name a folder"
    if not re.fullmatch(_COMPRESSIONS, experiment.prepare.shards.compression or "zstd"):
        problem = "must be br, bz2, snappy or zstd, optionally with a level as in zstd:3, or null"
        yield "prepare.shards.compression", problem
    loggers, flags = experiment.island.loggers, experiment.island.trainer
    if not {*loggers} <= {*LOGGERS} or len({*loggers}) < len(loggers):
        yield "island.loggers", f"must be a list of {', '.join(LOGGERS)}, each at most once"
    if others := [flag for flag in flags if flag not in TRAINER_FLAGS]:
        problem = f"cannot set the flag {others[0]!r}; it takes {', '.join(TRAINER_FLAGS)}, and other keys set the rest"
        yield "island.trainer", problem
    yield from _contradictions_of_sizes(experiment)
    yield from _contradictions_of_sampling(experiment)


def _contradictions_of_expert(name: str, expert: ExpertConfig, experiment: Experiment) -> Iterator[tuple[str, str]]:
    """Contradictions of the section ``expert``, or of it with the overrides of the expert ``name``."""
    num_clusters, base = experiment.prepare.partition.num_clusters, experiment.expert

    def of(key: str, problem: str) -> tuple[str, str]:
        return (f"expert.{key}", problem) if name == "expert" else (f"expert.overrides.{name}", f"{key} {problem}")

    if expert is not base and "overrides" in base.overrides[name]:
        yield of("overrides", "cannot be overridden; remove them")
    if expert.timesteps.shift != base.timesteps.shift:
        yield of("timesteps.shift", "must be that of all experts, because sampling uses it; remove it")
    batch = expert.train.global_batch_size
    if batch % num_clusters:
        divisor = f"prepare.partition.num_clusters = {num_clusters}, because each expert takes 1/K of it"
        remedy = f"set expert.train.global_batch_size={-(-batch // num_clusters) * num_clusters}"
        yield of("train.global_batch_size", f"must be divisible by {divisor}; {remedy}")
    if batch // num_clusters % experiment.island.devices:
        yield "island.devices", f"must divide the {name}'s {batch // num_clusters} samples per step; change one of them"
    for problem in _problems_of_widths(expert.train.ema_widths):
        yield of("train.ema_widths", problem)


def _problems_of_widths(widths: Sequence[float]) -> Iterator[str]:
    if not all(0.005 <= width <= 0.288 for width in widths):
        yield "every width must be from 0.005 to 0.288"
    if len({f"{width:g}" for width in widths}) < len(widths):
        yield "holds a width twice; remove one of them"


def _contradictions_of_sizes(experiment: Experiment) -> Iterator[tuple[str, str]]:
    island, partition = experiment.island, experiment.prepare.partition
    num_clusters, num_fine = partition.num_clusters, partition.num_fine_centroids
    if (partition.path is not None) != (partition.kind == "existing"):
        yield "prepare.partition.path", "belongs to prepare.partition.kind = existing; set both or neither"
    if partition.kind == "kmeans" and num_clusters > num_fine:
        problem = f"exceeds prepare.partition.num_fine_centroids = {num_fine}, which form the clusters; lower it"
        yield "prepare.partition.num_clusters", problem
    for name in ("expert", *experiment.expert.overrides):
        yield from _contradictions_of_expert(name, expert_section(name, experiment), experiment)
    batch = experiment.router.train.global_batch_size
    if batch % island.devices:
        yield "island.devices", f"must divide the router's {batch} samples per step; change one of them"
    for problem in _problems_of_widths(experiment.router.train.ema_widths):
        yield "router.train.ema_widths", problem
    every = island.evaluate_every_n_steps
    if every is not None and every % island.validate_every_n_steps:
        problem = f"must be a multiple of island.validate_every_n_steps = {island.validate_every_n_steps}; change one"
        yield "island.evaluate_every_n_steps", f"{problem}, because scores are part of a validation"
    if island.strategy == "single" and island.devices > 1:
        yield "island.devices", "island.strategy = 'single' uses one; set ddp or fsdp"
    if island.attention == "xformers" and island.accelerator == "cpu":
        yield "island.attention", "needs a CUDA device, but island.accelerator = 'cpu'; set sdpa or auto"


def _contradictions_of_sampling(experiment: Experiment) -> Iterator[tuple[str, str]]:
    sample, condition = experiment.sample, experiment.condition
    reads_text = condition.kind in ("text", "tokens")
    for key, name, plugins in (
        ("sample.strategy", sample.strategy, STRATEGIES),
        ("sample.solver", sample.solver, SOLVERS),
    ):
        if name not in plugins.names():
            yield key, f"is unknown; {plugins.known()}"
    if reads_text and experiment.prepare.caption_encoder is None:
        yield "condition.kind", "needs prepare.caption_encoder, which is null; set it"
    if sample.prompts and not reads_text:
        yield "condition.kind", "sample.prompts need condition.kind text or tokens; remove them, or change it"
    if sample.guidance_scale != 1 and (condition.kind == "none" or condition.dropout == 0):
        problem = "guidance needs a condition.kind other than none, and condition.dropout above 0; set 1"
        yield "sample.guidance_scale", problem
    times = sample.guidance_interval
    if len(times) != 2 or not 0 <= times[0] <= times[1] <= 1:
        yield "sample.guidance_interval", "must be two times, 0 <= low <= high <= 1, such as [0.1, 0.8]"
