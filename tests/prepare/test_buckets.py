"""Aspect buckets in ``prepare``, against plain loops over the images and Streaming's own reader."""

import json
import os
import shutil
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image
from prepare import share_work
from prepare.listed import Listed, Listener, experiment_of, hashes, plug_in, record
from source_files import lanczos
from streaming import StreamingDataset
from tiny_runs import TINY, bucket_settings, prepared

from ddm_lightning.cli.parser import main
from ddm_lightning.config.experiment import ImagesConfig, PluginConfig
from ddm_lightning.config.load import load_experiment
from ddm_lightning.core.buckets import Bucket
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.registry import IMAGE_ENCODERS, SOURCES
from ddm_lightning.encoders.interfaces import parse_encoding
from ddm_lightning.islands.plan_data import data_of
from ddm_lightning.prepare import engine, ledger, reading
from ddm_lightning.prepare.dry_run import dry_run
from ddm_lightning.prepare.stages import prepare
from ddm_lightning.prepare.write_shards import Split
from ddm_lightning.shards.manifest import ClusterSamples, Manifest
from ddm_lightning.testing import check_encoder

pytestmark = pytest.mark.usefixtures("quick_prepare")

SIZES = {"4x16": (4, 16), "8x8": (8, 8), "16x4": (16, 4)}


def covered(image, height, width):
    """The middle of an image, resized to cover height and width: Lanczos as sums, in float64."""
    own_height, own_width = image.shape[:2]
    scale = max(height / own_height, width / own_width)
    rows, columns = height / scale, width / scale
    down = lanczos(own_height, (own_height - rows) / 2, rows, height)
    across = lanczos(own_width, (own_width - columns) / 2, columns, width)
    return np.einsum("ih,jw,hwc->ijc", down, across, image.astype(float)).clip(0, 255)


def samples_of(prepared):
    """Folder below ``shards`` -> its samples, as Streaming reads them."""
    folders = {}
    for name in Manifest.read(prepared.parent).index_sha256:
        dataset = StreamingDataset(local=str(prepared / "shards" / name), shuffle=False, batch_size=1)
        folders[name] = [dataset[i] for i in range(dataset.num_samples)]
    return folders


@pytest.fixture(scope="module")
def folders(bucket_prepared):
    return samples_of(bucket_prepared)


def test_each_image_lies_once_in_the_folder_of_its_shape_and_cluster(bucket_prepared, folders):
    images = bucket_prepared.parent / "images"
    lines = map(json.loads, (images / "captions.jsonl").read_text().splitlines())
    captions = {line["file_name"]: line["caption"] for line in lines}
    left = {name: np.asarray(Image.open(images / name)) for name in captions}
    clusters = {}
    ids = []
    for folder, samples in folders.items():
        cluster, bucket, _ = folder.split("/")
        for sample in samples:
            colour, wanted = sample["caption"].split()
            assert wanted == bucket and sample["x_0"].shape == (3, *SIZES[bucket])
            assert clusters.setdefault(colour, cluster) == cluster == f"cluster-{sample['cluster']}"
            ids.append(sample["sample_id"])
            near = []
            for name, image in left.items():
                error = np.abs(covered(image, *SIZES[bucket]) - sample["x_0"].transpose(1, 2, 0)).max()
                if captions[name] == sample["caption"] and error <= 2:  # Pillow rounds its weights
                    near.append(name)

            (name,) = near
            del left[name]

    assert not left and sorted(ids) == list(range(len(captions)))
    assert len({*clusters.values()}) == 2


def test_the_manifest_counts_what_is_in_the_folders(bucket_prepared, folders):
    manifest = Manifest.read(bucket_prepared.parent)
    assert manifest.x_shape == (3, 8, 8)
    assert manifest.buckets == tuple(Bucket(h, w, (3, h, w)) for h, w in SIZES.values())
    assert parse_encoding(manifest.columns["x_0"]) == (np.uint8, (3, 4, 16))
    found = {name: len(samples) for name, samples in folders.items()}
    expected = Counter()
    for bucket, counts in zip(SIZES, manifest.bucket_samples, strict=True):
        for k, count in enumerate(counts):
            expected[f"cluster-{k}/{bucket}/train"] = count.train
            expected[f"cluster-{k}/{bucket}/held-out"] = count.held_out

    assert found == +expected
    assert [sum(c.train + c.held_out for c in counts) for counts in manifest.bucket_samples] == [20, 50, 30]
    for k, cluster in enumerate(manifest.clusters):
        of_buckets = [counts[k] for counts in manifest.bucket_samples]
        assert cluster == ClusterSamples(sum(c.train for c in of_buckets), sum(c.held_out for c in of_buckets))

    values = [sample["x_0"].reshape(3, -1) / 127.5 - 1 for samples in folders.values() for sample in samples]
    pixels = np.concatenate(values, 1)
    np.testing.assert_allclose(manifest.statistics["mean"], pixels.mean(1), rtol=1e-9)
    np.testing.assert_allclose(manifest.statistics["std"], pixels.std(1), rtol=1e-9)


