"""Batches of images of several shapes: each of one shape, and no sample left out."""

from collections import Counter
from itertools import chain, islice
from pathlib import Path

import numpy as np
import pytest
import torch
from deadline import within
from shards.mds import COLUMNS, WARNINGS, ids, module_of, sample, write_mds

from ddm_lightning.core import remote
from ddm_lightning.core.buckets import Bucket
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.shards import mosaic
from ddm_lightning.shards.mosaic import shuffled
from ddm_lightning.shards.order import mixed_order

pytestmark = WARNINGS
BATCH = 6
# Shards of each shape: 35, 13 and 3 samples, of which the last need two passes for a batch.
SIZES = [[17, 17, 1], [6, 7], [3]]
NUM_PASSES = 12


def plain(sizes, batch_size, seed):
    """All batches: queues that a pass fills, and from which whole batches are taken."""
    queues = [[] for _ in sizes]
    number = 0
    while True:
        ready = []
        start = 0
        for queue, own in zip(queues, sizes, strict=True):
            queue += [start + one for one in shuffled(own, seed, number).tolist()]
            start += sum(own)
            ready.append([])
            while len(queue) >= batch_size:
                ready[-1].append(queue[:batch_size])
                del queue[:batch_size]

        shapes = [shape for shape, batches in enumerate(ready) for _ in batches]
        for shape in np.random.default_rng((seed, number)).permutation(shapes).astype(int).tolist():
            yield ready[shape].pop(0)

        number += 1


@pytest.mark.parametrize("first", [0, 1, 20])
@pytest.mark.parametrize(("sizes", "batch_size"), [(SIZES, BATCH), (SIZES, 1), ([[2], [1], [5, 4]], 10)], ids=str)
def test_the_order_is_that_of_queues(sizes, batch_size, first):
    found = mixed_order(sizes, batch_size, 3, first, 50)
    batches = np.concatenate([*found]).reshape(-1, batch_size).tolist()

    assert batches == [*islice(plain(sizes, batch_size, 3), first, 50)]


