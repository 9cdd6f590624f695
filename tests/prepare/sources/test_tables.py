"""Parquet, Hugging Face and MDS: what their own writers wrote."""

import io
import math
import re
import shutil
import zipfile

import datasets
import fsspec
import numpy as np
import pytest
from PIL import Image
from source_files import CAPTIONS, bad_images, encoded, noise, read_all, write, write_arrow, write_mds, write_parquet

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOURCES
from ddm_lightning.prepare import records
from ddm_lightning.prepare.records import BrokenSample

NAMES = ["cat", "dog", "cow"]


def build(source, folder, **params):
    return SOURCES.build(source, {"path": str(folder), **params})


def samples(source, folder, **params):
    return read_all(build(source, folder, **params), lambda: build(source, folder, **params))


def rows(num_rows):
    return [{"image": encoded(noise(3, 4, 3, seed=i)), "caption": f"row {i}", "label": i % 3} for i in range(num_rows)]


MDS = {"image": "bytes", "caption": "str", "label": "int"}
DOT = encoded(noise(2, 2, 3))


def told(samples, attribute="label"):
    """An attribute of each record, or the cause of a broken sample."""
    return [getattr(sample, attribute, None) if hasattr(sample, "image") else sample.cause for sample in samples]


FILES = {"parquet": "0.parquet", "huggingface": "0.arrow", "mds": "shard.00000.mds"}


def write_any(source, folder, table):
    if source == "parquet":
        write_parquet(folder, "0.parquet", table, row_group_size=100)
    elif source == "huggingface":
        write_arrow(folder, table)
    else:
        columns = {name: "str" if isinstance(table[0][name], str) else MDS[name] for name in table[0]}
        write_mds(folder, columns, table)


@pytest.fixture(params=FILES)
def source(request):
    return request.param


def test_rows_come_back_in_parts_of_about_512_and_more_in_a_large_source(source, tmp_path, monkeypatch):
    table = rows(1300)
    write_any(source, tmp_path, table)
    params = {"label_column": "label", "num_classes": 3, "group_column": "caption"}
    found = samples(source, tmp_path, **params)
    assert [record.key for record in found] == [f"{FILES[source]}:{i}" for i in range(1300)]
    assert [record.caption for record in found] == [row["caption"] for row in table]
    assert [record.group for record in found] == [row["caption"] for row in table]
    assert [record.label for record in found] == [row["label"] for row in table]
    for index in (0, 511, 512, 1299):
        np.testing.assert_array_equal(found[index].image, noise(3, 4, 3, seed=index))
    sizes = [part.num_samples for part in build(source, tmp_path, **params).parts()]
    assert sizes == ([512, 512, 276] if source == "mds" else [600, 500, 200]), "whole groups of 100 rows"
    monkeypatch.setattr(records, "LARGE_SOURCE", 1000)
    monkeypatch.setattr(records, "LARGE_BLOCK_SIZE", 700)
    assert [part.num_samples for part in build(source, tmp_path, **params).parts()] == [700, 600]


def test_captions_and_bad_images_arrive_as_they_are(source, tmp_path):
    bad = bad_images()
    table = [{"image": DOT, "caption": caption} for caption in CAPTIONS.values()]
    table += [{"image": content, "caption": name} for name, (content, _) in bad.items()]
    write_any(source, tmp_path, table)

    found = samples(source, tmp_path)

    assert told(found[: len(CAPTIONS)], "caption") == list(CAPTIONS.values())
    assert [getattr(one, "cause", None) for one in found[len(CAPTIONS) :]] == [cause for _, cause in bad.values()]
    assert {record.caption for record in samples(source, tmp_path, caption_column=None)[:3]} == {""}


@pytest.mark.parametrize(
    ("params", "role", "missing"),
    [
        ({"image_column": "jpg"}, "image_column", "jpg"),
        ({"caption_column": "text"}, "caption_column", "text"),
        ({"caption_column": ["caption", "text"]}, "caption_column", "text"),
        ({"label_column": "class", "num_classes": 2}, "label_column", "class"),
        ({"key_column": "id"}, "key_column", "id"),
        ({"group_column": "film"}, "group_column", "film"),
    ],
)
def test_a_missing_column_is_refused_by_name(source, tmp_path, params, role, missing):
    write_any(source, tmp_path, rows(2))
    problem = f"key 'prepare.source.params.{role}': '{tmp_path}: "
    with pytest.raises(UserError, match=re.escape(problem)) as refusal:
        build(source, tmp_path, **params).parts()
    assert f"has no column '{missing}'; it has: image, caption, label" in str(refusal.value).replace(
        "caption, image", "image, caption"
    )


