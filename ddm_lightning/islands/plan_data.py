"""Sizes of a run's data for a plan, before ``prepare`` or after it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ddm_lightning.config.experiment import Experiment, PrepareConfig
from ddm_lightning.core.buckets import Bucket, bucket_sizes
from ddm_lightning.core.errors import UserError, first_line
from ddm_lightning.encoders.interfaces import bytes_per_sample
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.shards.manifest import DataSizes, Manifest, manifest_path

if TYPE_CHECKING:
    from ddm_lightning.prepare.plugins import Plugins


@dataclass(frozen=True)
class Data:
    """Sizes of a run's data: of its shards or, before ``prepare``, of what its plug-ins would write."""

    sizes: DataSizes | Manifest
    sample_bytes: int
    """Bytes of one sample in the shards, the largest, without its captions' texts."""
    total: int | None
    """Samples, held-out ones included; None if unknown."""
    num_samples: Sequence[int] | None
    """Training samples of each cluster; None if unknown."""
    source: str

    def __str__(self) -> str:
        total = "unknown" if self.total is None else f"{self.total:,}"
        shapes = ""
        if isinstance(self.sizes, Manifest) and self.sizes.buckets:
            shapes = f" ({self.sizes.bucket_line})"
        elif self.sizes.buckets:
            shapes = f" of {', '.join(bucket.name for bucket in self.sizes.buckets)} pixels"

        return (
            f"samples {total}{shapes}, {self.sample_bytes:,} bytes each in the shards without captions' texts; "
            f"{self.source}"
        )


def data_of(experiment: Experiment, num_samples: int | None = None, plugins: Plugins | None = None) -> Data:
    """Find the sizes of the data: in the manifest, else from the plug-ins, else assumed.

    Args:
        experiment: the experiment.
        num_samples: images of the source, for experiments that are not prepared.
        plugins: those of the experiment, if they are built.

    Raises:
        UserError: the manifest is damaged.
    """
    run_dir = RunFolder.of(experiment).root
    if manifest_path(run_dir).exists():
        manifest = Manifest.read(run_dir)
        samples = [cluster.train for cluster in manifest.clusters]
        columns = manifest.columns
        sample_bytes = bytes_per_sample(columns)
        if manifest.buckets:
            of_images = bytes_per_sample({name: columns[name] for name in columns if name.startswith("x_0")})
            entries = [math.prod(bucket.x_shape) for bucket in manifest.buckets]
            sample_bytes += of_images * (max(entries) - entries[0]) // entries[0]

        return Data(manifest, sample_bytes, manifest.num_samples, samples, "counted in the manifest")

    from ddm_lightning.prepare.plugins import Plugins
    from ddm_lightning.prepare.records import count_samples

    prepare = experiment.prepare
    plugins = plugins or Plugins(prepare)
    try:
        sizes = plugins.sizes()
        sample_bytes = plugins.sample_bytes(sizes)
        total = count_samples(plugins.parts)
        source = "from the source and the encoders"
    except (UserError, OSError) as error:
        sizes, sample_bytes = _assumed_sizes(prepare)
        total = None
        source = f"assumed: Stable Diffusion's latents, CLIP ViT-L/14's text, 1000 classes ({first_line(error)})"

    if num_samples:
        total = num_samples
        source += ", --samples"
    elif prepare.filters or prepare.drop_keys or not prepare.images.upscale:
        source += ", before filters"

    if total is None:
        return Data(sizes, sample_bytes, None, None, source)

    num_clusters = prepare.partition.num_clusters
    each = round(total * (1 - prepare.held_out_fraction) / num_clusters)
    return Data(sizes, sample_bytes, total, [each] * num_clusters, source)


def _assumed_sizes(prepare: PrepareConfig) -> tuple[DataSizes, int]:
    """Sizes of the data and bytes of a sample with Stable Diffusion's latents and CLIP ViT-L/14's text."""
    edge = (prepare.images.size or 256) // 8
    buckets = []
    for height, width in bucket_sizes(prepare.images.buckets, prepare.images.size or 0):
        buckets.append(Bucket(height, width, (4, height // 8, width // 8)))

    sizes = DataSizes((4, edge, edge), 768, (77, 768), 1000, tuple(buckets))
    text = 2 * 768
    if prepare.caption_encoder is not None:
        text = {"ids": 4 * 77, "tokens": 2 * 77 * 768}.get(prepare.caption_encoder.params.get("store", ""), text)

    num_latents = 1 + prepare.horizontal_flips
    num_captions = max(1, len(prepare.captions))
    return sizes, num_latents * 4 * math.prod(sizes.x_shape) + num_captions * text
