"""The experiment file: dataclasses are its schema, and the line under a field is its documentation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from omegaconf import MISSING


@dataclass
class PluginConfig:
    """A plug-in by name."""

    name: str = MISSING
    """Name under which the plug-in is registered."""
    params: dict[str, Any] = field(default_factory=dict)
    """Its keyword arguments, checked against its signature."""


@dataclass
class PicturesConfig:
    """How pictures of any size become the square ones that encoders and feature networks see."""

    size: int | None = None
    """Height and width in pixels; null takes pictures as they are and refuses a source with several sizes."""
    aspect: str = "crop"
    """What is done to the longer side: ``crop`` (its middle stays), ``pad`` (with white) or ``stretch``."""


@dataclass
class PartitionConfig:
    """How the data set is split into clusters."""

    kind: str = "kmeans"
    """``kmeans`` (two-stage, balanced, of the features), ``random`` (the paper's ablation), ``labels`` (a cluster holds
    whole classes) or ``existing`` (the clusters of another run, for new data)."""
    num_clusters: int = MISSING
    """K: clusters, hence experts."""
    path: str | None = None
    """For ``existing``: the other run's ``prepared/partition.safetensors``."""
    metric: str = "spherical"
    """``spherical`` (k-means of L2-normalised features) or ``euclidean``."""
    num_fine_centroids: int = 1024
    """Centroids of the first stage; the second stage groups them into K clusters."""
    fit_fraction: float = 1.0
    """Part of the samples on which the fine centroids are fitted."""
    device: str = "cpu"
    """Torch device that computes: ``cpu``, ``cuda``."""
    num_iterations: int = 20
    """Iterations of each k-means stage."""
    max_largest_over_mean: float = 1.05
    """Largest cluster allowed, as a multiple of N/K samples; a partition above it is refused."""
    out_of_cluster_fraction: float = 0.0
    """Part of each expert's training samples that is drawn from the other clusters (MoDE: 0.02)."""


@dataclass
class ShardsConfig:
    """The MDS shards that the islands stream."""

    max_bytes: int = 1 << 26
    """Size limit of one shard before compression."""
    compression: str | None = None
    """MDS compression, such as ``zstd:3``; null for none."""
    remote: str | None = None
    """URL (``s3://…``, ``sftp://…``) to which finished shards are uploaded; null keeps them here."""


@dataclass
class PrepareConfig:
    """From a source of pictures to one folder of shards a cluster."""

    source: PluginConfig = field(default_factory=PluginConfig)
    """Where the samples come from."""
    pictures: PicturesConfig = field(default_factory=PicturesConfig)
    """Size and aspect ratio."""
    image_encoder: PluginConfig = field(default_factory=lambda: PluginConfig(name="pixels"))
    """What turns a picture into the tensor that the experts model, and back."""
    caption_encoder: PluginConfig | None = None
    """What turns a caption into what is stored of it; null when nothing is conditioned on text."""
    features: PluginConfig = field(default_factory=PluginConfig)
    """The features that are clustered."""
    partition: PartitionConfig = field(default_factory=PartitionConfig)
    """How the features become K clusters."""
    held_out_fraction: float = 0.05
    """Part of the samples, drawn by a stable key, that no member trains on."""
    max_bad_fraction: float = 0.01
    """Part of the samples that may be broken and left out; above it preparation stops."""
    horizontal_flips: bool = False
    """Whether the encoding of the mirrored picture is stored too, from which training then picks by chance."""
    shards: ShardsConfig = field(default_factory=ShardsConfig)
    """Size and compression of the shards."""
    engine: str = "local"
    """What works on the parts of the source: ``local`` (processes here) or ``ray`` (Ray Data, on many machines)."""
    num_processes: int = 0
    """Processes of the ``local`` engine; 0 is one a core."""


@dataclass
class ConditionConfig:
    """What the experts are conditioned on."""

    kind: str = "none"
    """``text`` (pooled caption vector), ``tokens`` (a vector a token), ``class`` (label) or ``none``."""
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
    optimizer: str = "adamw"
    """``adamw``, or ``muon`` for the blocks' matrices and AdamW for the rest and adaLN; not with FSDP2."""
    learning_rate: float = 1e-4
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Weight decay, applied to matrices only."""
    warmup_steps: int = 0
    """Steps of linear warm-up."""
    schedule: str = "constant"
    """After the warm-up: ``constant``, ``linear`` (to 0) or ``cosine`` (to 0)."""
    gradient_clip_norm: float | None = 1.0
    """Global gradient-norm limit; null for none."""
    max_skipped_steps: int = 10
    """Steps left out in succession for a gradient that is not finite, at most; under ``16-mixed`` none is counted."""
    horizontal_flip: bool = False
    """Whether half of the training samples are mirrored; not for pictures with letters in them."""
    ema_decay: float = 0.9999
    """Decay a step of the exponential moving average of the weights, which the artifact holds."""
    ema_widths: list[float] = field(default_factory=list)
    """Widths of power-function averages kept besides, a copy of the weights each; EDM2: 0.05 and 0.1."""
    ema_snapshots: int = 16
    """Snapshots of those averages in the course of training; the command ``ema`` makes any width of them."""


@dataclass
class ExpertConfig:
    """The experts, and the monolith that they are compared with."""

    network: PluginConfig = field(default_factory=PluginConfig)
    """The network, by its name in the registry of experts."""
    timesteps: TimestepsConfig = field(default_factory=TimestepsConfig)
    """Training timesteps."""
    min_snr_gamma: float | None = None
    """Cap of the loss's weight min(SNR, gamma) over timesteps (Min-SNR; there 5); null: all weigh the same."""
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
    """``auto`` (by memory), ``single``, ``ddp``, ``fsdp`` (FSDP2) or ``fsdp-shard-grad-op`` (weights stay gathered)."""
    precision: str = "32-true"
    """Lightning's precision: ``32-true``, ``bf16-mixed``, ``16-mixed`` or ``64-true``; weights stay fp32 or wider."""
    attention: str = "auto"
    """``auto`` or ``sdpa`` (torch chooses), ``flash``, ``cudnn``, ``efficient`` (torch's kernels) or ``xformers``."""
    micro_batch_size: int | None = None
    """Samples of a training step that a device computes at once, summing gradients over parts; null for all of them."""
    activation_checkpointing: bool = False
    """Whether activations within a block are computed again in the backward pass: less memory, a third more work."""
    compile: bool = False
    """Whether each transformer block is compiled, as one graph."""
    num_threads: int = 1
    """Torch threads of one process on a CPU."""
    num_workers: int = 0
    """Data-loading processes of one rank."""
    shards: str | None = None
    """URL (``s3://…``, ``file://…``) from which shards are fetched, or folder with them; null: the run's own."""
    loader: str = "auto"
    """Who reads the shards: ``local`` (directly, from memory maps), ``streaming`` (also from URLs) or ``auto``."""
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
    milestone_every_n_steps: int | None = None
    """Steps between two checkpoints that are kept for good; null for none."""


@dataclass
class SampleConfig:
    """How pictures are drawn from the ensemble."""

    strategy: str = "top-1"
    """Routing strategy, by name: ``full``, ``top-1``, ``top-k``, ``bayes`` … (``sample --help`` lists all)."""
    strategy_params: dict[str, Any] = field(default_factory=dict)
    """The strategy's keyword arguments."""
    top_k: int = 2
    """Experts kept by ``top-k``; ``top_k`` in ``strategy_params`` wins."""
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
