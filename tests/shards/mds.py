"""Small MDS folders whose every sample is known."""

from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest

from ddm_lightning.shards.datamodule import ClusterDataModule

from streaming import MDSWriter  # isort: skip (after the shim)

# What Streaming warns of, for ``pytestmark``.
WARNINGS = [
    # Python 3.12 says so of every fork beside Streaming's threads.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # Streaming leaves the closing of the files that it hashes to the garbage collector.
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning"),
]
COLUMNS = {
    "x_0": "ndarray:uint8:3,4,4",
    "sample_id": "int64",
    "cluster": "int32",
    "label": "int32",
    "caption": "str",
    "text": "ndarray:float16:6",
}


def sample(sample_id, cluster, shape=(3, 4, 4)):
    rng = np.random.default_rng(sample_id)
    return {
        "x_0": rng.integers(0, 256, shape, np.uint8),
        "sample_id": sample_id,
        "cluster": cluster,
        "label": sample_id % 5,
        "caption": f"number {sample_id}",
        "text": rng.standard_normal(6).astype(np.float16),
    }


def write_mds(folder, ids, cluster=0, *, columns=COLUMNS, shard_bytes=1 << 11, compression=None):
    """About seventeen samples a shard."""
    shape = [*map(int, columns["x_0"].rpartition(":")[2].split(","))]
    with MDSWriter(
        out=str(folder), columns=columns, hashes=["sha1", "xxh64"], size_limit=shard_bytes, compression=compression
    ) as writer:
        for sample_id in ids:
            writer.write({name: value for name, value in sample(sample_id, cluster, shape).items() if name in columns})

    return folder


def damage(folder, kind):
    """Harm the third shard, or the only one; its path in ``folder``."""
    path = sorted(folder.rglob("shard.*.mds*"))[:3][-1]
    content = bytearray(path.read_bytes())
    if kind == "missing":
        path.unlink()
        return path.relative_to(folder).as_posix()

    if kind == "truncated":
        del content[len(content) // 2 :]
    elif kind == "grown":
        content += b"x"
    else:
        content[len(content) // 2] ^= 1

    path.write_bytes(content)
    return path.relative_to(folder).as_posix()


def module_of(shards, cache, rank=0, num_ranks=1, **settings):
    """The data module of one of several ranks, ready to load."""
    data = ClusterDataModule(shards, cache=cache, **{"clusters": [0], "batch_size": 5, "seed": 0, **settings})
    data.trainer = SimpleNamespace(world_size=num_ranks, global_rank=rank, local_rank=rank)
    if rank == 0:
        data.prepare_data()

    return data


def ids(batches):
    """Samples of each batch."""
    return [batch["sample_id"].tolist() for batch in batches]


def flat(batches):
    """Samples of all batches."""
    return [*chain.from_iterable(ids(batches))]
