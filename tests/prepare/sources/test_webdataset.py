import io
import json
import re
import tarfile
import warnings

import fsspec
import numpy as np
import pytest
from source_files import CAPTIONS, encoded, noise, read_all, tar_of, write

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOURCES
from ddm_lightning.prepare.records import BrokenSample

PNG = encoded(noise(2, 2, 3))


def laion(num_samples, first=0):
    """What img2dataset writes."""
    files = []
    for index in range(first, first + num_samples):
        key, caption = f"{index:09}", f"caption {index}"
        about = {
            "caption": caption,
            "url": f"https://host/{index}",
            "key": key,
            "status": "success",
            "class": index % 3,
        }
        files += [
            (f"{key}.jpg", encoded(noise(8, 8, 3, seed=index), "JPEG")),
            (f"{key}.txt", caption),
            (f"{key}.json", json.dumps(about)),
        ]
    return files


def samples(folder, **params):
    def build():
        return SOURCES.build("webdataset", {"path": folder, **params})

    return read_all(build(), build)


def test_tars_of_img2dataset(folder):
    write(folder, {"00000.tar": tar_of(laion(3)), "00001.tar": tar_of(laion(2, first=3)), "00000_stats.json": "{}"})
    write(folder, {"00000.parquet": b"?"})
    found = samples(folder, label_column="class", num_classes=3, group_column="url")
    assert [record.key for record in found] == [f"0000{i // 3}.tar/{i:09}" for i in range(5)]
    assert [record.caption for record in found] == [f"caption {i}" for i in range(5)]
    assert [record.label for record in found] == [0, 1, 2, 0, 1]
    assert [record.group for record in found] == [f"https://host/{i}" for i in range(5)]
    assert all(record.image.shape == (8, 8, 3) for record in found)
    assert len(SOURCES.build("webdataset", {"path": folder}).parts()) == 2


def library():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import webdataset

    return webdataset


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the library leaves files open
def test_samples_are_those_that_the_webdataset_library_finds(tmp_path):
    png = encoded(noise(4, 4, 3))
    files = [
        ("a/one.png", png), ("a/one.txt", "1"), ("a/one.seg.png", png), ("b/one.png", png), ("b/one.txt", "2"),
        ("two.TXT", "3"), ("two.Png", png), ("__meta__/x.png", png),
        ("__v.png", png), ("__v.txt", "6"), ("a/.hidden.png", png), ("a.b/three.x.txt", "no"),
        ("a.b/three.png", png), ("a.b/three.txt", "4"), ("./four.png", png), ("./four.txt", "ü" * 200),
        ("x" * 150 + ".png", png), ("x" * 150 + ".txt", "5"),
    ]  # fmt: skip
    path = tmp_path / "a.tar"
    for format in (tarfile.PAX_FORMAT, tarfile.GNU_FORMAT):
        path.write_bytes(tar_of(files, format))
        peer = library().WebDataset(str(path), shardshuffle=False, empty_check=False).decode("rgb8")
        # The library makes a sample "a/" of the hidden file, which macOS puts beside each image.
        rows = [sample for sample in peer if not sample["__key__"].endswith("/")]
        expected = [(f"a.tar/{row['__key__']}", row["txt"], row["png"]) for row in rows]
        found = samples(str(path))
        assert [(record.key, record.caption) for record in found] == [row[:2] for row in expected]
        for record, (_, _, pixels) in zip(found, expected, strict=True):
            np.testing.assert_array_equal(record.image, pixels)


def test_the_statistics_of_img2dataset_give_the_number_of_samples(folder):
    tars = {f"{number:05}": tar_of(laion(number + 1)) for number in range(5)}
    write(folder, {f"{name}.tar": tar for name, tar in tars.items()})
    stats = {"count": 9, "successes": 1, "failed_to_download": 8}  # the start of what it writes
    left = ["", json.dumps(stats), "[" * 100_000, '{"count": 9}', '{"successes": "4"}']
    write(folder, {f"{name}_stats.json": text for name, text in zip(tars, left, strict=True) if text})
    parts = SOURCES.build("webdataset", {"path": folder}).parts()
    assert [part.num_samples for part in parts] == [None, 1, None, None, None]


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # the library leaves files open
def test_of_two_captions_of_a_sample_the_first_counts_as_in_the_webdataset_library(tmp_path):
    files = [("a.png", PNG), ("a.txt", "1"), ("a.txt", "2"), ("b.txt", "3"), ("b.png", PNG), ("b.TXT", "4")]
    path = tmp_path / "a.tar"
    path.write_bytes(tar_of(files))

    # By default the library stops at the second.
    peer = library().WebDataset(str(path), shardshuffle=False, empty_check=False, handler=library().ignore_and_continue)

    expected = [(f"a.tar/{row['__key__']}", row["txt"].decode()) for row in peer]
    assert [(record.key, record.caption) for record in samples(str(path))] == expected
    assert expected == [("a.tar/a", "1"), ("a.tar/b", "3")]


