"""What a value may be, and what one field of an experiment asks of another."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddm_lightning.config.experiment import Experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import STRATEGIES

CHOICES = {
    "prepare.pictures.aspect": ("crop", "pad", "stretch"),
    "prepare.partition.kind": ("kmeans", "random", "labels", "existing"),
    "prepare.partition.metric": ("spherical", "euclidean"),
    "prepare.engine": ("local", "ray"),
    "condition.kind": ("text", "tokens", "class", "none"),
    "expert.timesteps.density": ("logit-normal", "uniform"),
    "router.timesteps.density": ("logit-normal", "uniform"),
    "expert.train.schedule": ("constant", "linear", "cosine"),
    "router.train.schedule": ("constant", "linear", "cosine"),
    "expert.train.optimizer": ("adamw", "muon"),
    "router.train.optimizer": ("adamw", "muon"),
    "island.accelerator": ("auto", "cpu", "gpu"),
    "island.strategy": ("auto", "single", "ddp", "fsdp", "fsdp-shard-grad-op"),
    "island.loader": ("auto", "local", "streaming"),
    "island.precision": ("32-true", "bf16-mixed", "16-mixed", "64-true"),
    "island.attention": ("auto", "sdpa", "flash", "cudnn", "efficient", "xformers"),
    "sample.solver": ("euler", "heun", "ancestral"),
}

# Lowest and highest value allowed; None is open.
RANGES: dict[str, tuple[float | None, float | None]] = {
    "seed": (0, 2**63 - 1),
    "prepare.partition.num_clusters": (1, None),
    "prepare.partition.num_fine_centroids": (1, None),
    "prepare.partition.num_iterations": (1, None),
    "prepare.partition.fit_fraction": (1e-6, 1),
    "prepare.partition.max_largest_over_mean": (1, None),
    "prepare.partition.out_of_cluster_fraction": (0, 0.5),
    "prepare.pictures.size": (8, None),
    "prepare.held_out_fraction": (0, 0.5),
    "prepare.max_bad_fraction": (0, 1),
    "prepare.num_processes": (0, None),
    "prepare.shards.max_bytes": (1024, None),
    "condition.dropout": (0, 1),
    "router.condition_dropout": (0, 1),
    "sample.top_k": (1, None),
    "sample.num_steps": (1, None),
    "sample.num_per_prompt": (1, None),
    "sample.guidance_scale": (0, None),
    "island.devices": (1, None),
    "island.micro_batch_size": (1, None),
    "island.num_threads": (1, 1024),
    "island.num_workers": (0, None),
    "island.log_every_n_steps": (1, None),
    "island.validate_every_n_steps": (1, None),
    "island.checkpoint_every_n_steps": (1, None),
    "island.keep_checkpoints": (1, None),
    "island.milestone_every_n_steps": (1, None),
    "expert.min_snr_gamma": (1e-6, None),
}
for _role in ("expert", "router"):
    RANGES |= {
        f"{_role}.timesteps.std": (1e-6, None),
        f"{_role}.timesteps.shift": (1e-6, None),
        f"{_role}.train.max_steps": (1, None),
        f"{_role}.train.global_batch_size": (1, None),
        f"{_role}.train.learning_rate": (0, None),
        f"{_role}.train.weight_decay": (0, None),
        f"{_role}.train.warmup_steps": (0, None),
        f"{_role}.train.gradient_clip_norm": (1e-12, None),
        f"{_role}.train.max_skipped_steps": (0, None),
        f"{_role}.train.ema_decay": (0, 0.9999999),
        f"{_role}.train.ema_snapshots": (1, None),
    }


def blamed(source: str | Path, overrides: Sequence[str], key: str, problem: str = "") -> str:
    """``source``, such as the file's name, with the one of ``overrides`` that ``problem`` of ``key`` comes from."""
    typed = {text: text.partition("=")[0] for text in overrides}
    # Above the key or below it.
    own = [text for text, at in typed.items() if f"{key}.".startswith(f"{at}.") or at.startswith(f"{key}.")]
    # Of two that contradict each other the file's may be the one that is named.
    other = [text for text, at in typed.items() if "." in at and at in problem]
    return f"{source} with {(own or other)[-1]!r}" if own or other else str(source)