THREE = ImagesConfig(size=8, buckets={"max_aspect": 4.0, "step": 4})
SOME = {"wide": (5, 18), "square": (9, 8), "tall": (40, 9)}
"""Buckets of 4 x 16, 8 x 8 and 16 x 4 pixels, by hand: the last one is 4.4 : 1, nearer to 4 : 1 than to 1 : 1."""


def samples_of_shapes(names, num, prefix=""):
    return [record(f"{prefix}{name}-{i}", size=SOME[name]) for i in range(num) for name in names]


def shards_of(run):
    """Each file by content, and all folders."""
    folder = run / "prepared" / "shards"
    return hashes(folder), {path.relative_to(folder) for path in folder.rglob("*")}


def test_a_list_of_one_square_changes_no_byte_and_no_key(tmp_path, tiny_prepared):
    plain = ["prepare.images.size=8"]
    assert main(["prepare", "-c", str(TINY), f"run_dir={tmp_path / 'plain'}", *plain]) == 0
    assert hashes(tmp_path / "plain" / "prepared" / "shards") == hashes(tiny_prepared / "shards")
    before = hashes(tmp_path / "plain" / "prepared")
    listed = ["prepare.images={size: 8, buckets: [[8, 8]]}"]
    prepared(tmp_path / "listed", *listed)
    assert hashes(tmp_path / "listed" / "prepared") == before
    assert main(["prepare", "-c", str(TINY), f"run_dir={tmp_path / 'plain'}", *listed]) == 0
    assert hashes(tmp_path / "plain" / "prepared") == before


class Fragile:
    """Float encoder that fails for images whose first pixel is white."""

    packages, dtype, stores = (), "float32", "x_0"
    normalisation = {"scale": 1.0, "shift": 0.0}

    def provenance(self):
        return {}

    def x_shape(self, image_size):
        return 3, image_size, image_size

    def encode(self, images):
        encoded = images.transpose(0, 3, 1, 2).astype(np.float32)
        encoded[(images[:, 0, 0] == 255).all(1)] = np.nan
        return np.ascontiguousarray(encoded)

    def decode(self, x_0):
        return x_0.numpy().round().clip(0, 255).astype(np.uint8).transpose(0, 2, 3, 1)