def test_a_file_counts_before_a_key_of_its_name_in_the_json(tmp_path):
    about = json.dumps({"txt": "of the JSON", "cls": 2, "png": "no image"})
    files = [("a.png", PNG), ("a.txt", "of the file"), ("a.cls", "1"), ("a.json", about)]
    write(str(tmp_path), {"a.tar": tar_of(files)})

    (found,) = samples(str(tmp_path), label_column="cls", num_classes=3)

    assert (found.caption, found.label) == ("of the file", 1)


def test_captions_arrive_unchanged_from_text_and_from_json(folder):
    files = []
    for key, caption in CAPTIONS.items():
        files += [(f"{key}.png", PNG), (f"{key}.txt", caption), (f"{key}.json", json.dumps({"long": caption[::-1]}))]
    write(folder, {"a.tar": tar_of(files)})

    texts = list(CAPTIONS.values())
    for column, expected in (("txt", texts), ("long", [text[::-1] for text in texts]), (None, [""] * len(texts))):
        assert [record.caption for record in samples(folder, caption_column=column)] == expected


def test_every_bad_sample_is_counted(folder):
    files = [
        ("empty.png", b""), ("empty.txt", "x"),
        ("latin.png", PNG), ("latin.txt", "café".encode("latin-1")),
        ("text.txt", "no image"),
        ("both.png", PNG), ("both.jpg", PNG), ("both.txt", "x"),
        ("bare.png", PNG),
        ("json.png", PNG), ("json.txt", "x"), ("json.json", "{"),
        ("deep.png", PNG), ("deep.txt", "x"), ("deep.json", "[" * 100_000),
        ("null.png", PNG), ("null.json", '{"caption": null}'),
        ("noname", "?"),
        ("twice.png", PNG), ("twice.txt", "x"), ("twice.png", PNG), ("twice.txt", "y"),
    ]  # fmt: skip
    write(folder, {"a.tar": tar_of(files)})

    found = [(sample.key.removeprefix("a.tar/"), sample) for sample in samples(folder)]

    assert [(key, getattr(sample, "cause", None)) for key, sample in found] == [
        ("empty", "empty file"),
        ("latin", "caption is not UTF-8"),
        ("text", "no image"),
        ("both", "several images"),
        ("bare", None),
        ("json", "damaged JSON"),
        ("deep", "damaged JSON"),
        ("null", None),
        ("noname", "no extension"),
        ("twice", None),
        ("twice", None),
    ]
    assert dict(found)["null"].caption == ""
    chosen = {sample.key: sample for sample in samples(folder, image_column="png")}
    assert chosen["a.tar/both"].image.shape == (2, 2, 3)


@pytest.mark.parametrize(
    ("label", "expected"),
    [("2", 2), ("dog", 1), ("7", "unknown class"), ("x", "unknown class"), ("-1", "unknown class")],
)
def test_labels_in_a_member(tmp_path, label, expected):
    files = [("a.png", PNG), ("a.txt", ""), ("a.cls", label)]
    write(str(tmp_path), {"a.tar": tar_of(files)})
    (found,) = samples(str(tmp_path), label_column="cls", class_names=["cat", "dog", "cow"])
    assert (found.cause if isinstance(found, BrokenSample) else found.label) == expected


def test_a_tar_cut_anywhere_gives_what_was_before_and_says_that_something_is_missing(tmp_path):
    whole = tar_of(laion(4))
    write(str(tmp_path), {"1.tar": tar_of(laion(2, first=10))})
    with tarfile.open(fileobj=io.BytesIO(whole)) as tar:
        starts = [member.offset for member in tar]
    end = starts[-1] + 1024
    for length in (*starts, *(start + 300 for start in starts), *(start + 700 for start in starts), end):
        write(str(tmp_path), {"0.tar": whole[:length]})
        found = samples(str(tmp_path))
        keys = [record.key for record in found if not isinstance(record, BrokenSample)]
        num_whole = sum(start + 512 <= length for start in starts[3::3])
        assert keys[:-2] == [f"0.tar/{i:09}" for i in range(num_whole)]
        assert keys[-2:] == ["1.tar/000000010", "1.tar/000000011"], "the next tar is read"
        broken = [sample for sample in found if isinstance(sample, BrokenSample)]
        assert {sample.cause for sample in broken[:-1]} <= {"damaged tar"}
        assert (broken[-1].key, broken[-1].cause) == ("0.tar", "rest of a damaged tar")


def test_a_damaged_header_in_the_middle_is_no_end(tmp_path):
    whole = bytearray(tar_of(laion(4)))
    with tarfile.open(fileobj=io.BytesIO(bytes(whole))) as tar:
        at = [member.offset for member in tar][10]
    whole[at + 148] ^= 0xFF
    write(str(tmp_path), {"a.tar": bytes(whole)})
    found = samples(str(tmp_path))
    causes = [getattr(sample, "cause", None) for sample in found]
    assert causes == [None, None, None, "damaged tar", "rest of a damaged tar"]
    with tarfile.open(tmp_path / "a.tar") as tar:
        assert len(tar.getmembers()) == 10, "which tarfile alone takes for the end"


