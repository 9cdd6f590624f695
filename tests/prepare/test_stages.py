import io
import json
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from prepare.listed import Listener, state_of
from prepare.tiny_experiment import tiny_experiment
from rich.console import Console
from streaming.base.format import reader_from_json
from tiny_runs import TINY, light_prepare

from ddm_lightning.cli.parser import main
from ddm_lightning.config.experiment import ImagesConfig, PartitionConfig, PluginConfig, ShardsConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.core.files import sha256_file
from ddm_lightning.core.formatting import Bars, format_bytes
from ddm_lightning.core.registry import CAPTION_ENCODERS, FEATURES, IMAGE_ENCODERS, SOURCES
from ddm_lightning.partition import build
from ddm_lightning.partition.partition import Partition, Samples
from ddm_lightning.prepare import stages
from ddm_lightning.prepare.engine import Reporter
from ddm_lightning.prepare.prepared import Prepared
from ddm_lightning.prepare.stages import prepare
from ddm_lightning.shards.manifest import Manifest
from ddm_lightning.shards.verify import verify_shards

EVERYTHING = ["source", "encode", "index", "partition", "shards", "merge"]

pytestmark = pytest.mark.usefixtures("quick_prepare")


def run(experiment, folder):
    listener = Listener()
    return prepare(experiment, folder, listener), listener


@pytest.fixture(scope="module")
def once(tmp_path_factory):
    folder = tmp_path_factory.mktemp("once")
    with light_prepare():
        return prepare(tiny_experiment(), folder), folder


@pytest.fixture
def first(once, tmp_path):
    """The manifest of the tiny experiment, prepared in ``tmp_path``."""
    manifest, folder = once
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return manifest


def test_the_size_of_the_shards_is_that_of_their_files(tmp_path):
    _, listener = run(tiny_experiment(), tmp_path)
    files = (tmp_path / "prepared" / "shards").glob("*/*/*/*")
    size = format_bytes(sum(path.stat().st_size for path in files))
    (line,) = (line for line in listener.lines if line.startswith("shards: "))
    assert line.endswith(f"60 samples, {size}")


def test_captions_of_damaged_files_are_one_line_and_prepare_repairs_them(tmp_path, capsys):
    given = ["-c", str(TINY), f"run_dir={tmp_path}"]
    asked = ["sample", *given, "--captions", "disc"]
    assert main(["prepare", *given]) == 0
    names = ("index.json", "parts.json", "parts/*/part.json", "parts/*/texts.npz")
    paths = [path for name in names for path in (tmp_path / "prepared").glob(name)]
    assert len(paths) == 4

    for path in paths:
        whole = path.read_bytes()
        for content in (b"[[]]", whole[:100]):
            path.write_bytes(content)
            capsys.readouterr()
            assert main(asked) == 2, (path, content[:9])
            error = capsys.readouterr().err
            assert error.startswith(f"error: {path}: ") and error.count("\n") == 1 and "run prepare again" in error
        path.write_bytes(whole)

    for path in paths:
        path.write_bytes(path.read_bytes()[:100])
    assert main(["prepare", *given]) == main(asked) == 0
    assert "red disc" in capsys.readouterr().out


