import re
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deadline import within
from shards.mds import COLUMNS, WARNINGS, damage, flat, ids, module_of, sample, write_mds

from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.shards import mosaic
from ddm_lightning.shards.verify import ShardError

pytestmark = WARNINGS
# Unequal clusters: 70, 20 and 36 training samples, 5, 3 and 0 held-out ones.
TRAIN = {0: range(70), 1: range(100, 120), 2: range(200, 236)}
HELD_OUT = {0: range(70, 75), 1: range(120, 123)}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("shards")
    for split, clusters in (("train", TRAIN), ("held-out", HELD_OUT)):
        for cluster, samples in clusters.items():
            write_mds(root / f"cluster-{cluster}" / split, samples, cluster)

    return root


@pytest.fixture
def shards(written, tmp_path):
    return shutil.copytree(written, tmp_path / "shards")


@pytest.fixture
def cache(tmp_path):
    return tmp_path / "cache"


def order_of(shards, cache, **settings):
    """All samples of the first epoch."""
    with within(60):
        return flat(module_of(shards, cache, **settings).train_dataloader())


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("clusters", "batch_size"), [([1], 2), ([0, 1, 2], 6)], ids=str)
def test_clusters_are_mixed_in_their_natural_proportions(written, cache, clusters, batch_size, num_workers):
    data = module_of(written, cache, clusters=clusters, batch_size=batch_size, num_workers=num_workers)
    loader = data.train_dataloader()
    with within(60):
        first = list(loader)
        second = list(loader)

    expected = sorted(i for cluster in clusters for i in TRAIN[cluster])
    assert sorted(flat(first)) == sorted(flat(second)) == expected
    assert ids(first) != ids(second)
    drawn = Counter(int(k) for batch in first for k in batch["cluster"])
    assert drawn == {cluster: len(TRAIN[cluster]) for cluster in clusters}
    for half in (first[:9], first[9:]) if len(clusters) > 1 else ():  # not one cluster behind the other
        assert {int(k) for batch in half for k in batch["cluster"]} == {*clusters}


