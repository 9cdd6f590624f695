import re
import shutil
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from deadline import within
from shards.mds import COLUMNS, WARNINGS, damage, sample, write_mds

from ddm_lightning.core import remote
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.shards import mosaic
from ddm_lightning.shards.datamodule import ClusterDataModule
from ddm_lightning.shards.fetch import Origin
from ddm_lightning.shards.verify import ShardError

pytestmark = WARNINGS
# Unequal clusters: 70, 20 and 36 training samples, 5, 3 and 0 held-out ones.
TRAIN = {0: range(70), 1: range(100, 120), 2: range(200, 236)}
HELD_OUT = {0: range(70, 75), 1: range(120, 123)}


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    root = tmp_path_factory.mktemp("shards")
    for split, clusters in (("train", TRAIN), ("held-out", HELD_OUT)):
        for cluster, ids in clusters.items():
            write_mds(root / f"cluster-{cluster}" / split, ids, cluster)
    return root


@pytest.fixture
def shards(written, tmp_path):
    return shutil.copytree(written, tmp_path / "shards")


def module_of(shards, clusters, batch_size, tmp_path, **settings):
    data = ClusterDataModule(
        shards, clusters, batch_size, seed=settings.pop("seed", 0), cache=tmp_path / "cache", **settings
    )
    data.prepare_data()
    return data


def ids(batches):
    return [i for batch in batches for i in batch["sample_id"].tolist()]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("clusters", [[1], [0, 1, 2]], ids=str)
def test_clusters_are_mixed_in_their_natural_proportions(shards, tmp_path, clusters, num_workers):
    expected = sorted(i for cluster in clusters for i in TRAIN[cluster])
    batch_size = 6 if clusters == [0, 1, 2] else 2  # divides the samples
    settings = {"num_workers": num_workers}
    loader = module_of(shards, clusters, batch_size, tmp_path, **settings).train_dataloader()
    with within(60):
        first, second = list(loader), list(loader)
    assert sorted(ids(first)) == sorted(ids(second)) == expected
    assert ids(first) != ids(second)
    drawn = Counter(int(k) for batch in first for k in batch["cluster"])
    assert drawn == {cluster: len(TRAIN[cluster]) for cluster in clusters}
    if len(clusters) > 1:  # mixed, not one cluster behind the other
        halves = [Counter(int(k) for batch in half for k in batch["cluster"]) for half in (first[:9], first[9:])]
        assert all(set(half) == set(clusters) for half in halves)