def test_manifest_files_and_partition_agree(tmp_path):
    manifest, listener = run(tiny_experiment(), tmp_path)
    assert listener.stages == EVERYTHING
    assert manifest == Manifest.read(tmp_path)
    assert manifest.x_shape == (3, 8, 8) and manifest.text_size == 8 and manifest.num_classes == 4
    assert manifest.class_names == ["red disc", "blue square", "green cross", "yellow ring"]
    assert manifest.source == {"name": "blobs", "params": {"num_samples": 60, "image_size": 8}}
    assert manifest.num_samples == 60 == sum(c.train + c.held_out for c in manifest.clusters)

    prepared = Prepared(tmp_path / "prepared")
    partition = Partition.load(prepared.partition_file)
    assert manifest.partition_sha256 == sha256_file(prepared.partition_file)
    assert manifest.priors == tuple(partition.priors.tolist())
    features = prepared.rows("features")
    labels = prepared.facts("label")
    clusters = partition.rule.assign(Samples(features, labels, prepared.texts("keys")))
    np.testing.assert_array_equal(clusters, prepared.clusters)
    np.testing.assert_array_equal(np.bincount(clusters), partition.counts)
    pairs = list(zip(clusters.tolist(), labels.tolist(), strict=True))
    assert manifest.class_counts == [[pairs.count((k, label)) for label in range(4)] for k in range(2)]
    assert partition.counts.max() <= 1.1 * 30
    for name, digest in manifest.index_sha256.items():
        folder = tmp_path / "prepared" / "shards" / name
        cluster, split = name.removeprefix("cluster-").split("/")
        expected = manifest.clusters[int(cluster)]
        expected = expected.train if split == "train" else expected.held_out
        assert verify_shards(folder, index_sha256=digest) == expected > 0
    assert len(manifest.index_sha256) == 4
    for stage in ("encode", "partition", "shards", "merge"):
        last = [t for t in listener.ticks if t[0] == stage][-1]
        assert last[1] == last[2], last
    pixels = np.stack(list(stored_images(tmp_path))) / 127.5 - 1
    np.testing.assert_allclose(manifest.statistics["mean"], pixels.mean((0, 2, 3)), rtol=1e-9)
    np.testing.assert_allclose(manifest.statistics["std"], pixels.std((0, 2, 3)), rtol=1e-9)
    assert manifest.columns == {"x_0": "ndarray:uint8:3,8,8", "label": "int32", "text": "ndarray:float16:8"}
    assert (manifest.num_read, manifest.broken, manifest.stores) == (60, {}, "x_0")
    assert manifest.images == {"size": 8, "aspect": "crop"}
    assert manifest.provenance == {"image_encoder": {}, "caption_encoder": {}, "features": {}}


def test_it_computes_in_full_float32_also_where_members_do_not(tmp_path):
    torch.set_float32_matmul_precision("high")  # as for a GPU
    prepare(tiny_experiment(), tmp_path)
    assert torch.get_float32_matmul_precision() == "highest"


def stored_images(run):
    return (sample["x_0"] for sample in stored_samples(run))


def stored_samples(run):
    for index in sorted((run / "prepared" / "shards").glob("*/*/index.json")):
        folder = index.parent
        for shard in json.loads(index.read_text())["shards"]:
            reader = reader_from_json(str(folder.parent), folder.name, shard)
            yield from (reader[i] for i in range(reader.samples))


def test_a_second_run_does_nothing_and_loads_no_encoder(tmp_path, monkeypatch, first):
    before = state_of(tmp_path)
    for registry in (IMAGE_ENCODERS, CAPTION_ENCODERS, FEATURES):
        monkeypatch.setattr(registry, "build", lambda *_: pytest.fail("nothing is to be built"))
    monkeypatch.setattr(type(SOURCES.build("blobs", {})), "read", lambda *_: pytest.fail("nothing is to be read"))
    second, listener = run(tiny_experiment(), tmp_path)
    assert second == first
    assert state_of(tmp_path) == before
    assert listener.lines == [f"{tmp_path / 'prepared'}: up to date"]


def test_a_source_that_is_gone_leaves_what_was_made_of_it(tmp_path, monkeypatch, first):
    """The shards outlive the disk that the images came on; only new work needs them."""

    def gone(_):
        raise UserError("/media/stick: is not there")

    monkeypatch.setattr(type(SOURCES.build("blobs", {})), "parts", gone)
    again, listener = run(tiny_experiment(), tmp_path)
    assert again == first
    assert listener.lines[0].startswith("the source cannot be listed (/media/stick: is not there)")
    assert listener.lines[1:] == [f"{tmp_path / 'prepared'}: up to date"]
    changed_clusters, listener = run(changed(seed=1), tmp_path)
    assert listener.stages == ["partition", "shards", "merge"] and changed_clusters.num_samples == 60
    before = state_of(tmp_path)
    for experiment, folder in (
        (tiny_experiment(), tmp_path / "elsewhere"),
        (changed(filters={"min_side": 4}), tmp_path),
    ):
        with pytest.raises(UserError, match="is not there"):
            run(experiment, folder)
    assert state_of(tmp_path) == before