def test_batches_hold_the_written_samples_in_an_order_that_follows_the_seed(written, cache):
    orders = []
    for seed in (1, 1, 2):
        loader = module_of(written, cache, clusters=[0, 1], batch_size=9, seed=seed).train_dataloader()
        orders.append(ids(loader))

    assert orders[0] == orders[1] != orders[2]
    batch = next(iter(loader))
    assert {name: value.dtype for name, value in batch.items()} == {
        "sample_id": torch.int64,
        "cluster": torch.int64,
        "label": torch.int64,
        "x_0": torch.uint8,
        "text": torch.float32,
    }
    assert batch["x_0"].shape == (9, 3, 4, 4)
    for row, sample_id in enumerate(batch["sample_id"].tolist()):
        wanted = sample(sample_id, cluster=sample_id // 100)
        np.testing.assert_array_equal(batch["x_0"][row], wanted["x_0"])
        np.testing.assert_array_equal(batch["text"][row], wanted["text"].astype(np.float32))
        assert (batch["cluster"][row], batch["label"][row]) == (wanted["cluster"], wanted["label"])


def test_fewer_samples_than_one_batch_are_refused(written, cache):
    assert sorted(order_of(written, cache, clusters=[1], batch_size=20, num_workers=2)) == [*TRAIN[1]]
    words = r"clusters \[1\] hold 20 training samples, fewer than the 21 .*global_batch_size"
    with pytest.raises(UserError, match=words):
        module_of(written, cache, clusters=[1], batch_size=21).train_dataloader()


def test_held_out_samples_come_once_each_in_one_order(written, cache):
    data = module_of(written, cache, clusters=[0, 1, 2], batch_size=3, held_out_clusters=[0, 1], num_workers=2)
    loader = data.val_dataloader()
    with within(60):
        orders = [flat(loader) for _ in range(2)]

    assert orders[0] == orders[1] == [*HELD_OUT[0], *HELD_OUT[1]]
    assert module_of(written, cache, clusters=[2]).val_dataloader() == []


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_seen", [0, 3])
def test_a_loader_resumes_where_another_was_stopped(written, cache, num_workers, num_seen):
    settings = {"clusters": [0, 2], "batch_size": 10}
    loader = module_of(written, cache, num_workers=num_workers, **settings).train_dataloader()
    again = module_of(written, cache, seed=99, **settings).train_dataloader()
    with within(60):
        ids(loader)
        iterator = iter(loader)
        seen = ids(next(iterator) for _ in range(num_seen))
        state = loader.state_dict()
        rest = ids(iterator)
        third = ids(loader)

        again.load_state_dict(state)  # and its seed
        assert again.state_dict() == state
        if not num_seen:  # nothing of the second epoch was asked for yet: it is at the end of the first
            assert list(again) == []

        assert ids(again) == rest
        assert ids(again) == third

    assert len(seen) + len(rest) == 10


def test_compressed_shards_on_this_machine_are_unpacked_once(tmp_path, cache):
    folder = write_mds(tmp_path / "shards/cluster-0/train", range(60), compression="zstd:3")
    before = {path.name for path in folder.iterdir()}
    store = cache / "store/cluster-0/train"

    def unpacked():
        return {path.name: path.stat().st_mtime_ns for path in store.glob("*.mds")}

    order = order_of(tmp_path / "shards", cache, num_workers=2)
    first = unpacked()
    assert sorted(order) == [*range(60)]
    assert {path.name for path in folder.iterdir()} == before, "nothing is added beside them"
    assert len(first) == 4

    assert order_of(tmp_path / "shards", cache, num_workers=2) == order
    assert unpacked() == first

    damaged = damage(store, "flipped")
    assert order_of(tmp_path / "shards", cache, num_workers=2) == order
    assert {name for name, time in unpacked().items() if time != first[name]} == {damaged}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize(("kind", "problem"), [("missing", "is missing"), ("flipped", "is damaged: its SHA-1 differs")])
def test_a_shard_damaged_after_the_start_is_named_before_one_of_its_samples_is_used(
    shards, cache, num_workers, kind, problem
):
    data = module_of(shards, cache, batch_size=1, num_workers=num_workers)
    folder = shards / "cluster-0/train"
    name = damage(folder, kind)
    seen = []
    line = f"a shard cannot be read: {folder / name}: {problem}.*; repair or copy it again"
    with within(20), pytest.raises(ShardError, match=line):
        for batch in data.train_dataloader():
            seen += batch["sample_id"].tolist()

    assert {*seen} <= {*range(34), *range(51, 70)}, "it was the third shard of seventeen samples"


@pytest.mark.parametrize(("kind", "split"), [("missing", "train"), ("truncated", "held-out")])
def test_a_damaged_local_shard_is_named_before_training(shards, cache, kind, split):
    folder = shards / "cluster-0" / split
    name = damage(folder, kind)
    with pytest.raises(UserError, match=f"{folder / name}: shard is (missing|damaged)"):
        module_of(shards, cache, held_out_clusters=[0])


def test_the_missing_shards_must_fit_on_the_disk(tmp_path, cache, monkeypatch):
    folder = write_mds(tmp_path / "shards/cluster-0/train", range(100))
    needed = sum(path.stat().st_size for path in folder.glob("*.mds"))
    free = SimpleNamespace(free=needed - 1)
    monkeypatch.setattr(shutil, "disk_usage", {cache: free}.__getitem__)

    line = rf"cache: the missing shards .*cluster-0/train need {needed / 1000:.1f} kB, but .* are free"
    with pytest.raises(UserError, match=line):
        order_of(f"file://{tmp_path}/shards", cache)

    free.free = needed
    assert len(order_of(f"file://{tmp_path}/shards", cache)) == 100
    free.free = 0  # nothing is to be fetched any more
    assert len(order_of(f"file://{tmp_path}/shards", cache)) == 100


# Shards behind a URL.


def remote_order(shards, cache, clusters=(0, 1), **settings):
    """As ``order_of``, by a URL, with the hashes of the indices as they are now."""
    hashes = {f"cluster-{k}/train": sha256_file(shards / f"cluster-{k}/train/index.json") for k in clusters}
    return order_of(f"file://{shards}", cache, clusters=clusters, index_sha256=hashes, **settings)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shards_from_a_url_give_the_same_batches(written, cache, num_workers):
    assert remote_order(written, cache, num_workers=num_workers) == order_of(written, cache, clusters=[0, 1])
    store = cache / "store"
    assert {path.relative_to(store) for path in store.rglob("*.mds")} == {
        path.relative_to(written) for k in (0, 1) for path in (written / f"cluster-{k}/train").glob("*.mds")
    }


@pytest.mark.parametrize("kind", ["missing", "truncated", "flipped"])
def test_a_shard_that_a_killed_process_left_half_fetched_is_fetched_again(written, cache, kind):
    order = remote_order(written, cache)
    store = cache / "store/cluster-0/train"
    name = damage(store, kind)
    for ending in (".part", ".lock"):
        (store / f"{name}{ending}").write_bytes(b"half a shard")

    assert remote_order(written, cache) == order
    assert sha256_file(store / name) == sha256_file(written / "cluster-0/train" / name)


def test_shards_of_an_earlier_preparation_are_fetched_anew(shards, cache):
    assert sorted(remote_order(shards, cache, [1])) == [*TRAIN[1]]
    shutil.rmtree(shards / "cluster-1/train")
    write_mds(shards / "cluster-1/train", range(500, 530), cluster=1)
    assert sorted(remote_order(shards, cache, [1])) == [*range(500, 530)]


@pytest.mark.parametrize("place", ["", "file://"], ids=["folder", "URL"])
def test_shards_of_another_preparation_are_refused_each_time(written, cache, place):
    for _ in range(2):
        with pytest.raises(UserError, match=r"cluster-1/train/index\.json: differs from the manifest's"):
            order_of(f"{place}{written}", cache, clusters=[1], index_sha256={"cluster-1/train": "0" * 64})


@pytest.mark.parametrize(
    ("address", "words"),
    [
        ("gopher://host/shards", "cluster-0/train: shards cannot be opened: .*Protocol not known.*island.shards"),
        ("file:///nowhere/shards", "cluster-0/train: shards cannot be opened: .*does not exist.*island.shards"),
        ("/nowhere", r"nowhere: no shards here; .*island\.shards"),
    ],
)
def test_an_address_that_leads_nowhere_is_an_error_line(cache, address, words):
    with pytest.raises(UserError, match=words):
        order_of(address, cache)


def test_columns_must_match_the_manifest(written, cache):
    columns = {name: COLUMNS[name] for name in ("x_0", "label", "text")}
    assert order_of(written, cache, columns=columns)
    for wrong in ({"x_0": "ndarray:uint8:3,8,8"}, {"text_tokens": "ndarray:float16:2,6"}):
        with pytest.raises(UserError, match="are not the manifest's"):
            order_of(written, cache, columns={**columns, **wrong})


# A cache smaller than the shards.


@pytest.mark.parametrize(("num_workers", "compression"), [(0, None), (2, "zstd:3")])
def test_a_cache_of_a_tenth_gives_the_same_batches(tmp_path, cache, monkeypatch, num_workers, compression):
    """Over two epochs and a resumed one; each epoch fetches a shard once at most, and the cache never grows beyond."""
    monkeypatch.setattr(mosaic, "_MIN_BLOCK", 64)
    write_mds(tmp_path / "shards/cluster-0/train", range(1600), compression=compression)
    whole = module_of(tmp_path / "shards", tmp_path / "whole", batch_size=16).train_dataloader()
    expected = [list(whole) for _ in range(3)]
    sizes = {shard.path.stem: shard.entry.raw_data.bytes for shard in whole.shards.shards}
    limit = sum(sizes.values()) // 10
    fetched = []
    held_bytes = []

    def counting_get(url, path):
        if ".mds" in url:
            fetched.append(url)
            held = {path.name.partition(".mds")[0] for path in cache.rglob("*.mds*")}  # locks are of those under way
            held_bytes.append(sum(sizes[name] for name in held))

        get(url, path)

    def compare(batches, wanted):
        for batch, other in zip(batches, wanted, strict=True):
            assert all(torch.equal(batch[name], other[name]) for name in other)
            assert len(loader.shards._maps) < 30

    def loader_of_a_tenth():
        settings = {"batch_size": 16, "num_workers": num_workers, "max_cache_bytes": limit}
        return module_of(f"file://{tmp_path}/shards", cache, **settings).train_dataloader()

    get = remote.download
    monkeypatch.setattr(remote, "download", counting_get)
    loader = loader_of_a_tenth()
    with within(120):
        compare(loader, expected[0])
        assert len(fetched) == len({*fetched}) == len(sizes)
        iterator = iter(loader)
        compare((next(iterator) for _ in range(40)), expected[1][:40])
        state = loader.state_dict()
        loader.close()

        loader = loader_of_a_tenth()
        loader.load_state_dict(state)
        compare(loader, expected[1][40:])
        compare(loader, expected[2])

    assert limit / 2 < max(held_bytes) <= limit


def test_a_cache_smaller_than_what_is_shuffled_together_is_refused(tmp_path, cache, monkeypatch):
    monkeypatch.setattr(mosaic, "_MIN_BLOCK", 64)
    write_mds(tmp_path / "shards/cluster-0/train", range(1000))
    write_mds(tmp_path / "shards/cluster-0/held-out", range(1000, 1100))

    def loader(limit, **settings):
        return module_of(f"file://{tmp_path}/shards", cache, max_cache_bytes=limit, **settings).train_dataloader()

    shards = loader(None).shards
    window = 5 * max(64, 4 * max(shards.sizes)) // 4
    least = window * shards.num_bytes.sum() / 1000 + 2 * shards.num_bytes.max()
    line = r"key 'island\.cache_gb': 1e-06 GB are too few .*cluster-0/train.*; set 1\.\d\de-05"
    with pytest.raises(UserError, match=line):
        loader(1000)

    with pytest.raises(UserError, match=r"island\.cache_gb"):
        loader(least - 1)

    loader(least + 1)
    with pytest.raises(UserError, match=r"island\.cache_gb") as refusal:  # a quarter is left to held-out samples
        loader(least + 1, held_out_clusters=[0])

    suggested = re.search(r"set (\S+) or more", str(refusal.value))
    loader(1.01e9 * float(suggested[1]), held_out_clusters=[0])  # it is rounded


def test_held_out_samples_in_order_pass_through_a_cache_of_three_shards(tmp_path, cache):
    folder = write_mds(tmp_path / "shards/cluster-0/held-out", range(500))
    limit = 3 * max(path.stat().st_size for path in folder.glob("*.mds"))
    settings = {"held_out_clusters": [0], "max_cache_bytes": 4 * limit}  # three quarters are for training samples
    seen = []
    for batch in module_of(f"file://{tmp_path}/shards", cache, **settings).val_dataloader():
        seen += batch["sample_id"].tolist()
        assert sum(path.stat().st_size for path in cache.rglob("*.mds")) <= limit

    assert seen == [*range(500)]
