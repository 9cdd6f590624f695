"""Filters, keys to drop and columns to keep, against a plain loop over the rows."""

import io
import json
import math

import numpy as np
import pytest
from prepare.listed import Listener
from prepare.test_stages import stored_samples
from prepare.tiny_experiment import tiny_experiment
from rich.console import Console
from source_files import encoded, noise, tar_of, write_parquet

from ddm_lightning.config.experiment import ImagesConfig, PluginConfig, PrepareConfig
from ddm_lightning.config.validate import check_experiment
from ddm_lightning.core.errors import UserError
from ddm_lightning.prepare.dry_run import dry_run, dry_run_table
from ddm_lightning.prepare.filters import Filters, filter_table
from ddm_lightning.prepare.stages import prepare
from ddm_lightning.shards.manifest import Manifest

pytestmark = pytest.mark.usefixtures("quick_prepare")
NUM = 90


def rows():
    """Images of several sizes with scores, some of which are missing, and two broken images."""
    random = np.random.default_rng(0)
    for index in range(NUM):
        height, width = random.integers(8, 25, 2).tolist()
        yield {
            "key": f"k{index}",
            "image": b"" if index in (3, 50) else encoded(noise(height, width, 3, seed=index)),
            "caption": f"row {index}",
            "aesthetic": None if index % 17 == 4 else round(float(random.uniform(3, 8)), 2),
            "nsfw": ["UNLIKELY", "NSFW"][index % 5 == 0],
            "size": (height, width),
        }


def write_table(folder):
    table = [{name: value for name, value in row.items() if name != "size"} for row in rows()]
    write_parquet(folder, "0.parquet", table)
    return PluginConfig("parquet", {"path": str(folder), "key_column": "key"})


def write_tar(folder):
    folder.mkdir()
    files = []
    for row in rows():
        about = {name: row[name] for name in ("aesthetic", "nsfw", "caption")}
        files += [(f"{row['key']}.png", row["image"]), (f"{row['key']}.json", json.dumps(about))]
    (folder / "0.tar").write_bytes(tar_of(files))
    return PluginConfig("webdataset", {"path": str(folder)})


FILTERS = {"min_side": 12, "aesthetic": ">= 4.5", "nsfw": "!= NSFW"}


def experiment_of(source, **changes):
    changes = {"max_bad_fraction": 0.1, "images": ImagesConfig(size=8), "filters": dict(FILTERS), **changes}
    experiment = tiny_experiment(**changes)
    experiment.prepare.source = source
    experiment.prepare.partition.max_largest_over_mean = 2.0
    return experiment


def taken_out(drop=()):
    """Filter by key, as a loop finds them; None for a sample that stays."""
    found = {}
    for row in rows():
        cause = None
        if not row["image"]:
            cause = "empty file"
        elif row["key"] in drop:
            cause = "in drop_keys"
        elif min(row["size"]) < 12:
            cause = "not min_side >= 12"
        elif row["aesthetic"] is None:
            cause = "no aesthetic"
        elif row["aesthetic"] < 4.5:
            cause = "not aesthetic >= 4.5"
        elif row["nsfw"] == "NSFW":
            cause = "not nsfw != NSFW"
        found[row["key"]] = cause
    return found


def counts(causes):
    return {cause: list(causes).count(cause) for cause in sorted(set(causes) - {None, "empty file"})}


@pytest.mark.parametrize("write", [write_table, write_tar])
def test_the_table_of_filters_adds_up_to_the_number_read(tmp_path, write):
    expected = taken_out()
    listener = Listener()
    # Broken samples count against the limit, filtered ones do not.
    experiment = experiment_of(write(tmp_path / "data"), max_bad_fraction=2 / NUM)
    manifest = prepare(experiment, tmp_path / "run", listener)
    assert manifest.filtered == counts(expected.values()) and len(manifest.filtered) == 4
    assert manifest.broken == {"empty file": 2}
    assert manifest.num_samples == list(expected.values()).count(None)
    assert manifest.num_read == NUM == manifest.num_samples + 2 + sum(manifest.filtered.values())
    assert Manifest.read(tmp_path / "run") == manifest
    words = ", ".join(f"{cause}: {count}" for cause, count in sorted(manifest.filtered.items()))
    (line,) = (line for line in listener.lines if line.startswith("index:"))
    assert f"; taken out by filters: {words}; skipped: empty file: 2; see" in line