def changed(num_samples=60, seed=0, **changes):
    experiment = tiny_experiment(num_samples, seed=seed)
    for key, value in changes.items():
        setattr(experiment.prepare, key, value)
    return experiment


@pytest.mark.parametrize(
    ("changes", "rerun"),
    [
        ({"num_samples": 70}, EVERYTHING),
        ({"features": PluginConfig("pooled-pixels", {"grid": 2})}, [*EVERYTHING[1:]]),
        # Whether all captions could be encoded decides which samples there are, so these are counted anew.
        ({"caption_encoder": PluginConfig("hashed-words", {"size": 4})}, ["encode", "index", "shards", "merge"]),
        ({"caption_encoder": None}, ["encode", "index", "shards", "merge"]),
        ({"horizontal_flips": True}, ["encode", "index", "shards", "merge"]),
        ({"images": ImagesConfig(size=6)}, EVERYTHING[1:]),
        ({"max_bad_fraction": 0.5}, ["index", "merge"]),
        ({"partition": PartitionConfig(kind="random", num_clusters=2, max_largest_over_mean=1.5)}, EVERYTHING[3:]),
        ({"partition": PartitionConfig(kind="labels", num_clusters=2, max_largest_over_mean=1.5)}, EVERYTHING[3:]),
        ({"held_out_fraction": 0.2}, EVERYTHING[3:]),
        ({"shards": ShardsConfig(compression="zstd:3")}, ["shards", "merge"]),
        ({"num_processes": 7}, []),
        ({"seed": 1}, ["partition", "shards", "merge"]),
    ],
)
def test_a_change_runs_again_what_hangs_on_it_and_gives_what_a_fresh_run_gives(tmp_path, first, changes, rerun):
    manifest, listener = run(changed(**changes), tmp_path)

    assert listener.stages == rerun
    fresh, _ = run(changed(**changes), tmp_path / "fresh")
    assert manifest == fresh


def test_the_setting_that_makes_stages_anew_is_named_before_the_work(tiny_prepared, tmp_path, capsys):
    settings = ["prepare", "-c", str(TINY), f"run_dir={tmp_path}"]
    shutil.copytree(tiny_prepared, tmp_path / "prepared")
    assert main(settings) == 0 and "changed" not in capsys.readouterr().out
    assert main([*settings, "prepare.horizontal_flips=true", "prepare.num_processes=1"]) == 0
    first, second, *_ = capsys.readouterr().out.splitlines()
    expected = "settings changed: prepare.horizontal_flips (was false); encode and what depends on it are made anew"
    assert first == expected and second.startswith("encode: done in")


def test_the_same_bytes_upstream_spare_the_stages_below(tmp_path, first):
    (Prepared(tmp_path / "prepared").part_folder(0) / "features.npy").unlink()
    again, listener = run(tiny_experiment(), tmp_path)
    # Merging rewrites the manifest, which is taken away while anything changes.
    assert listener.stages == ["encode", "merge"] and again == first


def test_a_change_that_was_stopped_half_way_and_taken_back_leaves_no_trace(tmp_path, monkeypatch, first):
    partition = tmp_path / "prepared" / "rule.safetensors"
    before = partition.read_bytes()

    def stopped(*_):
        raise KeyboardInterrupt

    # Another seed writes another partition of the same size, and is stopped before that is recorded.
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(stages, "save_array", stopped)  # of the clusters, which are written next
        prepare(tiny_experiment(seed=1), tmp_path)
    assert partition.read_bytes() != before and partition.stat().st_size == len(before)
    with pytest.raises(UserError, match="run prepare first"):
        Manifest.read(tmp_path)
    again, listener = run(tiny_experiment(), tmp_path)
    assert again == first and partition.read_bytes() == before
    assert listener.stages == ["partition", "merge"]


