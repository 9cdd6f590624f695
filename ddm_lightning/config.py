"""The experiment file: dataclasses are its schema, and the line under a field is its documentation.

``load_experiment`` merges a YAML file with ``key=value`` overrides (OmegaConf), checks types and names
against the dataclasses, then checks what one field asks of another. Importing this module imports
neither torch nor Lightning.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import MISSING, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ddm_lightning import schema
from ddm_lightning.errors import UserError


@dataclass
class PluginConfig:
    """A plug-in by name."""

    name: str = MISSING
    """Name under which the plug-in is registered."""
    params: dict[str, Any] = field(default_factory=dict)
    """Its keyword arguments, checked against its signature."""


@dataclass
class PartitionConfig:
    """How the data set is split into clusters (two-stage balanced k-means)."""

    num_clusters: int = MISSING
    """K: clusters, hence experts."""
    num_fine_centroids: int = 1024
    """Centroids of the first stage; the second stage groups them into K clusters."""
    fit_fraction: float = 1.0
    """Part of the samples on which the fine centroids are fitted."""
    num_iterations: int = 20
    """Iterations of each k-means stage."""
    max_largest_over_mean: float = 1.05
    """Largest cluster allowed, as a multiple of N/K samples; a partition above it is refused."""


@dataclass
class ShardsConfig:
    """The MDS shards that the islands stream."""

    max_bytes: int = 1 << 26
    """Size limit of one shard before compression."""
    compression: str | None = None
    """MDS compression, such as ``zstd:3``; null for none."""


@dataclass
class PrepareConfig:
    """From a source of pictures to one folder of shards a cluster."""

    source: PluginConfig = field(default_factory=PluginConfig)
    """Where the samples come from."""
    image_encoder: PluginConfig = field(default_factory=lambda: PluginConfig(name="pixels"))
    """What turns a picture into the tensor that the experts model, and back."""
    caption_encoder: PluginConfig | None = None
    """What turns a caption into the pooled text vector; null when nothing is conditioned on text."""
    features: PluginConfig = field(default_factory=PluginConfig)
    """The features that are clustered."""
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    """How the features become K clusters."""
    held_out_fraction: float = 0.05
    """Part of the samples, drawn by a stable key, that no member trains on."""
    shards: ShardsConfig = field(default_factory=ShardsConfig)
    """Size and compression of the shards."""


@dataclass
class ConditionConfig:
    """What the experts are conditioned on."""

    kind: str = "none"
    """``text`` (pooled caption vector), ``class`` (label) or ``none``."""
    dropout: float = 0.1
    """Probability of replacing a sample's condition by the learned null, for guidance."""


@dataclass
class TimestepsConfig:
    """The density of training timesteps; t = 0 is data, t = 1 is noise."""

    density: str = "logit-normal"
    """``logit-normal`` or ``uniform``."""
    mean: float = 0.0
    """Mean of logit(t), for ``logit-normal``."""
    std: float = 1.0
    """Standard deviation of logit(t), for ``logit-normal``."""
    shift: float = 1.0
    """Resolution shift s: t -> s·t / (1 + (s-1)·t); sampling uses the same."""


@dataclass
class TrainConfig:
    """One member's optimisation; everything is counted in samples and optimizer steps."""

    max_steps: int = MISSING
    """Optimizer steps."""
    global_batch_size: int = MISSING
    """Samples a step. For experts: of the equal-FLOP monolith; one expert takes 1/K of it."""
    learning_rate: float = 1e-4
    """Peak learning rate of AdamW."""
    weight_decay: float = 0.0
    """Weight decay of AdamW, applied to matrices only."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    schedule: str = "constant"
    """After the warm-up: ``constant``, ``linear`` (to 0) or ``cosine`` (to 0)."""
    gradient_clip_norm: float | None = 1.0
    """Global gradient-norm limit; null for none."""
    horizontal_flip: bool = False
    """Whether half of the training samples are mirrored; not for pictures with letters in them."""
    ema_decay: float = 0.9999
    """Decay a step of the exponential moving average of the weights."""


@dataclass
class ExpertConfig:
    """The experts, and the monolith that they are compared with."""

    network: PluginConfig = field(default_factory=PluginConfig)
    """The network, by its name in the registry of experts."""
    timesteps: TimestepsConfig = field(default_factory=TimestepsConfig)
    """Training timesteps."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Optimisation."""


@dataclass
class RouterConfig:
    """The router p(cluster | noisy latent, t, condition)."""

    network: PluginConfig = field(default_factory=PluginConfig)
    """The network, by its name in the registry of routers."""
    timesteps: TimestepsConfig = field(default_factory=lambda: TimestepsConfig(density="uniform"))
    """Training timesteps."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Optimisation."""
    conditional: bool = True
    """Whether the router sees the condition (published routers do not)."""
    condition_dropout: float = 0.5
    """Probability of the learned null in its training: it has to route with and without a condition."""