def test_rows_that_cannot_be_used_are_left_out_wherever_they_lie(tmp_path, monkeypatch):
    """Over chunks that mix shapes, parts of one shape, and keys that come twice."""
    white = {name: np.full((*size, 3), 255, np.uint8) for name, size in SOME.items()}
    first = [
        *samples_of_shapes(["square", "tall"], 6, "a-"),
        record("bad tall", image=white["tall"]),
        *samples_of_shapes(["tall", "wide"], 5, "b-"),
        record("bad square", image=white["square"]),
        record("a-tall-0", size=SOME["wide"]),
    ]
    second = samples_of_shapes(["wide"], 9, "c-")
    third = [record("bad wide", image=white["wide"]), *samples_of_shapes(["square", "wide", "tall"], 4, "d-")]
    check_encoder(Fragile, image_size=8)
    monkeypatch.setattr(reading, "IMAGES_AT_ONCE", 5)
    experiment = experiment_of(
        plug_in(monkeypatch, SOURCES, Listed({"one": first, "two": second, "three": third})),
        images=THREE,
        image_encoder=plug_in(monkeypatch, IMAGE_ENCODERS, Fragile()),
        max_bad_fraction=0.5,
        horizontal_flips=True,
        keep=["image_height", "crop_top", "crop_left"],
    )
    experiment.prepare.partition.max_largest_over_mean = 2.0
    manifest = prepare(experiment, tmp_path)
    bad = ["bad tall", "bad square", "a-tall-0", "bad wide"]
    lines = map(json.loads, (tmp_path / "prepared" / "broken.jsonl").read_text().splitlines())
    assert Counter((line["key"], line["cause"]) for line in lines) == Counter(
        (key, "duplicate key" if key == "a-tall-0" else "encoded image is not finite") for key in bad
    )
    good = [one for one in (*first[:-1], *second, *third) if not one.key.startswith("bad")]
    # By hand: 5 x 18 covers 4 x 16 as 4.4 x 16, 9 x 8 covers 8 x 8 as 9 x 8, and 40 x 9 covers 16 x 4 as 17.8 x 4.
    crops = {"wide": (4, 16, 0, 0), "square": (8, 8, 0, 0), "tall": (16, 4, 1, 0)}
    found = {}
    for folder, samples in samples_of(tmp_path / "prepared").items():
        for sample in samples:
            found[int(sample["sample_id"])] = sample
            assert folder.split("/")[1] == "{}x{}".format(*sample["x_0"].shape[1:])

    assert sorted(found) == list(range(len(good))) and manifest.num_samples == len(good)
    for number, one in enumerate(good):
        sample = found[number]
        height, width, top, left = crops[one.key.split("-")[1]]
        assert sample["caption"] == f"image of {one.key}"
        assert sample["x_0"].shape == (3, height, width)
        # Pillow rounds its weights, and cuts off what overshoots between its two directions.
        difference = np.abs(covered(one.image, height, width) - sample["x_0"].transpose(1, 2, 0))
        assert np.quantile(difference, 0.8) <= 2
        np.testing.assert_allclose(sample["x_0_flipped"], sample["x_0"][:, :, ::-1], atol=2)
        kept = [sample[name] for name in ("image_height", "crop_top", "crop_left")]
        assert kept == [one.image.shape[0], top, left]

    totals = [sum(count.train + count.held_out for count in counts) for counts in manifest.bucket_samples]
    assert totals == [5 + 9 + 4, 6 + 4, 6 + 5 + 4]


def test_clusters_see_the_whole_image_and_no_bucket(tmp_path, bucket_prepared):
    images = bucket_prepared.parent / "images"
    settings = [*bucket_settings(images), "prepare.images.buckets=null", "prepare.images.aspect=stretch"]
    stretched = prepared(tmp_path, *settings)
    for file in ("clusters.npy", "rule.safetensors", "split.json"):
        assert (stretched / file).read_bytes() == (bucket_prepared / file).read_bytes()


class Stopped(BaseException):
    """As a kill: nothing catches it."""


def stop_and_go_on(run, settings, at):
    """Stop at a file that is about to appear, or has just appeared, and start again."""
    moments = []

    def replace_file(source, target, replaced=os.replace):
        for act in (lambda: None, lambda: replaced(source, target)):
            act()
            moments.append(target)
            if len(moments) == at:
                raise Stopped

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "replace", replace_file)
        with pytest.raises(Stopped):
            prepared(run, *settings)

    prepared(run, *settings)


@pytest.mark.parametrize("at", [3, 9, 16, 23, 30, 37, 44])
def test_stopped_prepare_goes_on_to_the_same_files(tmp_path, bucket_prepared, at):
    settings = bucket_settings(bucket_prepared.parent / "images")
    stop_and_go_on(tmp_path, settings, at)
    assert without_ledgers(tmp_path / "prepared") == without_ledgers(bucket_prepared)


def without_ledgers(folder):
    """Files by content; ledgers of parts are written in more than one go."""
    return {name: found for name, found in hashes(folder).items() if not name.endswith(("part.json", "stages.json"))}


@pytest.mark.slow
def test_two_processes_write_the_same_files(tmp_path, monkeypatch, bucket_prepared):
    monkeypatch.setattr(engine, "WORTH_PROCESSES", 1)
    settings = bucket_settings(bucket_prepared.parent / "images")
    assert without_ledgers(prepared(tmp_path, *settings, "prepare.num_processes=2")) == without_ledgers(bucket_prepared)


def test_two_machines_write_the_same_shards(tmp_path, monkeypatch, bucket_prepared):
    monkeypatch.setattr(ledger, "POLL_SECONDS", 0.05)
    settings = [*bucket_settings(bucket_prepared.parent / "images"), f"remote={tmp_path / 'url'}"]
    (_, manifest), (_, nothing) = share_work.together(load_experiment(TINY, settings), [tmp_path / "a", tmp_path / "b"])
    assert manifest == Manifest.read(bucket_prepared.parent) and nothing is None
    mine, theirs = (
        {name: found for name, found in hashes(folder / "shards").items() if name.endswith(".mds")}
        for folder in (tmp_path / "url" / "prepared", bucket_prepared)
    )
    assert mine == theirs


