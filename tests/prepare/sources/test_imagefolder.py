import json
import re

import numpy as np
import pytest
from source_files import CAPTIONS, encoded, noise, read_all, write

from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import SOURCES
from ddm_lightning.prepare import records


def build(folder, **params):
    return SOURCES.build("imagefolder", {"path": folder, **params})


def samples(folder, **params):
    found = read_all(build(folder, **params), lambda: build(folder, **params))
    assert len({sample.key for sample in found}) == len(found)
    return {sample.key: sample for sample in found}


DOT = encoded(noise(2, 2, 3))


def dots(*names):
    return dict.fromkeys(names, DOT)


def lines(*rows):
    return "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)


def test_folders_are_classes_in_alphabetical_order(folder):
    images = {name: noise(5, 4, 3, seed=i) for i, name in enumerate(["dog/1.png", "cat/2.png", "dog/deep/3.PNG"])}
    write(folder, {name: encoded(pixels) for name, pixels in images.items()})
    found = samples(folder)
    assert list(found) == ["cat/2.png", "dog/1.png", "dog/deep/3.PNG"]
    assert [record.label for record in found.values()] == [0, 1, 1] and build(folder).num_classes == 2
    assert build(folder).class_names == ["cat", "dog"] and build(folder, labels=False).class_names == []
    for name, pixels in images.items():
        np.testing.assert_array_equal(found[name].image, pixels)
        assert found[name].caption == ""


def test_a_worker_does_not_list_the_folder_again(folder, monkeypatch):
    write(folder, dots("cat/a.png", "dog/a.png"))
    (part,) = build(folder).parts()
    worker = build(folder)
    monkeypatch.setattr(type(worker.files), "states", property(lambda _: pytest.fail("lists the folder")))
    assert [record.label for record in worker.read(part)] == [0, 1] and worker.num_classes == 2


@pytest.mark.parametrize(
    ("files", "labels"),
    [
        (dots("a.png", "b.png"), {"a.png": 0, "b.png": 0}),
        (dots("a.png", "x/b.png"), {"a.png": "outside the class folders", "x/b.png": 0}),
        # Of servers and trainers.
        (
            {**dots("a.png", "@eaDir/a.png/M.jpg", "__MACOSX/a.png"), "a.npz": b"PK", "desktop.ini": b"[x]"},
            {"a.png": 0},
        ),
    ],
    ids=["no folders", "an image outside", "files of others"],
)
def test_which_files_are_images_of_which_class(folder, files, labels):
    write(folder, files)

    found = samples(folder)

    assert {key: getattr(one, "cause", getattr(one, "label", None)) for key, one in found.items()} == labels
    assert build(folder).num_classes == 1
    assert {sample.label for sample in samples(folder, labels=False).values()} == {0}


def test_captions_from_text_files_arrive_unchanged(folder):
    texts = {**CAPTIONS, "bom": b"\xef\xbb\xbf" + "a café\r\n".encode(), "latin": "café".encode("latin-1")}
    write(folder, dots(*(f"{name}.png" for name in texts), "none.png"))
    write(folder, {f"{name}.txt": caption for name, caption in texts.items()})

    found = {key.removesuffix(".png"): sample for key, sample in samples(folder).items()}

    assert found.pop("latin").cause == "caption is not UTF-8"
    assert {key: one.caption for key, one in found.items()} == {**CAPTIONS, "none": "", "bom": "a café"}


def test_a_link_is_followed_and_a_dead_or_circular_one_is_counted(tmp_path):
    write(str(tmp_path / "in"), dots("a.png", "deep/b.png"))
    links = {"live.png": "a.png", "dead.png": "gone.png", "folder": "deep", "self.png": "self.png", "deep/up": "."}
    for name, to in links.items():
        (tmp_path / "in" / name).symlink_to(tmp_path / "in" / to)
    found = samples(str(tmp_path / "in"), labels=False)
    causes = {key: getattr(sample, "cause", None) for key, sample in found.items()}
    broken = {"dead.png": "missing file", "self.png": "unreadable file"}
    assert causes == {"a.png": None, "deep/b.png": None, "live.png": None, **broken}


