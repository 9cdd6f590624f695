import json

import numpy as np
import pytest
import torch
from deadline import within
from shards.mds import COLUMNS, sample, write_mds

from ddm_lightning.core.errors import UserError
from ddm_lightning.shards.mds import Layout, open_shards
from ddm_lightning.shards.mosaic import decompress
from ddm_lightning.shards.verify import ShardError

from streaming import MDSWriter, StreamingDataset  # isort: skip (after the shim)

# Columns lie in the order of their names: text between, before and behind those of fixed size, or none.
VARIABLE = {
    "none": {},
    "first": {"caption": "str"},
    "last": {"zeta": "str"},
    "between": {"middle": "str"},
    "several": {"caption": "str", "middle": "json", "zeta": "str"},
}
FIXED = {
    "x_0": "ndarray:float16:2,3,3",
    "x_0_flipped": "ndarray:float16:2,3,3",
    "text": "ndarray:float16:5",
    "text_ids": "ndarray:int32:7",
    "text_tokens": "ndarray:float16:7,4",
    "text_length": "int32",
    "sample_id": "int64",
    "cluster": "int32",
    "label": "int32",
    "zz": "float32",
}
TEXTS = ["", "a", "Ω 🦊", "long " * 40]


def value_of(encoding, number, rng):
    if encoding in ("str", "json"):
        return TEXTS[number % 4] if encoding == "str" else {"n": TEXTS[number % 3]}
    if encoding.startswith("ndarray"):
        _, dtype, shape = encoding.split(":")
        return (rng.standard_normal(tuple(map(int, shape.split(",")))) * 100).astype(dtype)
    return float(rng.standard_normal()) if encoding == "float32" else number


@pytest.mark.parametrize("variable", VARIABLE)
def test_a_batch_is_what_streaming_reads_one_by_one(tmp_path, variable):
    columns = FIXED | VARIABLE[variable]
    rng = np.random.default_rng(0)
    with MDSWriter(out=str(tmp_path), columns=columns, size_limit=1 << 11) as writer:
        for number in range(40):
            writer.write({name: value_of(encoding, number, rng) for name, encoding in columns.items()})
    shards = open_shards([tmp_path])
    assert len(shards) == 40 and len(shards.sizes) > 3
    ids = rng.permutation(40)[:30]
    batch = shards.take(ids)
    one_by_one = StreamingDataset(local=str(tmp_path), batch_size=1)
    assert next(iter(batch)) == "sample_id"
    assert set(batch) == set(FIXED)
    for row, number in enumerate(ids.tolist()):
        for name in FIXED:
            np.testing.assert_array_equal(batch[name][row].numpy(), one_by_one[number][name])


def test_several_folders_are_concatenated(tmp_path):
    folders = [write_mds(tmp_path / "a", range(30)), write_mds(tmp_path / "b", range(100, 140), cluster=1)]
    batch = open_shards(folders).take(np.array([29, 30, 0, 69]))
    assert batch["sample_id"].tolist() == [29, 100, 0, 139]
    for row, number in enumerate(batch["sample_id"].tolist()):
        np.testing.assert_array_equal(batch["x_0"][row].numpy(), sample(number, 0)["x_0"])


def test_an_unpacked_shard_can_be_read_after_another_rank_has_evicted_it(tmp_path):
    write_mds(tmp_path, range(9), compression="zstd", shard_bytes=1 << 16)
    (packed,) = tmp_path.glob("shard.*")
    packed.with_suffix("").write_bytes(decompress("zstd", packed.read_bytes()))
    shards = open_shards([tmp_path])
    for _ in range(2):
        assert shards.take(np.arange(9))["sample_id"].tolist() == [*range(9)]
        for path in tmp_path.glob("shard.*"):
            path.unlink()


def test_no_file_stays_open(tmp_path):
    from pathlib import Path

    shards = open_shards([write_mds(tmp_path, range(100))])
    before = len(list(Path("/proc/self/fd").iterdir()))
    shards.take(np.arange(100))
    assert len(list(Path("/proc/self/fd").iterdir())) == before


def edit_index(folder, **changes):
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0].update(changes)
    (folder / "index.json").write_text(json.dumps(index))


def test_an_index_that_does_not_fit_its_shard_is_refused(tmp_path):
    write_mds(tmp_path, range(17), shard_bytes=1 << 16)
    edit_index(tmp_path, samples=5)
    with pytest.raises(ShardError, match="holds 17 samples instead of 5"):
        open_shards([tmp_path]).take(np.arange(3))