def test_what_follows_the_end_of_a_tar_is_read_or_counted(tmp_path):
    one, two = tar_of(laion(1)), tar_of(laion(1, first=1))
    with tarfile.open(fileobj=io.BytesIO(one)) as tar:
        second = tar.getmembers()[1].offset  # in both
    hole = one[:second] + bytes(512) + one[second + 512 :]  # as an interrupted download leaves it
    write(tmp_path, {"a.tar": one + two, "b.tar": one + two[:second], "c.tar": hole})
    found = [one.cause if isinstance(one, BrokenSample) else one.caption for one in samples(str(tmp_path))]
    damaged = ["damaged tar", "rest of a damaged tar"]
    assert found == ["caption 0", "caption 1", "caption 0", *damaged, *damaged]


def test_links_in_a_tar_are_read_or_counted(folder):
    first, second = PNG, encoded(noise(2, 2, 3, seed=1))
    links = [
        ("d/c.png", "d/a.png", tarfile.LNKTYPE), ("d/c.txt", "d/./b.txt", tarfile.LNKTYPE),
        ("d/e.png", "./b.png", tarfile.SYMTYPE), ("d/e.txt", "../d/c.txt", tarfile.SYMTYPE),
        ("d/f.png", "d/gone.png", tarfile.LNKTYPE), ("d/f.txt", "/etc/hostname", tarfile.SYMTYPE),
        ("d/g.png", "h.png", tarfile.SYMTYPE), ("d/h.png", "g.png", tarfile.SYMTYPE), ("d/all", ".", tarfile.SYMTYPE),
    ]  # fmt: skip
    buffer = io.BytesIO(tar_of([("d/a.png", first), ("d/a.txt", "one"), ("d/b.png", second), ("d/b.txt", "two")]))
    with tarfile.open(fileobj=buffer, mode="a") as tar:
        member = tarfile.TarInfo("d")
        member.type = tarfile.DIRTYPE
        tar.addfile(member)
        for name, target, kind in links:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            tar.addfile(member)
    write(folder, {"a.tar": buffer.getvalue()})
    found = {sample.key.removeprefix("a.tar/d/"): sample for sample in samples(folder)}
    captions = {key: getattr(sample, "caption", None) or sample.cause for key, sample in found.items()}
    expected = {"a": "one", "b": "two", "c": "two", "e": "two"} | dict.fromkeys("fgh", "missing file")
    assert captions == expected
    for key, seed in {"c": 0, "e": 1}.items():
        np.testing.assert_array_equal(found[key].image, noise(2, 2, 3, seed=seed))


def test_an_empty_tar_is_whole_and_an_empty_file_is_damaged(tmp_path):
    write(str(tmp_path), {"a.tar": tar_of(laion(2)), "b.tar": tar_of([]), "c.tar": b""})
    found = samples(str(tmp_path))
    assert [sample.key for sample in found] == [*(f"a.tar/{i:09}" for i in range(2)), "c.tar"]
    assert found[-1].cause == "rest of a damaged tar"


def test_a_connection_that_breaks_is_no_damaged_tar(tmp_path, monkeypatch):
    write(str(tmp_path), {"a.tar": tar_of(laion(2))})
    source = SOURCES.build("webdataset", {"path": str(tmp_path)})

    class Cut(io.BytesIO):
        def read(self, size=-1):
            raise ConnectionResetError("reset by peer")

    files = fsspec.filesystem("file")
    monkeypatch.setattr(type(files), "open", lambda *_: Cut())
    with pytest.raises(UserError, match=re.escape("a.tar' cannot be read: ConnectionResetError: reset by peer")):
        list(source.read(source.parts()[0]))


@pytest.mark.parametrize(
    ("params", "line"),
    [
        (
            {"caption_column": "text"},
            "caption_column': none of the first 2 samples of .*a.tar' has 'text'; they have: ",
        ),
        (
            {"image_column": "webp"},
            "image_column': none of the first 2 samples .* has 'webp'; they have: jpg, txt, json,",
        ),
        ({"label_column": "cls", "num_classes": 2}, "label_column': none of .* has 'cls'; .*; or set it to null"),
        ({"group_column": "album"}, "group_column': none of .* has 'album'"),
    ],
)
def test_a_column_that_the_first_samples_lack_is_refused_before_anything_is_read(tmp_path, params, line):
    write(str(tmp_path), {"a.tar": tar_of(laion(2))})
    with pytest.raises(UserError, match=line):
        SOURCES.build("webdataset", {"path": str(tmp_path), **params}).parts()


def test_samples_without_a_caption_have_an_empty_one_where_others_have_one(tmp_path):
    write(str(tmp_path), {"a.tar": tar_of([("a.png", PNG), ("a.txt", "a cat"), ("b.png", PNG)])})
    assert [record.caption for record in samples(str(tmp_path))] == ["a cat", ""]

    write(str(tmp_path), {"a.tar": tar_of([("a.png", PNG), ("b.png", PNG)])})
    with pytest.raises(UserError, match=r"caption_column.*has 'txt'; they have: png; or set it to null"):
        samples(str(tmp_path))
