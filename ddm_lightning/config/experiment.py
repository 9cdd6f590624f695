"""Schema of the experiment file: dataclasses, with the documentation of each field below it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING

from ddm_lightning.core.buckets import is_size
from ddm_lightning.core.checks import CHANGEABLE, INTERVAL, SHA256, Check, choice, matching, option

ROLE_NAMES = ("expert", "router", "monolith", "student")
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
_LOGGERS: Check = (
    lambda names: {*names} <= {*LOGGERS} and len({*names}) == len(names),
    f"a list of {', '.join(LOGGERS)}, each at most once",
)
_FLAGS: Check = (
    lambda flags: {*flags} <= {*TRAINER_FLAGS},
    f"of the flags {', '.join(TRAINER_FLAGS)}; other keys set the rest",
)
_NAME = matching(r"[A-Za-z0-9_][\w.-]*", "the name of a folder: letters, digits, '_', '-' and '.' only")
# Addresses without a bucket, host or folder; fsspec's memory is each process's own.
_NOWHERE = r"memory:.*|(s3|sftp|ssh)://([^/]*@)?(:\d*)?(/.*)?|(\w+:)?/*"
_REMOTE: Check = (
    lambda place: re.fullmatch(_NOWHERE, place) is None,
    "a place that all islands reach: a folder, s3://bucket/… or sftp://host/…",
)
# All of Streaming's except gz, which writes the time into the shards.
_COMPRESSION = matching(
    r"br(:(\d|1[01]))?|bz2(:[1-9])?|snappy|zstd(:([1-9]|1\d|2[0-2]))?",
    "br, bz2, snappy or zstd, optionally with a level as in zstd:3, or null",
)
_WIDTHS: Check = (
    lambda widths: all(0.005 <= width <= 0.288 for width in widths) and len({*widths}) == len(widths),
    "a list of widths from 0.005 to 0.288, each once",
)
_TIMES: Check = (
    lambda times: len(times) == 2 and 0 <= times[0] <= times[1] <= 1,
    "two times, 0 <= low <= high <= 1, such as [0.1, 0.8]",
)
_SIZES: Check = (
    lambda given: is_size(given) or (isinstance(given, list) and given != [] and all(map(is_size, given))),
    "[height, width] in pixels, or a list of such sizes, of at most 8192 pixels a side",
)


@dataclass
class PluginConfig:
    """A plug-in by name."""

    name: str = MISSING
    """Name under which the plug-in is registered."""
    params: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of the plug-in, checked against its signature."""


@dataclass
class LoraConfig:
    """LoRA adapters (Hu et al., 2106.09685): ``W + (alpha / rank)·B·A`` in place of a frozen matrix ``W``."""

    rank: int = option(MISSING, low=1)
    """Columns of B and rows of A."""
    alpha: float | None = option(None, low=1e-12)
    """Scale of the adapters times ``rank``; null for ``rank``, so that the scale is 1."""
    target_modules: list[str] = MISSING
    """Layers to adapt, each by the end of its name, as in peft: ``[qkv, out]`` or ``[blocks.0.mlp.0]``."""


@dataclass
class NetworkConfig(PluginConfig):
    """A network by name, perhaps with adapters."""

    lora: LoraConfig | None = None
    """Train only adapters, on the weights of ``expert.init_from``, which stay frozen; null to train all weights."""


@dataclass
class ImagesConfig:
    """Resizing of images of any size to the squares that encoders and feature networks take."""

    size: int | None = option(None, low=8, high=8192)
    """Height and width in pixels; null keeps images as they are and refuses a source with several sizes."""
    aspect: str = choice("crop", "pad", "stretch")
    """How to make an image square: ``crop`` (keep the centre), ``pad`` (with white) or ``stretch``."""
    buckets: Any = None
    """Shapes of images, instead of one square: ``{max_aspect: 2.0, step: 32}`` for all of about ``size`` x ``size``
    pixels whose sides ``step`` divides, or a list of [height, width]. Each image is resized to cover the shape of the
    nearest aspect ratio, and its middle is kept."""
    upscale: bool = True
    """Whether to keep images that are enlarged; false skips and counts them."""
    reduce: bool = True
    """Whether to decode large JPEGs at 1/2, 1/4 or 1/8 of their size, as long as both sides are still at least twice
    those of the resized image; false decodes all pixels. A folder prepared without this rule keeps to that."""


