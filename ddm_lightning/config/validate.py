"""Contradictions between the fields of an experiment; ``core.checks`` checks each field alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from omegaconf import OmegaConf

from ddm_lightning.config.experiment import (
    ROLE_NAMES,
    ConditionConfig,
    Experiment,
    ExpertConfig,
    ImagesConfig,
    InitConfig,
    IslandConfig,
    PrepareConfig,
    SampleConfig,
)
from ddm_lightning.config.merge import expert_clusters, expert_section, init_keys, init_of, island_of
from ddm_lightning.core import checks
from ddm_lightning.core.buckets import bucket_sizes, sizes_of
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import LAUNCHERS, SOLVERS, STRATEGIES

Problem: TypeAlias = tuple[str, str]
"""Key to blame, and what is wrong with it."""
# Columns that the shards have anyway.
_COLUMNS = r"x_0|x_0_flipped|label|sample_id|cluster|has_caption|(text|caption).*"


def blamed(source: str | Path, overrides: Sequence[str], key: str, problem: str = "") -> str:
    """Name ``source``, such as a file, and the override that caused the ``problem`` of ``key``, if one did."""
    culprit = None
    # If two keys contradict each other, ``key`` may be in the file, and ``problem`` names the overridden one.
    for text in overrides:
        typed = text.partition("=")[0]
        if "." in typed and typed in problem:
            culprit = text

    # The override sets the key, a section around it, or a key below it.
    for text in overrides:
        typed = text.partition("=")[0]
        if f"{key}.".startswith(f"{typed}.") or typed.startswith(f"{key}."):
            culprit = text

    if culprit is None:
        return str(source)

    return f"{source} with {culprit!r}"


def check_experiment(experiment: Experiment, source: str | Path, overrides: Sequence[str] = ()) -> None:
    """Refuse fields out of their limits, and fields that contradict each other.

    Args:
        experiment: the resolved experiment.
        source: begins the error line, such as the file's name.
        overrides: ``key=value`` pairs; the error line names the one at fault, if any.

    Raises:
        UserError: the line names ``source``, key and remedy.
    """
    checks.check(asdict(experiment), Experiment, "", str(source), references=False)
    _check_changes(experiment, source, overrides)
    _refuse(_problems(experiment), asdict(experiment), source, overrides)


def check_sampling(
    sample: SampleConfig, condition: ConditionConfig, source: str | Path, overrides: Sequence[str] = ()
) -> None:
    """Refuse settings of sampling out of their limits, or that do not go with the experts' condition.

    Args:
        sample: the settings.
        condition: of the experts.
        source: as in ``check_experiment``.
        overrides: as in ``check_experiment``.

    Raises:
        UserError: the line names ``source``, key and remedy.
    """
    sections = {"sample": asdict(sample), "condition": asdict(condition)}
    checks.check(sections, Experiment, "", str(source), references=False)
    _refuse(_problems_of_sampling(sample, condition), sections, source, overrides)


def _refuse(problems: Iterator[Problem], values: dict[str, Any], source: str | Path, overrides: Sequence[str]) -> None:
    """Raise the first of the ``problems``, if there is one; ``values`` are those of all keys."""
    for key, problem in problems:
        value = OmegaConf.select(OmegaConf.create(values), key)
        raise UserError(f"{blamed(source, overrides, key, problem)}: key {key!r} = {value!r}: {problem}")


def _check_changes(experiment: Experiment, source: str | Path, overrides: Sequence[str]) -> None:
    """Check ``expert.overrides``, ``islands`` and both forms of ``init_from``."""
    experts = _experts(experiment)

    def check_section(section: str, changes: dict[str, Any], schema: type, names: Sequence[str], word: str) -> None:
        for name, change in changes.items():
            key = f"{section}.{name}"
            where = blamed(source, overrides, key)
            if name not in names:
                raise UserError(
                    f"{where}: key {key!r}: there is no such {word}; experts are {experts[0]} to {experts[-1]}; "
                    "rename or remove it"
                )

            checks.check(change, schema, key, where, references=False)

    check_section("expert.overrides", experiment.expert.overrides, ExpertConfig, experts, "expert")
    check_section("islands", experiment.islands, IslandConfig, [*experts, *ROLE_NAMES], "member or role")
    initial = {"expert": experiment.expert.init_from, "router": experiment.router.init_from}
    for name, change in experiment.expert.overrides.items():
        initial[f"expert.overrides.{name}"] = change.get("init_from")

    for section, given in initial.items():
        if given is not None:
            key = f"{section}.init_from"
            checks.check(init_keys(given), InitConfig, key, blamed(source, overrides, key), references=False)


def _experts(experiment: Experiment) -> list[str]:
    return [f"expert-{number}" for number in range(experiment.num_experts)]


def _problems(experiment: Experiment) -> Iterator[Problem]:
    partition = experiment.prepare.partition
    yield from _problems_of_columns(experiment.prepare)
    if experiment.condition.kind not in ("class", "none") and experiment.prepare.caption_encoder is None:
        yield "condition.kind", "needs prepare.caption_encoder, which is null; set it"

    if (partition.path is not None) != (partition.kind == "existing"):
        yield "prepare.partition.path", "belongs to prepare.partition.kind = existing; set both or neither"

    if partition.kind == "kmeans" and partition.num_clusters > partition.num_fine_centroids:
        yield (
            "prepare.partition.num_clusters",
            f"exceeds prepare.partition.num_fine_centroids = {partition.num_fine_centroids}, which form the clusters; "
            "lower it",
        )

    for launcher in sorted(experiment.launch):
        if launcher not in LAUNCHERS.names():
            yield "launch", f"there is no launcher {launcher!r}; {LAUNCHERS.known()}"

    for key, problem in _problems_of_expert("expert", experiment):
        yield f"expert.{key}", problem

    for name in experiment.expert.overrides:
        for key, problem in _problems_of_expert(name, experiment):
            yield f"expert.overrides.{name}", f"{key} {problem}"

    all_samples = experiment.expert.train.global_batch_size
    batch_sizes = {}
    intervals: list[list[list[float]]] = [[] for _ in range(partition.num_clusters)]
    for name, cluster in zip(_experts(experiment), expert_clusters(experiment), strict=True):
        expert = expert_section(name, experiment)
        batch_sizes[name] = expert.train.global_batch_size // experiment.num_experts
        intervals[cluster].append(expert.interval)

    batch_sizes["router"] = experiment.router.train.global_batch_size
    batch_sizes["monolith"] = all_samples
    batch_sizes["student"] = experiment.distill.global_batch_size or all_samples
    for cluster, held in enumerate(intervals):
        gap = checks.uncovered(held)
        if gap is not None:
            remedy = "change an expert's interval or cluster, or expert.num_experts"
            yield "expert.overrides", f"cluster {cluster} has {gap}; {remedy}"

    for name, batch_size in batch_sizes.items():
        yield from _problems_of_island(name, batch_size, experiment)

    yield from _problems_of_sampling(experiment.sample, experiment.condition)
    images = experiment.prepare.images
    is_known = images.buckets is not None or images.size is None or experiment.sample.exact
    if not is_known and {*sizes_of(experiment.sample.size)} - {None, (images.size, images.size)}:
        yield (
            "sample.size",
            "needs prepare.images.buckets, as all images are one square; remove it, or set sample.exact",
        )


def _bucket_problems(images: ImagesConfig) -> Iterator[Problem]:
    if images.size is None:
        yield "prepare.images.buckets", "needs prepare.images.size, the side of a square of the same area; set it"
        return

    if images.aspect != "crop":
        yield "prepare.images.aspect", "must be crop with prepare.images.buckets; remove one of them"

    try:
        bucket_sizes(images.buckets, images.size)
    except ValueError as error:
        yield "prepare.images.buckets", str(error)


def _problems_of_columns(prepare: PrepareConfig) -> Iterator[Problem]:
    if prepare.images.buckets is not None:
        yield from _bucket_problems(prepare.images)

    for name, condition in prepare.filters.items():
        is_side = name == "min_side" and checks.is_number(condition)
        if not (condition is None or is_side or checks.COMPARISON[0](condition)):
            yield "prepare.filters", f"{name!r} must be {checks.COMPARISON[1]}"

    columns = {caption.column for caption in prepare.captions}
    if len(columns) < len(prepare.captions):
        yield "prepare.captions", "names a column twice; remove one of them"

    if columns and not any(caption.weight > 0 for caption in prepare.captions):
        yield "prepare.captions", "has no weight above 0; raise one"

    for name in prepare.keep:
        if re.fullmatch(_COLUMNS, name) or prepare.keep.count(name) > 1:
            yield (
                "prepare.keep",
                f"{name!r} is listed twice, or is the name of another column of the shards; remove it",
            )


def _problems_of_expert(name: str, experiment: Experiment) -> Iterator[Problem]:
    """Problems of the section ``expert``, or of the overrides of the expert ``name``; keys are relative to these."""
    base = experiment.expert
    num_clusters = experiment.prepare.partition.num_clusters
    num_experts = experiment.num_experts
    expert = expert_section(name, experiment)
    if expert is base:
        if base.cluster is not None:
            yield "cluster", "belongs in expert.overrides, for one expert"

        if base.interval != [0, 1]:
            yield "interval", "belongs in expert.overrides: the monolith and the student need all noise levels"

    else:
        for key in ("overrides", "num_experts"):
            if key in base.overrides[name]:
                yield key, "cannot be overridden; remove it"

    if (expert.cluster or 0) >= num_clusters:
        yield "cluster", f"{expert.cluster} does not exist; give one from 0 to {num_clusters - 1}"

    for key in ("shift", "shift_by_tokens"):
        if getattr(expert.timesteps, key) != getattr(base.timesteps, key):
            yield f"timesteps.{key}", "must be that of all experts, because sampling uses it; remove it"

    batch_size = expert.train.global_batch_size
    if batch_size % num_experts:
        key = "expert.num_experts" if base.num_experts else "prepare.partition.num_clusters"
        suggestion = -(-batch_size // num_experts) * num_experts
        yield (
            "train.global_batch_size",
            f"must be divisible by {key} = {num_experts}, because each expert takes an equal part of it; set "
            f"expert.train.global_batch_size={suggestion}",
        )

    if expert.network.lora is not None:
        if expert.init_from is None:
            yield "init_from", f"must name the base that {name}.network.lora adapts; set it"

        if base.network.lora is not None and init_of(expert) != init_of(base):
            yield "init_from", "must be that of all experts, because adapters share one base; remove it"


def _problems_of_island(name: str, batch_size: int, experiment: Experiment) -> Iterator[Problem]:
    """Problems of the island of the member ``name``, whose steps have ``batch_size`` samples."""
    section, train = "expert", expert_section(name, experiment).train
    if name == "router":
        section, train = "router", experiment.router.train
    elif train.optimizer != experiment.expert.train.optimizer:
        section = f"expert.overrides.{name}"

    problems = _problems_of_devices(name, batch_size, island_of(name, experiment), section, train.optimizer)
    for key, problem in problems:
        # Only the first problem is reported, so the narrowest section comes first.
        for section in (name, name.partition("-")[0]):
            if section in experiment.islands:
                yield f"islands.{section}", f"{key} {problem}"

        yield f"island.{key}", problem


def _problems_of_devices(
    name: str, batch_size: int, island: IslandConfig, section: str, optimizer: str
) -> Iterator[Problem]:
    times = f"times nodes = {island.nodes} " if island.nodes > 1 else ""
    if batch_size % island.num_ranks:
        yield "devices", f"{times}must divide the {batch_size} samples per step of {name}; change one of them"

    if island.strategy == "single" and island.num_ranks > 1:
        yield "devices", f"{times}must be 1 with island.strategy = 'single'; set ddp or fsdp"

    if island.attention == "xformers" and island.accelerator == "cpu":
        yield "attention", "needs a CUDA device, but island.accelerator = 'cpu'; set sdpa or auto"

    if island.precision == "bf16-true" and optimizer == "muon":
        needs = f"{section}.train.optimizer = 'muon' needs"
        yield "precision", f"keeps no weights in float32, which {needs}; set bf16-mixed, or bf16-true for others alone"


def _problems_of_sampling(sample: SampleConfig, condition: ConditionConfig) -> Iterator[Problem]:
    reads_text = condition.kind not in ("class", "none")
    if sample.strategy not in STRATEGIES.names():
        yield "sample.strategy", f"is unknown; {STRATEGIES.known()}"

    if sample.solver not in SOLVERS.names():
        yield "sample.solver", f"is unknown; {SOLVERS.known()}"

    if sample.prompts and not reads_text:
        yield (
            "condition.kind",
            "sample.prompts need condition.kind text, tokens or tokens+text; remove them, or change it",
        )

    if sample.guidance_scale != 1 and (condition.kind == "none" or condition.dropout == 0):
        yield (
            "sample.guidance_scale",
            "guidance needs a condition.kind other than none, and condition.dropout above 0; set 1",
        )