def test_after_twelve_passes_each_sample_was_seen_equally_often_to_within_one():
    num_batches = [NUM_PASSES * sum(sizes) // BATCH for sizes in SIZES]
    seen = Counter(np.concatenate([*mixed_order(SIZES, BATCH, 0, 0, sum(num_batches))]).tolist())

    assert num_batches == [70, 26, 6]
    assert seen == dict.fromkeys(range(51), NUM_PASSES)  # 6 divides the samples of 12 passes
    for num in range(1, sum(num_batches)):
        seen = Counter(np.concatenate([*mixed_order(SIZES, BATCH, 0, 0, num)]).tolist())
        for shape in (range(35), range(35, 48), range(48, 51)):
            counts = [seen[one] for one in shape]
            assert max(counts) - min(counts) <= 1


# The loader.

BUCKETS = [Bucket(2, 8, (3, 2, 8)), Bucket(4, 4, (3, 4, 4)), Bucket(8, 2, (3, 8, 2))]
# By cluster and bucket. The first cluster has no tall image, the second one wide image, which is held out.
TRAIN = {(0, "2x8"): range(35), (0, "4x4"): range(100, 113), (1, "4x4"): range(200, 205), (1, "8x2"): range(300, 303)}
HELD_OUT = {(0, "2x8"): range(400, 407), (0, "4x4"): range(500, 502), (1, "4x4"): range(600, 603), (1, "2x8"): [700]}


def columns_of(bucket):
    return {**COLUMNS, "x_0": f"ndarray:uint8:{','.join(map(str, bucket.x_shape))}"}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("shards")
    buckets = {bucket.name: bucket for bucket in BUCKETS}
    for split, parts in (("train", TRAIN), ("held-out", HELD_OUT)):
        for (cluster, name), samples in parts.items():
            folder = root / f"cluster-{cluster}" / name / split
            write_mds(folder, samples, cluster, columns=columns_of(buckets[name]), shard_bytes=1 << 10)

    return root


def module(shards, cache, rank=0, num_ranks=1, **more):
    """With the hashes of the folders that exist."""
    root = str(shards).removeprefix("file://")
    settings = {
        "clusters": [0, 1],
        "held_out_clusters": [0, 1],
        "batch_size": BATCH,
        "columns": columns_of(BUCKETS[0]),
        "buckets": BUCKETS,
        "index_sha256": hashes_in(root),
    }
    return module_of(shards, cache, rank, num_ranks, **settings | more)


def hashes_in(root):
    found = Path(root).glob("*/*/*/index.json")
    return {path.parent.relative_to(root).as_posix(): sha256_file(path) for path in found}


def on_ranks(loaders, num):
    """The next ``num`` batches of all ranks, whose parts alternate in a step."""
    with within(60):
        dealt = [ids(islice(loader, num)) for loader in loaders]

    return [[*chain(*zip(*step, strict=True))] for step in zip(*dealt, strict=True)]


@pytest.fixture
def loaders(written, tmp_path):
    def build(num_ranks=1, **more):
        modules = [module(written, tmp_path / "cache", rank, num_ranks, **more) for rank in range(num_ranks)]
        return [one.train_dataloader() for one in modules]

    return build


def test_batches_hold_the_written_samples_of_one_shape(loaders):
    (loader,) = loaders(num_workers=2)
    shapes = Counter()
    seen = Counter()
    for _ in range(3):
        for batch in loader:
            shapes[tuple(batch["x_0"].shape[1:])] += 1
            seen.update(batch["sample_id"].tolist())
            for row, (number, cluster) in enumerate(zip(batch["sample_id"].tolist(), batch["cluster"], strict=True)):
                wanted = sample(number, int(cluster), batch["x_0"].shape[1:])
                np.testing.assert_array_equal(batch["x_0"][row], wanted["x_0"])
                assert batch["label"][row] == wanted["label"]

    assert len(loader) == 56 // BATCH
    assert shapes == {(3, 2, 8): 17, (3, 4, 4): 9, (3, 8, 2): 1}
    assert seen.keys() == {*chain(*TRAIN.values())}


def endless(loader):
    """Batches of one epoch after the other."""
    while True:
        yield from loader


@pytest.mark.parametrize("num_seen", [0, 3, 9, 14])  # a start, in mid-epoch, at its end, and in the next
@pytest.mark.parametrize("num_ranks", [2, 3])
def test_any_number_of_ranks_goes_on_with_the_same_batches(loaders, num_ranks, num_seen):
    """Nine batches are an epoch, which is less than a pass."""
    several = loaders(num_ranks, num_workers=1)
    expected = on_ranks(map(endless, loaders()), 40)

    assert len(several[0]) == 9
    assert on_ranks(map(endless, several), num_seen) == expected[:num_seen]

    states = [loader.state_dict() for loader in several]
    assert states == states[:1] * num_ranks
    for again in (loaders(num_ranks), loaders(5 - num_ranks), loaders()):
        for loader in again:
            loader.load_state_dict(states[0])
            assert loader.state_dict() == states[0]

        assert on_ranks(map(endless, again), 20) == expected[num_seen:][:20]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_held_out_batches_come_bucket_by_bucket(written, tmp_path, num_ranks):
    modules = [module(written, tmp_path / "cache", rank, num_ranks, batch_size=4) for rank in range(num_ranks)]
    loaders = [one.val_dataloader() for one in modules]
    batches = on_ranks(loaders, 100)
    wide, square = [*HELD_OUT[0, "2x8"], 700], [500, 501, 600, 601, 602]

    assert [len(loader) for loader in loaders] == [4] * num_ranks
    repeated = [500] * (num_ranks - 1)
    assert batches == [wide[:4], wide[4:], square[:4], square[4:] + repeated]
    shapes = [tuple(batch["x_0"].shape[2:]) for batch in loaders[0]]
    assert shapes == [(2, 8), (2, 8), (4, 4), (4, 4)]


def test_buckets_that_hold_less_than_a_batch_together_are_refused(loaders):
    assert loaders(batch_size=56)
    with pytest.raises(UserError, match="56 training samples, fewer than the 57"):
        loaders(batch_size=57)


def test_columns_must_be_the_manifest_s_in_all_but_the_shape(written, tmp_path):
    for wrong, problem in (
        ({"buckets": [*BUCKETS[1:], Bucket(16, 1, (3, 16, 1))]}, "are not the manifest's"),
        ({"columns": {**columns_of(BUCKETS[0]), "text": "ndarray:float16:7"}}, "are not the manifest's"),
    ):
        data = module(written, tmp_path / "cache", **wrong)
        data._training = ["cluster-0/2x8/train", "cluster-0/4x4/train"]
        with pytest.raises(UserError, match=problem):
            data.train_dataloader()

    other = {**columns_of(BUCKETS[2]), "label": "int64"}
    for folder, columns in (("2x8", columns_of(BUCKETS[0])), ("8x2", other)):
        write_mds(tmp_path / f"shards/cluster-0/{folder}/train", range(9), columns=columns)

    with pytest.raises(UserError, match="all with the same columns"):
        module(tmp_path / "shards", tmp_path / "cache", clusters=[0]).train_dataloader()


def test_a_small_cache_gives_the_same_batches_and_fetches_a_shard_once_a_pass(tmp_path, monkeypatch):
    monkeypatch.setattr(mosaic, "_MIN_BLOCK", 32)
    for bucket, num, first in ((BUCKETS[0], 800, 0), (BUCKETS[1], 410, 1000), (BUCKETS[2], 37, 2000)):
        folder = tmp_path / f"shards/cluster-0/{bucket.name}/train"
        write_mds(folder, range(first, first + num), columns=columns_of(bucket), shard_bytes=1 << 10)

    def loader(place, cache, **more):
        settings = {"clusters": [0], "held_out_clusters": [], "batch_size": 16, **more}
        return module(f"{place}{tmp_path}/shards", tmp_path / cache, **settings).train_dataloader()

    whole = loader("", "whole")
    limit = 0.5 * whole.shards.num_bytes.sum()
    with pytest.raises(UserError, match=r"island\.cache_gb"):
        loader("file://", "none", max_cache_bytes=1000)

    fetched = []
    get = remote.download
    monkeypatch.setattr(remote, "download", lambda url, path: (fetched.append(url), get(url, path)))
    small = loader("file://", "cache", max_cache_bytes=limit)
    held = []
    with within(120):
        for _ in range(2):
            for batch, other in zip(small, whole, strict=True):
                assert all(torch.equal(batch[name], other[name]) for name in other)
                is_here = [shard.path.is_file() for shard in small.shards.shards]
                held.append(small.shards.num_bytes[is_here].sum())

    assert limit / 2 < max(held) <= limit
    assert len(is_here) < len(fetched) <= 2 * len(is_here)
