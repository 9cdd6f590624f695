import shutil
from dataclasses import replace

import numpy as np
import pytest
from prepare.listed import Listed, Listener, experiment_of, part_folder, plug_in, record, records

from ddm_lightning.config.experiment import ImagesConfig, PluginConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.core.formatting import format_bytes
from ddm_lightning.core.registry import CAPTION_ENCODERS, FEATURES, IMAGE_ENCODERS, SOURCES
from ddm_lightning.prepare import encode
from ddm_lightning.prepare import prepared as prepared_files
from ddm_lightning.prepare.encode import LEDGER, is_sampled, key_hash
from ddm_lightning.prepare.ledger import Ledger
from ddm_lightning.prepare.prepared import Prepared, Thumbnails
from ddm_lightning.prepare.reading import to_square
from ddm_lightning.prepare.records import BrokenSample
from ddm_lightning.prepare.stages import prepare

pytestmark = pytest.mark.usefixtures("quick_prepare")


@pytest.fixture
def source():
    return Listed({"one": records(20), "two": [BrokenSample("x", "empty file"), *records(15, "b")], "none": []})


@pytest.fixture
def experiment(source, monkeypatch):
    return experiment_of(plug_in(monkeypatch, SOURCES, source), max_bad_fraction=0.5)


@pytest.fixture
def first(tmp_path, experiment):
    """The manifest of the experiment, prepared in ``tmp_path``."""
    return prepare(experiment, tmp_path)


def read_state(folder):
    return Ledger(folder / LEDGER).entries


def groups_written(folder):
    """When each group of each part was written."""
    written = {}
    for part in Prepared(folder / "prepared").parts:
        path = part_folder(folder, part.name)
        for group, entry in read_state(path).items():
            if entry["files"]:
                written[part.name, group] = max((path / name).stat().st_mtime_ns for name in entry["files"])
    return written


def rewritten(folder, experiment):
    """The (part, group)s whose files are others after ``prepare``."""
    before = groups_written(folder)
    prepare(experiment, folder)
    after = groups_written(folder)
    assert before.keys() == after.keys()
    return {key for key in after if after[key] != before[key]}


ALL_GROUPS = ("records", "latents", "captions", "features")
OTHER_FEATURES = PluginConfig("pooled-pixels", {"grid": 2})


def groups_of(part, groups=ALL_GROUPS):
    return {(part, group) for group in groups}


