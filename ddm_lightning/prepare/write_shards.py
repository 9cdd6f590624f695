"""Write the MDS shards of a group of parts, one folder per cluster and split: the same bytes for the same input."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from jaxtyping import Float64, Shaped
from torch import Tensor

from ddm_lightning.config.experiment import ShardsConfig
from ddm_lightning.core.files import atomic_files, read_json, sha256_file
from ddm_lightning.encoders.interfaces import StoredForm, numbered, parse_encoding
from ddm_lightning.partition.columns import RowNumbers, Rows, packed_strings
from ddm_lightning.partition.partition import Partition, Samples
from ddm_lightning.prepare.encode import FEATURES, Hashes, Mask
from ddm_lightning.prepare.ledger import Entries, Job, OnProgress
from ddm_lightning.prepare.plugins import Plugins, num_captions
from ddm_lightning.prepare.prepared import Prepared
from ddm_lightning.shards.manifest import HELD_OUT, IMAGE_COLUMNS, TRAIN, shard_name
from ddm_lightning.shards.mosaic import open_writer

GROUP = "group"
"""Name of a group's work in its ledger."""
_SAMPLES_AT_ONCE = 256
_VALUES_AT_ONCE = 1 << 18
_MAX_BYTES = 1 << 29
"""Bytes of samples that a process reads at a time: many, because it reads them in the order of the disk."""


Moments: TypeAlias = Float64[np.ndarray, "3 c"]
"""Per channel of ``x_0``: number of values, their sum, and the sum of their squares."""


@dataclass(frozen=True)
class Split:
    """The split by hashes as a file that every machine reads: the limit, and hashes on the other side of it.

    The hash is of the sample's group or key alone. So samples keep their split when the data set grows or the clusters
    change, and a group stays together.
    """

    limit: float
    """Fraction of the range of hashes below which samples are held out."""
    held_out: Sequence[int]
    """Hashes above the limit that are held out all the same, for clusters without others."""
    trained_on: Sequence[int]
    """Hashes below the limit that are trained on."""

    @classmethod
    def of(cls, split_hash: Hashes, clusters: RowNumbers, fraction: float) -> Split:
        """Decide from the samples of the fit.

        Every cluster keeps samples to train on. With a fraction above 0, every cluster of at least two groups also has
        held-out samples, unless another cluster needs them for training.
        """
        below = cls(fraction, (), ()).is_held_out(split_hash)
        held_out = below.copy()
        for cluster in np.unique(clusters):
            rows = clusters == cluster
            ranks = split_hash[rows]
            if fraction > 0 and ranks.min() != ranks.max() and not held_out[rows].any():
                held_out[split_hash == ranks.min()] = True

        # Afterwards: a group just held out may be all that another cluster trains on.
        for cluster in np.unique(clusters):
            rows = clusters == cluster
            if held_out[rows].all():
                held_out[split_hash == split_hash[rows].max()] = False

        moved_out = np.unique(split_hash[held_out & ~below])
        moved_in = np.unique(split_hash[below & ~held_out])
        return cls(fraction, moved_out.tolist(), moved_in.tolist())

    def is_held_out(self, split_hash: Hashes) -> Mask:
        """Whether each sample is held out."""
        below = split_hash < np.uint64(int(self.limit * 2.0**64))
        held_out = np.isin(split_hash, np.array(self.held_out, np.uint64))
        return (below | held_out) & ~np.isin(split_hash, np.array(self.trained_on, np.uint64))


@dataclass(frozen=True)
class ShardColumns:
    """What the shards of a group store."""

    columns: Mapping[str, Rows]
    """``x_0``, ``label``, the caption encoder's columns and those of ``prepare.keep``; ``x_0_flipped`` if stored."""
    encodings: Mapping[str, str]
    """MDS encoding of each column; its rows are cast to it."""
    captions: Mapping[str, Rows]
    """``caption``, then ``caption_2`` and so on."""
    ids: RowNumbers
    """``sample_id`` of each row."""
    form: StoredForm
    """Form in which ``x_0`` is stored."""


