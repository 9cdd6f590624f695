import io
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from prepare.tiny_experiment import tiny_experiment
from rich.console import Console

from ddm_lightning.config import PluginConfig
from ddm_lightning.errors import UserError
from ddm_lightning.files import sha256_file
from ddm_lightning.prepare import Manifest, Record, prepare, shard_folder, verify_shards
from ddm_lightning.prepare.partition import Partition
from ddm_lightning.prepare.progress import RichReporter, SilentReporter
from ddm_lightning.prepare.registry import FEATURES, SOURCES
from ddm_lightning.prepare.steps import Prepared

EVERYTHING = ["source", "features", "captions", "partition", "shards", "report"]


class Listener(SilentReporter):
    def __init__(self):
        self.lines, self.ticks = [], []

    def say(self, line):
        self.lines.append(line)

    def advance(self, stage, done, total):
        self.ticks.append((stage, done, total))

    @property
    def stages(self):
        return [line.partition(":")[0] for line in self.lines if ": done in" in line]


def run(experiment, folder):
    listener = Listener()
    return prepare(experiment, folder, listener), listener


def state_of(folder):
    """Everything that would betray a file that was written again."""
    stats = {path: path.stat() for path in sorted(folder.rglob("*"))}
    return {path: (stat.st_ino, stat.st_mtime_ns, stat.st_size) for path, stat in stats.items()}


def test_manifest_files_and_partition_agree(tmp_path):
    manifest, listener = run(tiny_experiment(), tmp_path)
    assert listener.stages == EVERYTHING
    assert manifest == Manifest.read(tmp_path)
    assert manifest.x_shape == (3, 8, 8) and manifest.text_size == 8 and manifest.num_classes == 4
    assert manifest.source == {"name": "blobs", "params": {"num_samples": 60, "image_size": 8}}
    assert manifest.num_samples == 60 == sum(c.train + c.held_out for c in manifest.clusters)

    prepared = Prepared(tmp_path / "prepared")
    partition = Partition.load(prepared.partition_file)
    assert manifest.partition_sha256 == sha256_file(prepared.partition_file)
    assert manifest.priors == tuple(partition.priors.tolist())
    np.testing.assert_array_equal(partition.assign(torch.from_numpy(prepared.features)), prepared.clusters)
    assert partition.counts.max() <= 1.1 * 30
    for name, digest in manifest.index_sha256.items():
        folder = tmp_path / "prepared" / "shards" / name
        cluster, split = name.removeprefix("cluster-").split("/")
        expected = manifest.clusters[int(cluster)]
        expected = expected.train if split == "train" else expected.held_out
        assert folder == shard_folder(tmp_path, int(cluster), split)
        assert verify_shards(folder, index_sha256=digest) == expected > 0
    assert len(manifest.index_sha256) == 4
    for stage in EVERYTHING:
        assert [t for t in listener.ticks if t[0] == stage][-1][1:] == (60, 60)


def test_features_and_captions_are_those_of_the_records(tmp_path):
    run(tiny_experiment(), tmp_path)
    prepared = Prepared(tmp_path / "prepared")
    records = list(SOURCES.build("blobs", {"num_samples": 60, "image_size": 8}))
    np.testing.assert_array_equal(prepared.images, np.stack([record.image for record in records]))
    assert prepared.records() == tuple(
        [getattr(record, name) for record in records] for name in ("key", "caption", "label")
    )
    np.testing.assert_allclose(
        prepared.features, FEATURES.build("pooled-pixels", {}).encode(prepared.images), rtol=1e-6
    )


def test_a_second_run_does_nothing_and_needs_no_plug_in(tmp_path, monkeypatch):
    first, _ = run(tiny_experiment(), tmp_path)
    before = state_of(tmp_path)
    for registry in (SOURCES, FEATURES):
        monkeypatch.setattr(registry, "build", lambda *_: pytest.fail("nothing is to be built"))
    second, listener = run(tiny_experiment(), tmp_path)
    assert second == first
    assert state_of(tmp_path) == before
    assert listener.lines == [f"{tmp_path / 'prepared'}: up to date"]


def changed(**changes):
    experiment = tiny_experiment(**{key: value for key, value in changes.items() if key in ("num_samples", "seed")})
    for key, value in changes.items():
        if key not in ("num_samples", "seed"):
            setattr(experiment.prepare, key, value)
    return experiment


