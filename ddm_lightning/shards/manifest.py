"""``prepared/manifest.json``: contents of a run's shards and how to read them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from ddm_lightning.core import checks
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import atomic_write_json, read_json

FORMAT_VERSION = 3
TRAIN, HELD_OUT = "train", "held-out"
_REMEDY = "run prepare first, with the same FILE and settings, or copy it from where that was done"

_COUNT = checks.integer(0)
_WEIGHT: checks.Check = (lambda value: checks.is_number(value) and value >= 0, "a number of at least 0")
_CAPTIONS = checks.list_of(checks.object_of({"column": checks.TEXT, "weight": _WEIGHT}))
_TOKENS = checks.optional((lambda value: checks.is_shape(value, 2), "a list of tokens and their size"))


@dataclass(frozen=True)
class ClusterSamples:
    """Samples of one cluster."""

    train: Annotated[int, _COUNT]
    held_out: Annotated[int, _COUNT]
    out_of_cluster: Annotated[int, (lambda value: value == 0, "0")] = 0
    """Always 0; earlier versions could add samples of other clusters."""


_CLUSTERS = checks.list_of(checks.object_of(checks.field_checks(ClusterSamples)))


@dataclass(frozen=True)
class DataSizes:
    """Sizes of the data that a network needs."""

    x_shape: tuple[int, int, int]
    """Channels, height, width of ``x_0``."""
    text_size: int
    """Entries of a text vector; 0 for none."""
    token_shape: tuple[int, int] | None
    """Tokens per caption and entries of each; None if the shards hold no tokens."""
    num_classes: int
    """Labels run from 0 to this minus 1."""


@dataclass(frozen=True)
class Manifest:
    """Everything that loading, training and sampling need to know about the shards; annotations check JSON values."""

    source: dict[str, Any]
    """Name and parameters."""
    attribution: str
    """Credit required by the source's licence."""
    images: dict[str, Any]
    """Side in pixels of the encoded square images, and the treatment of other aspect ratios."""
    image_encoder: dict[str, Any]
    """Name and parameters."""
    stores: Annotated[str, checks.one_of(("x_0", "posterior"))]
    """``x_0``, or ``posterior``: mean, then standard deviation, of the Gaussian of ``x_0``."""
    x_shape: Annotated[tuple[int, int, int], checks.X_SHAPE]
    """Channels, height, width of ``x_0``."""
    normalisation: Annotated[dict[str, float | list[float]], checks.NORMALISATION]
    """``x_0 = (stored - shift) * scale``, float32; one number each or one per channel."""
    statistics: dict[str, list[float]]
    """Mean and standard deviation of ``x_0`` per channel: near 0 and 1 if the encoder suits the data."""
    caption_encoder: dict[str, Any] | None
    """Name and parameters; None if the shards hold no text vectors."""
    text_size: Annotated[int, _COUNT]
    """Entries of a text vector; 0 for none."""
    token_shape: Annotated[tuple[int, int] | None, _TOKENS]
    """Tokens per caption and entries of each; None if the shards hold no tokens."""
    columns: Annotated[dict[str, str], checks.TEXTS]
    """The MDS encoding of each column besides ``sample_id``, ``cluster`` and ``caption``."""
    num_classes: Annotated[int, _COUNT]
    """Labels run from 0 to this minus 1."""
    features: dict[str, Any]
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
    clusters: Annotated[tuple[ClusterSamples, ...], _CLUSTERS]
    """Samples of each cluster."""
    priors: Annotated[tuple[float, ...], checks.SHARES]
    """Each cluster's share of the samples."""
    seed: int
    """Seed of the partition and of the sample order."""
    index_sha256: Annotated[dict[str, str], checks.TEXTS]
    """SHA-256 of each ``index.json``, by its folder below ``shards/`` ("cluster-0/train")."""
    partition_sha256: Annotated[str, checks.TEXT]
    """SHA-256 of ``partition.safetensors``; equal in artifacts that belong together."""
    versions: dict[str, str]
    """Versions of the packages that shaped the result."""
    class_names: list[str] | None
    """Name of each of the ``num_classes`` classes; None if the source has none."""
    class_counts: Annotated[list[list[int]], checks.list_of(checks.list_of(_COUNT))] = field(default_factory=list)
    """Samples of each class in each cluster, held-out ones included, [K][num_classes]."""
    filtered: dict[str, int] = field(default_factory=dict)
    """Samples taken out by each filter."""
    captions: Annotated[list[dict[str, Any]], _CAPTIONS] = field(default_factory=list)
    """Column and weight of each of several captions; empty if the source itself names the caption."""
    format_version: int = FORMAT_VERSION

    @property
    def num_clusters(self) -> int:
        """K."""
        return len(self.clusters)

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
        if problem := _problem_with(stored):
            raise UserError(f"{path}: {problem}; delete it and {_REMEDY}")
        return cls(
            **{
                **stored,
                "x_shape": tuple(stored["x_shape"]),
                "clusters": tuple(ClusterSamples(**entry) for entry in stored["clusters"]),
                "priors": tuple(map(float, stored["priors"])),
                "token_shape": stored["token_shape"] and tuple(stored["token_shape"]),
            }
        )


_ANYTHING: checks.Check = (lambda _: True, "anything")
_CHECKS = {field.name: _ANYTHING for field in dataclasses.fields(Manifest)} | checks.field_checks(Manifest)


def _problem_with(stored: Any) -> str | None:
    """Describe the first value that is wrong or contradicts another; None if there is none."""
    version = stored.get("format_version") if isinstance(stored, dict) else None
    if version != FORMAT_VERSION:
        return f"format_version {version!r:.20} is not {FORMAT_VERSION} (another release of ddm_lightning wrote it)"
    if problem := checks.problem_with(stored, _CHECKS):
        return problem
    channels, *rest = stored["x_shape"]
    x_0 = [channels * (2 if stored["stores"] == "posterior" else 1), *rest]
    columns, tokens = stored["columns"], stored["token_shape"] or []
    for name, shape in {"x_0": x_0, "x_0_flipped": x_0, "text": [stored["text_size"]], "text_tokens": tokens}.items():
        if (name == "x_0" or name in columns) and columns.get(name, "").split(":")[2:] != [",".join(map(str, shape))]:
            return f"key 'columns' gives {name} another shape than {shape}"
    for name, values in stored["normalisation"].items():
        if isinstance(values, list) and len(values) not in (1, channels):
            return f"key 'normalisation' has {len(values)} numbers of {name} for {channels} channels"
    if len(stored["priors"]) != len(stored["clusters"]):
        return "key 'priors' has another length than key 'clusters'"
    if (counts := stored["class_counts"]) and [*map(len, counts)] != [stored["num_classes"]] * len(stored["clusters"]):
        return "key 'class_counts' has another shape than num_classes counts of each of the 'clusters'"
    return None


def manifest_path(run_dir: Path) -> Path:
    """Return the path of a run's manifest."""
    return run_dir / "prepared" / "manifest.json"


def shard_name(cluster: int, split: str) -> str:
    """Return a cluster's folder in ``shards/``; ``split`` is ``TRAIN`` or ``HELD_OUT``."""
    return f"cluster-{cluster}/{split}"
