"""``prepared/manifest.json``: contents of a run's shards and how to read them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from ddm_lightning.config.experiment import CaptionConfig, PluginConfig
from ddm_lightning.core import checks
from ddm_lightning.core.buckets import Bucket
from ddm_lightning.core.files import atomic_write_json, read_json

FORMAT_VERSION = 3
TRAIN = "train"
HELD_OUT = "held-out"
IMAGE_COLUMNS = ("x_0", "x_0_flipped")
_REMEDY = "run prepare first, with the same FILE and settings, or copy it from where that was done"


@dataclass(frozen=True)
class ClusterSamples:
    """Samples of one cluster."""

    train: checks.Count
    held_out: checks.Count


@dataclass(frozen=True)
class DataSizes:
    """Sizes of the data that a network needs."""

    x_shape: tuple[int, int, int]
    """Channels, height, width of ``x_0``; with buckets, of a square image of the same area."""
    text_size: int
    """Entries of a text vector; 0 for none."""
    token_shape: tuple[int, int] | None
    """Tokens per caption and entries of each; None if the shards hold no tokens."""
    num_classes: int
    """Labels run from 0 to this minus 1."""
    buckets: tuple[Bucket, ...] = ()
    """Shapes of the images; none if all have ``x_shape``."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Everything that loading, training and sampling need to know about the shards."""

    format_version: Annotated[int, checks.version(FORMAT_VERSION)]
    """Version of this layout."""
    source: dict[str, Any]
    """Name and parameters."""
    attribution: str
    """Credit required by the source's licence."""
    images: dict[str, Any]
    """Side in pixels of the square images, the treatment of other aspect ratios, and the sizes of all buckets."""
    image_encoder: PluginConfig
    """Name and parameters."""
    stores: Annotated[str, checks.one_of(("x_0", "posterior"))]
    """``x_0``, or ``posterior``: mean, then standard deviation, of the Gaussian of ``x_0``."""
    x_shape: checks.Shape3
    """Channels, height, width of ``x_0``; with buckets, of a square image of the same area."""
    normalisation: checks.Normalisation
    """``x_0 = (stored - shift) * scale``, float32; one number each or one per channel."""
    statistics: dict[str, list[float]]
    """Mean and standard deviation of ``x_0`` per channel: near 0 and 1 if the encoder suits the data."""
    caption_encoder: PluginConfig | None
    """Name and parameters; None if the shards hold no text vectors."""
    text_size: checks.Count
    """Entries of a text vector; 0 for none."""
    token_shape: Annotated[tuple[checks.Size, checks.Size], checks.shape(2)] | None
    """Tokens per caption and entries of each; None if the shards hold no tokens."""
    columns: dict[str, checks.Text]
    """The MDS encoding of each column besides ``sample_id``, ``cluster`` and ``caption``."""
    num_classes: checks.Count
    """Labels run from 0 to this minus 1."""
    features: PluginConfig
    """Name and parameters of the feature network for clustering."""
    provenance: dict[str, dict[str, str]]
    """Hashes and revisions of the weights of encoders and feature network."""
    num_read: int
    """Samples of the source, broken ones included."""
    broken: dict[str, int]
    """Skipped samples by cause."""
    num_samples: int
    """Samples of all clusters, held-out ones included."""
    num_without_caption: int
    """Samples with an empty caption."""
    clusters: tuple[ClusterSamples, ...]
    """Samples of each cluster."""
    priors: checks.Shares
    """Each cluster's share of the samples."""
    seed: int
    """Seed of the partition and of the sample order."""
    index_sha256: dict[str, checks.Text]
    """SHA-256 of each ``index.json``, by its folder below ``shards/`` ("cluster-0/train")."""
    partition_sha256: checks.Text
    """SHA-256 of ``partition.safetensors``; equal in artifacts that belong together."""
    versions: dict[str, str]
    """Versions of the packages that shaped the result."""
    class_names: list[str] | None
    """Name of each of the ``num_classes`` classes; None if the source has none."""
    class_counts: list[list[checks.Count]] = field(default_factory=list)
    """Samples of each class in each cluster, held-out ones included, [K][num_classes]."""
    filtered: dict[str, int] = field(default_factory=dict)
    """Samples taken out by each filter."""
    captions: list[CaptionConfig] = field(default_factory=list)
    """Column and weight of each of several captions; empty if the source itself names the caption."""
    buckets: tuple[Bucket, ...] = ()
    """Shapes of the images; none if all have ``x_shape``. Columns have the shape of the first bucket."""
    bucket_samples: tuple[tuple[ClusterSamples, ...], ...] = ()
    """Samples of each bucket in each cluster, [buckets][K]."""

    @property
    def num_clusters(self) -> int:
        """K."""
        return len(self.clusters)

    @property
    def by_bucket(self) -> dict[Bucket | None, tuple[ClusterSamples, ...]]:
        """Samples of each bucket in each cluster; of all, under None, without buckets."""
        return dict(zip(self.buckets, self.bucket_samples, strict=True)) or {None: self.clusters}

    @property
    def bucket_line(self) -> str:
        """Samples of each bucket, ``shapes 4x16: 20, 8x8: 50``; empty without buckets."""
        words = []
        for bucket, clusters in zip(self.buckets, self.bucket_samples, strict=True):
            words.append(f"{bucket.name}: {sum(one.train + one.held_out for one in clusters):,}")

        return f"shapes {', '.join(words)}" if words else ""

    def __post_init__(self) -> None:
        """Refuse values that contradict each other.

        Raises:
            ValueError: some do.
        """
        channels, *rest = self.buckets[0].x_shape if self.buckets else self.x_shape
        stored = [channels * (2 if self.stores == "posterior" else 1), *rest]
        shapes = {
            "x_0": stored,
            "x_0_flipped": stored,
            "text": [self.text_size],
            "text_tokens": self.token_shape or [],
        }
        for name, shape in shapes.items():
            wanted = ",".join(map(str, shape))
            if name in self.columns and self.columns[name].rpartition(":")[2] != wanted:
                raise ValueError(f"key 'columns' gives {name} another shape than {wanted}")

        for name, values in self.normalisation.items():
            if isinstance(values, list) and len(values) not in (1, channels):
                raise ValueError(f"key 'normalisation' has {len(values)} numbers of {name} for {channels} channels")

        if {bucket.x_shape[0] for bucket in self.buckets} - {self.x_shape[0]}:
            raise ValueError("key 'buckets' has a bucket of other channels than key 'x_shape'")
        if [*map(len, self.bucket_samples)] != [self.num_clusters] * len(self.buckets):
            raise ValueError("key 'bucket_samples' has another shape than counts of each bucket in each of 'clusters'")
        if len(self.priors) != self.num_clusters:
            raise ValueError("key 'priors' has another length than key 'clusters'")
        if self.class_counts and [*map(len, self.class_counts)] != [self.num_classes] * self.num_clusters:
            raise ValueError("key 'class_counts' has another shape than num_classes counts of each of the 'clusters'")

    def write(self, run_dir: Path) -> None:
        """Write ``prepared/manifest.json``, whole or not at all."""
        atomic_write_json(manifest_path(run_dir), dataclasses.asdict(self))

    @classmethod
    def read(cls, run_dir: Path) -> Manifest:
        """Read ``prepared/manifest.json``.

        Raises:
            UserError: the manifest is missing, damaged or of another version.
        """
        path = manifest_path(run_dir)
        stored = read_json(path, "the manifest of the prepared shards", _REMEDY)
        return checks.record(stored, cls, str(path), f"delete it and {_REMEDY}")


def columns_in(columns: Mapping[str, str], bucket: Bucket) -> dict[str, str]:
    """Return the encodings of columns, whatever shape they are in, with images in the shape of a bucket."""
    found = dict(columns)
    for name in columns.keys() & IMAGE_COLUMNS:
        height, width = bucket.x_shape[1:]
        found[name] = f"{columns[name].rsplit(',', 2)[0]},{height},{width}"

    return found


def manifest_path(run_dir: Path) -> Path:
    """Return the path of a run's manifest."""
    return run_dir / "prepared" / "manifest.json"


def shard_name(cluster: int, split: str, bucket: str | None = None) -> str:
    """Return a cluster's folder in ``shards/``; ``split`` is ``TRAIN`` or ``HELD_OUT``, ``bucket`` a bucket's name."""
    if bucket is None:
        return f"cluster-{cluster}/{split}"

    return f"cluster-{cluster}/{bucket}/{split}"