@dataclass
class IslandConfig:
    """What the machine that trains a member is and does; may differ from island to island."""

    accelerator: str = "auto"
    """Lightning's accelerator: ``auto``, ``cpu``, ``gpu``."""
    devices: int = 1
    """Devices of the node that train one member together."""
    strategy: str = "auto"
    """``auto``, ``single``, ``ddp`` or ``fsdp`` (FSDP2 inside the node)."""
    precision: str = "32-true"
    """Lightning's precision: ``32-true``, ``bf16-mixed``, ``16-mixed`` or ``64-true``; weights stay fp32 or wider."""
    attention: str = "auto"
    """Attention back end: ``auto`` (what runs), ``sdpa`` or ``xformers``."""
    compile: bool = False
    """Whether each transformer block is compiled."""
    num_threads: int = 1
    """Torch threads of one process on a CPU."""
    num_workers: int = 0
    """Data-loading processes of one rank."""
    shards: str | None = None
    """URL (``s3://…``, ``file://…``) from which shards are fetched, or folder with them; null: the run's own."""
    log_every_n_steps: int = 50
    """Steps between two points of a TensorBoard curve."""
    validate_every_n_steps: int = 1000
    """Steps between two validations on held-out samples, each with its pictures in TensorBoard."""
    checkpoint_every_n_steps: int = 500
    """Steps between two checkpoints; what a killed member loses at most."""
    log_sample_ids: bool = False
    """Whether each step's sample ids are written to ``sample_ids.txt`` (``sample_ids-0.txt`` …, one a device)."""
    keep_checkpoints: int = 2
    """Checkpoints kept; the older ones stand in when the newest is damaged."""


@dataclass
class SampleConfig:
    """How pictures are drawn from the ensemble."""

    strategy: str = "top-1"
    """``full``, ``top-1``, ``top-k`` or ``bayes``."""
    top_k: int = 2
    """Experts kept by ``top-k``."""
    solver: str = "euler"
    """``euler``, ``heun`` (the ODE) or ``ancestral`` (stochastic; ``bayes`` uses no other)."""
    num_steps: int = 50
    """Steps from noise to data."""
    guidance_scale: float = 1.0
    """Classifier-free guidance; 1 is none."""
    prompts: list[str] = field(default_factory=list)
    """Rows of the sample grid that ``fit`` leaves."""
    num_per_prompt: int = 8
    """Columns of that grid."""