@pytest.mark.parametrize(
    ("columns", "number", "by", "longer"),
    [
        ("fixed", -1, 4, 4),  # the last sample is too long
        ("fixed", 3, 4, 0),
        ("all", -1, 0, 4),  # bytes after the last sample
        ("all", 0, None, 0),  # the first sample begins among the offsets
    ],
)
def test_offsets_that_do_not_fit_their_shard_are_refused(tmp_path, columns, number, by, longer):
    kept = {name: kind for name, kind in COLUMNS.items() if columns == "all" or kind != "str"}
    write_mds(tmp_path, range(9), columns=kept, shard_bytes=1 << 16)
    open_shards([tmp_path]).take(np.arange(9))
    path = tmp_path / "shard.00000.mds"
    content = np.frombuffer(path.read_bytes() + bytes(longer), np.uint8).copy()
    offsets = content[4 : 4 + 4 * 10].view(np.int32)
    offsets[number] = 40 if by is None else offsets[number] + by
    path.write_bytes(content.tobytes())
    edit_index(tmp_path, raw_data={"basename": path.name, "bytes": len(content), "hashes": {}})
    with pytest.raises(ShardError, match=r"00000.mds: its samples do not have the columns that the index lists"):
        open_shards([tmp_path]).take(np.arange(9))


def test_labels_of_any_integer_type_are_int64(tmp_path):
    write_mds(tmp_path, range(9), columns=COLUMNS | {"label": "uint8", "cluster": "uint16"})
    batch = open_shards([tmp_path]).take(np.arange(9))
    assert batch["label"].dtype == batch["cluster"].dtype == torch.int64
    assert batch["label"].tolist() == [i % 5 for i in range(9)]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"sample_id": "int64", "x_0": "png"}, "columns: 'x_0': 'png' has no fixed size"),
        ({"sample_id": "int64", "x_0": "ndarray:float16"}, "no fixed size"),
        ({"x_0": "ndarray:float16:3"}, "columns: x_0: 'sample_id' is missing"),
    ],
)
def test_unusable_columns_are_refused(columns, words):
    sizes = [None if "float16" in kind or kind == "png" else 8 for kind in columns.values()]
    sizes = [6 if kind.endswith(":3") else size for kind, size in zip(columns.values(), sizes, strict=True)]
    with pytest.raises(UserError, match=words):
        Layout.of(list(columns), list(columns.values()), sizes)


def test_clusters_of_different_columns_are_refused(tmp_path):
    write_mds(tmp_path / "a", range(3))
    write_mds(tmp_path / "b", range(3), columns={name: kind for name, kind in COLUMNS.items() if name != "text"})
    with pytest.raises(UserError, match="all with the same columns"):
        open_shards([tmp_path / "a", tmp_path / "b"])


HUGE = [f"ndarray:uint8:{size}" for size in ("3,100000,100000", "-3,-4,4", "3,4,x", "0")]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": 10**9}, r"1000000000 samples in \d+ bytes"),
        ({"samples": 10**12}, "key 'samples'"),
        ({"samples": -1}, "key 'samples'"),
        ({"samples": "17"}, "key 'samples'"),
        ({"raw_data": {"basename": "shard.00000.mds", "bytes": 10**12, "hashes": {}}}, "key 'raw_data"),
        ({"raw_data": None}, "key 'raw_data"),
        ({"column_sizes": [None, 4, 4, 8, 12, 6000]}, "cannot have 6000 bytes"),
        ({"column_sizes": [None, 4, 4, 8, 12]}, "have no size"),
        ({"column_names": ["caption", "cluster", "label", "sample_id", "text", "text"]}, "listed twice"),
        *(
            ({"column_encodings": ["str", "int32", "int32", "int64", "ndarray:float16:6", x]}, "48 bytes|numbers")
            for x in HUGE
        ),
        ({"column_encodings": ["str", "int32", "int32", "int64", "ndarray:O:6", "ndarray:uint8:3,4,4"]}, "numbers"),
        ({"zip_data": {"basename": "../x", "bytes": 1}}, "key 'zip_data"),
        ({"format": "json"}, "not MDS"),
        ({"raw_data": {"basename": "../../etc/passwd", "bytes": 1, "hashes": {}}}, "leaves its folder"),
    ],
    ids=str,
)
def test_sizes_that_contradict_each_other_are_one_line(tmp_path, changes, words):
    write_mds(tmp_path, range(17), shard_bytes=1 << 16)
    edit_index(tmp_path, **changes)
    with within(10), pytest.raises(UserError, match=words) as refusal:
        open_shards([tmp_path]).take(np.arange(3))
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("content", ["[]", "{}", '{"shards": {}}', '{"shards": [1]}'])
def test_an_invalid_index_is_one_line(tmp_path, content):
    (tmp_path / "index.json").write_text(content)
    with pytest.raises(UserError, match="is not an index of MDS shards"):
        open_shards([tmp_path])


def test_a_text_longer_than_its_file_is_refused(tmp_path):
    columns = {"a": "str", "b": "str", "sample_id": "int64"}
    with MDSWriter(out=str(tmp_path), columns=columns) as writer:
        writer.write({"a": "one", "b": "two", "sample_id": 1})
    path = tmp_path / "shard.00000.mds"
    content = bytearray(path.read_bytes())
    begin = int.from_bytes(content[4:8], "little")
    content[begin : begin + 4] = b"\xff\xff\xff\x7f"
    path.write_bytes(content)
    with pytest.raises(ShardError, match=r"shard.00000.mds: a sample ends after the file"):
        open_shards([tmp_path]).take(np.arange(1))
