import json
from pathlib import Path

import numpy as np
import pytest
import torch
from deadline import within
from shards.mds import COLUMNS, sample, write_mds

from ddm_lightning.core.errors import UserError
from ddm_lightning.shards.mds import open_shards
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
    "cluster": "uint16",
    "label": "uint8",
    "zz": "float32",
}
TEXTS = ["", "a", "Ω 🦊", "long " * 40]


def value_of(encoding, number, rng):
    if encoding == "str":
        return TEXTS[number % 4]
    if encoding == "json":
        return {"n": TEXTS[number % 3]}
    if encoding == "float32":
        return float(rng.standard_normal())
    if not encoding.startswith("ndarray"):
        return number

    _, dtype, shape = encoding.split(":")
    return (rng.standard_normal([*map(int, shape.split(","))]) * 100).astype(dtype)


@pytest.mark.parametrize("variable", VARIABLE)
def test_a_batch_is_what_streaming_reads_one_by_one(tmp_path, variable):
    texts = VARIABLE[variable]
    columns = FIXED | texts
    rng = np.random.default_rng(0)
    with MDSWriter(out=str(tmp_path), columns=columns, size_limit=1 << 11) as writer:
        for number in range(40):
            writer.write({name: value_of(encoding, number, rng) for name, encoding in columns.items()})

    shards = open_shards([tmp_path])
    ids = rng.permutation(40)[:30]
    batch = shards.take(ids)

    assert len(shards) == 40
    assert len(shards.sizes) > 3
    assert batch.keys() == FIXED.keys()
    one_by_one = StreamingDataset(local=str(tmp_path), batch_size=1)
    for name, values in batch.items():
        expected = [one_by_one[number][name] for number in ids.tolist()]
        np.testing.assert_array_equal(values.numpy(), expected)

    assert {batch[name].dtype for name in ("sample_id", "cluster", "label", "text_length")} == {torch.int64}
    for name in [name for name, encoding in texts.items() if encoding == "str"]:
        assert shards.texts(ids, name) == [one_by_one[number][name] for number in ids.tolist()]


def test_several_folders_are_concatenated_and_no_file_stays_open(tmp_path):
    folders = [write_mds(tmp_path / "a", range(30)), write_mds(tmp_path / "b", range(100, 140), cluster=1)]
    shards = open_shards(folders)
    before = len(list(Path("/proc/self/fd").iterdir()))
    batch = shards.take(np.array([29, 30, 0, 69]))

    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert batch["sample_id"].tolist() == [29, 100, 0, 139]
    for row, number in enumerate(batch["sample_id"].tolist()):
        np.testing.assert_array_equal(batch["x_0"][row].numpy(), sample(number, 0)["x_0"])


def test_an_unpacked_shard_can_be_read_after_another_rank_has_evicted_it(tmp_path):
    write_mds(tmp_path, range(9), compression="zstd", shard_bytes=1 << 16)
    (packed,) = tmp_path.glob("shard.*")
    assert open_shards([tmp_path]).take(np.arange(9))["sample_id"].tolist() == [*range(9)]

    packed.with_suffix("").write_bytes(decompress("zstd", packed.read_bytes()))
    shards = open_shards([tmp_path])
    for _ in range(2):
        assert shards.take(np.arange(9))["sample_id"].tolist() == [*range(9)]
        for path in tmp_path.glob("shard.*"):
            path.unlink()


def edit_index(folder, **changes):
    index = json.loads((folder / "index.json").read_text())
    index["shards"][0].update(changes)
    (folder / "index.json").write_text(json.dumps(index))


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

    with pytest.raises(ShardError, match=r"00000.mds: its samples do not have the columns that the index lists"):
        open_shards([tmp_path]).take(np.arange(9))


def test_clusters_of_different_columns_are_refused(tmp_path):
    write_mds(tmp_path / "a", range(3))
    write_mds(tmp_path / "b", range(3), columns={name: kind for name, kind in COLUMNS.items() if name != "text"})
    with pytest.raises(UserError, match="all with the same columns"):
        open_shards([tmp_path / "a", tmp_path / "b"])


def encoded(x_0, text="ndarray:float16:6"):
    return {"column_encodings": ["str", "int32", "int32", "int64", text, x_0]}


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"samples": 5}, "holds 17 samples instead of 5"),
        ({"samples": 10**9}, r"1000000000 samples in \d+ bytes"),
        ({"samples": 10**12}, "key 'samples'"),
        ({"samples": -1}, "key 'samples'"),
        ({"samples": "17"}, "key 'samples'"),
        ({"raw_data": {"basename": "shard.00000.mds", "bytes": 10**12, "hashes": {}}}, "key 'raw_data"),
        ({"raw_data": None}, "key 'raw_data"),
        ({"raw_data": {"basename": "../../etc/passwd", "bytes": 1 << 20, "hashes": {}}}, "leaves its folder"),
        ({"zip_data": {"basename": "../x", "bytes": 1}}, "key 'zip_data"),
        ({"zip_data": {"basename": "../x", "bytes": 1, "hashes": {}}}, "leaves its folder"),
        ({"format": "json"}, "'format' = 'json': must be one of mds"),
        ({"version": 3}, "'version' = 3: must be from 2 to 2"),
        ({"column_encodings": ["str", "int32"]}, "the shards' columns: "),
        (encoded("ndarray:uint8:3,100000,100000"), r"17 samples in \d+ bytes"),
        (encoded("ndarray:uint8:-3,-4,4"), "no fixed size, or does not hold numbers"),
        (encoded("ndarray:uint8:3,4,x"), "no fixed size"),
        (encoded("ndarray:uint8:0"), "no fixed size"),
        (encoded("ndarray:float16"), "no fixed size"),
        (encoded("png"), "'png' has no fixed size"),
        (encoded("ndarray:uint8:3,4,4", text="ndarray:O:6"), "does not hold numbers"),
    ],
    ids=str,
)
def test_an_index_that_contradicts_itself_or_its_shard_is_one_line(tmp_path, changes, words):
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
    with pytest.raises(ShardError, match=r"shard.00000.mds: index \d+ is out of bounds"):
        open_shards([tmp_path]).take(np.arange(1))
