import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from prepare.listed import hashes
from streaming.base.format import reader_from_json

from ddm_lightning.config.experiment import ShardsConfig
from ddm_lightning.encoders.interfaces import StoredForm
from ddm_lightning.partition.columns import Rows
from ddm_lightning.prepare import write_shards
from ddm_lightning.prepare.merge import statistics_of
from ddm_lightning.prepare.write_shards import ShardColumns, Split, _moments, split_orders, write_split
from ddm_lightning.shards.manifest import shard_name

NUM, K = 50, 3
SPLITS = ("train", "held-out")


@pytest.fixture
def columns():
    random = np.random.default_rng(0)
    return {
        "x_0": random.integers(0, 256, (NUM, 3, 6, 6), dtype=np.uint8),
        "label": random.integers(0, 5, NUM).astype(np.int32),
        "text": random.standard_normal((NUM, 4)).astype(np.float16),
    }


@pytest.fixture
def samples(columns):
    encodings = {"x_0": "ndarray:uint8:3,6,6", "label": "int32", "text": "ndarray:float16:4"}
    halves = {name: Rows([rows[:20], rows[20:]]) for name, rows in columns.items()}
    captions = {"caption": Rows([np.array([f"caption {i}, Åland" for i in range(NUM)], object)])}
    return ShardColumns(halves, encodings, captions, np.arange(NUM), PIXELS)


CLUSTERS = np.random.default_rng(1).integers(0, K, NUM)


PIXELS = StoredForm("x_0", {"scale": 1 / 127.5, "shift": 127.5})


def write(folder, samples, *, seed=0, on_progress=lambda _: None, **shards):
    held_out = np.random.default_rng(2).random(NUM) < 0.3
    orders = list(split_orders(held_out, CLUSTERS, K, seed))
    config = ShardsConfig(**shards)
    return [
        write_split(folder / shard_name(cluster, split), cluster, order, samples, config, on_progress)
        for cluster, split, order in orders
    ], orders


def read(folder):
    shards = json.loads((folder / "index.json").read_text())["shards"]
    readers = [reader_from_json(str(folder.parent), folder.name, shard) for shard in shards]
    return [reader[i] for reader in readers for i in range(reader.samples)]


def test_each_sample_lies_once_in_its_clusters_folder_with_all_its_columns(tmp_path, samples, columns):
    ticks = []
    _, orders = write(tmp_path, samples, on_progress=ticks.append, max_bytes=1000)

    for cluster, split, order in orders:
        found = read(tmp_path / f"cluster-{cluster}" / split)
        assert [int(sample["sample_id"]) for sample in found] == order.tolist(), "in the order given"
        for i, sample in zip(order, found, strict=True):
            assert sample.keys() == {"sample_id", "cluster", "caption", *columns}
            assert sample["cluster"] == cluster == CLUSTERS[i]
            assert sample["caption"] == f"caption {i}, Åland"
            for name, rows in columns.items():
                np.testing.assert_array_equal(sample[name], rows[i])
                assert np.asarray(sample[name]).dtype == rows.dtype

    assert sorted(np.concatenate([order for *_, order in orders]).tolist()) == list(range(NUM))
    assert sum(ticks) == NUM  # one call per folder


def test_reading_some_samples_at_a_time_changes_no_byte(tmp_path, samples, monkeypatch):
    write(tmp_path / "at once", samples)
    taken = []
    monkeypatch.setattr(Rows, "take", lambda rows, which, take=Rows.take: taken.append(len(which)) or take(rows, which))
    monkeypatch.setattr(write_shards, "_SAMPLES_AT_ONCE", 2)
    monkeypatch.setattr(write_shards, "_MAX_BYTES", 4 * 120)  # of 3 * 36 + 4 + 4 * 2 bytes per sample
    write(tmp_path / "some", samples)
    assert max(taken) == 4 and hashes(tmp_path / "some") == hashes(tmp_path / "at once")


def test_the_order_is_that_of_the_seed_cluster_and_split():
    held_out = np.arange(NUM) % 4 == 0
    first, same, *others = (list(split_orders(held_out, CLUSTERS, K, *how)) for how in ((7,), (7,), (8,), (7, 1)))

    assert [(cluster, split) for cluster, split, _ in first] == [(k, split) for k in range(K) for split in SPLITS]
    for number, (cluster, split, order) in enumerate(first):
        ids = np.flatnonzero((cluster == CLUSTERS) & (held_out == (split == "held-out")))
        assert sorted(order.tolist()) == ids.tolist() != order.tolist()
        np.testing.assert_array_equal(order, same[number][2])
        assert all(order.tolist() != other[number][2].tolist() for other in others)


def test_a_split_without_samples_has_no_folder():
    nobody = split_orders(np.zeros(NUM, bool), CLUSTERS, K, 0)
    assert [(cluster, split) for cluster, split, _ in nobody] == [(k, "train") for k in range(K)]


@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_the_same_input_gives_the_same_bytes(tmp_path, samples, compression):
    for name in "ab":
        write(tmp_path / name, samples, max_bytes=1000, compression=compression)
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    index = json.loads((tmp_path / "a" / "cluster-0" / "train" / "index.json").read_text())
    assert len(index["shards"]) > 1, "the size limit splits the samples"
    assert index["shards"][0]["raw_data"]["hashes"].keys() == {"sha1", "xxh64"}
    assert (index["shards"][0]["zip_data"] is None) == (compression is None)