def test_batches_hold_the_written_samples(shards, tmp_path):
    for batch in module_of(shards, [0, 1], 9, tmp_path).train_dataloader():
        assert {name: value.dtype for name, value in batch.items()} == {
            "sample_id": torch.int64,
            "cluster": torch.int64,
            "label": torch.int64,
            "x_0": torch.uint8,
            "text": torch.float32,
        }
        assert batch["x_0"].shape == (9, 3, 4, 4)
        for row, sample_id in enumerate(batch["sample_id"].tolist()):
            written = sample(sample_id, cluster=sample_id // 100)
            np.testing.assert_array_equal(batch["x_0"][row], written["x_0"])
            np.testing.assert_array_equal(batch["text"][row], written["text"].astype(np.float32))
            assert (batch["cluster"][row], batch["label"][row]) == (written["cluster"], written["label"])


def test_fewer_samples_than_one_batch_are_refused(shards, tmp_path):
    loader = module_of(shards, [1], 20, tmp_path, num_workers=2).train_dataloader()
    with within(60):
        assert [sorted(ids([batch])) for batch in loader] == [list(TRAIN[1])]
    with pytest.raises(
        UserError, match=r"clusters \[1\] hold 20 training samples, fewer than the 21 .*global_batch_size"
    ):
        module_of(shards, [1], 21, tmp_path).train_dataloader()


def test_held_out_samples_come_once_each_in_one_order(shards, tmp_path):
    settings = {"held_out_clusters": [0, 1], "num_workers": 2}
    data = module_of(shards, [0, 1, 2], 3, tmp_path, **settings)
    loader = data.val_dataloader()
    with within(60):
        orders = [ids(loader), ids(loader)]
    assert orders[0] == orders[1] == [*HELD_OUT[0], *HELD_OUT[1]]


def test_no_held_out_samples_means_no_validation(shards, tmp_path):
    assert module_of(shards, [2], 3, tmp_path).val_dataloader() == []


def test_the_order_follows_the_seed(shards, tmp_path):
    orders = [ids(module_of(shards, [0, 2], 7, tmp_path, seed=seed).train_dataloader()) for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("num_seen", [0, 3])
def test_a_loader_resumes_where_another_was_stopped(shards, tmp_path, num_workers, num_seen):
    loader = module_of(shards, [0, 2], 10, tmp_path, num_workers=num_workers).train_dataloader()
    with within(60):
        first = ids(loader)
        iterator = iter(loader)
        seen = [ids([next(iterator)]) for _ in range(num_seen)]
        state = loader.state_dict()
        rest = [ids([batch]) for batch in iterator]
        third = ids(loader)

        again = module_of(shards, [0, 2], 10, tmp_path, seed=99).train_dataloader()
        again.load_state_dict(state)  # and its seed
        assert again.state_dict()["sample_in_epoch"] == state["sample_in_epoch"]
        if num_seen:  # else nothing of the second epoch was asked for yet: it is at the end of the first
            assert [ids([batch]) for batch in again] == rest
        else:
            assert list(again) == []
            assert [ids([batch]) for batch in again] == rest
        assert ids(again) == third
    assert len(seen) + len(rest) == 10
    assert len(set(first) | {i for batch in seen + rest for i in batch}) > len(first)


def test_compressed_shards_on_this_machine_are_unpacked_once(tmp_path):
    folder = write_mds(tmp_path / "shards/cluster-0/train", range(60), compression="zstd:3")
    before = {path.name for path in folder.iterdir()}
    settings = {"num_workers": 2}
    order = ids(module_of(tmp_path / "shards", [0], 6, tmp_path, **settings).train_dataloader())
    assert sorted(order) == list(range(60))
    assert {path.name for path in folder.iterdir()} == before  # nothing is added beside them
    store = tmp_path / "cache/store/cluster-0/train"
    unpacked = {path: path.stat().st_mtime_ns for path in store.glob("*.mds")}
    assert len(unpacked) == 4
    assert ids(module_of(tmp_path / "shards", [0], 6, tmp_path, **settings).train_dataloader()) == order
    assert {path: path.stat().st_mtime_ns for path in store.glob("*.mds")} == unpacked
    damaged = damage(store, "flipped")
    assert ids(module_of(tmp_path / "shards", [0], 6, tmp_path, **settings).train_dataloader()) == order
    assert (store / damaged).stat().st_mtime_ns != unpacked[store / damaged]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_shard_removed_during_training_is_an_error(shards, tmp_path, num_workers):
    data = module_of(shards, [0], 7, tmp_path, num_workers=num_workers)
    name = damage(shards / "cluster-0/train", "missing")
    with within(20), pytest.raises(ShardError, match=f"a shard cannot be read: .*{name}.*; repair or copy it again"):
        list(data.train_dataloader())


@pytest.mark.parametrize(("kind", "split"), [("missing", "train"), ("truncated", "held-out")])
def test_a_damaged_local_shard_is_named_before_training(shards, tmp_path, kind, split):
    folder = shards / "cluster-0" / split
    name = damage(folder, kind)
    with pytest.raises(UserError, match=f"{folder / name}: shard is (missing|damaged)"):
        module_of(shards, [0], 7, tmp_path, held_out_clusters=[0])


def test_a_changed_local_shard_is_named_before_one_of_its_samples_is_used(shards, tmp_path):
    folder = shards / "cluster-0/train"
    data = module_of(shards, [0], 1, tmp_path, num_workers=2)
    name, clean = damage(folder, "flipped"), {*range(34), *range(51, 70)}  # the third shard of seventeen samples
    seen = []
    with within(20), pytest.raises(ShardError, match=f"{folder / name}: is damaged: its SHA-1 differs"):
        for batch in data.train_dataloader():
            seen += batch["sample_id"].tolist()
    assert set(seen) <= clean


def test_shards_of_another_preparation_are_refused(shards, tmp_path):
    with pytest.raises(UserError, match=r"cluster-1/train/index\.json: differs from the manifest's"):
        module_of(shards, [1], 4, tmp_path, index_sha256={"cluster-1/train": "0" * 64})


@pytest.fixture
def free(monkeypatch):
    """Bytes that a disk claims to have free, by folder."""
    answers = {}
    real = shutil.disk_usage

    def usage(path):
        return SimpleNamespace(free=answers[str(path)]) if str(path) in answers else real(path)

    monkeypatch.setattr(shutil, "disk_usage", usage)
    return answers


def test_a_batch_that_ranks_cannot_share_is_refused(shards, tmp_path):
    data = module_of(shards, [0], 10, tmp_path)
    data.trainer = SimpleNamespace(world_size=4, global_rank=0)
    with pytest.raises(
        UserError, match=r"10 samples per step cannot be shared equally by 4 devices; .*island\.devices"
    ):
        data.train_dataloader()


def test_a_disk_too_small_for_the_fetched_shards(tmp_path, free):
    folder = write_mds(tmp_path / "shards/cluster-0/train", range(100))
    needed = sum(path.stat().st_size for path in folder.glob("*.mds"))
    cache = tmp_path / "cache"
    free[str(cache)] = needed - 1
    with pytest.raises(
        UserError, match=rf"cache: the missing shards .*cluster-0/train need {needed / 1000:.1f} kB, but .* are free"
    ):
        module_of(f"file://{tmp_path}/shards", [0], 6, tmp_path).train_dataloader()
    free[str(cache)] = needed
    loader = module_of(f"file://{tmp_path}/shards", [0], 6, tmp_path).train_dataloader()
    assert len(list(loader)) == 16
    free[str(cache)] = 0  # nothing is to be fetched any more
    module_of(f"file://{tmp_path}/shards", [0], 6, tmp_path).train_dataloader()


# Shards behind a URL.


def remote_module(shards, tmp_path, clusters=(0, 1), **settings):
    index = {f"cluster-{k}/train": sha256_file(shards / f"cluster-{k}/train/index.json") for k in clusters}
    settings = {"index_sha256": index, "batch_size": 5, **settings}
    return module_of(f"file://{shards}", list(clusters), tmp_path=tmp_path, **settings)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_shards_from_a_url_give_the_same_batches(shards, tmp_path, num_workers):
    local = ids(module_of(shards, [0, 1], 5, tmp_path).train_dataloader())
    data = remote_module(shards, tmp_path, num_workers=num_workers)
    with within(60):
        assert ids(data.train_dataloader()) == local
    store = tmp_path / "cache/store"
    assert {path.relative_to(store) for path in store.rglob("*.mds")} == {
        path.relative_to(shards) for k in (0, 1) for path in (shards / f"cluster-{k}/train").glob("*.mds")
    }


def test_leftovers_of_a_killed_process_are_harmless(shards, tmp_path):
    order = ids(remote_module(shards, tmp_path).train_dataloader())
    store = tmp_path / "cache/store/cluster-0/train"
    (shard, *_) = sorted(store.glob("*.mds"))
    for ending in (".part", ".lock"):
        (store / f"{shard.name}{ending}").write_bytes(b"half a shard")
    shard.unlink()
    assert ids(remote_module(shards, tmp_path).train_dataloader()) == order


@pytest.mark.parametrize("kind", ["truncated", "flipped"])
def test_a_damaged_fetched_shard_is_fetched_again(shards, tmp_path, kind):
    """A process that is killed while it fetches leaves a part of a shard under the shard's name."""
    order = ids(remote_module(shards, tmp_path).train_dataloader())
    store = tmp_path / "cache/store/cluster-0/train"
    name = damage(store, kind)
    assert ids(remote_module(shards, tmp_path).train_dataloader()) == order
    assert sha256_file(store / name) == sha256_file(shards / "cluster-0/train" / name)


def test_shards_of_an_earlier_preparation_are_fetched_anew(shards, tmp_path):
    assert sorted(ids(remote_module(shards, tmp_path, [1]).train_dataloader())) == list(TRAIN[1])
    shutil.rmtree(shards / "cluster-1/train")
    write_mds(shards / "cluster-1/train", range(500, 530), cluster=1)
    assert sorted(ids(remote_module(shards, tmp_path, [1]).train_dataloader())) == list(range(500, 530))


def test_a_url_with_shards_of_another_preparation_is_refused_each_time(shards, tmp_path):
    for _ in range(2):
        with pytest.raises(UserError, match=r"file://.*cluster-1/train/index\.json: differs from the manifest's"):
            remote_module(shards, tmp_path, [1], index_sha256={"cluster-1/train": "0" * 64}).train_dataloader()


@pytest.mark.parametrize(
    ("url", "words"), [("gopher://host/shards", "Protocol not known"), ("file:///nowhere/shards", "does not exist")]
)
def test_a_url_that_leads_nowhere_is_an_error_line(tmp_path, url, words):
    data = module_of(url, [0], 5, tmp_path)
    with pytest.raises(ShardError, match=f"cluster-0/train: shards cannot be opened: .*{words}.*island.shards"):
        data.train_dataloader()


def test_missing_shards_are_an_error_line(tmp_path):
    with pytest.raises(UserError, match=r"nowhere: no shards here; .*island\.shards"):
        module_of(str(tmp_path / "nowhere"), [0], 5, tmp_path).prepare_data()


def test_columns_must_match_the_manifest(shards, tmp_path):
    columns = {name: COLUMNS[name] for name in ("x_0", "label", "text")}
    assert module_of(shards, [0], 2, tmp_path, columns=columns).train_dataloader()
    for wrong in ({"x_0": "ndarray:uint8:3,8,8"}, {"text_tokens": "ndarray:float16:2,6"}):
        data = module_of(shards, [0], 2, tmp_path, columns={**columns, **wrong})
        with pytest.raises(UserError, match="are not the manifest's"):
            data.train_dataloader()


# A cache smaller than the shards.


@pytest.mark.parametrize(("num_workers", "compression"), [(0, None), (2, "zstd:3")])
def test_a_cache_of_a_tenth_gives_the_same_batches(tmp_path, monkeypatch, num_workers, compression):
    """Over two epochs and a resumed one; each epoch fetches a shard once at most, and the cache never grows beyond."""
    monkeypatch.setattr(mosaic, "_MIN_BLOCK", 64)
    write_mds(tmp_path / "shards/cluster-0/train", range(1600), compression=compression)
    whole = module_of(tmp_path / "shards", [0], 16, tmp_path / "whole").train_dataloader()
    expected = [list(whole) for _ in range(3)]
    sizes = {file.path.name: file.num_bytes for file in whole.shards.files}
    limit, peak, held, fetched = sum(sizes.values()) // 10, 0, set(), []
    get, remove = remote.download, Origin.remove

    def counting_get(url, path):
        nonlocal peak
        if ".mds" in url:
            fetched.append(url)
            held.add(url.rpartition("/")[2].partition(".zstd")[0])
            peak = max(peak, sum(sizes[name] for name in held))
        get(url, path)

    def counting_remove(origin, entry):
        remove(origin, entry)
        held.discard(entry["raw_data"]["basename"])

    def compare(batches, wanted):
        for batch, other in zip(batches, wanted, strict=True):
            assert all(torch.equal(batch[name], other[name]) for name in other)
            assert len(loader.shards._maps) < 30
        assert {path.name for path in (tmp_path / "cache").rglob("*.mds")} <= held

    monkeypatch.setattr(remote, "download", counting_get)
    monkeypatch.setattr(Origin, "remove", counting_remove)
    settings = {"num_workers": num_workers, "max_cache_bytes": limit}
    loader = module_of(f"file://{tmp_path}/shards", [0], 16, tmp_path, **settings).train_dataloader()
    with within(120):
        compare(loader, expected[0])
        assert len(fetched) == len(set(fetched)) == len(sizes)
        iterator = iter(loader)
        compare((next(iterator) for _ in range(40)), expected[1][:40])
        state = loader.state_dict()
        loader.close()
        loader = module_of(f"file://{tmp_path}/shards", [0], 16, tmp_path, **settings).train_dataloader()
        loader.load_state_dict(state)
        compare(loader, expected[1][40:])
        compare(loader, expected[2])
    assert limit / 2 < peak <= limit


def test_a_cache_smaller_than_what_is_shuffled_together_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(mosaic, "_MIN_BLOCK", 64)
    write_mds(tmp_path / "shards/cluster-0/train", range(1000))
    write_mds(tmp_path / "shards/cluster-0/held-out", range(1000, 1100))

    def loader(limit, **settings):
        settings["max_cache_bytes"] = limit
        return module_of(f"file://{tmp_path}/shards", [0], 6, tmp_path, **settings).train_dataloader()

    shards = loader(None).shards
    window = 5 * max(64, 4 * max(shards.sizes)) // 4
    least = window * shards.num_bytes.sum() / 1000 + 2 * shards.num_bytes.max()
    with pytest.raises(
        UserError, match=r"key 'island\.cache_gb': 1e-06 GB are too few .*cluster-0/train.*; set 1\.\d\de-05"
    ):
        loader(1000)
    with pytest.raises(UserError, match=r"island\.cache_gb"):
        loader(least - 1)
    loader(least + 1)
    with pytest.raises(UserError, match=r"island\.cache_gb") as refusal:  # a quarter is left to held-out samples
        loader(least + 1, held_out_clusters=[0])
    suggested = re.search(r"set (\S+) or more", str(refusal.value))
    loader(1.01e9 * float(suggested[1]), held_out_clusters=[0])  # it is rounded


def test_held_out_samples_in_order_pass_through_a_cache_of_three_shards(tmp_path):
    folder = write_mds(tmp_path / "shards/cluster-0/held-out", range(500))
    limit, seen = 3 * max(path.stat().st_size for path in folder.glob("*.mds")), []
    settings = {"held_out_clusters": [0], "max_cache_bytes": 4 * limit}  # three quarters are for training samples
    for batch in module_of(f"file://{tmp_path}/shards", [0], 6, tmp_path, **settings).val_dataloader():
        seen += batch["sample_id"].tolist()
        assert sum(path.stat().st_size for path in (tmp_path / "cache").rglob("*.mds")) <= limit
    assert seen == [*range(500)]