@pytest.mark.parametrize(
    ("changes", "rerun"),
    [
        ({"num_samples": 70}, EVERYTHING),
        ({"features": PluginConfig("pooled-pixels", {"grid": 2})}, ["features", "partition", "shards", "report"]),
        ({"caption_encoder": PluginConfig("hashed-words", {"size": 4})}, ["captions", "shards", "report"]),
        ({"held_out_fraction": 0.2}, ["shards", "report"]),
        ({"seed": 1}, ["partition", "shards", "report"]),
    ],
)
def test_a_change_runs_again_what_hangs_on_it_and_gives_what_a_fresh_run_gives(tmp_path, changes, rerun):
    run(tiny_experiment(), tmp_path / "run")
    manifest, listener = run(changed(**changes), tmp_path / "run")
    assert listener.stages == rerun
    fresh, _ = run(changed(**changes), tmp_path / "fresh")
    assert manifest == fresh


def test_the_same_bytes_upstream_spare_the_stages_below(tmp_path):
    run(tiny_experiment(), tmp_path)
    (tmp_path / "prepared" / "features.npy").unlink()
    _, listener = run(tiny_experiment(), tmp_path)
    # The report rewrites the manifest, which is taken away while anything changes.
    assert listener.stages == ["features", "report"]


def test_a_change_that_was_stopped_half_way_and_taken_back_leaves_no_trace(tmp_path):
    first, _ = run(tiny_experiment(), tmp_path)

    class Stopped(SilentReporter):
        def advance(self, stage, done, total):
            if (stage, done) == ("partition", total):
                raise KeyboardInterrupt

    # Another seed writes another partition of the same size, and is stopped before that is recorded.
    with pytest.raises(KeyboardInterrupt):
        prepare(tiny_experiment(seed=1), tmp_path, Stopped())
    assert sha256_file(tmp_path / "prepared" / "partition.safetensors") != first.partition_sha256
    with pytest.raises(UserError, match="run prepare first"):
        Manifest.read(tmp_path)
    again, listener = run(tiny_experiment(), tmp_path)
    assert again == first
    assert sha256_file(tmp_path / "prepared" / "partition.safetensors") == first.partition_sha256
    assert listener.stages == ["partition", "report"]


def test_deleted_shards_are_written_again_as_they_were(tmp_path):
    """What ``verify_shards`` advises about a damaged shard."""
    first, _ = run(tiny_experiment(), tmp_path)
    victim = next((tmp_path / "prepared" / "shards").rglob("*.mds"))
    victim.write_bytes(b"damaged")
    with pytest.raises(UserError, match="delete the run's prepared/shards"):
        verify_shards(victim.parent)
    shutil.rmtree(tmp_path / "prepared" / "shards")
    again, listener = run(tiny_experiment(), tmp_path)
    assert listener.stages == ["shards", "report"] and again == first
    verify_shards(victim.parent)


def test_without_a_caption_encoder_there_is_no_text(tmp_path):
    experiment = tiny_experiment()
    experiment.prepare.caption_encoder = None
    experiment.condition.kind = "class"
    manifest, listener = run(experiment, tmp_path)
    assert manifest.text_size == 0 and manifest.caption_encoder is None
    assert "captions" not in listener.stages


def bad(key, value):
    experiment = tiny_experiment()
    section, _, name = key.rpartition(".")
    owner = experiment
    for part in section.split("."):
        owner = getattr(owner, part)
    setattr(owner, name, value)
    return experiment