@dataclass
class Experiment:
    """A whole decentralized training: K experts and a router, one file."""

    name: str = MISSING
    """Name of the experiment, of its run folder too."""
    run_dir: str = "runs/${name}"
    """Folder of everything that the experiment produces."""
    seed: int = 0
    """Seed of the partition, the initial weights, the sample order, noise and timesteps."""
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    """From a source to shards."""
    condition: ConditionConfig = field(default_factory=ConditionConfig)
    """What the members are conditioned on."""
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    """The experts and the monolith."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """The router."""
    island: IslandConfig = field(default_factory=IslandConfig)
    """The machine."""
    sample: SampleConfig = field(default_factory=SampleConfig)
    """Sampling."""


_CHOICES = {
    "condition.kind": ("text", "class", "none"),
    "expert.timesteps.density": ("logit-normal", "uniform"),
    "router.timesteps.density": ("logit-normal", "uniform"),
    "expert.train.schedule": ("constant", "linear", "cosine"),
    "router.train.schedule": ("constant", "linear", "cosine"),
    "island.accelerator": ("auto", "cpu", "gpu"),
    "island.strategy": ("auto", "single", "ddp", "fsdp"),
    "island.precision": ("32-true", "bf16-mixed", "16-mixed", "64-true"),
    "island.attention": ("auto", "sdpa", "xformers"),
    "sample.strategy": ("full", "top-1", "top-k", "bayes"),
    "sample.solver": ("euler", "heun", "ancestral"),
}

# Lowest and highest value allowed; None is open.
_RANGES: dict[str, tuple[float | None, float | None]] = {
    "seed": (0, 2**63 - 1),
    "prepare.partition.num_clusters": (1, None),
    "prepare.partition.num_fine_centroids": (1, None),
    "prepare.partition.num_iterations": (1, None),
    "prepare.partition.fit_fraction": (1e-6, 1),
    "prepare.partition.max_largest_over_mean": (1, None),
    "prepare.held_out_fraction": (0, 0.5),
    "prepare.shards.max_bytes": (1024, None),
    "condition.dropout": (0, 1),
    "router.condition_dropout": (0, 1),
    "sample.top_k": (1, None),
    "sample.num_steps": (1, None),
    "sample.num_per_prompt": (1, None),
    "sample.guidance_scale": (0, None),
    "island.devices": (1, None),
    "island.num_threads": (1, None),
    "island.num_workers": (0, None),
    "island.log_every_n_steps": (1, None),
    "island.validate_every_n_steps": (1, None),
    "island.checkpoint_every_n_steps": (1, None),
    "island.keep_checkpoints": (1, None),
}
for _role in ("expert", "router"):
    _RANGES |= {
        f"{_role}.timesteps.std": (1e-6, None),
        f"{_role}.timesteps.shift": (1e-6, None),
        f"{_role}.train.max_steps": (1, None),
        f"{_role}.train.global_batch_size": (1, None),
        f"{_role}.train.learning_rate": (0, None),
        f"{_role}.train.weight_decay": (0, None),
        f"{_role}.train.warmup_steps": (0, None),
        f"{_role}.train.gradient_clip_norm": (1e-12, None),
        f"{_role}.train.ema_decay": (0, 0.9999999),
    }


def load_experiment(path: str | Path, overrides: Sequence[str] = ()) -> Experiment:
    """Read, merge and check an experiment file.

    Args:
        path: the YAML file.
        overrides: ``key=value`` pairs in OmegaConf's dot-list form; they win over the file.

    Returns:
        The experiment as plain dataclasses, every interpolation resolved.

    Raises:
        UserError: missing file, YAML syntax, unknown key, wrong type, missing value or contradiction.
    """
    path = Path(path)
    changes = [(str(path), schema.read_yaml(path))]
    changes += [(f"{path} with {text!r}", schema.read_override(text, str(path))) for text in overrides]
    try:
        merged = OmegaConf.structured(Experiment)
        for source, change in changes:
            schema.check(OmegaConf.to_container(change, resolve=False), Experiment, "", source)
            merged = OmegaConf.merge(merged, change)
        schema.check_complete(OmegaConf.to_container(merged, resolve=False), Experiment, str(path))
        resolved = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        problem = schema.first_line(error)
        raise UserError(f"{path}: key {error.full_key!r}: {problem}; mend the reference ${{…}} in it") from None
    schema.check(resolved, Experiment, "", str(path), references=False)
    experiment: Experiment = schema.build(resolved, Experiment)
    check_experiment(experiment, path)
    return experiment


def check_experiment(experiment: Experiment, source: str | Path) -> None:
    """Refuse values out of range and fields that contradict each other.

    Raises:
        UserError: the line names ``source``, key and remedy.
    """

    def value_of(key: str) -> Any:
        return functools.reduce(getattr, key.split("."), experiment)

    def refuse(key: str, problem: str) -> None:
        raise UserError(f"{source}: key {key!r} = {value_of(key)!r}: {problem}")

    for key, choices in _CHOICES.items():
        if value_of(key) not in choices:
            refuse(key, f"must be one of {', '.join(choices)}")
    for key, (low, high) in _RANGES.items():
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
    num_clusters = experiment.prepare.partition.num_clusters
    if num_clusters > experiment.prepare.partition.num_fine_centroids:
        refuse("prepare.partition.num_clusters", "exceeds num_fine_centroids, which are grouped into clusters")
    batch = experiment.expert.train.global_batch_size
    if batch % num_clusters:
        problem = f"must be divisible by prepare.partition.num_clusters = {num_clusters}: each expert takes 1/K of it"
        refuse("expert.train.global_batch_size", problem)
    for role, part in (("expert", batch // num_clusters), ("router", experiment.router.train.global_batch_size)):
        if part % island.devices:
            refuse("island.devices", f"must divide the {role}'s {part} samples a step; change one of them")
    if island.strategy == "single" and island.devices > 1:
        refuse("island.devices", "island.strategy = 'single' uses one; set ddp or fsdp")
    if island.attention == "xformers" and island.accelerator == "cpu":
        refuse("island.attention", "runs on CUDA devices only; set sdpa or auto")
    if sample.strategy == "top-k" and sample.top_k > num_clusters:
        refuse("sample.top_k", f"exceeds the number of experts, {num_clusters}")
    if sample.strategy == "bayes" and sample.solver != "ancestral":
        refuse("sample.solver", "strategy 'bayes' filters along a stochastic chain; set sample.solver=ancestral")
    if condition.kind == "text" and experiment.prepare.caption_encoder is None:
        refuse("condition.kind", "needs prepare.caption_encoder, which is null")
    if sample.prompts and condition.kind != "text":
        refuse("condition.kind", "sample.prompts are texts, which only a text condition reads; remove them")
    if sample.guidance_scale != 1 and (condition.kind == "none" or condition.dropout == 0):
        refuse("sample.guidance_scale", "needs a condition.kind to guide by and condition.dropout above 0; set 1")


def to_dict(experiment: Experiment) -> dict[str, Any]:
    """The experiment as plain nested dicts, ready for YAML or JSON."""
    return asdict(experiment)


def to_yaml(experiment: Experiment) -> str:
    """The resolved experiment as YAML."""
    return OmegaConf.to_yaml(OmegaConf.create(to_dict(experiment)))
