"""Contradictions between the fields of an experiment; ``core.checks`` checks each field alone."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, TypeAlias

from omegaconf import OmegaConf

from ddm_lightning.config.experiment import Experiment, ExpertConfig, InitConfig, IslandConfig
from ddm_lightning.config.merge import expert_clusters, expert_section, init_keys, init_of, island_of
from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import LAUNCHERS, SOLVERS, STRATEGIES

Rule: TypeAlias = tuple[bool, str, str]
"""Whether the rule is broken, the key to blame, and the problem."""
_KINDS = ("expert", "router", "monolith", "student")
# Columns that the shards have already.
_COLUMNS = r"x_0|x_0_flipped|label|sample_id|cluster|has_caption|(text|caption).*"


def blamed(source: str | Path, overrides: Sequence[str], key: str, problem: str = "") -> str:
    """Name ``source``, such as a file, and the override that caused the ``problem`` of ``key``, if there is one."""
    typed = {text: text.partition("=")[0] for text in overrides}
    # The override sets the key, a section around it, or a key below it.
    own = []
    for text, at in typed.items():
        if f"{key}.".startswith(f"{at}.") or at.startswith(f"{key}."):
            own.append(text)

    # If two keys contradict each other, ``key`` may be in the file, and ``problem`` names the overridden one.
    other = []
    for text, at in typed.items():
        if "." in at and at in problem:
            other.append(text)

    if own or other:
        return f"{source} with {(own or other)[-1]!r}"

    return str(source)


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
    experts = [f"expert-{number}" for number in range(experiment.num_experts)]
    own: tuple[tuple[str, dict[str, Any], type, list[str], str], ...] = (
        ("expert.overrides", experiment.expert.overrides, ExpertConfig, experts, "expert"),
        ("islands", experiment.islands, IslandConfig, [*experts, *_KINDS], "member or kind"),
    )
    for section, changes, schema, names, word in own:
        for name, change in changes.items():
            key = f"{section}.{name}"
            where = blamed(source, overrides, key)
            if name not in names:
                raise UserError(
                    f"{where}: key {key!r}: there is no such {word}; experts are {experts[0]} to {experts[-1]}; "
                    "rename or remove it"
                )

            checks.check(change, schema, key, where, references=False)

    overrides_of = {f"expert.overrides.{name}": change for name, change in experiment.expert.overrides.items()}
    sections = {"expert": vars(experiment.expert), "router": vars(experiment.router), **overrides_of}
    for section, keys in sections.items():
        if (given := keys.get("init_from")) is not None:
            key = f"{section}.init_from"
            checks.check(init_keys(given), InitConfig, key, blamed(source, overrides, key), references=False)

    for is_wrong, key, problem in (_rules_of_sampling if sampling_only else _rules)(experiment):
        if is_wrong:
            value = OmegaConf.select(OmegaConf.create(asdict(experiment)), key)
            raise UserError(f"{blamed(source, overrides, key, problem)}: key {key!r} = {value!r}: {problem}")


def _rules(experiment: Experiment) -> Iterator[Rule]:
    prepare = experiment.prepare
    router = experiment.router.train
    partition = prepare.partition
    yield from [
        *_rules_of_columns(experiment),
        (
            (partition.path is not None) != (partition.kind == "existing"),
            "prepare.partition.path",
            "belongs to prepare.partition.kind = existing; set both or neither",
        ),
        (
            partition.kind == "kmeans" and partition.num_clusters > partition.num_fine_centroids,
            "prepare.partition.num_clusters",
            f"exceeds prepare.partition.num_fine_centroids = {partition.num_fine_centroids}, which form the clusters; "
            "lower it",
        ),
    ]
    if experiment.launch and (unknown := {*experiment.launch} - {*LAUNCHERS.names()}):
        yield True, "launch", f"there is no launcher {min(unknown)!r}; {LAUNCHERS.known()}"

    for name in ("expert", *experiment.expert.overrides):
        yield from _rules_of_expert(name, expert_section(name, experiment), experiment)

    held: dict[int, list[list[float]]] = {cluster: [] for cluster in range(partition.num_clusters)}
    for number, cluster in enumerate(expert_clusters(experiment)):
        held[cluster].append(expert_section(f"expert-{number}", experiment).interval)

    for cluster, intervals in held.items():
        problem = checks.uncovered(intervals)
        remedy = "change an expert's interval or cluster, or expert.num_experts"
        yield problem is not None, "expert.overrides", f"cluster {cluster} has {problem}; {remedy}"

    all_samples = experiment.expert.train.global_batch_size
    batch_sizes = {
        **{
            name: expert_section(name, experiment).train.global_batch_size // experiment.num_experts
            for name in (f"expert-{number}" for number in range(experiment.num_experts))
        },
        "router": router.global_batch_size,
        "monolith": all_samples,
        "student": experiment.distill.global_batch_size or all_samples,
    }
    for name, batch_size in batch_sizes.items():
        yield from _rules_of_island(name, batch_size, experiment)

    yield from _rules_of_sampling(experiment)


def _rules_of_columns(experiment: Experiment) -> Iterator[Rule]:
    prepare = experiment.prepare
    for name, condition in prepare.filters.items():
        is_least = name == "min_side" and checks.is_number(condition)
        is_right = condition is None or is_least or checks.COMPARISON[0](condition)
        yield not is_right, "prepare.filters", f"{name!r} must be {checks.COMPARISON[1]}"

    columns = [caption.column for caption in prepare.captions]
    yield len({*columns}) < len(columns), "prepare.captions", "names a column twice; remove one of them"
    is_weighted = not columns or any(caption.weight > 0 for caption in prepare.captions)
    yield not is_weighted, "prepare.captions", "has no weight above 0; raise one"
    taken = [name for name in prepare.keep if re.fullmatch(_COLUMNS, name) or prepare.keep.count(name) > 1]
    problem = f"{next(iter(taken), None)!r} is listed twice, or is the name of another column of the shards; remove it"
    yield bool(taken), "prepare.keep", problem


def _rules_of_expert(name: str, expert: ExpertConfig, experiment: Experiment) -> Iterator[Rule]:
    """Rules of the section ``expert``, or of it with the overrides of the expert ``name``."""
    num_clusters = experiment.prepare.partition.num_clusters
    base = experiment.expert
    batch = expert.train.global_batch_size
    num_experts = experiment.num_experts
    if base.num_experts:
        number = "expert.num_experts"
    else:
        number = "prepare.partition.num_clusters"

    for is_wrong, key, problem in (
        *(
            (expert is not base and key in base.overrides.get(name, {}), key, "cannot be overridden; remove it")
            for key in ("overrides", "num_experts")
        ),
        (expert is base and base.cluster is not None, "cluster", "belongs in expert.overrides, for one expert"),
        (
            expert is base and base.interval != [0, 1],
            "interval",
            "belongs in expert.overrides: the monolith and the student need all noise levels",
        ),
        (
            (expert.cluster or 0) >= num_clusters,
            "cluster",
            f"{expert.cluster} does not exist; give one from 0 to {num_clusters - 1}",
        ),
        (
            expert.timesteps.shift != base.timesteps.shift,
            "timesteps.shift",
            "must be that of all experts, because sampling uses it; remove it",
        ),
        (
            batch % num_experts > 0,
            "train.global_batch_size",
            f"must be divisible by {number} = {num_experts}, because each expert takes an equal part of it; set "
            f"expert.train.global_batch_size={-(-batch // num_experts) * num_experts}",
        ),
        (
            expert.network.lora is not None and expert.init_from is None,
            "init_from",
            f"must name the base that {name}.network.lora adapts; set it",
        ),
        (
            None not in (expert.network.lora, base.network.lora) and init_of(expert) != init_of(base),
            "init_from",
            "must be that of all experts, because adapters share one base; remove it",
        ),
    ):
        if name == "expert":
            own = (f"expert.{key}", problem)
        else:
            own = (f"expert.overrides.{name}", f"{key} {problem}")

        yield is_wrong, *own


def _rules_of_island(name: str, batch_size: int, experiment: Experiment) -> Iterator[Rule]:
    """Rules of the island of the member ``name``, whose steps have ``batch_size`` samples."""
    island = island_of(name, experiment)
    own = (name, name.partition("-")[0])
    section = next((f"islands.{key}" for key in own if key in experiment.islands), "island")
    if island.nodes > 1:
        times = f"times nodes = {island.nodes} "
    else:
        times = ""

    for is_wrong, key, problem in (
        (
            batch_size % island.num_ranks > 0,
            "devices",
            f"{times}must divide the {batch_size} samples per step of {name}; change one of them",
        ),
        (
            island.strategy == "single" and island.num_ranks > 1,
            "devices",
            f"{times}must be 1 with island.strategy = 'single'; set ddp or fsdp",
        ),
        (
            island.attention == "xformers" and island.accelerator == "cpu",
            "attention",
            "needs a CUDA device, but island.accelerator = 'cpu'; set sdpa or auto",
        ),
    ):
        yield is_wrong, *((f"island.{key}", problem) if section == "island" else (section, f"{key} {problem}"))


def _rules_of_sampling(experiment: Experiment) -> Iterator[Rule]:
    sample = experiment.sample
    condition = experiment.condition
    reads_text = condition.kind not in ("class", "none")
    yield from [
        (sample.strategy not in STRATEGIES.names(), "sample.strategy", f"is unknown; {STRATEGIES.known()}"),
        (sample.solver not in SOLVERS.names(), "sample.solver", f"is unknown; {SOLVERS.known()}"),
        (
            reads_text and experiment.prepare.caption_encoder is None,
            "condition.kind",
            "needs prepare.caption_encoder, which is null; set it",
        ),
        (
            bool(sample.prompts) and not reads_text,
            "condition.kind",
            "sample.prompts need condition.kind text, tokens or tokens+text; remove them, or change it",
        ),
        (
            sample.guidance_scale != 1 and (condition.kind == "none" or condition.dropout == 0),
            "sample.guidance_scale",
            "guidance needs a condition.kind other than none, and condition.dropout above 0; set 1",
        ),
    ]