def test_kept_columns_are_in_the_shards(tmp_path):
    (tmp_path / "drop.txt").write_text("k2\nk7\nnone\n", encoding="utf-8-sig")
    keep = ["aesthetic", "image_height", "image_width", "crop_top", "crop_left"]
    changes = {"keep": keep, "drop_keys": str(tmp_path / "drop.txt"), "filters": {"aesthetic": None}}
    manifest = prepare(experiment_of(write_table(tmp_path / "data"), **changes), tmp_path)
    assert manifest.filtered == {"in drop_keys": 2}
    assert {name: manifest.columns[name] for name in keep} == dict.fromkeys(keep, "float64")
    found = {one["caption"]: [one[name] for name in keep] for one in stored_samples(tmp_path)}
    expected = {}
    for row in rows():
        if row["image"] and row["key"] not in ("k2", "k7"):
            (height, width), shorter = row["size"], min(row["size"])
            # Of the image scaled to a shorter side of 8, the middle 8 x 8 pixels are used.
            top, left = (height * 8 / shorter - 8) / 2, (width * 8 / shorter - 8) / 2
            score = math.nan if row["aesthetic"] is None else row["aesthetic"]
            expected[row["caption"]] = (score, height, width, top, left)
    assert found.keys() == expected.keys()
    for caption, values in found.items():
        np.testing.assert_allclose(values[:3], expected[caption][:3])
        np.testing.assert_allclose(values[3:], expected[caption][3:], atol=0.5)


def test_another_column_of_the_same_numbers_is_kept_under_its_own_name(tmp_path):
    for name in ("image_width", "image_height"):  # of square images
        manifest = prepare(tiny_experiment(keep=[name]), tmp_path)
        assert [column for column in manifest.columns if column.startswith("image_")] == [name]
        (shards, *_) = (tmp_path / "prepared" / "shards").glob("*/*/index.json")
        assert name in json.loads(shards.read_text())["shards"][0]["column_names"]


def test_another_list_of_keys_is_applied(tmp_path):
    drop = tmp_path / "drop.txt"
    experiment = experiment_of(write_table(tmp_path / "data"), drop_keys=str(drop))
    with pytest.raises(UserError, match=r"key 'prepare\.drop_keys': .*drop\.txt cannot be read.*; change the path"):
        prepare(experiment, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    for keys in (["k1", "k2"], ["k8"]):
        drop.write_text("\n".join(keys))
        assert prepare(experiment, tmp_path / "run").filtered == counts(taken_out(keys).values())


def test_a_list_of_keys_that_matches_nothing_is_told(tmp_path, capsys):
    (tmp_path / "drop.txt").write_text("0.parquet:1\n0.parquet:2\n")
    experiment = experiment_of(write_table(tmp_path / "data"), drop_keys=str(tmp_path / "drop.txt"), filters={})
    assert dry_run(experiment, tmp_path / "run").looked.filtered == {"in drop_keys": 0}
    listener = Listener()
    assert prepare(experiment, tmp_path / "run", listener).filtered == {"in drop_keys": 0}
    assert any("; taken out by filters: in drop_keys: 0" in line for line in listener.lines)
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("note: "))
    assert line == "note: key 'prepare.drop_keys': no key of the file is a sample's, such as 'k0'"
    (tmp_path / "drop.txt").write_text("k1\nother\n")
    assert prepare(experiment, tmp_path / "run").filtered == {"in drop_keys": 1}
    assert "note" not in capsys.readouterr().err


