"""Loaders of ``dataloader.py``: writer and fastest reader of each format.

All hold the same columns. WebDataset and LitData store a sample as one block of bytes, which both read faster than
columns.
"""

from __future__ import annotations

import io
import os
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from ddm_lightning.shards.datamodule import ClusterDataModule
from ddm_lightning.shards.mosaic import open_writer

BATCH_SIZE = 256
_SHARD_BYTES = 1 << 26
_SEED = 0
_COLUMNS = {"x_0": "ndarray:float16:8,32,32", "sample_id": "int64", "cluster": "int32", "label": "int32"}
_ROW = np.dtype([("x_0", "f2", (8, 32, 32)), ("sample_id", "i8"), ("cluster", "i8"), ("label", "i8")])
_TAR_SAMPLES = _SHARD_BYTES // _ROW.itemsize


def write_all(folder: Path, num_samples: int) -> None:
    """Write ``num_samples`` samples in each format: MDS as ``prepare`` does, tars, and LitData's chunks."""
    from litdata.streaming.writer import BinaryWriter

    for name in ("tar", "litdata"):
        (folder / name).mkdir(parents=True)

    chunks = BinaryWriter(str(folder / "litdata"), chunk_bytes=_SHARD_BYTES)
    rng = np.random.default_rng(_SEED)
    with open_writer(folder / "mds/cluster-0/train", _COLUMNS, None, _SHARD_BYTES) as shards:
        for first in range(0, num_samples, _TAR_SAMPLES):
            with tarfile.open(folder / f"tar/{first:08}.tar", "w") as tar:
                for number in range(first, min(first + _TAR_SAMPLES, num_samples)):
                    x_0 = rng.integers(0, 1 << 14, (8, 32, 32), np.int16).view(np.float16)
                    row = np.array((x_0, number, 0, number % 1000), _ROW).tobytes()
                    shards.write({"x_0": x_0, "sample_id": number, "cluster": 0, "label": number % 1000})
                    chunks[number] = row
                    member = tarfile.TarInfo(f"{number:08}.row")
                    member.size = len(row)
                    tar.addfile(member, io.BytesIO(row))

    chunks.done()
    chunks.merge()


def _ours(place: str, cache: Path, num_threads: int) -> Iterable[Any]:
    data = ClusterDataModule(f"{place}/mds", [0], BATCH_SIZE, _SEED, cache, num_workers=num_threads)
    data.prepare_data()
    return data.train_dataloader()


def _streaming(place: str, cache: Path, num_workers: int) -> Iterable[Any]:
    from streaming import StreamingDataset

    folder = f"{place}/mds/cluster-0/train"
    where: dict[str, Any] = {"remote": folder, "local": str(cache)} if "://" in place else {"local": folder}
    dataset = StreamingDataset(**where, shuffle=True, batch_size=BATCH_SIZE, num_canonical_nodes=1)
    return DataLoader(dataset, BATCH_SIZE, num_workers=num_workers, persistent_workers=num_workers > 0)


def _columns(samples: list[bytes]) -> dict[str, torch.Tensor]:
    rows = np.frombuffer(b"".join(samples), _ROW)
    return {name: torch.from_numpy(np.ascontiguousarray(rows[name])) for name in _ROW.names or ()}


def _webdataset(place: str, _cache: Path, num_workers: int) -> Iterable[Any]:
    import boto3
    import webdataset

    if "://" in place:
        bucket, _, prefix = place.removeprefix("s3://").partition("/")
        endpoint = os.environ["S3_ENDPOINT_URL"]
        client = boto3.client("s3", endpoint_url=endpoint)
        listed = client.list_objects_v2(Bucket=bucket, Prefix=f"{prefix}/tar/")
        keys = sorted(one["Key"] for one in listed["Contents"])
        tars = []
        for key in keys:
            address = client.generate_presigned_url("get_object", Params={"Bucket": bucket, "Key": key})
            tars.append(f"pipe:curl -sf --retry 5 --retry-all-errors '{address}'")
    else:
        tars = sorted(str(path) for path in Path(place, "tar").glob("*.tar"))

    dataset = webdataset.WebDataset(tars, shardshuffle=len(tars), seed=_SEED, empty_check=False)
    dataset = dataset.shuffle(1000).batched(
        BATCH_SIZE, collation_fn=lambda samples: _columns([sample["row"] for sample in samples])
    )
    return webdataset.WebLoader(dataset, batch_size=None, num_workers=num_workers, persistent_workers=num_workers > 0)


def _litdata(place: str, cache: Path, num_workers: int) -> Iterable[Any]:
    os.environ["LITDATA_DISABLE_VERSION_CHECK"] = "1"  # the check uses the network
    os.environ["AWS_ENDPOINT_URL"] = os.environ["S3_ENDPOINT_URL"]
    import litdata
    from litdata.streaming import downloader

    downloader._OBSTORE_CLIENT_OPTIONS["allow_http"] = True  # its faster way of two, which takes no server without TLS
    dataset = litdata.StreamingDataset(
        f"{place}/litdata",
        cache_dir=str(cache) if "://" in place else None,
        shuffle=True,
        drop_last=False,
        seed=_SEED,
        batch_decode=BATCH_SIZE,
    )
    return litdata.StreamingDataLoader(
        dataset,
        batch_size=BATCH_SIZE,
        collate_fn=_columns,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )


SIDES: dict[str, Callable[[str, Path, int], Iterable[Any]]] = {
    "ours": _ours,
    "streaming": _streaming,
    "webdataset": _webdataset,
    "litdata": _litdata,
}
"""Build a loader of the data in a folder or at a URL, with a folder for a cache and a number of threads or workers."""