@pytest.mark.parametrize(
    ("experiment", "problem"),
    [
        (bad("prepare.partition.num_clusters", 61), "only 60 samples"),
        (bad("prepare.partition.num_fine_centroids", 61), "only 60 samples"),
        (bad("prepare.partition.fit_fraction", 0.1), "leaves 6 of 60"),
        (bad("prepare.source.name", "blob"), "unknown source 'blob'"),
        (bad("prepare.features.params", {"grits": 4}), "no parameter 'grits'"),
        (bad("prepare.image_encoder.name", "vae"), "unknown image encoder 'vae'"),
        (bad("prepare.caption_encoder.name", "clip"), "unknown caption encoder 'clip'"),
        (bad("prepare.shards.compression", "zip:9"), "no such compression"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(tmp_path, experiment, problem):
    with pytest.raises(UserError, match=problem) as refusal:
        prepare(experiment, tmp_path / "run")
    assert "\n" not in str(refusal.value)
    assert list(tmp_path.iterdir()) == []


def test_class_conditions_need_classes(tmp_path):
    experiment = tiny_experiment()
    experiment.prepare.source.params["num_kinds"] = 1
    experiment.condition.kind = "class"
    with pytest.raises(UserError, match=r"condition\.kind"):
        prepare(experiment, tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_an_unbalanced_partition_stops_before_the_shards_and_leaves_no_manifest(tmp_path):
    experiment = tiny_experiment(num_fine_centroids=2)
    experiment.prepare.partition.max_largest_over_mean = 1.0
    with pytest.raises(UserError, match="max_largest_over_mean"):
        prepare(experiment, tmp_path)
    assert not (tmp_path / "prepared" / "shards").exists()
    with pytest.raises(UserError, match="run prepare first"):
        Manifest.read(tmp_path)
    # The stages before it are kept.
    experiment.prepare.partition.num_fine_centroids = 30
    _, listener = run(experiment, tmp_path)
    assert listener.stages == ["partition", "shards", "report"]


class Faulty:
    """A source that breaks its contract in a way that is chosen by name."""

    packages, attribution, num_classes = (), "", 2

    def __init__(self, fault):
        self.fault = fault

    def __len__(self):
        return 20

    def __iter__(self):
        for index in range({"few": 19, "many": 21}.get(self.fault, 20)):
            image = np.zeros((8, 8, 3), np.uint8)
            label = 0
            if index == 5:
                image = {
                    "size": np.zeros((9, 9, 3), np.uint8),
                    "dtype": image.astype(float),
                    "grey": image[..., 0],
                }.get(self.fault, image)
                label = 2 if self.fault == "label" else 0
            yield Record(str(index), image, "", label)


@pytest.mark.parametrize(
    ("fault", "problem"),
    [
        ("few", "yields 19 samples, its length says 20"),
        ("many", "more than the 20 samples"),
        ("size", r"'5' has shape \[9, 9, 3\]"),
        ("dtype", "no square uint8 RGB"),
        ("grey", "no square uint8 RGB"),
        ("label", "'5' has label 2, outside 0 to 1"),
    ],
)
def test_a_source_that_breaks_its_contract_is_named(tmp_path, monkeypatch, unchecked_types, fault, problem):
    monkeypatch.setattr(SOURCES, "build", lambda *_: Faulty(fault))
    with pytest.raises(UserError, match=problem):
        prepare(tiny_experiment(), tmp_path)
    assert not (tmp_path / "prepared" / "source").exists()


def test_features_that_are_not_finite_are_refused(tmp_path, monkeypatch):
    class Broken:
        packages, size = (), 4

        def encode(self, images):
            return np.full((len(images), 4), np.nan, np.float32)

    monkeypatch.setattr(FEATURES, "build", lambda *_: Broken())
    with pytest.raises(UserError, match="not finite"):
        prepare(tiny_experiment(), tmp_path)
    assert not (tmp_path / "prepared" / "features.npy").exists()


def test_the_picture_of_the_clusters_credits_the_source(tmp_path):
    """The credit is in the manifest and takes room at the foot of the picture."""
    plain, _ = run(tiny_experiment(), tmp_path / "plain")

    class Credited(type(SOURCES.build("blobs", {}))):
        attribution = "drawn by somebody"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SOURCES, "build", lambda _, params: Credited(**params))
        credited, listener = run(tiny_experiment(), tmp_path / "credited")
    assert (plain.attribution, credited.attribution) == ("", "drawn by somebody")
    assert listener.lines[-1] == "drawn by somebody"

    def height_of(name):
        with Image.open(tmp_path / name / "prepared" / "clusters.png") as image:
            return image.height

    assert height_of("credited") > height_of("plain") + 10


def test_progress_bars_and_lines_reach_the_terminal(tmp_path):
    output = io.StringIO()
    with RichReporter(Console(file=output, force_terminal=True, width=100)) as reporter:
        prepare(tiny_experiment(), tmp_path, reporter)
    text = output.getvalue()
    assert "60/60" in text and "left" in text
    assert all(f"{stage}: done in" in text for stage in EVERYTHING)


@pytest.mark.slow
def test_openmoji_falls_into_four_balanced_clusters_that_differ_in_what_they_show(tmp_path):
    experiment = tiny_experiment(num_clusters=4, num_fine_centroids=96)
    experiment.prepare.source = PluginConfig("openmoji", {"image_size": 24})
    # Half the resolution of the demo, a quarter of its time.
    experiment.prepare.features = PluginConfig("efficientnet-lite0", {"resolution": 56})
    experiment.prepare.partition.max_largest_over_mean = 1.05
    manifest, _ = run(experiment, tmp_path)
    assert manifest.num_samples > 1850
    assert max(manifest.priors) * 4 <= 1.05
    assert "CC BY-SA 4.0" in manifest.attribution

    prepared = Prepared(tmp_path / "prepared")
    _, captions, _ = prepared.records()
    is_flag = np.array([caption.startswith("flag: ") for caption in captions])
    is_face = np.array([caption.endswith("face") for caption in captions])
    for kind in (is_flag, is_face):
        per_cluster = np.bincount(prepared.clusters[kind], minlength=4)
        assert per_cluster.max() > 0.6 * kind.sum(), per_cluster
    assert np.bincount(prepared.clusters[is_flag]).argmax() != np.bincount(prepared.clusters[is_face]).argmax()