@dataclass
class PartitionConfig:
    """Split of the data set into clusters."""

    kind: str = choice("kmeans", "flat", "random", "labels", "existing")
    """``kmeans`` (two-stage, balanced, on the features), ``flat`` (one stage, balances single samples), ``random`` (the
    paper's ablation), ``labels`` (whole classes per cluster) or
    ``existing`` (the clusters of another run, for new data)."""
    num_clusters: int = option(MISSING, low=1)
    """K: number of clusters, hence of experts."""
    path: str | None = None
    """For ``existing``: path of the other run's ``prepared/partition.safetensors``."""
    metric: str = choice("spherical", "euclidean")
    """``spherical`` (k-means on L2-normalised features) or ``euclidean``."""
    num_fine_centroids: int = option(1024, low=1)
    """For ``kmeans``: centroids of the first stage; the second stage groups them into K clusters."""
    fit_fraction: float = option(1.0, low=1e-6, high=1)
    """Fraction of the samples on which k-means is fitted."""
    device: str = "cpu"
    """Torch device for k-means: ``cpu``, ``cuda`` or one of several GPUs, such as ``cuda:1``."""
    num_iterations: int = option(20, low=1)
    """Iterations of each k-means stage."""
    max_largest_over_mean: float = option(1.05, low=1)
    """Largest allowed cluster, as a multiple of N/K samples; a larger one is refused. With ``fit_fraction`` below 1 it
    holds for the fitted sample; in the whole data set four standard errors more are allowed."""


@dataclass
class ShardsConfig:
    """The MDS shards that the islands stream."""

    max_bytes: int = option(1 << 26, low=1024, high=(1 << 32) - 1)
    """Maximum bytes of one shard before compression."""
    compression: str | None = option(None, check=_COMPRESSION)
    """MDS compression, such as ``zstd:3``; null for none."""


@dataclass
class CaptionConfig:
    """One of several captions of each image."""

    column: str = MISSING
    """Column of the source."""
    weight: float = option(1.0, low=0)
    """Each step draws one of the captions that an image has, with a probability in proportion to this weight."""


@dataclass
class PrepareConfig:
    """From a source of images to one folder of shards per cluster."""

    source: PluginConfig = field(default_factory=PluginConfig)
    """Source of the samples."""
    images: ImagesConfig = field(default_factory=ImagesConfig)
    """Size and aspect ratio."""
    image_encoder: PluginConfig = field(default_factory=lambda: PluginConfig(name="pixels"))
    """Encoder from images to the tensors that the experts model, and back."""
    caption_encoder: PluginConfig | None = None
    """Encoder of captions; null if nothing is conditioned on text."""
    captions: list[CaptionConfig] = field(default_factory=list)
    """Columns with captions, instead of the source's ``caption_column``. All are encoded; each step draws one
    per image. Held-out figures use the first one that an image has."""
    features: PluginConfig = field(default_factory=PluginConfig)
    """Network whose features are clustered."""
    filters: dict[str, Any] = field(default_factory=dict)
    """Samples to keep: conditions on columns of the source and on the image, such as ``{min_side: 256, aesthetic:
    ">= 5"}``; a sample must fulfil all, and one without a value for a column is skipped."""
    drop_keys: str | None = None
    """File with the keys of samples to skip, one per line; null for none."""
    near_duplicates: float | None = option(None, low=0.5, high=1)
    """Cosine similarity of features from which on images count as the same, such as 0.97; at least 0.5. The first one
    is kept. Null keeps all."""
    keep: list[str] = field(default_factory=list)
    """Numeric columns to store with each sample: columns of the source or, for the image before resizing,
    ``image_height``, ``image_width``, ``min_side``, ``crop_top`` and ``crop_left``."""
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    """Clustering of the features."""
    held_out_fraction: float = option(0.05, low=0, high=0.5)
    """Fraction of the samples, chosen by a stable key, that no member trains on."""
    max_bad_fraction: float = option(0.01, low=0, high=1)
    """Fraction of broken samples that may be skipped; above it ``prepare`` stops."""
    horizontal_flips: bool = False
    """Whether to store the encoding of the mirrored image as well, for ``train.horizontal_flip``."""
    shards: ShardsConfig = field(default_factory=ShardsConfig)
    """Size and compression of the shards."""
    engine: str = choice("local", "ray", changeable=True)
    """Workers for the parts of the source: ``local`` (processes here) or ``ray`` (Ray actors on many machines)."""
    num_processes: int = option(0, low=0, changeable=True)
    """Processes or Ray actors in all; 0 means four per GPU with encoders, else one per core."""