def test_paths_are_relative_to_the_folder(source, tmp_path):
    pixels = noise(3, 3, 3)
    write("memory://elsewhere", {"b.png": encoded(pixels)})
    there = ["images/a.png", str(tmp_path / "images/a.png"), "memory://elsewhere/b.png"]
    table = [{"image": path, "caption": ""} for path in (*there, "gone.png", "nonsense://a")]
    write_any(source, tmp_path, table)
    write(str(tmp_path), {"images/a.png": encoded(pixels)})
    found = samples(source, tmp_path)
    for record in found[:3]:
        np.testing.assert_array_equal(record.image, pixels)
    assert [sample.cause for sample in found[3:]] == ["missing file", "unreadable file"]
    fsspec.filesystem("memory").store.clear()


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["2", "1", "0"], [2, 1, 0]),
        (["1", "2", "3"], ["unknown class", 0, 1]),  # digits from 1 on; 0 is none of them
        (["cat", "dog", "cow"], [0, 1, 2]),
        (["cat", "dog"], [0, 1, "unknown class"]),
    ],
)
def test_numbers_are_classes_or_the_names_of_classes(source, tmp_path, names, expected):
    write_any(source, tmp_path, rows(3))
    params = {"key_column": "caption", "label_column": "label", "class_names": names}

    found = samples(source, tmp_path, **params)

    assert told(found) == expected and build(source, tmp_path, **params).class_names == names
    assert [sample.key for sample in found] == ["row 0", "row 1", "row 2"]


def test_stored_class_names_that_are_numbers_do_not_renumber(tmp_path):
    features = datasets.Features(
        {"image": datasets.Value("binary"), "kind": datasets.ClassLabel(names=["1", "0", "7"])}
    )
    data = datasets.Dataset.from_dict({"image": [DOT] * 3, "kind": ["7", "1", "0"]}, features=features)
    data.save_to_disk(str(tmp_path))

    assert told(samples("huggingface", tmp_path, caption_column=None, label_column="kind")) == [2, 0, 1]


WHOLE = {"label": 0, "id": "a", "film": "f", "caption": "x"}
COLUMNS = {"label_column": "label", "num_classes": 1, "key_column": "id", "group_column": "film"}


@pytest.mark.parametrize(
    ("cells", "params", "attribute", "expected"),
    [
        (
            [{"label": value} for value in (math.inf, math.nan, 1.5, 1.0)],
            {"caption_column": None, "label_column": "label", "num_classes": 2},
            "label",
            ["unknown class"] * 3 + [1],
        ),
        (
            [{"id": key} for key in (b"\xff\x00", b"\xfe\x00", b"\x80\x01", b"a1")],
            {"caption_column": None, "key_column": "id", "group_column": "id"},
            "group",
            ["\\xff\0", "\\xfe\0", "\\x80\x01", "a1"],
        ),
        (
            [
                {"long": "a long one", "short": ["one", "two"]},
                {"long": None, "short": ["one", "two"]},
                {"long": "", "short": []},
                {"long": None, "short": None},
                {"long": " \n", "short": [" \n", None, "two"]},
            ],
            {"caption_column": ["long", "short"]},
            "caption",
            ["a long one", "one", "", "", "two"],
        ),
        (
            [{**WHOLE, name: None} for name in ("image", *WHOLE)],
            COLUMNS,
            "caption",
            ["no image", "no label", "no key", "no group", ""],
        ),
        ([{"image": 7, "caption": "x"}], {}, "caption", ["no image"]),
    ],
    ids=["labels", "binary keys", "several captions", "nulls", "no image"],
)
def test_odd_cells(tmp_path, cells, params, attribute, expected):
    write_parquet(tmp_path, "a.parquet", [{"image": DOT, **cell} for cell in cells])

    found = samples("parquet", tmp_path, **params)

    assert told(found, attribute) == expected
    if attribute == "group":
        assert [record.key for record in found] == expected