def test_a_caption_file_may_lie_in_any_folder_and_be_written_elsewhere(folder):
    names = ["top.png", "train/a b.png", "train/deep/b.PNG", "test/c.png", "test/d.png", "e.png"]
    write(folder, dots(*names))
    train = lines({"file_name": "./a b.png", "caption": "one"}, {"file_name": "deep\\b.PNG", "caption": "two"})
    write(folder, {"train/metadata.jsonl": b"\xef\xbb\xbf" + train.encode(), "e.TXT": "five", "test/d.caption": "four"})
    write(folder, {"test/Metadata.csv": '\ufefffile_name ,caption\r\nc.png,"three, and ""more"""\r\n\r\n'})
    write(folder, {"top.png.txt": "top", "metadata.csv": "id,label\n1,2\n"})
    found = {key: sample.caption for key, sample in samples(folder, labels=False).items()}
    assert found == dict(zip(sorted(names), ["five", 'three, and "more"', "four", "top", "one", "two"], strict=True))
    assert {one.caption for one in samples(folder, labels=False, caption_column=None).values()} == {""}


@pytest.mark.parametrize("name", ["../b.png", "x/../../b.png", "/b.png"])
def test_a_caption_file_that_names_an_image_outside_is_refused(folder, name):
    write(folder, {"in/a.png": DOT, "b.png": DOT})
    write(folder, {"in/captions.jsonl": lines({"file_name": name, "caption": "x"})})
    with pytest.raises(UserError, match=r"captions\.jsonl': line 1: needs .*leads out of the folder"):
        build(f"{folder}/in").parts()


def test_captions_from_jsonl_arrive_unchanged(folder):
    write(folder, dots(*(f"{key}.png" for key in (*CAPTIONS, "unlisted"))))
    write(folder, {"plain.txt": "not this one"})
    rows = [{"file_name": f"{key}.png", "text": caption} for key, caption in CAPTIONS.items()]
    write(folder, {"captions.jsonl": lines(*rows, {"file_name": "gone.png", "text": "?"}) + "\n\n"})
    found = samples(folder, caption_column="text")
    gone = found.pop("gone.png")
    assert (gone.cause, gone.key) == ("missing file", "gone.png")
    captions = {key.removesuffix(".png"): record.caption for key, record in found.items()}
    assert captions == {**CAPTIONS, "unlisted": ""}


@pytest.mark.parametrize(
    ("files", "problem"),
    [
        (
            {"captions.jsonl": lines({"file_name": "a.png", "text": "x", "url": "y"})},
            "the caption files in {} (captions.jsonl) have no column 'caption'; they have: file_name, text, url; or",
        ),
        (
            {"captions.jsonl": lines({"file_name": "a.png", "caption": "x"})}
            | {"x/metadata.jsonl": lines({"file_name": "b.png", "text": "y"})},
            "the caption files in {} (x/metadata.jsonl) have no column 'caption'; they have: file_name, text; or",
        ),
        ({"captions.jsonl": "{}\nnonsense"}, "captions.jsonl': line 1: needs JSON with its own 'file_name'"),
        ({"captions.jsonl": lines({"file_name": "a.png"}) + "\n{nonsense"}, "captions.jsonl': line 2: needs JSON"),
        ({"captions.jsonl": b'{"file_name": "\xff"}'}, "captions.jsonl': line 1: needs JSON"),
        (
            {"captions.jsonl": lines(*[{"file_name": "a.png", "caption": "x"}] * 2)},
            "line 2: needs JSON with its own 'file_name'",
        ),
        (
            {"captions.jsonl": lines({"file_name": "a.png", "caption": 7})},
            "line 1: needs JSON with its own 'file_name'",
        ),
        ({"captions.jsonl": "", "metadata.jsonl": ""}, "has both captions.jsonl and metadata.jsonl; keep one"),
        (
            {"captions.jsonl": lines({"file_name": "x/a.png", "caption": "1"})}
            | {"x/metadata.csv": "file_name,caption\na.png,2\n"},
            "metadata.csv': line 2: needs JSON with its own 'file_name'",
        ),
        ({"captions.jsonl": "[" * 100_000}, "captions.jsonl': line 1: needs JSON"),
        ({"metadata.csv": "file_name,caption\na.png,a cat, asleep\n"}, "line 2: needs JSON with its own 'file_name'"),
        ({"metadata.csv": b"file_name,caption\na.png,caf\xe9\n"}, "metadata.csv': is no CSV file in UTF-8"),
        (
            {"metadata.csv": "file_name;text\na.png;x\n"},
            "its first line 'file_name;text' has no column file_name; separate",
        ),
        ({"metadata.csv": "text\tfile_name\nx\ta.png\n"}, "separate columns by commas"),
        ({"captions.csv": "image,caption\na.png,x\n"}, "its first line 'image, caption' has no column file_name"),
    ],
)
def test_a_caption_file_that_cannot_be_used_is_refused(folder, files, problem):
    write(folder, {"a.png": DOT, **files})
    with pytest.raises(UserError, match=re.escape(problem.format(repr(folder)))) as refusal:
        build(folder).parts()
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("name", ["metadata.json", "Captions.parquet", "captions.tsv"])
def test_a_caption_file_of_another_format_is_named(folder, name, capsys):
    write(folder, {"a.png": DOT, f"x/{name}": "{}", "x/scores.json": "{}"})
    write(folder, {"captions.jsonl": lines({"file_name": "a.png", "caption": "one"})})
    assert samples(folder)["a.png"].caption == "one"
    (line,) = capsys.readouterr().err.splitlines()
    assert f"x/{name}': is not read; captions may be in one of captions.jsonl, metadata.jsonl, captions.csv" in line