@dataclass
class ConditionConfig:
    """Condition of the experts."""

    kind: str = choice("none", "text", "tokens", "tokens+text", "class")
    """``text`` (pooled caption vector), ``tokens`` (one vector per token), ``tokens+text`` (both), ``class`` (label)
    or ``none``."""
    dropout: float = option(0.1, low=0, high=1)
    """Probability of replacing a sample's condition with the learned null, for guidance."""


@dataclass
class TimestepsConfig:
    """Density of the training timesteps; t = 0 is data, t = 1 is noise."""

    density: str = choice("logit-normal", "uniform")
    """``logit-normal`` or ``uniform``."""
    mean: float = 0.0
    """Mean of logit(t), for ``logit-normal``."""
    std: float = option(1.0, low=1e-6)
    """Standard deviation of logit(t), for ``logit-normal``."""
    shift: float = option(1.0, low=1e-6)
    """Resolution shift s: t -> s·t / (1 + (s-1)·t); sampling uses the same."""
    shift_by_tokens: bool = False
    """With ``prepare.images.buckets``: multiply s by the root of an image's area over that of the square."""


@dataclass
class TrainConfig:
    """Optimisation of one member, counted in samples and optimizer steps."""

    max_steps: int = option(MISSING, low=0)
    """Optimizer steps; 0 hands over the initial weights."""
    global_batch_size: int = option(MISSING, low=1, high=1 << 24)
    """Samples per step. For experts, the monolith's batch; each of M experts takes 1/M of it."""
    optimizer: str = choice("adamw", "adamw-8bit", "muon")
    """``adamw``; ``adamw-8bit`` (moments in a quarter of the memory); ``muon`` for the blocks' matrices, not with FSDP2
    (AdamW for adaLN and the rest)."""
    learning_rate: float = option(1e-4, low=1e-12)
    """Peak learning rate."""
    weight_decay: float = option(0.0, low=0)
    """Weight decay of matrices; other parameters have none."""
    warmup_steps: int = option(0, low=0)
    """Steps of linear warm-up."""
    schedule: str = choice("constant", "linear", "cosine")
    """After the warm-up: ``constant``, ``linear`` (to 0) or ``cosine`` (to 0)."""
    gradient_clip_norm: float | None = option(1.0, low=1e-12)
    """Maximum global gradient norm; null for no clipping."""
    max_skipped_steps: int = option(10, low=0)
    """Maximum number of consecutive steps skipped for a non-finite gradient; not counted under ``16-mixed``."""
    horizontal_flip: bool = False
    """Whether to mirror half of the training samples; not for images with text."""
    ema_decay: float = option(0.9999, low=0, high=0.9999999)
    """Decay per step of the exponential moving average (EMA) of the weights, which the artifact holds."""
    keep: str = choice("last", "best")
    """EMA in the artifact: of the ``last`` step, or of the validation with the ``best`` held-out loss (two EMAs)."""
    ema_widths: list[float] = option([], check=_WIDTHS)
    """Widths (sigma_rel) of additional power-function EMAs, each a copy of the weights; EDM2: 0.05 and 0.1."""
    ema_snapshots: int = option(16, low=1)
    """Snapshots of these EMAs during training; the command ``ema`` reconstructs any width from them."""

    @property
    def num_copies(self) -> int:
        """Copies of the weights besides the EMA."""
        return len(self.ema_widths) + (self.keep == "best")


@dataclass
class InitConfig:
    """Weights to start from; a string alone is their ``source``."""

    source: str = MISSING
    """Path or URL of an artifact, a run, a model of diffusers, or a ``.safetensors`` file."""
    sha256: str | None = option(None, check=SHA256)
    """SHA-256 that the weights must have; null for any."""
    partial: bool = False
    """Whether weights that do not fit the network may start anew; they are listed."""


