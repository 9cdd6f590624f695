"""Loaders of ``dataloader.py``: writer and fastest reader of each format.

All formats hold the same columns: ``x_0``, ``sample_id``, ``cluster``, ``label`` and, in the second data set, ``text``.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ddm_lightning.shards.datamodule import ClusterDataModule, ShardLoader

BATCH_SIZE = 256
SHARD_BYTES = 1 << 25
X_SHAPE = (4, 32, 32)
_SEED = 0


@dataclass(frozen=True)
class Data:
    """A data set of random numbers, equal at each iteration."""

    name: str
    num_samples: int
    text_size: int

    def columns(self) -> dict[str, str]:
        """Column -> MDS encoding."""
        columns = {"x_0": "ndarray:float16:" + ",".join(map(str, X_SHAPE)), "sample_id": "int64"}
        columns |= {"cluster": "int32", "label": "int32"}
        return columns | ({"text": f"ndarray:float16:{self.text_size}"} if self.text_size else {})

    def samples(self) -> Iterator[dict[str, Any]]:
        """Yield the samples in order."""
        rng = np.random.default_rng(_SEED)
        for number in range(self.num_samples):
            sample = {
                "x_0": rng.integers(0, 1 << 15, X_SHAPE, np.int16).view(np.float16),
                "sample_id": number,
                "cluster": 0,
                "label": number % 1000,
            }
            if self.text_size:
                sample["text"] = rng.standard_normal(self.text_size).astype(np.float16)
            yield sample

    def row(self) -> np.dtype:
        """Type of a sample as one block of bytes, for formats without columns."""
        fields: list[Any] = [("sample_id", "i8"), ("cluster", "i8"), ("label", "i8"), ("x_0", "f2", X_SHAPE)]
        return np.dtype(fields + ([("text", "f2", (self.text_size,))] if self.text_size else []))


def write_mds(data: Data, folder: Path) -> None:
    """Write shards as ``prepare`` does."""
    from streaming import MDSWriter

    out = str(folder / "cluster-0" / "train")
    with MDSWriter(out=out, columns=data.columns(), hashes=["sha1", "xxh64"], size_limit=SHARD_BYTES) as writer:
        for sample in data.samples():
            writer.write(sample)


def write_tars(data: Data, folder: Path) -> None:
    """Write tars for WebDataset, one file per sample with all columns; several files per sample are slower to read."""
    folder.mkdir(parents=True)
    row = np.zeros((), data.row())
    tar, size = None, SHARD_BYTES
    for sample in data.samples():
        if size >= SHARD_BYTES:
            if tar is not None:
                tar.close()
            tar, size = tarfile.open(folder / f"{sample['sample_id']:08}.tar", "w"), 0  # noqa: SIM115
        for name, value in sample.items():
            row[name] = value
        member = tarfile.TarInfo(f"{sample['sample_id']:08}.row")
        member.size = row.nbytes
        assert tar is not None
        tar.addfile(member, io.BytesIO(row.tobytes()))
        size += row.nbytes
    if tar is not None:
        tar.close()


def write_chunks(data: Data, folder: Path) -> None:
    """Write chunks for LitData, each sample as bytes; a dictionary of tensors and integers is 20 times slower."""
    from litdata.streaming.writer import BinaryWriter

    folder.mkdir(parents=True)
    writer = BinaryWriter(str(folder), chunk_bytes=SHARD_BYTES)
    row = np.zeros((), data.row())
    for number, sample in enumerate(data.samples()):
        for name, value in sample.items():
            row[name] = value
        writer[number] = row.tobytes()
    writer.done()
    writer.merge()


def _ours(back_end: str) -> Callable[[Data, Path, int], Iterable[Any]]:
    def build(_data: Data, folder: Path, num_workers: int) -> Any:
        module = ClusterDataModule(
            folder, [0], BATCH_SIZE, _SEED, folder / f"cache-{os.getpid()}", num_workers=num_workers, loader=back_end
        )
        return module.train_dataloader()

    return build


def _streaming(_data: Data, folder: Path, num_workers: int) -> Iterable[Any]:
    from streaming import StreamingDataset

    dataset = StreamingDataset(
        local=str(folder / "cluster-0" / "train"), shuffle=True, batch_size=BATCH_SIZE, num_canonical_nodes=1
    )
    return DataLoader(dataset, BATCH_SIZE, num_workers=num_workers, persistent_workers=num_workers > 0)


def _columns(samples: list[bytes], row: np.dtype) -> dict[str, torch.Tensor]:
    rows = np.frombuffer(b"".join(samples), row)
    return {name: torch.from_numpy(np.ascontiguousarray(rows[name])) for name in row.names or ()}


def _webdataset(data: Data, folder: Path, num_workers: int) -> Iterable[Any]:
    import webdataset

    def collate(samples: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return _columns([sample["row"] for sample in samples], data.row())

    tars = sorted(str(path) for path in folder.glob("*.tar"))
    dataset = webdataset.WebDataset(tars, shardshuffle=len(tars), seed=_SEED)
    dataset = dataset.shuffle(1000).batched(BATCH_SIZE, collation_fn=collate)
    return webdataset.WebLoader(dataset, batch_size=None, num_workers=num_workers, persistent_workers=num_workers > 0)


def _litdata(data: Data, folder: Path, num_workers: int) -> Iterable[Any]:
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"  # the check uses the network
    import litdata

    dataset = litdata.StreamingDataset(str(folder), shuffle=True, drop_last=False, seed=_SEED, batch_decode=BATCH_SIZE)
    return litdata.StreamingDataLoader(
        dataset,
        batch_size=BATCH_SIZE,
        collate_fn=lambda samples: _columns(samples, data.row()),
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )


@dataclass(frozen=True)
class Side:
    """One loader."""

    title: str
    format: str
    build: Callable[[Data, Path, int], Iterable[Any]]


WRITERS = {"mds": write_mds, "tar": write_tars, "litdata": write_chunks}
SIDES = {
    "ours": Side("ours, streaming back end", "mds", _ours("streaming")),
    "local": Side("ours, local back end", "mds", _ours("local")),
    "streaming": Side("StreamingDataset + DataLoader", "mds", _streaming),
    "webdataset": Side("WebDataset", "tar", _webdataset),
    "litdata": Side("LitData", "litdata", _litdata),
}


def samples_per_second(side: Side, data: Data, folder: Path, num_workers: int, clock: Callable[[], float]) -> float:
    """Measure whole epochs that last at least a second together, after a warm-up epoch.

    Raises:
        RuntimeError: an epoch did not hold every sample exactly once.
    """
    loader = side.build(data, folder / data.name / side.format, num_workers)
    for _ in loader:
        pass
    seconds, num_epochs = 0.0, 0
    while seconds < 1:
        seen = []
        start = clock()
        for batch in loader:
            seen.append(batch["sample_id"])
        seconds += clock() - start
        num_epochs += 1
        ids = torch.cat([torch.as_tensor(ids) for ids in seen]).sort().values
        if not torch.equal(ids, torch.arange(data.num_samples)):
            raise RuntimeError(
                f"{side.title}, {num_workers} workers: an epoch of {len(ids)} samples misses or repeats some"
            )
    if isinstance(loader, ShardLoader):
        assert len(loader) * BATCH_SIZE == data.num_samples
    return num_epochs * data.num_samples / seconds
