import json

import numpy as np
import pytest
from streaming.base.format import reader_from_json

from ddm_lightning.config import ShardsConfig
from ddm_lightning.errors import UserError
from ddm_lightning.files import sha256_file
from ddm_lightning.prepare.encoders import Pixels
from ddm_lightning.prepare.shards import check_compression, held_out_samples, write_shards

NUM, K = 50, 3


@pytest.fixture
def samples():
    random = np.random.default_rng(0)
    return {
        "images": random.integers(0, 256, (NUM, 6, 6, 3), dtype=np.uint8),
        "keys": [f"key-{i}" for i in range(NUM)],
        "captions": [f"caption {i}, Åland" for i in range(NUM)],
        "labels": random.integers(0, 5, NUM).tolist(),
        "texts": random.standard_normal((NUM, 4)).astype(np.float32),
        "clusters": random.integers(0, K, NUM).astype(np.int32),
    }


def write(folder, samples, *, seed=0, fraction=0.2, tick=lambda *_: None, **shards):
    write_shards(
        folder,
        **samples,
        num_clusters=K,
        encoder=Pixels(),
        held_out_fraction=fraction,
        config=ShardsConfig(**shards),
        seed=seed,
        tick=tick,
    )


def hashes(folder):
    return {path.relative_to(folder).as_posix(): sha256_file(path) for path in folder.rglob("*") if path.is_file()}


def read(folder):
    shards = json.loads((folder / "index.json").read_text())["shards"]
    readers = [reader_from_json(str(folder.parent), folder.name, shard) for shard in shards]
    return [reader[i] for reader in readers for i in range(reader.samples)]


def test_each_sample_lies_once_in_its_clusters_folder_with_all_its_columns(tmp_path, samples):
    write(tmp_path / "shards", samples)
    seen = []
    for k in range(K):
        for split in ("train", "held-out"):
            for sample in read(tmp_path / "shards" / f"cluster-{k}" / split):
                i = int(sample["sample_id"])
                seen.append(i)
                assert sample["cluster"] == k == samples["clusters"][i]
                assert sample["caption"] == samples["captions"][i] and sample["label"] == samples["labels"][i]
                assert sample["x_0"].dtype == np.uint8
                np.testing.assert_array_equal(sample["x_0"], samples["images"][i].transpose(2, 0, 1))
                assert sample["text"].dtype == np.float16
                np.testing.assert_array_equal(sample["text"], samples["texts"][i].astype(np.float16))
    assert sorted(seen) == list(range(NUM))


def test_samples_lie_in_a_drawn_order(tmp_path, samples):
    for name, seed in (("a", 1), ("b", 2)):
        write(tmp_path / name, samples, seed=seed)
    orders = {name: [int(s["sample_id"]) for s in read(tmp_path / name / "cluster-0" / "train")] for name in "ab"}
    assert orders["a"] != sorted(orders["a"]) and orders["a"] != orders["b"]
    assert sorted(orders["a"]) == sorted(orders["b"])


@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_the_same_input_gives_the_same_bytes(tmp_path, samples, compression):
    for name in "ab":
        write(tmp_path / name, samples, max_bytes=1000, compression=compression)
    assert hashes(tmp_path / "a") == hashes(tmp_path / "b")
    index = json.loads((tmp_path / "a" / "cluster-0" / "train" / "index.json").read_text())
    assert len(index["shards"]) > 1, "the size limit splits the samples"
    assert index["shards"][0]["raw_data"]["hashes"].keys() == {"sha1", "xxh64"}
    assert (index["shards"][0]["zip_data"] is None) == (compression is None)


def test_no_text_column_without_a_caption_encoder(tmp_path, samples):
    write(tmp_path / "shards", {**samples, "texts": None})
    assert "text" not in read(tmp_path / "shards" / "cluster-1" / "train")[0]


def test_a_split_without_samples_has_no_folder(tmp_path, samples):
    ticks = []
    write(tmp_path / "shards", samples, fraction=0, tick=lambda *done: ticks.append(done))
    assert not list((tmp_path / "shards").glob("*/held-out"))
    assert ticks[-1] == (NUM, NUM) and len(ticks) == K


def test_a_failure_leaves_nothing_behind(tmp_path, samples):
    def stop(done, total):
        if done > NUM // 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "shards", samples, tick=stop)
    assert list(tmp_path.iterdir()) == []


def test_held_out_samples_do_not_depend_on_the_rest_of_the_data_set():
    keys = [f"key-{i}" for i in range(4000)]
    one_cluster = np.zeros(4000, dtype=np.int32)
    held_out = held_out_samples(keys, one_cluster, 1, 0.1)
    assert 0.085 < held_out.mean() < 0.115
    np.testing.assert_array_equal(held_out_samples(keys[::-1], one_cluster, 1, 0.1), held_out[::-1])
    np.testing.assert_array_equal(held_out_samples(keys[:1000], one_cluster[:1000], 1, 0.1), held_out[:1000])
    assert (held_out_samples(keys, one_cluster, 1, 0.2) >= held_out).all(), "a larger part contains the smaller one"


def test_each_cluster_of_two_or_more_has_samples_on_both_sides():
    keys = [f"key-{i}" for i in range(41)]
    clusters = np.array([*np.arange(20).repeat(2), 20])
    for fraction in (1e-6, 0.5):
        held_out = held_out_samples(keys, clusters, 22, fraction)
        np.testing.assert_array_equal(np.bincount(clusters, held_out, minlength=21)[:20], 1)
        assert not held_out[-1], "the only sample of a cluster is trained on"
    assert not held_out_samples(keys, clusters, 22, 0.0).any()


@pytest.mark.parametrize(("compression", "problem"), [("zip", "no such compression"), ("gz:3", "no two runs agree")])
def test_compressions_that_cannot_serve_are_refused(compression, problem):
    with pytest.raises(UserError, match=problem) as refusal:
        check_compression(ShardsConfig(compression=compression))
    assert "prepare.shards.compression" in str(refusal.value)
    check_compression(ShardsConfig(compression="zstd:3"))
    check_compression(ShardsConfig())
