"""The validator of experiments: choices, ranges, and contradictions between fields."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
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
"""Flags of Lightning's Trainer that ``island.trainer`` takes."""
OWNED_FLAGS = {
    "accelerator": "island.accelerator",
    "accumulate_grad_batches": "island.micro_batch_size",
    "callbacks": "island.callbacks",
    "check_val_every_n_epoch": "island.validate_every_n_steps",
    "default_root_dir": "run_dir",
    "devices": "island.devices",
    "enable_checkpointing": "island.checkpoint_every_n_steps",
    "gradient_clip_val": "train.gradient_clip_norm",
    "log_every_n_steps": "island.log_every_n_steps",
    "logger": "island.loggers",
    "max_epochs": "train.max_steps",
    "max_steps": "train.max_steps",
    "max_time": "train.max_steps",
    "num_nodes": "island.devices",
    "precision": "island.precision",
    "strategy": "island.strategy",
    "val_check_interval": "island.validate_every_n_steps",
}
"""Flags that another key sets."""

# Lowest and highest allowed value; None is open.
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
    """``source``, such as a file name, with the override that causes the ``problem`` of ``key``, if one does."""
    typed = {text: text.partition("=")[0] for text in overrides}
    # The override sets the key, a section around it, or a key below it.
    own = [text for text, at in typed.items() if f"{key}.".startswith(f"{at}.") or at.startswith(f"{key}.")]
    # Of two contradicting keys, ``key`` may be the one in the file, and ``problem`` names the overridden one.
    other = [text for text, at in typed.items() if "." in at and at in problem]
    return f"{source} with {(own or other)[-1]!r}" if own or other else str(source)


def check_experiment(experiment: Experiment, source: str | Path, overrides: Sequence[str] = ()) -> None:
    """Refuse values out of range and fields that contradict each other.

    Args:
        experiment: the resolved experiment.
        source: begins the error line, such as the file's name.
        overrides: ``key=value`` pairs; the error line names the one that caused it.

    Raises:
        UserError: the line names ``source``, key and remedy.
    """

    def value_of(key: str) -> Any:
        return functools.reduce(getattr, key.split("."), experiment)

    def require(holds: bool, key: str, problem: str) -> None:
        if not holds:
            raise UserError(f"{blamed(source, overrides, key, problem)}: key {key!r} = {value_of(key)!r}: {problem}")

    for key, choices in {**CHOICES, "sample.strategy": STRATEGIES.names()}.items():
        require(value_of(key) in choices, key, f"must be one of {', '.join(choices)}")
    for key, (low, high) in RANGES.items():
        value = value_of(key)
        require(value is None or low is None or value >= low, key, f"must be at least {low}")
        require(value is None or high is None or value <= high, key, f"must be at most {high}")
    is_name = re.fullmatch(r"[A-Za-z0-9_][\w.-]*", experiment.name) is not None
    require(is_name, "name", "names a folder: use letters, digits, '_', '-' and '.' only")
    require(experiment.run_dir != "", "run_dir", "must name a folder")
    compression = experiment.prepare.shards.compression
    is_known = compression is None or re.fullmatch(r"(br|bz2|gz|zstd)(:\d+)?|snappy", compression) is not None
    problem = "must be br, bz2, gz, snappy or zstd, optionally with a level as in zstd:3, or null"
    require(is_known, "prepare.shards.compression", problem)
    known = ", ".join(LOGGERS)
    require({*experiment.island.loggers} <= {*LOGGERS}, "island.loggers", f"every one must be one of {known}")
    is_unique = len({*experiment.island.loggers}) == len(experiment.island.loggers)
    require(is_unique, "island.loggers", "names a logger twice; remove one of them")
    for flag in experiment.island.trainer:
        problem = f"the flag {flag!r} is set by the key {OWNED_FLAGS.get(flag)}; use that instead"
        require(flag not in OWNED_FLAGS, "island.trainer", problem)
        problem = f"no flag {flag!r} can be set here; those that can: {', '.join(TRAINER_FLAGS)}"
        require(flag in TRAINER_FLAGS, "island.trainer", problem)
    _check_partition_and_batches(experiment, require)
    _check_sampling(experiment, require)


def _check_partition_and_batches(experiment: Experiment, require: Callable[[bool, str, str], None]) -> None:
    island, partition = experiment.island, experiment.prepare.partition
    num_clusters = partition.num_clusters
    has_path, wants_path = partition.path is not None, partition.kind == "existing"
    problem = "belongs to prepare.partition.kind = existing; set both or neither"
    require(has_path == wants_path, "prepare.partition.path", problem)
    num_fine = partition.num_fine_centroids
    problem = f"exceeds prepare.partition.num_fine_centroids = {num_fine}, which are grouped into clusters; lower it"
    require(partition.kind != "kmeans" or num_clusters <= num_fine, "prepare.partition.num_clusters", problem)

    batch, router_batch = experiment.expert.train.global_batch_size, experiment.router.train.global_batch_size
    problem = (
        f"must be divisible by prepare.partition.num_clusters = {num_clusters}, because each expert takes 1/K of it; "
        f"set expert.train.global_batch_size={-(-batch // num_clusters) * num_clusters}"
    )
    require(batch % num_clusters == 0, "expert.train.global_batch_size", problem)
    problem = f"must divide the expert's {batch // num_clusters} samples per step ({batch} over {num_clusters} experts)"
    require(batch // num_clusters % island.devices == 0, "island.devices", f"{problem}; change one of them")
    problem = f"must divide the router's {router_batch} samples per step; change one of them"
    require(router_batch % island.devices == 0, "island.devices", problem)

    for role, train in (("expert", experiment.expert.train), ("router", experiment.router.train)):
        key, widths = f"{role}.train.ema_widths", train.ema_widths
        require(all(0.005 <= width <= 0.288 for width in widths), key, "every width must be from 0.005 to 0.288")
        is_unique = len({f"{width:g}" for width in widths}) == len(widths)
        require(is_unique, key, "holds a width twice; remove one of them")

    is_single = island.strategy == "single"
    problem = "island.strategy = 'single' uses one; set ddp or fsdp"
    require(not is_single or island.devices == 1, "island.devices", problem)
    problem = "needs a CUDA device, but island.accelerator = 'cpu'; set sdpa or auto"
    require(island.attention != "xformers" or island.accelerator != "cpu", "island.attention", problem)


def _check_sampling(experiment: Experiment, require: Callable[[bool, str, str], None]) -> None:
    sample, condition = experiment.sample, experiment.condition
    reads_text = condition.kind in ("text", "tokens")
    has_encoder = experiment.prepare.caption_encoder is not None
    problem = "needs prepare.caption_encoder, which is null; set it"
    require(has_encoder or not reads_text, "condition.kind", problem)
    problem = "sample.prompts need condition.kind text or tokens; remove them, or change it"
    require(reads_text or not sample.prompts, "condition.kind", problem)
    can_guide = condition.kind != "none" and condition.dropout > 0
    problem = "guidance needs a condition.kind other than none, and condition.dropout above 0; set 1"
    require(can_guide or sample.guidance_scale == 1, "sample.guidance_scale", problem)