def check_experiment(experiment: Experiment, source: str | Path, overrides: Sequence[str] = ()) -> None:
    """Refuse values out of range and fields that contradict each other.

    Args:
        experiment: to be looked at.
        source: what to blame, such as the file's name,
        overrides: or the ``key=value`` of these that a refused value came from.

    Raises:
        UserError: the line names ``source``, key and remedy.
    """

    def value_of(key: str) -> Any:
        return functools.reduce(getattr, key.split("."), experiment)

    def refuse(key: str, problem: str) -> None:
        raise UserError(f"{blamed(source, overrides, key, problem)}: key {key!r} = {value_of(key)!r}: {problem}")

    for key, choices in {**CHOICES, "sample.strategy": STRATEGIES.names()}.items():
        if value_of(key) not in choices:
            refuse(key, f"must be one of {', '.join(choices)}")
    for key, (low, high) in RANGES.items():
        value = value_of(key)
        if value is not None and low is not None and value < low:
            refuse(key, f"must be at least {low}")
        if value is not None and high is not None and value > high:
            refuse(key, f"must be at most {high}")
    if not re.fullmatch(r"[A-Za-z0-9_][\w.-]*", experiment.name):
        refuse("name", "names a folder: use letters, digits, '_', '-' and '.' only")
    if not experiment.run_dir:
        refuse("run_dir", "must name a folder")
    compression = experiment.prepare.shards.compression
    if compression is not None and not re.fullmatch(r"(br|bz2|gz|zstd)(:\d+)?|snappy", compression):
        refuse("prepare.shards.compression", "must be br, bz2, gz, snappy or zstd, a level behind a colon, or null")

    island, sample, condition = experiment.island, experiment.sample, experiment.condition
    partition = experiment.prepare.partition
    num_clusters = partition.num_clusters
    if (partition.kind == "existing") != (partition.path is not None):
        refuse("prepare.partition.path", "belongs to prepare.partition.kind = existing; set both or neither")
    num_fine = partition.num_fine_centroids
    if partition.kind == "kmeans" and num_clusters > num_fine:
        refuse(
            "prepare.partition.num_clusters",
            f"exceeds prepare.partition.num_fine_centroids = {num_fine}, which are grouped into clusters",
        )
    batch = experiment.expert.train.global_batch_size
    if batch % num_clusters:
        nearest = -(-batch // num_clusters) * num_clusters
        problem = (
            f"must be divisible by prepare.partition.num_clusters = {num_clusters}, each expert takes 1/K of it; "
            f"set expert.train.global_batch_size={nearest}"
        )
        refuse("expert.train.global_batch_size", problem)
    for role, train in (("expert", experiment.expert.train), ("router", experiment.router.train)):
        for width in train.ema_widths:
            if not 0.005 <= width <= 0.288:
                refuse(f"{role}.train.ema_widths", "each has to be a share of the training, from 0.005 to 0.288")
        if len({f"{width:g}" for width in train.ema_widths}) < len(train.ema_widths):
            refuse(f"{role}.train.ema_widths", "holds a width twice; remove one of them")
    of_expert = f"expert's {batch // num_clusters} samples a step ({batch} over {num_clusters} experts)"
    of_router = f"router's {experiment.router.train.global_batch_size} samples a step"
    for whose, part in ((of_expert, batch // num_clusters), (of_router, experiment.router.train.global_batch_size)):
        if part % island.devices:
            refuse("island.devices", f"must divide the {whose}; change one of them")
    if island.strategy == "single" and island.devices > 1:
        refuse("island.devices", "island.strategy = 'single' uses one; set ddp or fsdp")
    if island.attention == "xformers" and island.accelerator == "cpu":
        refuse("island.attention", "runs on CUDA devices only, not with island.accelerator = 'cpu'; set sdpa or auto")
    reads_text = condition.kind in ("text", "tokens")
    if reads_text and experiment.prepare.caption_encoder is None:
        refuse("condition.kind", "needs prepare.caption_encoder, which is null")
    if sample.prompts and not reads_text:
        refuse("condition.kind", "sample.prompts are texts, which only text and tokens read; remove them")
    if sample.guidance_scale != 1 and (condition.kind == "none" or condition.dropout == 0):
        refuse("sample.guidance_scale", "needs a condition.kind to guide by and condition.dropout above 0; set 1")