@dataclass
class ExpertConfig:
    """Experts, and the monolith that they are compared with."""

    network: NetworkConfig = field(default_factory=NetworkConfig)
    """Network, by its name in the registry of experts."""
    init_from: Any = None
    """Weights to start from: path or URL of an artifact, a run (its monolith), a model of diffusers or a
    ``.safetensors`` file; or ``{source, sha256, partial: true}``. Null for random ones."""
    timesteps: TimestepsConfig = field(default_factory=TimestepsConfig)
    """Training timesteps."""
    path: str = choice("linear", "cosine", "vp")
    """Path from data to noise in training: ``linear``, ``cosine`` or ``vp`` (DDPM's); sampling uses ``linear``."""
    loss: str = choice("prediction", "velocity")
    """Squared error in the loss: of the network's ``prediction``, or of the ``velocity`` it implies (JiT)."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Optimisation."""
    num_experts: int | None = option(None, low=1)
    """M: number of experts; null for K, one per cluster. Experts of one cluster differ in ``interval``."""
    cluster: int | None = option(None, low=0)
    """Only in ``overrides``: cluster on which the expert trains; null for its number modulo K."""
    interval: list[float] = option([0.0, 1.0], check=INTERVAL)
    """Only in ``overrides``: the expert's t in [low, high), on the linear path and after the shift."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Keys of this section that differ for some experts, as in ``{expert-1: {path: cosine}}``."""


@dataclass
class RouterConfig:
    """Router p(cluster | noisy latent, t, condition)."""

    network: PluginConfig = field(default_factory=PluginConfig)
    """Network, by its name in the registry of routers."""
    init_from: Any = None
    """Weights to start from, as in ``expert.init_from``; a run stands for its router."""
    timesteps: TimestepsConfig = field(default_factory=lambda: TimestepsConfig(density="uniform"))
    """Training timesteps."""
    train: TrainConfig = field(default_factory=TrainConfig)
    """Optimisation."""
    conditional: bool = True
    """Whether the router sees the condition: no in DDM, Paris and HDDM, yes in Paris 2.0 (2605.26064)."""
    condition_dropout: float = option(0.5, low=0, high=1)
    """Probability of the learned null in training; the router has to work with and without a condition."""


@dataclass
class DistillConfig:
    """Distillation of the ensemble into one network, by ``fit member=student`` (2501.05450, section 4)."""

    teacher: str = "owner"
    """``owner`` (the expert of the sample's cluster; no router needed) or a routing strategy, such as ``full``."""
    max_steps: int | None = option(None, low=1)
    """Optimizer steps; null for as many as an expert takes."""
    global_batch_size: int | None = option(None, low=1, high=1 << 24)
    """Samples per step; null for ``expert.train.global_batch_size``. The paper takes a quarter of it."""