def test_folders_of_other_shapes_do_not_stay(tmp_path, bucket_prepared):
    images = bucket_prepared.parent / "images"
    squares = [*bucket_settings(images), "prepare.images.buckets=null"]
    fresh = shards_of(prepared(tmp_path / "fresh", *squares).parent)
    shutil.copytree(bucket_prepared, tmp_path / "run" / "prepared")
    assert shards_of(prepared(tmp_path / "run", *squares).parent) == fresh
    for settings in (["seed=1"], []):
        changed = shards_of(prepared(tmp_path / "run", *bucket_settings(images), *settings).parent)
        assert (changed == shards_of(bucket_prepared.parent)) == (not settings)

    (index, *_) = (tmp_path / "run" / "prepared" / "shards").glob("*/*/*/index.json")
    index.unlink()
    assert shards_of(prepared(tmp_path / "run", *bucket_settings(images)).parent) == changed


SIZES_OF = {"exact": (8, 8), "tall": (15, 8), "wide": (5, 15), "banner": (5, 18), "square": (7, 7), "large": (30, 30)}


@pytest.mark.parametrize(
    ("images", "kept"),
    [
        (ImagesConfig(size=8), "exact tall wide banner square large"),
        (ImagesConfig(size=8, upscale=False), "exact tall large"),
        (ImagesConfig(size=8, aspect="stretch", upscale=False), "exact tall large"),
        (ImagesConfig(size=8, aspect="pad", upscale=False), "exact tall wide banner large"),
        (replace(THREE, upscale=False), "exact tall banner large"),
    ],
    ids=["enlarged", "crop", "stretch", "pad", "buckets"],
)
def test_images_that_would_be_enlarged_are_counted(tmp_path, monkeypatch, images, kept):
    """Of the wide ones, 5 x 18 covers 4 x 16, and 5 x 15 does not."""
    samples = [record(f"{name}-{i}", size=size) for i in range(8) for name, size in SIZES_OF.items()]
    experiment = experiment_of(plug_in(monkeypatch, SOURCES, Listed({"one": samples})), images=images)
    experiment.prepare.partition.max_largest_over_mean = 2.0
    listener = Listener()
    plan = dry_run(experiment, tmp_path)
    manifest = prepare(experiment, tmp_path, listener)
    num_out = 8 * (len(SIZES_OF) - len(kept.split()))
    expected = {"would be enlarged": num_out} if num_out else {}
    assert manifest.filtered == dict(plan.looked.filtered) == expected
    captions = {sample["caption"] for samples in samples_of(tmp_path / "prepared").values() for sample in samples}
    assert captions == {f"image of {name}-{i}" for name in kept.split() for i in range(8)}
    (line,) = (line for line in listener.lines if line.startswith("index:"))
    assert (f"taken out by filters: would be enlarged: {num_out}" in line) == (num_out > 0)