@pytest.mark.parametrize("to", ["parquet", "huggingface"])
def test_what_hugging_face_wrote(to, tmp_path):
    kinds = {"image": datasets.Image(), "text": datasets.Value("string"), "kind": datasets.ClassLabel(names=NAMES)}
    columns = {
        "image": [Image.fromarray(noise(3, 4, 3, seed=i)) for i in range(40)],
        "text": [f"é {i}" for i in range(40)],
        "kind": [i % 3 for i in range(40)],
    }
    data = datasets.Dataset.from_dict(columns, features=datasets.Features(kinds)).select(range(39, -1, -1))
    if to == "parquet":
        data.to_parquet(str(tmp_path / "a.parquet"), batch_size=16)
    else:
        data.save_to_disk(str(tmp_path), num_shards=3)
        shutil.copy(tmp_path / "data-00000-of-00003.arrow", tmp_path / "data-00000-of-00004.arrow")

    params = {"caption_column": "text", "label_column": "kind"}
    found = samples(to, tmp_path, **params)

    assert build(to, tmp_path, **params).class_names == NAMES
    assert [record.caption for record in found] == data["text"][:]
    assert [record.label for record in found] == data["kind"][:]
    for record, expected in zip(found, data["image"], strict=True):
        np.testing.assert_array_equal(record.image, np.asarray(expected))


def test_splits_of_a_dataset_dict(tmp_path):
    def split(word):
        return datasets.Dataset.from_dict({"image": [encoded(noise(2, 2, 3))] * 2, "caption": [word] * 2})

    both = datasets.DatasetDict(train=split("train"), test=split("test"))
    both.save_to_disk(str(tmp_path / "both"))
    assert {record.caption for record in samples("huggingface", tmp_path / "both", split="test")} == {"test"}
    for params in ({}, {"split": "validation"}):
        with pytest.raises(UserError, match=re.escape("'prepare.source.params.split'")) as refusal:
            build("huggingface", tmp_path / "both", **params).parts()
        assert "has the splits test, train; name one" in str(refusal.value)
    datasets.DatasetDict(train=split("train")).save_to_disk(str(tmp_path / "one"))
    assert len(samples("huggingface", tmp_path / "one")) == 2


def test_files_behind_a_url(source, folder, tmp_path):
    write_any(source, tmp_path / "made", rows(250))
    write(folder, {f"sub/{path.name}": path.read_bytes() for path in (tmp_path / "made").iterdir()})

    found = samples(source, folder)

    assert [record.caption for record in found] == [f"row {i}" for i in range(250)]
    assert found[0].key == f"sub/{FILES[source]}:0"


def test_arrow_files_of_the_other_format_and_no_caches(folder):
    write_arrow(folder, rows(250), file_format=True)
    write(folder, {"cache-0123.arrow": b"?"})

    assert [record.caption for record in samples("huggingface", folder)] == [f"row {i}" for i in range(250)]


def test_images_may_lie_behind_another_url(folder):
    write(folder + "-images", {"x/a.png": encoded(noise(3, 3, 3))})
    write_parquet(folder, "a.parquet", [{"path": "x/a.png", "caption": "a"}])

    (found,) = samples("parquet", folder, image_column="path", image_root=folder + "-images/")

    np.testing.assert_array_equal(found.image, noise(3, 3, 3))


@pytest.mark.parametrize("compression", [None, "zstd:3", "gz", "br:4"])
def test_mds_of_several_compressed_shards_in_folders(tmp_path, compression):
    for cluster in ("00", "01"):
        write_mds(tmp_path / cluster, MDS, rows(9), size_limit=500, compression=compression, hashes=["sha1"])

    found = samples("mds", tmp_path, label_column="label", num_classes=3)

    assert [record.caption for record in found] == [f"row {i}" for i in range(9)] * 2
    assert len({record.key for record in found}) == 18 and found[0].key == "00/shard.00000.mds:0"
    for index, record in enumerate(found[:9]):
        np.testing.assert_array_equal(record.image, noise(3, 4, 3, seed=index))