@dataclass
class IslandConfig:
    """Settings of the machine that trains a member; they may differ between islands."""

    accelerator: str = choice("auto", "cpu", "gpu")
    """Lightning's accelerator: ``auto``, ``cpu``, ``gpu``."""
    devices: int = option(1, low=1)
    """Devices of each node that train one member together."""
    nodes: int = option(1, low=1)
    """Nodes that train one member together, with ``devices`` each; ``fit`` is started on every one."""
    strategy: str = choice("auto", "single", "ddp", "fsdp", "fsdp-shard-grad-op")
    """``auto`` (by memory), ``single``, ``ddp``, ``fsdp`` (FSDP2) or ``fsdp-shard-grad-op`` (weights stay gathered)."""
    precision: str = choice("32-true", "bf16-mixed", "16-mixed", "bf16-true")
    """``32-true``, ``bf16-mixed`` or ``16-mixed``, with weights in fp32; ``bf16-true``: as ``bf16-mixed``, but weights
    and gradients are stored in bfloat16, rounded stochastically; averages stay fp32."""
    ema: str = choice("device", "host")
    """Memory of the weight averages: the ``device``'s, or the ``host``'s, where they take in every tenth step."""
    attention: str = choice("auto", "sdpa", "flash", "cudnn", "efficient", "xformers")
    """``auto`` or ``sdpa`` (first of flash, efficient, math that can run), or a kernel by name, such as ``cudnn``."""
    micro_batch_size: int | None = option(None, low=1)
    """Samples that a device computes at once; a step accumulates their gradients. Null for all at once."""
    activation_checkpointing: bool = False
    """Whether to recompute each block's activations in the backward pass: less memory, a third more FLOPs."""
    compile: bool = False
    """Whether to compile each transformer block as one graph."""
    num_threads: int = option(1, low=1, high=1024)
    """Torch threads per process on a CPU."""
    num_workers: int = option(0, low=0)
    """Threads per rank that gather batches ahead; 0 gathers each when it is needed."""
    shards: str | None = None
    """URL (``s3://…``, ``file://…``) or folder to read shards from; null for the run's own."""
    cache_gb: float | None = option(None, low=1e-6)
    """Disk space per member and node for shards from a URL, in GB; null keeps every shard that was fetched."""
    loggers: list[str] = option(["tensorboard"], check=_LOGGERS)
    """Where curves go: ``tensorboard``, ``csv`` and ``wandb`` (Weights & Biases); images go to all but ``csv``."""
    callbacks: list[PluginConfig] = field(default_factory=list)
    """Lightning callbacks by name: ``early-stopping``, or those of other packages."""
    trainer: dict[str, Any] = field(default_factory=dict, metadata={"check": _FLAGS})
    """Further flags of Lightning's Trainer, such as ``profiler: simple`` or ``detect_anomaly: true``."""
    log_every_n_steps: int = option(50, low=1)
    """Steps between points of a curve."""
    validate_every_n_steps: int = option(1000, low=1)
    """Steps between validations on held-out samples; each logs images."""
    checkpoint_every_n_steps: int = option(500, low=1)
    """Steps between checkpoints; a killed member loses at most this many."""
    checkpoint_every_n_minutes: float | None = option(None, low=0.01)
    """Minutes between checkpoints, instead of ``checkpoint_every_n_steps``; null to count steps."""
    keep_checkpoints: int = option(2, low=1)
    """Number of checkpoints to keep; an older one is used if the newest is damaged."""
    publish_every_n_minutes: float = option(10.0, low=0.001)
    """Minutes between publications of the newest checkpoint and the curves at ``remote``."""
    milestone_every_n_steps: int | None = option(None, low=1)
    """Steps between checkpoints that are never deleted; null for none."""
    signing_key: str | None = None
    """File of the private key (elliptic curve, PEM) that signs what this island hands over; null to sign nothing."""
    trusted_keys: dict[str, Any] = field(default_factory=dict)
    """Public keys that must have signed what others hand over: ``{prepare: a.pub, expert: [b.pub, c.pub]}``, or
    ``{all: a.pub}``; empty to check no signatures."""
    max_minutes: float | None = option(None, low=0.01)
    """Minutes from the start of ``fit`` within which a member stops, saves and publishes; null for no limit."""
    lease_file: str | None = None
    """File in which the machine's lender writes the end of the slot, in ISO 8601 or Unix seconds; null for none."""

    @property
    def is_lent(self) -> bool:
        """Whether the machine may be lent for a limited time."""
        return self.max_minutes is not None or self.lease_file is not None

    @property
    def num_ranks(self) -> int:
        """Devices of all nodes."""
        return self.nodes * self.devices

    @property
    def size(self) -> str:
        """Devices in words: ``4 devices`` or ``2 nodes x 4 devices``."""
        if self.nodes > 1:
            return f"{self.nodes} nodes x {self.devices} devices"

        return f"{self.devices} devices"