def test_deleted_shards_are_written_again_as_they_were(tmp_path, first):
    """What ``verify_shards`` advises about a damaged shard."""
    victim = next((tmp_path / "prepared" / "shards").rglob("*.mds"))
    victim.write_bytes(b"damaged")
    with pytest.raises(UserError, match="delete the run's prepared/shards"):
        verify_shards(victim.parent)
    shutil.rmtree(tmp_path / "prepared" / "shards")
    again, listener = run(tiny_experiment(), tmp_path)
    assert listener.stages == ["shards", "merge"] and again == first
    verify_shards(victim.parent)


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
    assert listener.stages == ["partition", "shards", "merge"]


def test_a_refused_or_stopped_partition_leaves_the_finished_one(tmp_path, monkeypatch, first):
    before = state_of(tmp_path / "prepared" / "shards")
    with pytest.raises(UserError, match="max_largest_over_mean"):
        prepare(changed(partition=PartitionConfig(kind="labels", num_clusters=3, max_largest_over_mean=1.0)), tmp_path)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(build, "balanced_kmeans", interrupted)
        prepare(tiny_experiment(seed=1), tmp_path)
    assert Manifest.read(tmp_path) == first
    again, listener = run(tiny_experiment(), tmp_path)
    assert again == first and listener.stages == [] and state_of(tmp_path / "prepared" / "shards") == before


def interrupted(*_, **__):
    raise KeyboardInterrupt


def test_another_number_of_clusters_groups_the_fine_centroids_that_are_there(tmp_path, monkeypatch, first):
    with monkeypatch.context() as patch:
        patch.setattr(build, "fit_fine", lambda *_: pytest.fail("fits again"))
        patch.setattr(build, "nearest_of_rows", lambda *_: pytest.fail("passes over all samples again"))
        found, _ = run(tiny_experiment(num_clusters=3), tmp_path)

    fresh, _ = run(tiny_experiment(num_clusters=3), tmp_path / "fresh")
    assert found == fresh
    other, _ = run(tiny_experiment(num_clusters=3, seed=1), tmp_path)
    assert other.partition_sha256 != found.partition_sha256


def test_a_changed_partition_of_another_run_is_taken_over(tmp_path):
    theirs = changed(partition=PartitionConfig(kind="random", num_clusters=2))
    run(theirs, tmp_path / "theirs")
    path = str(tmp_path / "theirs" / "prepared" / "partition.safetensors")
    ours = changed(partition=PartitionConfig(kind="existing", num_clusters=2, path=path))
    before, _ = run(ours, tmp_path / "ours")
    theirs.seed = 1
    run(theirs, tmp_path / "theirs")
    after, listener = run(ours, tmp_path / "ours")
    assert listener.stages == ["partition", "shards", "merge"]
    fresh, _ = run(ours, tmp_path / "fresh")
    assert after == fresh != before


def test_the_image_of_the_clusters_credits_the_source(tmp_path, monkeypatch):
    """The credit is in the manifest and takes room at the foot of the image."""
    blobs = type(SOURCES.build("blobs", {}))
    heights = []
    for credit in ("", "drawn by somebody"):
        monkeypatch.setattr(blobs, "attribution", credit)
        manifest, listener = run(tiny_experiment(), tmp_path / credit)
        assert manifest.attribution == credit
        with Image.open(tmp_path / credit / "prepared" / "clusters.png") as image:
            heights.append(image.height)

    assert listener.lines[-1] == "drawn by somebody"
    assert heights[1] > heights[0] + 10


def test_progress_bars_and_lines_reach_the_terminal(tmp_path):
    output = io.StringIO()
    output.isatty = lambda: True
    with Bars(Console(file=output, width=100)) as bars:
        prepare(tiny_experiment(), tmp_path, Reporter(bars))
    text = output.getvalue()
    assert "60/60" in text and "0:00:00" in text
    assert all(f"{stage}: done in" in text for stage in EVERYTHING)