@pytest.mark.parametrize("encoding", ["jpeg", "png", "pil"])
def test_mds_encodings_of_images(tmp_path, encoding):
    image = Image.fromarray(noise(8, 8, 4), "CMYK") if encoding == "pil" else Image.fromarray(noise(8, 8, 3))
    columns = {"image": encoding, "caption": "str", "kind": "uint8", "id": "int32"}
    write_mds(tmp_path, columns, [{"image": image, "caption": "x", "kind": np.uint8(1), "id": np.int32(7)}])
    (found,) = samples("mds", tmp_path, label_column="kind", num_classes=2, key_column="id")
    from streaming.base.format.mds.encodings import mds_decode, mds_encode

    expected = mds_decode(encoding, mds_encode(encoding, image)).convert("RGB")
    np.testing.assert_array_equal(found.image, np.asarray(expected))
    assert (found.key, found.label) == ("7", 1)


def test_mds_images_whose_palette_was_not_stored_or_of_an_odd_mode_end_nothing(tmp_path):
    images = [Image.new("P", (4, 4)), Image.new("LA", (4, 4), (9, 255)).convert("La"), Image.new("L", (4, 4), 9)]
    images[0].putpalette(noise(256, 3).ravel().tolist())
    write_mds(tmp_path, {"image": "pil", "caption": "str"}, [{"image": image, "caption": "x"} for image in images])
    palette, premultiplied, grey = samples("mds", tmp_path)
    assert palette.cause == "unsupported pixels"
    assert premultiplied.image.tolist() == grey.image.tolist() == np.full((4, 4, 3), 9).tolist()


def test_an_index_that_is_too_deep_or_lists_what_is_not_there_is_refused(tmp_path):
    write(str(tmp_path / "mds"), {"index.json": "[" * 100_000})
    with pytest.raises(UserError, match=r"index\.json' is not an index of MDS shards: .*nested too deep"):
        build("mds", tmp_path / "mds").parts()
    datasets.Dataset.from_dict({"image": [b""], "caption": [""]}).save_to_disk(str(tmp_path / "arrow"))
    outside = '{"_data_files": [{"filename": "../other.arrow"}]}'
    wrong = dict.fromkeys(("5", "[" * 100_000), r"state\.json' lists no Arrow files") | {outside: "leads out of"}
    for state, problem in wrong.items():
        write(str(tmp_path / "arrow"), {"state.json": state})
        with pytest.raises(UserError, match=problem):
            build("huggingface", tmp_path / "arrow").parts()


def test_a_path_in_a_table_that_leads_out_of_the_folder_is_not_read(tmp_path):
    write(str(tmp_path), {"secret.png": DOT, "data/in.png": DOT})
    paths = ["in.png", "./in.png", "../secret.png", "x/../../secret.png", ".up/secret.png", "a\0b"]
    write_parquet(tmp_path / "data", "a.parquet", [{"image": path, "caption": "x"} for path in paths])
    (tmp_path / "data" / ".up").symlink_to(tmp_path)

    outside = "unreadable file"
    assert told(samples("parquet", tmp_path / "data"), "caption") == ["x", "x", *[outside] * 4]
    followed = told(samples("parquet", tmp_path / "data", follow_links=True), "caption")
    assert followed == ["x", "x", outside, outside, "x", outside]


def test_no_form_of_a_local_path_leads_out_of_the_folder(tmp_path):
    write(str(tmp_path), {"secret.png": DOT, "data/in.png": DOT})
    with zipfile.ZipFile(tmp_path / "secret.zip", "w") as archive:
        archive.writestr("a.png", DOT)
    inside = [f"{prefix}{tmp_path}/data/in.png" for prefix in ("", "file://", "local://")]
    outside = [f"{prefix}{tmp_path}/secret.png" for prefix in ("", "file://", "local://", "simplecache::file://")]
    outside += [f"file://{tmp_path}/data/../secret.png", f"zip://a.png::{tmp_path}/secret.zip"]
    outside += [f"zip://a.png::file://{tmp_path}/secret.zip"]
    table = [{"image": {"bytes": None, "path": path}, "caption": "x"} for path in (*inside, *outside)]
    write_parquet(tmp_path / "data", "a.parquet", table)

    found = samples("parquet", tmp_path / "data")

    assert [isinstance(one, BrokenSample) for one in found] == [False] * 3 + [True] * 7
    assert "leads out of" in found[3].detail and "key 'prepare.source.params.path'" in found[3].detail
    # The key that names the root allows them; a server as the root does not.
    assert told(samples("parquet", tmp_path / "data", image_root=str(tmp_path))[3:6]) == [0] * 3
    served = samples("parquet", tmp_path / "data", image_root="http://127.0.0.1:9/images")
    assert "leads out of" in served[3].detail