@dataclass
class SampleConfig:
    """Sampling from the ensemble, or from one member."""

    member: str | None = None
    """Member to sample from alone, such as ``monolith``, ``student`` or ``expert-3``; null for the ensemble."""
    strategy: str = "top-1"
    """Routing strategy, by name: ``full``, ``top-1``, ``top-k``, ``bayes`` … (``sample --help`` lists all)."""
    strategy_params: dict[str, Any] = field(default_factory=dict)
    """The strategy's keyword arguments."""
    solver: str = "dpm++2m"
    """Solver, by name: ``dpm++2m``, ``euler``, ``heun``, ``ancestral`` (stochastic) and others."""
    solver_params: dict[str, Any] = field(default_factory=dict)
    """The solver's keyword arguments."""
    num_steps: int = option(50, low=1)
    """Steps from noise to data: one evaluation each, with ``heun`` and ``midpoint`` two; ``dormand-prince`` chooses its
    own."""
    guidance_scale: float = option(1.0, low=0, high=1000)
    """Scale of classifier-free guidance; 1 means none."""
    guidance: str = choice("expert", "mixture")
    """Where guidance happens: ``expert`` (inside each, before mixing) or ``mixture`` (exact, as in one model)."""
    guidance_interval: list[float] = option([0.0, 1.0], check=_TIMES)
    """Lowest and highest t at which guidance acts."""
    router_temperature: float = option(1.0, low=1e-3)
    """Divisor of the router's calibrated logits; below 1 makes it more confident."""
    compile: bool = False
    """Whether to compile the transformer blocks; takes a minute and pays off for many images."""
    precision: str = choice("auto", "32-true", "bf16-mixed", "16-mixed")
    """Precision within the networks: ``32-true``, ``bf16-mixed``, ``16-mixed`` or ``auto``, which is ``bf16-mixed`` on
    a GPU only."""
    resident_experts: int | None = option(None, low=2)
    """Experts kept at once on a device too small for all, while the next one loads; null keeps all."""
    prompts: list[str] = field(default_factory=list)
    """Text prompts, one per row of the sample grid that ``fit`` writes; validations show the first eight."""
    num_per_prompt: int = option(8, low=1)
    """Images per prompt: columns of the grid."""
    size: Any = option(None, check=_SIZES)
    """[height, width] of the images in pixels, or several, each for all prompts; null for the square, or for the bucket
    nearest to it. Another size takes the bucket of the nearest aspect ratio."""
    exact: bool = False
    """Whether to take ``size`` as it is, even if no network was trained on it."""


@dataclass
class EvaluateConfig:
    """Scores of generated images."""

    metrics: list[PluginConfig] = field(
        default_factory=lambda: [PluginConfig(name="kid"), PluginConfig(name="precision-recall")]
    )
    """Metrics by name: ``kid``, ``fid``, ``precision-recall``, ``clip-score`` and others."""
    num_images: int = option(1000, low=4)
    """Images to generate."""
    reference: str = "held-out"
    """Images to compare with: ``held-out`` or ``train`` (of the prepared shards), or a folder or ``.npz`` file."""
    batch_size: int = option(64, low=1)
    """Images generated at once."""
    image_format: str = choice("npz", "png")
    """``npz`` keeps the images in parts; ``png`` also writes each as a file."""
    max_train_images: int = option(50_000, low=0)
    """Maximum number of training images in the check for memorised samples; 0 for no check."""


@dataclass
class Experiment:
    """Decentralized training of K experts and a router."""

    name: str = option(MISSING, check=_NAME)
    """Name of the experiment and, by default, of its run folder."""
    run_dir: str = option("runs/${name}", check=matching(".+", "a folder"), changeable=True)
    """Run folder: everything that the experiment produces; ``~`` is your home, ``$HOME`` has no meaning."""
    seed: int = option(0, low=0, high=2**63 - 1)
    """Seed of the partition, the initial weights, the sample order, noise and timesteps."""
    remote: str | None = option(None, check=_REMOTE, changeable=True)
    """URL or folder that all islands reach (``s3://…``, ``sftp://…``): the run's shards, checkpoints and artifacts."""
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    """From a source to shards."""
    condition: ConditionConfig = field(default_factory=ConditionConfig)
    """Condition of the members."""
    expert: ExpertConfig = field(default_factory=ExpertConfig)
    """Experts and monolith."""
    router: RouterConfig = field(default_factory=RouterConfig)
    """Router."""
    distill: DistillConfig = field(default_factory=DistillConfig, metadata=CHANGEABLE)
    """Distillation of the ensemble into a student."""
    island: IslandConfig = field(default_factory=IslandConfig, metadata=CHANGEABLE)
    """Machine that trains a member."""
    islands: dict[str, Any] = field(default_factory=dict, metadata=CHANGEABLE)
    """Keys of ``island`` that differ for some members: ``{router: {devices: 1}, expert-3: {precision: 32-true}}``."""
    launch: dict[str, dict[str, Any]] = field(default_factory=dict, metadata=CHANGEABLE)
    """Params of the launchers, by name: ``{slurm: {partition: gpu}, ssh: {hosts: {expert-0: alice@node-1}}}``."""
    sample: SampleConfig = field(default_factory=SampleConfig, metadata=CHANGEABLE)
    """Sampling."""
    evaluate: EvaluateConfig = field(default_factory=EvaluateConfig, metadata=CHANGEABLE)
    """Evaluation of the ensemble's images."""

    @property
    def num_experts(self) -> int:
        """M: number of experts."""
        return self.expert.num_experts or self.prepare.partition.num_clusters
