import json
import resource
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from prepare.listed import Listed, experiment_of, plug_in, record, records
from prepare.test_stages import stored_samples

from ddm_lightning.config.experiment import CaptionConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import CAPTION_ENCODERS, FEATURES, IMAGE_ENCODERS, SOURCES
from ddm_lightning.partition.columns import Rows
from ddm_lightning.partition.partition import Partition, Samples
from ddm_lightning.prepare import merge
from ddm_lightning.prepare import prepared as prepared_files
from ddm_lightning.prepare.encode import check_broken
from ddm_lightning.prepare.prepared import Prepared, Thumbnails
from ddm_lightning.prepare.records import BrokenSample
from ddm_lightning.prepare.stages import prepare
from ddm_lightning.shards.manifest import Manifest

pytestmark = pytest.mark.usefixtures("quick_prepare")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Prepare given parts; gives the manifest, the folder and what ``broken.jsonl`` lists."""

    def prepared_of(parts, **changes):
        changes = {"max_bad_fraction": 0.9, **changes}
        experiment = experiment_of(plug_in(monkeypatch, SOURCES, Listed(parts)), **changes)
        manifest = prepare(experiment, tmp_path)
        prepared = Prepared(tmp_path / "prepared")
        return manifest, prepared, [json.loads(line) for line in prepared.broken_file.read_text().splitlines()]

    return prepared_of


def sick(plug_in_class, sick_rows, **attributes):
    """A plug-in whose output is not finite for images, or captions, that ``sick_rows`` picks."""

    class Sick(plug_in_class):
        def encode(self, given):
            rows = super().encode(given)
            bad = np.array([sick_rows(one) for one in given], bool)
            for array in rows.values() if isinstance(rows, dict) else [rows]:
                array[bad, ..., 0] = np.nan
            return rows

    return Sick(**attributes)


def test_the_first_bearer_of_a_key_stays_within_a_part_and_across_parts(run):
    first = [record("x", caption="first x"), *records(20), record("x", caption="second x")]
    second = [*records(20, "b"), record("a3", caption="another a3"), record("x", caption="third x")]
    manifest, prepared, broken = run({"one": first, "two": second})
    assert manifest.broken == {"duplicate key": 3}
    assert (manifest.num_read, manifest.num_samples) == (44, 41)
    keys, captions = list(prepared.texts("keys")), list(prepared.texts("captions"))
    assert keys == ["x", *(f"a{i}" for i in range(20)), *(f"b{i}" for i in range(20))]
    assert captions[0] == "first x" and captions[4] == "image of a3"
    assert [(line["part"], line["key"]) for line in broken] == [("one", "x"), ("two", "a3"), ("two", "x")]
    assert {line["cause"] for line in broken} == {"duplicate key"}


def test_what_cannot_be_used_is_found_in_every_chunk_and_its_key_is_given_to_the_next(run, monkeypatch):
    """Chunks of 64 images."""
    features = FEATURES.build("pooled-pixels", {})
    sick_ones = [record(name).image for name in ("a3", "a70")]
    plugin = plug_in(
        monkeypatch, FEATURES, sick(type(features), lambda image: any(np.array_equal(image, one) for one in sick_ones))
    )

    manifest, prepared, broken = run(
        {"one": [*records(80), record("a3", size=8, image=sick_ones[0] ^ 1)]}, features=plugin
    )

    assert manifest.broken == {"features are not finite": 2} and manifest.num_samples == 79
    assert [line["key"] for line in broken] == ["a3", "a70"]
    assert list(prepared.texts("keys")) == [*(f"a{i}" for i in range(80) if i not in (3, 70)), "a3"]


def test_what_is_broken_is_counted_by_cause_listed_and_left_out(run, monkeypatch):
    sources = {
        "one": [
            BrokenSample("p", "empty file"),
            *records(15),
            BrokenSample("q", "truncated image", "12 of 99 bytes"),
            record("lone", caption="\ud800"),
        ],
        "nothing": [BrokenSample("r", "empty file")],
        "two": records(15, "b"),
    }
    pixels, pooled = IMAGE_ENCODERS.build("pixels", {}), FEATURES.build("pooled-pixels", {})
    words = CAPTION_ENCODERS.build("hashed-words", {})
    first = {name: record(name).image for name in ("a2", "b3")}

    class Floats(type(pixels)):
        dtype = "float32"

        def encode(self, images):
            bad = np.array([np.array_equal(image, first["a2"]) for image in images])
            rows = images.transpose(0, 3, 1, 2).astype(np.float32)
            rows[bad, 0, 0, 0] = np.inf
            return rows

    manifest, prepared, broken = run(
        sources,
        image_encoder=plug_in(monkeypatch, IMAGE_ENCODERS, Floats()),
        features=plug_in(monkeypatch, FEATURES, sick(type(pooled), lambda image: np.array_equal(image, first["b3"]))),
        caption_encoder=plug_in(
            monkeypatch, CAPTION_ENCODERS, sick(type(words), lambda text: text == "image of a5", size=8)
        ),
    )
    assert manifest.broken == {
        "empty file": 2,
        "encoded caption is not finite": 1,
        "encoded image is not finite": 1,
        "features are not finite": 1,
        "text that UTF-8 cannot hold": 1,
        "truncated image": 1,
    }
    assert (manifest.num_read, manifest.num_samples) == (34, 27)
    expected = {
        ("one", "p", "empty file", ""),
        ("one", "q", "truncated image", "12 of 99 bytes"),
        ("nothing", "r", "empty file", ""),
        ("one", "a2", "encoded image is not finite", ""),
        ("one", "a5", "encoded caption is not finite", ""),
        ("two", "b3", "features are not finite", ""),
    }
    found = {(line["part"], line["key"], line["cause"], line["detail"]) for line in broken}
    (lone,) = found - expected
    assert lone[2] == "text that UTF-8 cannot hold" and expected < found and len(broken) == 7
    keys = {*(f"a{i}" for i in range(15)), *(f"b{i}" for i in range(15))} - {"a2", "a5", "b3"}
    assert set(prepared.texts("keys")) == keys
    x_0 = prepared.rows("x_0")[:]
    for key, row in zip(prepared.texts("keys"), x_0, strict=True):
        np.testing.assert_array_equal(row, record(key).image.transpose(2, 0, 1))


def test_rows_left_out_of_a_column_that_is_gone_come_back(run, monkeypatch):
    """Without the caption encoder nobody minds that it failed on a caption."""
    words = CAPTION_ENCODERS.build("hashed-words", {})
    sick_words = plug_in(monkeypatch, CAPTION_ENCODERS, sick(type(words), lambda text: text == "image of a5", size=8))
    manifest, *_ = run({"one": records(30)}, caption_encoder=sick_words)
    assert manifest.num_samples == 29
    manifest, *_ = run({"one": records(30)}, caption_encoder=None)
    assert manifest.num_samples == 30 and manifest.broken == {}


def test_thumbnails_are_of_rows_that_are_kept(run):
    _, prepared, _ = run({"one": [record("a4"), *records(20)], "two": [*records(5), *records(12, "b")]})
    found = Thumbnails.read([prepared.folder / "groups" / "00000.npz"])
    assert found.captions == [f"image of {key}" for key in prepared.texts("keys")]
    for image, caption in zip(found.images, found.captions, strict=True):
        np.testing.assert_array_equal(image, record(caption.removeprefix("image of ")).image)
    np.testing.assert_array_equal(found.clusters, prepared.clusters)


def test_too_many_broken_samples_stop_it_before_the_partition(run, tmp_path):
    samples = [*(BrokenSample(f"bad{i}", "empty file") for i in range(4)), *records(36)]
    with pytest.raises(UserError, match=r"4 of 40 samples cannot be used \(empty file: 4\)"):
        run({"one": samples}, max_bad_fraction=0.09)

    assert len((tmp_path / "prepared" / "broken.jsonl").read_text().splitlines()) == 4, "to be looked at"
    assert not (tmp_path / "prepared" / "index.json").exists()
    with pytest.raises(UserError, match="run prepare first"):
        Manifest.read(tmp_path)
    assert run({"one": samples}, max_bad_fraction=0.1)[0].num_samples == 36


def test_far_too_many_broken_samples_stop_it_early(monkeypatch, tmp_path):
    parts = {f"part {i}": [BrokenSample(f"{i}-{j}", "unreadable URL") for j in range(600)] for i in range(5)}
    source = Listed(parts)
    experiment = experiment_of(plug_in(monkeypatch, SOURCES, source), max_bad_fraction=0.2)
    experiment.condition.kind = "none"
    with pytest.raises(UserError, match="1200 of 1200 samples cannot be used"):
        prepare(experiment, tmp_path)

    assert "part 1" in source.reads and "part 2" not in source.reads


def test_the_fraction_counts_after_enough_samples_and_is_not_exceeded_by_being_met(tmp_path):
    here = tmp_path / "broken.jsonl"
    check_broken({"empty file": 500}, 999, 0.1, here)
    check_broken({"empty file": 60, "truncated image": 40}, 1000, 0.1, here)
    with pytest.raises(UserError) as refusal:
        check_broken({"truncated image": 41, "empty file": 60}, 1000, 0.1, here)
    assert str(refusal.value) == (
        f"{here}: 101 of 1000 samples cannot be used (empty file: 60, truncated image: 41), more than "
        "prepare.max_bad_fraction = 0.1 allows; fix the source or raise that limit"
    )
    with pytest.raises(UserError, match=r"1 of 1 samples.*raise that limit$"):
        check_broken({"empty file": 1}, 1, 0.5, here, enough=1)


def test_empty_captions_are_counted_of_the_samples_that_can_be_used(run):
    first = [record("a", caption=""), record("b", caption="b"), record("b", caption="")]
    manifest, prepared, _ = run({"one": first, "two": records(20), "three": [record("c", caption="")]})
    assert manifest.num_without_caption == 2 and prepared.index["num_without_caption"] == 2


def test_a_source_of_which_nothing_is_left_is_refused(run):
    broken = [BrokenSample(f"{number}", "empty file") for number in range(26)]
    with pytest.raises(UserError, match=r"has no usable samples; fix prepare\.source"):
        run({"one": broken}, max_bad_fraction=1.0)


def test_a_source_without_parts_is_refused_before_anything_is_written(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"'made-up': has no samples; fix prepare\.source"):
        prepare(experiment_of(plug_in(monkeypatch, SOURCES, Listed({}))), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_parts_of_several_image_sizes_are_named(run):
    with pytest.raises(UserError, match=r"8 pixels in 'one', 12 pixels in 'three'.*set prepare.images.size"):
        run({"one": records(20), "two": [BrokenSample("x", "empty file")], "three": records(20, "c", size=12)})


def test_neither_open_files_nor_maps_grow_with_the_number_of_parts(run):
    parts = {f"part {number}": records(2, f"{number}-") for number in range(60)}
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    num_open = len([*Path("/dev/fd").iterdir()])
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_open + 40, before[1]))
    try:
        _, prepared, _ = run({**parts, "again": parts["part 7"]})
        kept = [prepared.rows("features"), prepared.texts("captions")]
        kept += [prepared.rows("x_0"), prepared.rows("text")]
        assert {len(rows[:]) for rows in kept} == {120}
        assert len([*Path("/dev/fd").iterdir()]) < num_open + 20
        if Path("/proc/self/maps").exists():
            assert str(prepared.folder / "parts") not in Path("/proc/self/maps").read_text()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def with_columns(part):
    """Eighteen samples to keep, in part a 19; a broken file, a key, a filter or their likes take out the others."""
    rows = {"same": record("same", image=record(f"{part} same").image)} | {one.key: one for one in records(20, part)}
    rows[f"{part}copy"] = record(f"{part}copy", image=np.minimum(rows[f"{part}5"].image, 254) + 1)
    yield BrokenSample("x", "empty file")
    for number, (key, made) in enumerate(rows.items()):
        score = 9.0 if key == "same" else number / 2
        yield replace(made, values={"first": f"1 {key}", "second": f"2 {key}", "score": score})


def test_all_features_at_once_store_every_sample_as_it_came(tmp_path, monkeypatch):
    """Over several groups of parts, and fitted on half of them."""
    monkeypatch.setattr(prepared_files, "GROUP_SIZE", 2)
    balanced: list[tuple[int, int]] = []
    monkeypatch.setattr(merge, "check_balance", lambda counts, _, num: balanced.append((int(counts.sum()), num)))
    source = Listed({part: list(with_columns(part)) for part in "abcde"})
    source.extra_columns = {}
    experiment = experiment_of(
        plug_in(monkeypatch, SOURCES, source),
        captions=[CaptionConfig("first"), CaptionConfig("second")],
        filters={"score": ">= 1.5"},
        keep=["score"],
        near_duplicates=0.999,
        horizontal_flips=True,
        max_bad_fraction=0.5,
    )
    experiment.prepare.partition.fit_fraction = 0.5
    manifest = prepare(experiment, tmp_path)
    assert manifest.broken == {"empty file": 5, "duplicate key": 4}
    assert manifest.filtered == {"not score >= 1.5": 10, "near-duplicate": 5}
    expected = [one for part in "abcde" for one in source.samples[part][4:22]]
    expected.insert(0, source.samples["a"][1])
    prepared, stored = Prepared(tmp_path / "prepared"), [*stored_samples(tmp_path)]
    features = FEATURES.build("pooled-pixels", {}).encode(np.stack([one.image for one in expected]))
    clusters = Partition.load(prepared.rule_file).rule.assign(Samples(Rows([features]), np.zeros(91), []))
    assert sorted(sample["sample_id"] for sample in stored) == [*range(91)]
    for sample in stored:
        one = expected[sample["sample_id"]]
        assert {name: sample[name] for name in ("caption", "caption_2", "score")} == {
            "caption": one.values["first"],
            "caption_2": one.values["second"],
            "score": one.values["score"],
        }
        np.testing.assert_array_equal(sample["x_0"], one.image.transpose(2, 0, 1))
        np.testing.assert_array_equal(sample["x_0_flipped"], one.image[:, ::-1].transpose(2, 0, 1))
        assert sample["cluster"] == clusters[sample["sample_id"]]
    fitted, _ = prepared.sample(0.5)
    keys = [one.key for one in expected]
    rows = [keys.index(key) for key in fitted.keys]
    assert 30 < len(rows) < 60 and balanced == [(91, len(rows))], "of all samples, by the error of the fitted ones"
    np.testing.assert_array_equal(fitted.features[:], features[rows])