def test_a_dry_run_estimates_what_filters_take_out(tmp_path):
    experiment = experiment_of(write_table(tmp_path / "data"))
    plan = dry_run(experiment, tmp_path / "run")
    expected = taken_out().values()
    looked = plan.looked
    num_kept = list(expected).count(None)
    assert (looked.num_read, len(looked.broken), dict(looked.filtered)) == (NUM, 2, counts(expected))
    assert plan.num_kept == num_kept

    console = Console(file=io.StringIO(), width=120)
    console.print(dry_run_table(plan, 1))
    console.print(filter_table(NUM, looked.filtered, 2, "filters"))
    text = console.file.getvalue()
    assert f"samples: {NUM}, about {num_kept} after filters" in text
    cells = [line.rsplit(maxsplit=2) for line in text[text.rindex("filters") :].splitlines() if "%" in line]
    table = {name.strip(): int(number) for name, number, _ in cells}
    assert table.pop("read") == NUM == sum(table.values()) and table["kept"] == num_kept
    experiment.prepare.filters = {"min_side": 100}
    with pytest.raises(UserError, match=r"no sample can be read \(empty file, not min_side >= 100\)"):
        dry_run(experiment, tmp_path / "run")


@pytest.mark.parametrize("write", [write_table, write_tar])
def test_a_column_that_no_sample_has_is_refused(tmp_path, write):
    source = write(tmp_path / "data")
    with pytest.raises(UserError, match=r"^key 'prepare\.filters\.beauty': .*'beauty'.*aesthetic"):
        prepare(experiment_of(source, filters={"beauty": "> 1"}), tmp_path / "run")
    with pytest.raises(UserError, match=r"^key 'prepare\.keep': .*'beauty'.*aesthetic"):
        prepare(experiment_of(source, keep=["beauty"]), tmp_path / "run")
    with pytest.raises(UserError, match=r"key 'prepare\.filters\.x': source 'blobs' has no column 'x'.*min_side"):
        prepare(tiny_experiment(filters={"x": "> 1"}), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    with pytest.raises(UserError, match=r"sample '\S*k0' has 'NSFW' in column 'nsfw'; remove it from prepare\.keep"):
        prepare(experiment_of(source, keep=["nsfw"], filters={}), tmp_path / "run")
    if write is write_table:
        with pytest.raises(UserError, match=r"has b'.* in column 'image'; remove it from prepare\.keep"):
            prepare(experiment_of(source, keep=["image"], filters={}), tmp_path / "run")


@pytest.mark.parametrize(
    ("conditions", "out", "kept"),
    [
        (["!= True", "!= true", "!= 1", "== False", "== 'False' "], True, False),
        (["!= NSFW", "!= NSFW ", "!= 'NSFW'", '!= "NSFW"'], "NSFW", "nsfw"),
        (["== NSFW"], b"nsfw", b" NSFW "),
    ],
    ids=["truth", "words", "bytes"],
)
def test_truth_and_words_are_compared_however_they_are_written(conditions, out, kept):
    for condition in conditions:
        filters = Filters(PrepareConfig(filters={"nsfw": condition}))
        assert filters.cause("a", {"nsfw": out}) and filters.cause("b", {"nsfw": kept}) is None


def test_what_filters_leave_nothing_of_is_told(tmp_path):
    with pytest.raises(UserError, match=r"no usable samples; taken out by filters: not min_side >= 100: 60; fix"):
        prepare(tiny_experiment(filters={"min_side": ">= 100"}), tmp_path)


@pytest.mark.parametrize("condition", ["5", ">= five", "> ", "=> 5", "aesthetic", 5, True, ["> 5"], ">= nan"])
def test_a_malformed_condition_is_refused(condition):
    with pytest.raises(
        UserError, match=r"^FILE: key 'prepare\.filters' = .*'score' must be a comparison with a number"
    ):
        check_experiment(tiny_experiment(filters={"score": condition}), "FILE")


@pytest.mark.parametrize("keep", [["label"], ["text"], ["score", "score"], ["caption_2"]])
def test_a_column_that_the_shards_have_already_is_refused(keep):
    with pytest.raises(UserError, match=r"^FILE: key 'prepare\.keep' = .*remove it$"):
        check_experiment(tiny_experiment(keep=keep), "FILE")