def split_orders(
    held_out: Mask, clusters: RowNumbers, num_clusters: int, seed: int, group: int = 0
) -> Iterator[tuple[int, str, RowNumbers]]:
    """Yield cluster, split and samples of each non-empty folder; shuffled, so that sequential readers see no order."""
    for cluster in range(num_clusters):
        for split_index, split in enumerate((TRAIN, HELD_OUT)):
            ids = np.flatnonzero((clusters == cluster) & (held_out == split_index))
            if len(ids):
                random = np.random.default_rng([seed, cluster, split_index, group])
                yield cluster, split, random.permutation(ids)


def write_split(
    folder: Path,
    cluster: int,
    order: RowNumbers,
    samples: ShardColumns,
    config: ShardsConfig,
    on_progress: OnProgress,
) -> Moments:
    """Write the shards of one cluster and split.

    Columns: those of ``samples``, ``sample_id`` (the sample's row in the whole data set), ``cluster`` and the captions.

    Args:
        folder: the MDS folder.
        cluster: number of the cluster.
        order: rows of ``samples`` to write.
        samples: rows of all samples of the group.
        config: shard size and compression.
        on_progress: called with the number of samples written so far.

    """
    moments = []
    encodings = {**samples.encodings, "sample_id": "int64", "cluster": "int32"} | dict.fromkeys(samples.captions, "str")
    num_written = 0
    with open_writer(folder, encodings, config.compression, config.max_bytes) as writer:
        for block in _blocks(samples, order):
            stored = torch.from_numpy(block["x_0"])
            moments.append(_moments(stored, samples.form))
            for row in range(len(stored)):
                sample = {name: values[row] for name, values in block.items()}
                writer.write(sample | {"cluster": np.int32(cluster)})

            num_written += len(stored)
            on_progress(num_written)

    return np.sum(moments, axis=0)