def test_report_dry_run_plan_and_prepare_show_the_shapes(tmp_path, monkeypatch, capsys):
    samples = [*samples_of_shapes(["wide", "square"], 20), record("tall", size=SOME["tall"]), record("x", size=(3, 3))]
    (tmp_path / "images").mkdir()
    for one in samples:
        Image.fromarray(one.image).save(tmp_path / "images" / f"{one.key}.png")
        (tmp_path / "images" / f"{one.key}.txt").write_text("noise")

    given = ["-c", str(TINY), f"run_dir={tmp_path / 'run'}", *bucket_settings(tmp_path / "images")]
    given += ["prepare.images.upscale=false", "prepare.partition.kind=random"]
    assert main(["prepare", "--dry-run", *given]) == 0
    out = capsys.readouterr().out
    # By hand: 4.5 x 18 of 5 x 18, 8 x 8 of 9 x 8 and 36 x 9 of 40 x 9 are kept.
    mean = f"{(20 * 0.1 + 20 / 9 + 0.1) / 41:.2%}"
    rows = ["4x16 20 48.78% 10.00%", "8x8 20 48.78% 11.11%", "16x4 1 2.44% 10.00%", f"all 41 100.00% {mean}"]
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[lines.index("shapes of images, by 42 samples") :][4:8] == rows
    assert "would be enlarged 1 2.38%" in lines
    told = "samples 41 of 4x16, 8x8, 16x4 pixels, 228 bytes each"
    assert any(line.startswith(f"data, as in plan: {told}") for line in lines)

    shown = []
    monkeypatch.setattr("ddm_lightning.prepare.report.write_report", lambda _, data: shown.append(data))
    monkeypatch.setattr("ddm_lightning.prepare.report.save_png", lambda *_: None)
    monkeypatch.setattr(Split, "is_held_out", lambda _, hashes: hashes == hashes.min())
    assert main(["prepare", *given]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("merge: "))
    assert ": shapes 4x16: 20, 8x8: 20, 16x4: 1; without held-out samples: " in line
    manifest = Manifest.read(tmp_path / "run")
    without = [
        bucket.name
        for bucket, counts in zip(manifest.buckets, manifest.bucket_samples, strict=True)
        if not any(count.held_out for count in counts)
    ]
    assert len(without) == 2 and line.endswith(", ".join(without))
    (data,) = shown
    assert {name: row[:2] for name, row in data.buckets.items()} == {
        "4x16": (20, pytest.approx(0.1)),
        "8x8": (20, pytest.approx(1 / 9)),
        "16x4": (1, pytest.approx(0.1)),
        "all": (41, pytest.approx((20 * 0.1 + 20 / 9 + 0.1) / 41)),
    }
    assert [sum(row[2]) for row in data.buckets.values()] == [20, 20, 1, 41]
    assert np.sum([row[2] for row in data.buckets.values()][:-1], axis=0).tolist() == data.buckets["all"][2]
    # Wide and tall thumbnails lie in the middle of white squares.
    assert {image.shape for image in data.thumbnails.images} == {(16, 16, 3)}


def test_a_bucket_without_images_is_not_listed_and_the_largest_sample_is_planned(tmp_path, monkeypatch):
    source = plug_in(monkeypatch, SOURCES, Listed({"one": samples_of_shapes(["wide", "square"], 12)}))
    images = ImagesConfig(size=12, buckets=[[8, 32], [9, 9], [12, 12], [32, 8]])
    experiment = experiment_of(source, images=images)
    experiment.prepare.partition.max_largest_over_mean = 2.0
    manifest = prepare(experiment, tmp_path)
    # Of equal proportions, the larger shape is taken.
    assert [bucket.name for bucket in manifest.buckets] == ["8x32", "12x12"]
    experiment.run_dir = str(tmp_path)
    assert manifest.x_shape == (3, 12, 12) and parse_encoding(manifest.columns["x_0"])[1] == (3, 8, 32)
    assert data_of(experiment).sample_bytes == 3 * 8 * 32 + 2 * 8 + 4
    assert data_of(experiment).sizes.buckets == manifest.buckets


def test_shapes_that_the_encoder_cannot_take_are_refused(tmp_path, monkeypatch):
    class Eights(Fragile):
        def x_shape(self, image_size):
            if image_size % 8:
                raise UserError(f"eights: {image_size} pixels are not a multiple of 8; set another size")

            return 3, image_size, image_size

    source = plug_in(monkeypatch, SOURCES, Listed({"one": samples_of_shapes(["wide", "square"], 12)}))
    for encoder, problem in (
        (plug_in(monkeypatch, IMAGE_ENCODERS, Eights()), r"4 x 16: .* 4 pixels are not a multiple of 8; change it$"),
        (PluginConfig("pixels", {"image_size": 4}), "in one shape; remove its parameter 'image_size'$"),
    ):
        with pytest.raises(UserError, match=problem) as refusal:
            prepare(experiment_of(source, images=THREE, image_encoder=encoder), tmp_path / "run")
        assert "\n" not in str(refusal.value) and not (tmp_path / "run").exists()


def test_a_manifest_that_contradicts_its_shapes_is_refused(bucket_prepared):
    manifest = Manifest.read(bucket_prepared.parent)
    for changes, problem in (
        ({"bucket_samples": manifest.bucket_samples[1:]}, "'bucket_samples'"),
        ({"bucket_samples": tuple(counts[1:] for counts in manifest.bucket_samples)}, "'bucket_samples'"),
        ({"buckets": (*manifest.buckets[:2], Bucket(16, 4, (4, 16, 4)))}, "other channels"),
        ({"buckets": manifest.buckets[::-1]}, "'columns'"),
    ):
        with pytest.raises(ValueError, match=problem):
            replace(manifest, **changes)