def test_pickled_columns_are_never_read(tmp_path):
    write_mds(tmp_path, {"image": "bytes", "caption": "pkl"}, [{"image": b"", "caption": "x"}])
    with pytest.raises(UserError, match="column 'caption' is pickled"):
        build("mds", tmp_path).parts()


def test_damage_inside_a_table_breaks_its_rows_and_no_others(source, tmp_path):
    write_any(source, tmp_path, rows(1100))
    built = build(source, tmp_path)
    parts = built.parts()
    path = tmp_path / FILES[source]
    content = bytearray(path.read_bytes())
    at = content.index(encoded(noise(3, 4, 3, seed=700)))
    if source == "mds":
        content[4 + 4 * 700 : 8 + 4 * 700] = b"\xff" * 4  # an offset
    elif source == "parquet":
        content[at - 6000 : at + 6000] = b"\xff" * 12_000
    else:  # the file ends in the middle, behind what parts() counted
        del content[at:]
    path.write_bytes(bytes(content))

    found = [sample for part in parts for sample in built.read(part)]

    assert len(found) == 1100, "every row is accounted for"
    broken = [index for index, sample in enumerate(found) if isinstance(sample, BrokenSample)]
    assert 700 in broken and 0 < len(broken) <= 600 and 0 not in broken
    assert {found[index].cause for index in broken} <= {"damaged table", "damaged shard"}
    assert found[700].key == f"{FILES[source]}:700"


@pytest.mark.parametrize("num_bytes", [0, 20_000])
@pytest.mark.parametrize("source", ["parquet", "huggingface"])
def test_a_connection_that_breaks_is_no_damaged_table(monkeypatch, source, num_bytes):
    write_any(source, "memory://cut", rows(1100))
    built = build(source, "memory://cut")
    parts = built.parts()

    class Cut(io.BytesIO):
        left = num_bytes

        def read(self, size=-1):
            content = super().read(size)
            # The end of the file is where its table of contents lies.
            self.left -= len(content) if self.tell() < len(self.getvalue()) - 2_000 or not num_bytes else 0
            if self.left < 0:
                raise ConnectionResetError("reset by peer")
            return content

    store = fsspec.filesystem("memory")
    monkeypatch.setattr(type(store), "_open", lambda self, path, *_, **__: Cut(self.store[path].getvalue()))
    with pytest.raises(UserError, match="cannot be read: ConnectionResetError: reset by peer; fix the address"):
        for part in parts:
            assert not [found for found in built.read(part) if isinstance(found, BrokenSample)]


def test_a_file_that_is_none_is_refused(source, tmp_path):
    write_any(source, tmp_path, rows(3))
    path = tmp_path / ("index.json" if source == "mds" else FILES[source])
    path.write_bytes(path.read_bytes()[:-20] if source != "huggingface" else b"nonsense")
    with pytest.raises(UserError, match=re.escape(path.name)) as refusal:
        build(source, tmp_path).parts()
    assert "\n" not in str(refusal.value)


def test_a_missing_shard_is_refused(tmp_path):
    write_mds(tmp_path, MDS, rows(3))
    (tmp_path / "shard.00000.mds").unlink()
    with pytest.raises(UserError, match=r"shard\.00000\.mds' does not exist"):
        build("mds", tmp_path).parts()


@pytest.mark.parametrize(
    ("params", "problem"),
    [
        ({"image_column": None}, r"params\.image_column': must be a string, is null"),
        ({"label_column": "label", "num_classes": -3}, "num_classes' = -3: must be at least 1"),
        ({"label_column": "label", "class_names": ["cat", "dog", "cat"]}, "class_names has a name twice"),
        ({"label_column": "label"}, "num_classes or class_names"),
        ({"label_column": "label", "num_classes": 2, "class_names": ["a"]}, "give one of num_classes and class_names"),
        ({"num_classes": 2}, "only with a label_column"),
        ({"caption_column": [1]}, "caption_column must be a name, a list of names or null"),
    ],
)
def test_params_that_contradict_each_other_are_refused(source, tmp_path, params, problem):
    write_any(source, tmp_path, rows(2))
    with pytest.raises(UserError, match=problem):
        build(source, tmp_path, **params)