def _moments(stored: Shaped[Tensor, "b s h w"], form: StoredForm) -> Moments:
    """Count and sum values, a few at a time, which stay in the processor's cache.

    Each channel is summed piece by piece; added in this order, pieces have the bits of one sum over all samples.
    """
    moments = []
    for some in stored.flatten(2).unsqueeze(2).split(max(1, _VALUES_AT_ONCE // stored[0].numel())):
        pieces = []
        for values in some.split(np.getbufsize(), 3):
            mean = form.mean(values, torch.float64).numpy()
            square = mean**2
            std = form.std(values, torch.float64)
            if std is not None:
                square += std.square().numpy()

            pieces.append([mean.sum(3), square.sum(3)])

        sums = np.concatenate(pieces, 3).swapaxes(2, 3)
        moments.append(sums.reshape(2, -1, sums.shape[3]).copy())  # a view would be added in another order

    total, squares = (rows.sum(0) for rows in np.concatenate(moments, 1))
    counts = np.full_like(total, len(stored) * stored[0, 0].numel())
    return np.stack([counts, total, squares])


def _blocks(samples: ShardColumns, order: RowNumbers) -> Iterator[dict[str, Shaped[np.ndarray, "b ..."]]]:
    """Yield the samples in this order, some at a time, of which no more than ``_MAX_BYTES`` are read ahead."""
    row_bytes = 0
    for column in samples.columns.values():
        row_bytes += math.prod(column.row_shape) * column.dtype.itemsize

    num_read = max(1, _MAX_BYTES // (row_bytes * _SAMPLES_AT_ONCE)) * _SAMPLES_AT_ONCE
    for start in range(0, len(order), num_read):
        rows = order[start : start + num_read]
        columns = {}
        for name, column in samples.columns.items():
            dtype, _ = parse_encoding(samples.encodings[name])
            columns[name] = column.take(rows).astype(dtype, copy=False)
        for name, captions in samples.captions.items():
            columns[name] = captions.take(rows)

        columns["sample_id"] = samples.ids[rows]
        for first in range(0, len(rows), _SAMPLES_AT_ONCE):
            yield {name: values[first : first + _SAMPLES_AT_ONCE] for name, values in columns.items()}


@dataclass(frozen=True)
class GroupJob(Job):
    """The shards of one group of parts."""

    prepared: Prepared
    """Of the parts."""
    seed: int

    @property
    def num_samples(self) -> int:
        """Usable samples."""
        return self.prepared.num_samples


def write_group(job: GroupJob, plugins: Plugins, on_progress: OnProgress) -> Entries:
    """Write the shards of a group, or publish them and keep none; return the entries of its ledger."""
    ledger = job.ledger
    if not ledger.is_done(GROUP, job.keys[GROUP]):
        job.prepared.fetch(range(len(job.prepared.parts)))
        _write_group(job, plugins, on_progress)

    job.publish()
    for name in ledger.files(GROUP):
        if job.store and name.startswith("shards/"):
            (ledger.folder / name).unlink()

    for part in job.prepared.ledgers:
        if not part.file.exists():  # fetched, now or before a kill
            shutil.rmtree(part.folder, ignore_errors=True)

    return ledger.entries


def _write_group(job: GroupJob, plugins: Plugins, on_progress: OnProgress) -> None:
    """Assign the samples of a group to clusters, write their shards and keep some thumbnails.

    The folder of a cluster and split is named after its content, so an upload that was stopped can go on.
    """
    config = plugins.config
    ledger = job.ledger
    prepared = job.prepared
    ledger.forget(GROUP)
    partition = Partition.load(prepared.rule_file)
    labels = prepared.facts("label")
    keys = prepared.texts("keys")
    features = prepared.rows(FEATURES)
    clusters = partition.rule.assign(Samples(features, labels, keys), config.partition.device)
    counts = np.zeros((partition.num_clusters, plugins.source.num_classes), np.int64)
    np.add.at(counts, (clusters, labels), 1)
    split = Split(**read_json(prepared.split_file, "the split", "run prepare again"))
    held_out = split.is_held_out(prepared.facts("split_hash"))
    thumbnails = ledger.file.with_suffix(".npz")
    done = 0
    folders = {}
    encodings = dict[str, str]()
    paths = [thumbnails]

    def advance(here: int) -> None:
        on_progress(done + here)

    for number, bucket in enumerate(plugins.bucket_names):
        samples = columns_of(prepared, plugins, labels, number)
        encodings |= samples.encodings
        own = samples.ids - prepared.first_row
        for cluster, side, order in split_orders(
            held_out[own], clusters[own], partition.num_clusters, job.seed, job.number
        ):
            name = shard_name(cluster, side, bucket)
            with atomic_files(prepared.shards / name) as temporary:
                folder = temporary / f"{job.number:05}"
                moments = write_split(folder, cluster, order, samples, config.shards, advance)
                folder = folder.rename(f"{folder}-{sha256_file(folder / 'index.json')[:12]}")
                paths += [prepared.shards / name / folder.name / path.name for path in folder.iterdir()]

            done += len(order)
            folders[name] = {"folder": folder.name, "samples": len(order), "moments": moments.tolist()}

    images, rows = prepared.thumbnails()
    captions = packed_strings("captions", prepared.texts("captions").take(rows).tolist())
    with atomic_files(thumbnails.parent) as temporary:
        np.savez(temporary / thumbnails.name, images=np.array(images), clusters=clusters[rows], **captions)

    facts = {"folders": folders, "columns": encodings, "class_counts": counts.tolist()}
    ledger.add(GROUP, job.keys[GROUP], paths, **facts)
    ledger.save()


def columns_of(prepared: Prepared, plugins: Plugins, labels: RowNumbers, number: int = 0) -> ShardColumns:
    """Return the columns of one bucket to store in the shards, and their encodings.

    Args:
        prepared: the parts.
        plugins: the encoders.
        labels: of all usable samples.
        number: of the bucket; 0 without buckets.
    """
    encoder = plugins.image_encoder
    bucket = plugins.bucket_names[number]
    kept = in_file = prepared.kept
    own = np.arange(prepared.num_samples)
    if bucket is not None:
        kept, in_file = prepared.bucket_rows(number)
        own = np.flatnonzero(prepared.facts("bucket") == number)

    texts = {}
    for caption in range(num_captions(plugins.config)):
        texts[numbered("caption", caption)] = prepared.texts(numbered("captions", caption), kept)

    encoded = {}
    for name in IMAGE_COLUMNS[: 1 + plugins.config.horizontal_flips]:
        encoded[name] = Rows(prepared.arrays(name, bucket), in_file)

    encodings = plugins.encodings(encoded["x_0"].row_shape)
    files = {name: f"kept-{place}" for place, name in enumerate(plugins.config.keep)}
    columns = {"label": Rows([labels[own]]), **encoded}
    for name in encodings:
        if name not in columns:
            columns[name] = prepared.rows(files.get(name, name), kept)

    form = StoredForm(encoder.stores, encoder.normalisation)
    return ShardColumns(columns, encodings, texts, prepared.first_row + own, form)
