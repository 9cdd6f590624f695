"""All training or held-out samples of a data set, in memory and in a fixed order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from streaming.base.format import reader_from_json
from torch import Tensor

from ddm_lightning.core.errors import UserError
from ddm_lightning.flow.condition import Condition
from ddm_lightning.flow.path import interpolate
from ddm_lightning.flow.randomness import keyed_generator
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.shards.fetch import Origin
from ddm_lightning.shards.manifest import HELD_OUT, Manifest, StoredForm, shard_name
from ddm_lightning.shards.verify import read_index, verify_shards


@dataclass(frozen=True, eq=False)
class Split:
    """Samples in the source's order."""

    sample_ids: Int[Tensor, " n"]
    """Position in the source."""
    clusters: Int[Tensor, " n"]
    """The cluster of each."""
    labels: Int[Tensor, " n"]
    """The source's label of each."""
    captions: list[str]
    """The caption of each."""
    x_0: Float[Tensor, "n c h w"]
    """Samples as the experts model them, float32."""
    texts: Float[Tensor, "n size"] | None
    """Pooled text vectors, float32; None if the shards hold none."""

    def __len__(self) -> int:
        return len(self.sample_ids)

    def condition(self, kind: str) -> Condition | None:
        """Conditions of the samples for a ``condition.kind``; None for ``none``."""
        if kind == "none":
            return None
        if kind == "class":
            return Condition.of(self.labels)
        if kind == "tokens":
            raise UserError("key 'condition.kind' = 'tokens': benchmarks read pooled vectors only; set text")
        assert self.texts is not None, "check_experiment asks for a caption encoder"
        return Condition.of(self.texts)


def read_split(run: RunFolder, manifest: Manifest, side: str) -> Split:
    """Read the shards of all clusters; ``side`` is ``TRAIN`` or ``HELD_OUT`` of ``shards.manifest``.

    Raises:
        UserError: a shard is missing or damaged, or this side has no samples.
    """
    counts = [cluster.held_out if side == HELD_OUT else cluster.train for cluster in manifest.clusters]
    names = [shard_name(k, side) for k, count in enumerate(counts) if count]
    if not names:
        raise UserError(f"{run.shards}: no {side} samples; set prepare.held_out_fraction above 0 and prepare again")
    for name in names:
        verify_shards(run.shards / name, index_sha256=manifest.index_sha256[name])
    samples = sorted(read_samples([run.shards / name for name in names]), key=lambda sample: int(sample["sample_id"]))

    def integers(column: str) -> Int[Tensor, " n"]:
        return torch.tensor([int(sample[column]) for sample in samples], dtype=torch.int64)

    stored = torch.from_numpy(np.stack([sample["x_0"] for sample in samples])).float()
    texts = None
    if "text" in samples[0]:
        texts = torch.from_numpy(np.stack([sample["text"] for sample in samples])).float()
    return Split(
        sample_ids=integers("sample_id"),
        clusters=integers("cluster"),
        labels=integers("label"),
        captions=[str(sample["caption"]) for sample in samples],
        x_0=StoredForm(manifest.stores, manifest.normalisation).mean(stored),
        texts=texts,
    )


def read_samples(folders: Sequence[Path]) -> Iterator[dict[str, Any]]:
    """Yield every sample of some MDS folders with all its columns, captions included."""
    for folder in folders:
        for info in read_index(folder):
            with TemporaryDirectory() as scratch:
                if info["zip_data"]:
                    Origin(str(folder), Path(scratch)).fetch(info, wait=True)
                yield from reader_from_json(scratch if info["zip_data"] else str(folder), None, info)


def noised(x_0: Float[Tensor, "n c h w"], t: float, draw: int, seed: int, purpose: str) -> Float[Tensor, "n c h w"]:
    """Add the noise of one draw to every sample; different purposes have different noise."""
    noise = torch.randn(x_0.shape, generator=keyed_generator(seed, purpose, draw))
    return interpolate(x_0, noise, torch.full((len(x_0),), t))