def test_files_of_unknown_formats_are_counted(folder):
    write(folder, {"drawing.svg": "<svg/>", "raw.heic": b"\0\0\0\x18ftypheic", "cut.jpg": b"", "dot.png": DOT})

    found = samples(folder)

    assert {key: getattr(sample, "cause", None) for key, sample in found.items()} == {
        "cut.jpg": "empty file",
        "dot.png": None,
        "drawing.svg": "no image",
        "raw.heic": "no image",
    }


def test_a_caption_column_without_a_caption_file_is_refused(folder):
    write(folder, {"a.png": DOT, "a.txt": "x"})
    with pytest.raises(UserError, match=r"caption_column': the caption files in .* \(none\) have no column 'text'"):
        build(folder, caption_column="text").parts()


def fingerprints(folder):
    return {part.name: part.fingerprint for part in build(folder).parts()}


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(records, "BLOCK_SIZE", 8)


def test_parts_are_blocks_that_change_with_what_they_hold(tmp_path, small_blocks):
    folder = str(tmp_path)
    write(folder, {f"{i:04}.png": DOT for i in range(80)})
    write(folder, {"0079.txt": "before"})
    parts, before = build(folder).parts(), fingerprints(folder)
    assert [name for part in parts for name, *_ in part.where["images"]] == [f"{i:04}.png" for i in range(80)]
    assert 5 <= len(before) == len(parts) <= 16
    write(folder, {"0079.txt": "afterwards"})
    after = fingerprints(folder)
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] != after[name]] == [parts[-1].name]
    write(folder, {"captions.jsonl": lines({"file_name": "0000.png", "caption": "new"})})
    assert fingerprints(folder)[parts[0].name] != before[parts[0].name]


def test_a_new_file_anywhere_changes_its_own_block_alone(tmp_path, small_blocks):
    folder = str(tmp_path)
    write(folder, {f"b/{i:04}.png": DOT for i in range(0, 160, 2)})
    before = fingerprints(folder)
    new = [*(f"b/{i:04}.png" for i in range(1, 160, 16)), "b/!.png", "b/~.png", "c/new-class.png"]
    for name in new:
        write(folder, {name: DOT})
        after = fingerprints(folder)
        # One that begins a block cuts the one in which it falls in two.
        assert len(after.items() - before.items()) <= 2 and len(before.items() - after.items()) <= 1, name
        before = after
    assert len(before) > 10