@pytest.mark.parametrize("std", [0, 50])
def test_the_sums_give_mean_and_std_of_x_0(tmp_path, samples, columns, std):
    """The variance of a posterior adds to that of the means."""
    pixels = columns["x_0"]
    if std:
        samples = replace(samples, form=StoredForm("posterior", {"scale": 1 / 127.5, "shift": 127.5}))
        samples.columns["x_0"] = Rows([np.concatenate([pixels, np.full_like(pixels, std)], 1)])
        samples.encodings["x_0"] = "ndarray:uint8:6,6,6"
    sums, _ = write(tmp_path, samples)
    statistics = statistics_of(sum(sums))
    x_0 = pixels / 127.5 - 1
    np.testing.assert_allclose(statistics["mean"], x_0.mean((0, 2, 3)), rtol=1e-9)
    np.testing.assert_allclose(statistics["std"], np.sqrt(x_0.var((0, 2, 3)) + (std / 127.5) ** 2), rtol=1e-9)


def test_a_channel_that_never_changes_has_no_spread():
    constant = np.array([[3], [3 * 0.1], [3 * 0.1**2 - 1e-17]])
    assert statistics_of(constant)["std"] == pytest.approx([0], abs=1e-8)


def held_out_samples(split_hash, clusters, fraction):
    return Split.of(split_hash, clusters, fraction).is_held_out(split_hash)


def test_a_split_of_the_sample_holds_for_all_samples():
    """By hashes alone, so machines agree that see other samples."""
    hashes, clusters = hashes_of(500), np.repeat([0, 1], [497, 3])
    split = Split.of(hashes, clusters, 0.01)
    held_out = split.is_held_out(hashes)
    assert len(split.held_out) == 1 and held_out[497:].sum() == 1
    np.testing.assert_array_equal(split.is_held_out(hashes[::-7]), held_out[::-7])


def hashes_of(num, seed=0):
    return np.random.default_rng(seed).integers(0, 2**64, num, dtype=np.uint64)


def test_held_out_samples_do_not_depend_on_the_rest_of_the_data_set():
    keys = hashes_of(4000)
    one_cluster = np.zeros(4000, dtype=np.int32)
    held_out = held_out_samples(keys, one_cluster, 0.1)
    np.testing.assert_array_equal(held_out, keys / 2.0**64 < 0.1)
    np.testing.assert_array_equal(held_out_samples(keys[::-1], one_cluster, 0.1), held_out[::-1])
    np.testing.assert_array_equal(held_out_samples(keys[:1000], one_cluster[:1000], 0.1), held_out[:1000])
    assert (held_out_samples(keys, one_cluster, 0.2) >= held_out).all(), "a larger part contains the smaller one"


@pytest.mark.parametrize(
    ("rows", "fraction", "expected"),
    [
        ([(100, 0), (200, 0), (50, 1), (100, 1)], 1e-18, {100}),  # the first cluster's; the second then has some, too
        ([(200, 0), (100, 1), (200, 1)], 1e-18, {100}),  # not 200: the first cluster has nothing else to train on
        ([(200, 0), (300, 1), (200, 1)], 1e-18, set()),  # nor here, although the second would hold it out
        ([(100, 0), (200, 0), (300, 0)], 0.5, {100, 200}),  # all would be: one stays
    ],
)
def test_which_group_is_held_out_where_the_fraction_finds_none_or_all(rows, fraction, expected):
    hashes, clusters = np.array(rows, np.uint64).T
    held_out = held_out_samples(hashes, clusters.astype(np.int64), fraction)
    assert set(hashes[held_out].tolist()) == expected


def test_each_cluster_of_two_or_more_has_samples_on_both_sides():
    keys = hashes_of(41)
    clusters = np.array([*np.arange(20).repeat(2), 20])
    for fraction in (1e-6, 0.5):
        held_out = held_out_samples(keys, clusters, fraction)
        np.testing.assert_array_equal(np.bincount(clusters, held_out, minlength=21)[:20], 1)
        assert not held_out[-1], "the only sample of a cluster is trained on"
    assert not held_out_samples(keys, clusters, 0.0).any()


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=20), st.floats(0, 0.999))
def test_every_cluster_trains_on_something_however_groups_are_spread(pairs, fraction):
    groups = hashes_of(6)[[group for group, _ in pairs]]
    clusters = np.array([cluster for _, cluster in pairs])
    held_out = held_out_samples(groups, clusters, fraction)
    for cluster in set(clusters.tolist()):
        here = clusters == cluster
        assert not held_out[here].all()
        shared = set(groups[here].tolist()) & set(groups[~here].tolist())
        if fraction > 0 and not shared and len(set(groups[here].tolist())) > 1:
            assert held_out[here].any()
    assert all(len(set(held_out[groups == group].tolist())) == 1 for group in groups)


@pytest.mark.parametrize("size", [(7, 5), (96, 96), (90, 92), (210, 215)])
def test_moments_have_the_bits_of_one_sum_over_all_samples(size):
    stored = np.random.default_rng(0).integers(0, 256, (50, 3, *size), dtype=np.uint8)
    form = StoredForm("x_0", {"scale": [0.1, 0.2, 0.3], "shift": 127.5})
    x_0 = (stored - np.float64(127.5)) * np.array([0.1, 0.2, 0.3]).reshape(3, 1, 1)
    expected = [power.sum((0, 2, 3)) for power in (np.ones_like(x_0), x_0, x_0**2)]
    np.testing.assert_array_equal(_moments(torch.from_numpy(stored), form), expected)
