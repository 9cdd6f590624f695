"""The part of an experiment file that ``prepare`` reads; the line under a field is its documentation."""

from __future__ import annotations

from dataclasses import dataclass, field

from omegaconf import MISSING

from ddm_lightning.config.plugin import PluginConfig


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