def test_columns_hold_what_source_and_encoders_give(tmp_path, experiment, first, source):
    prepared = Prepared(tmp_path / "prepared")
    expected = [one for samples in source.samples.values() for one in samples if not isinstance(one, BrokenSample)]
    images = np.stack([one.image for one in expected])
    captions = CAPTION_ENCODERS.build("hashed-words", {"size": 8}).encode([one.caption for one in expected])

    np.testing.assert_array_equal(prepared.rows("x_0")[:], images.transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(prepared.rows("features")[:], FEATURES.build("pooled-pixels", {}).encode(images))
    np.testing.assert_array_equal(prepared.rows("text")[:], captions["text"])
    assert list(prepared.texts("keys")) == [one.key for one in expected]
    assert prepared.facts("key_hash").tolist() == [key_hash(one.key) for one in expected]
    assert len({key_hash(one.key) for one in expected}) == 35 and key_hash("a0") > 2**32


def test_a_group_decides_over_the_key_on_which_side_a_sample_falls(tmp_path, monkeypatch):
    tiles = [record(f"t{i}", group=f"region {i // 5}") for i in range(40)]
    alone = [record(f"s{i}", group="" if i % 2 else None) for i in range(10)]
    prepare(experiment_of(plug_in(monkeypatch, SOURCES, Listed({"one": tiles + alone}))), tmp_path)
    split = Prepared(tmp_path / "prepared").facts("split_hash").tolist()
    assert split[:40] == [key_hash(f"region {i // 5}") for i in range(40)]
    assert split[40:] == [key_hash(f"s{i}") for i in range(10)]


def test_the_sample_of_the_fit_is_independent_of_the_held_out_side():
    hashes = np.array([key_hash(f"sample {number}") for number in range(20_000)], np.uint64)
    sampled = is_sampled(hashes, 0.3)
    for side in (hashes < hashes.max() // 20, hashes >= hashes.max() // 20):
        error = (0.3 * 0.7 / side.sum()) ** 0.5
        assert sampled[side].mean() == pytest.approx(0.3, abs=4 * error)


@pytest.mark.parametrize(
    ("key", "value", "group", "num_reads"),
    [
        ("caption_encoder", PluginConfig("hashed-words", {"size": 4}), "captions", 0),
        ("features", OTHER_FEATURES, "features", 3),
        ("horizontal_flips", True, "latents", 3),
    ],
)
def test_a_change_computes_its_group_again_and_no_other(
    tmp_path, experiment, source, first, key, value, group, num_reads
):
    source.reads.clear()
    setattr(experiment.prepare, key, value)

    assert rewritten(tmp_path, experiment) == {("one", group), ("two", group)}
    assert len(source.reads) == num_reads


def digests(run):
    """Columns and shards by content."""
    files = [p for kind in ("parts", "shards") for p in sorted((run / "prepared" / kind).rglob("*")) if p.is_file()]
    return {p.relative_to(run).as_posix(): sha256_file(p) for p in files if p.name != "part.json"}


def test_what_was_read_before_the_encoders_began_changes_no_byte(tmp_path, monkeypatch, experiment, source):
    broken = [BrokenSample(f"x{number}", "empty file") for number in range(9)]
    source.samples["one"] = [*records(300), *broken, *records(400, "c")]
    listener = Listener()
    prepare(experiment, tmp_path / "the next chunk", listener)
    monkeypatch.setattr(encode, "one_ahead", iter)
    prepare(experiment, tmp_path / "nothing")

    assert digests(tmp_path / "the next chunk") == digests(tmp_path / "nothing")
    ticks = [done for stage, done, _ in listener.ticks if stage == "encode"]
    assert ticks == sorted(ticks) and ticks[-1] == 725


@pytest.mark.parametrize("sized", [True, False])
def test_samples_under_a_new_fingerprint_are_encoded_again_only_if_they_changed(tmp_path, experiment, source, sized):
    source.sized = sized
    prepare(experiment, tmp_path)
    source.fingerprints = dict.fromkeys(source.samples, "touched")
    assert rewritten(tmp_path, experiment) == set()

    source.reads.clear()
    prepare(experiment, tmp_path)
    assert source.reads == []

    # Touched, and other features at the same time.
    source.fingerprints = dict.fromkeys(source.samples, "again")
    experiment.prepare.features = OTHER_FEATURES
    assert rewritten(tmp_path, experiment) == {("one", "features"), ("two", "features")}

    source.samples["one"][3] = record("a3", image=np.zeros((8, 8, 3), np.uint8))
    source.fingerprints["one"] = "painted"
    assert rewritten(tmp_path, experiment) == groups_of("one")


def test_what_a_part_needs_to_be_found_again_does_not_have_it_encoded_again(tmp_path, experiment, source, first):
    """The parts of a folder of classes say how many there are."""
    listed = [replace(part, where={"num_classes": 5}) for part in source.parts()]
    source.parts = lambda: listed
    source.reads.clear()
    prepare(experiment, tmp_path)
    assert source.reads == []


def test_a_part_in_front_of_the_others_is_all_there_is_to_do(tmp_path, experiment, source):
    prepare(experiment, tmp_path / "run")
    before = groups_written(tmp_path / "run")
    source.samples = {"zero / new.tar": records(7, "z"), **source.samples}
    source.fingerprints["zero / new.tar"] = "1"
    source.reads.clear()
    listener = Listener()

    prepare(experiment, tmp_path / "run", listener)

    assert source.reads == ["zero / new.tar"]
    assert any(line.endswith(": 4 parts, 3 already encoded") for line in listener.lines)
    assert before.items() <= groups_written(tmp_path / "run").items()
    assert part_folder(tmp_path / "run", "zero / new.tar").name.startswith("zero-new-tar-")
    prepare(experiment, tmp_path / "fresh")
    assert digests(tmp_path / "run") == digests(tmp_path / "fresh")


def test_two_parts_of_one_name_are_refused(tmp_path, experiment, source):
    listed = source.parts()
    source.parts = lambda: [*listed, listed[1]]
    with pytest.raises(UserError, match="source 'made-up': has 2 parts named 'two'; fix the source"):
        prepare(experiment, tmp_path)


def test_parts_that_are_gone_are_kept_until_pruned(tmp_path, experiment, source, first):
    two, listed = part_folder(tmp_path, "two"), dict(source.samples)
    size = sum(path.stat().st_size for path in two.rglob("*") if path.is_file())
    del source.samples["two"]
    listener = Listener()
    manifest = prepare(experiment, tmp_path, listener)
    kept = f"encoded parts that the source no longer lists: 1, {format_bytes(size)}; "
    assert listener.lines[-1] == kept + "prepare --prune removes them"
    source.samples = listed
    source.reads.clear()
    assert prepare(experiment, tmp_path) == first and source.reads == []
    del source.samples["two"], source.samples["none"]
    prepare(experiment, tmp_path)
    assert two.is_dir()
    prepare(experiment, tmp_path, listener, prune=True)
    assert listener.lines[-1].endswith("; removed")
    assert list((tmp_path / "prepared" / "parts").iterdir()) == [part_folder(tmp_path, "one")]
    assert manifest.num_samples == 20 and manifest.broken == {} and manifest.class_names is None


def truncate(part):
    column = part / "features.npy"
    column.write_bytes(column.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "groups"),
    [
        (lambda part: (part / "features.npy").unlink(), ["features"]),
        (truncate, ["features"]),
        (lambda part: (part / "part.json").unlink(), ALL_GROUPS),
        (lambda part: (part / "part.json").write_text("{"), ALL_GROUPS),
        (lambda part: (part / "part.json").write_text("[]"), ALL_GROUPS),
    ],
    ids=["missing", "truncated", "no ledger", "no JSON", "a list"],
)
def test_a_part_that_lost_something_is_mended(tmp_path, experiment, first, damage, groups):
    before = groups_written(tmp_path)
    whole = digests(tmp_path)
    damage(part_folder(tmp_path, "two"))

    assert prepare(experiment, tmp_path) == first
    after = groups_written(tmp_path)
    assert {key for key in after if after[key] != before[key]} == groups_of("two", groups)
    assert digests(tmp_path) == whole


class Stopped(BaseException):
    """As if the process were gone."""


@pytest.mark.parametrize(
    ("registry", "name", "whole", "again"),
    [
        (FEATURES, "pooled-pixels", set(), ["two", "none"]),
        # Captions come after the images, whose columns are whole by then.
        (CAPTION_ENCODERS, "hashed-words", {"features", "latents", "records"}, ["none"]),
    ],
    ids=["features", "captions"],
)
def test_stopped_in_between_it_keeps_the_parts_that_are_whole(
    tmp_path, experiment, source, monkeypatch, registry, name, whole, again
):
    class Stopping(registry.get(name)):
        def encode(self, given):
            if len(given) == 15:
                raise Stopped
            return super().encode(given)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setitem(registry._built_in, name, Stopping)
        prepare(experiment, tmp_path / "run")
    two = part_folder(tmp_path / "run", "two")
    assert read_state(part_folder(tmp_path / "run", "one")).keys() == set(ALL_GROUPS)
    assert read_state(two).keys() == whole
    assert {path.name for path in two.glob("*.np*")} == {
        path for group in whole for path in read_state(two)[group]["files"]
    }

    source.reads.clear()
    prepare(experiment, tmp_path / "run")
    assert source.reads == again
    prepare(experiment, tmp_path / "fresh")
    assert digests(tmp_path / "run") == digests(tmp_path / "fresh")


def test_a_source_that_gives_other_samples_under_the_same_fingerprint_is_named(tmp_path, experiment, source, first):
    source.samples["two"] = records(14, "b")
    listed = source.parts()
    listed[1] = replace(listed[1], num_samples=16)
    source.parts = lambda: listed
    experiment.prepare.features = OTHER_FEATURES
    with pytest.raises(UserError, match=r"part 'two' of the source: has 14 samples instead of 15.*delete"):
        prepare(experiment, tmp_path)
    shutil.rmtree(part_folder(tmp_path, "two"))
    assert prepare(experiment, tmp_path).num_samples == 34


def test_captions_of_rows_that_are_gone_are_not_taken_for_those_of_new_ones(tmp_path, experiment, source, first):
    """Left by a caption encoder that was taken out of the file while the records were made anew."""
    encoder = experiment.prepare.caption_encoder
    experiment.prepare.caption_encoder = None
    source.samples["two"] = [BrokenSample("x", "empty file"), BrokenSample("y", "empty file"), *records(14, "b")]
    (part_folder(tmp_path, "two") / "texts.npz").unlink()
    source.reads.clear()
    prepare(experiment, tmp_path)
    assert source.reads == ["two"], "once for all columns"
    experiment.prepare.caption_encoder = encoder
    prepare(experiment, tmp_path)
    assert len(Prepared(tmp_path / "prepared").rows("text")) == 34


def test_a_change_that_was_stopped_and_taken_back_leaves_no_column_of_it(tmp_path, experiment, first, monkeypatch):
    """The files of the change are there, of the same size, and nothing has said so yet."""
    before = digests(tmp_path)
    features = experiment.prepare.features
    pooled = FEATURES.get("pooled-pixels")

    class Brighter(pooled):
        def encode(self, images):
            return super().encode(images) + 1

    def stopped(*_, **__):
        raise Stopped

    with monkeypatch.context() as patch:
        experiment.prepare.features = plug_in(patch, FEATURES, Brighter(), "brighter")
        patch.setattr(Ledger, "add", stopped)
        with pytest.raises(Stopped):
            prepare(experiment, tmp_path)
    assert digests(tmp_path) != before and not list((tmp_path / "prepared").rglob(".tmp-*"))
    experiment.prepare.features = features
    prepare(experiment, tmp_path)
    assert digests(tmp_path) == before


def test_each_part_keeps_thumbnails_of_its_lowest_hashes(tmp_path, monkeypatch):
    """Of as many samples as its share of the budget allows, but of one at least."""
    monkeypatch.setattr(encode, "MAX_THUMBNAILS", 40)
    parts = {f"part {n}": records(9, f"{n}-", size=100) for n in range(8)}
    prepare(experiment_of(plug_in(monkeypatch, SOURCES, Listed(parts))), tmp_path)
    kept = [np.load(part_folder(tmp_path, name) / "texts.npz")["thumbnails"] for name in parts]
    assert {images.shape for images in kept} == {(5, 96, 96, 3)}
    chosen = {one.key for part in parts.values() for one in sorted(part, key=lambda one: key_hash(one.key))[:5]}
    found = Thumbnails.read([tmp_path / "prepared" / "groups" / "00000.npz"])
    expected = [one for part in parts.values() for one in part if one.key in chosen]
    assert found.captions == [one.caption for one in expected]
    means = [one.image.mean((0, 1)) for one in expected]
    np.testing.assert_allclose(found.images.mean((1, 2)), means, atol=1.5)
    monkeypatch.setattr(prepared_files, "MAX_THUMBNAILS", 15)  # fewer than there are parts, as it were
    assert Thumbnails.read([tmp_path / "prepared" / "groups" / "00000.npz"]).captions == found.captions[::3]


def test_flips_store_the_encoding_of_the_mirrored_image(tmp_path, monkeypatch):
    pixels = IMAGE_ENCODERS.build("pixels", {})

    class Lopsided(type(pixels)):
        """Not symmetric: the mirror of its output is not its output for the mirror."""

        def encode(self, images):
            return super().encode(images + np.arange(8, dtype=np.uint8)[:, None])

    source = Listed({"one": records(20)})
    experiment = experiment_of(
        plug_in(monkeypatch, SOURCES, source),
        image_encoder=plug_in(monkeypatch, IMAGE_ENCODERS, Lopsided()),
        horizontal_flips=True,
    )
    manifest = prepare(experiment, tmp_path)
    assert manifest.columns["x_0_flipped"] == manifest.columns["x_0"] == "ndarray:uint8:3,8,8"
    prepared = Prepared(tmp_path / "prepared")
    found = prepared.rows("x_0_flipped")[:]
    mirrored = np.stack([one.image[:, ::-1] for one in source.samples["one"]])
    np.testing.assert_array_equal(found, Lopsided().encode(mirrored))
    assert (found != prepared.rows("x_0")[:][..., ::-1]).any()


def test_images_of_any_size_become_squares(tmp_path, monkeypatch):
    sizes = [(8, 8), (9, 20), (1, 1), (200, 3), (7, 7), (64, 65)]
    samples = [record(f"a{i}", size=sizes[i % len(sizes)]) for i in range(24)]
    experiment = experiment_of(plug_in(monkeypatch, SOURCES, Listed({"one": samples})))
    with pytest.raises(UserError, match=r"'a1' has 20 x 9 pixels and is not square; set prepare\.images\.size"):
        prepare(experiment, tmp_path)

    experiment.prepare.images = ImagesConfig(size=10, aspect="pad")
    manifest = prepare(experiment, tmp_path)

    assert manifest.images == {"size": 10, "aspect": "pad", "reduce": "whole pixels"}
    assert manifest.x_shape == (3, 10, 10)
    expected = np.stack([to_square(one.image, 10, "pad") for one in samples]).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(Prepared(tmp_path / "prepared").rows("x_0")[:], expected)


@pytest.mark.parametrize(
    ("sample", "problem"),
    [
        (record("odd", size=9), r"'odd' has 9 x 9 pixels, others have 8 x 8; set prepare\.images\.size"),
        (record("odd", image=np.zeros((8, 8, 3))), r"'odd' is not a uint8 RGB image \(float64 \[8, 8, 3\]\)"),
        (record("odd", image=np.zeros((8, 8), np.uint8)), r"'odd' is not a uint8 RGB image \(uint8 \[8, 8\]\)"),
        (record("odd", image=np.zeros((8, 8, 4), np.uint8)), r"'odd' is not a uint8 RGB image \(uint8 \[8, 8, 4\]\)"),
        (record("odd", image=np.zeros((0, 8, 3), np.uint8)), r"'odd' is not a uint8 RGB image \(uint8 \[0, 8, 3\]\)"),
        (record("odd", label=4), "'odd' has label 4, outside 0 to 3"),
        (record("odd", label=-1), "'odd' has label -1, outside 0 to 3"),
        (record("odd", caption=("a", "b")), r"'odd' has a key or caption that is no text"),
    ],
)
def test_a_source_that_breaks_its_contract_is_named(tmp_path, monkeypatch, sample, problem):
    source = Listed({"good": records(20), "bad": [*records(5, "b"), sample]})
    experiment = experiment_of(plug_in(monkeypatch, SOURCES, source))
    with pytest.raises(UserError, match=f"source 'made-up': sample {problem}") as refusal:
        prepare(experiment, tmp_path)

    assert "\n" not in str(refusal.value)
    assert len(read_state(part_folder(tmp_path, "good"))) == 4
    assert not part_folder(tmp_path, "bad").exists()
