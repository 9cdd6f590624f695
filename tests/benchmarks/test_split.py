import numpy as np
import pytest
import torch
from shards.mds import write_mds
from split import read_samples, read_split

from ddm_lightning.encoders.captions import HashedWords
from ddm_lightning.encoders.images import Pixels
from ddm_lightning.members.run_folder import RunFolder
from ddm_lightning.prepare.prepared import Prepared
from ddm_lightning.prepare.sources.toys import Blobs
from ddm_lightning.shards.manifest import HELD_OUT, TRAIN, Manifest


@pytest.fixture
def run(tiny_prepared):
    return RunFolder(tiny_prepared.parent)


def test_both_sides_are_the_whole_source_with_its_images_clusters_and_texts(run):
    manifest, prepared = Manifest.read(run.root), Prepared(run.prepared)
    source = Blobs(num_samples=96, image_size=8)
    records = [record for part in source.parts() for record in source.read(part)]
    images, texts = np.stack([r.image for r in records]), HashedWords(size=16).vectors([r.caption for r in records])
    sides = [read_split(run, manifest, side) for side in (TRAIN, HELD_OUT)]
    assert sum(len(side) for side in sides) == manifest.num_samples
    assert len(sides[1]) == sum(cluster.held_out for cluster in manifest.clusters)
    for side in sides:
        ids = side.sample_ids.numpy()
        assert (np.diff(ids) > 0).all()
        assert np.array_equal(Pixels().decode(side.x_0), images[ids])
        assert np.array_equal(side.clusters.numpy(), prepared.clusters[ids])
        assert side.captions == [records[i].caption for i in ids]
        assert side.labels.tolist() == [records[i].label for i in ids]
        np.testing.assert_allclose(side.texts.numpy(), texts[ids], rtol=1e-3)
    assert not set(sides[0].sample_ids.tolist()) & set(sides[1].sample_ids.tolist())


def test_conditions_by_kind(run):
    side = read_split(run, Manifest.read(run.root), HELD_OUT)
    assert side.condition("none") is None
    assert torch.equal(side.condition("class").values, side.labels)
    assert torch.equal(side.condition("text").values, side.texts)


@pytest.mark.parametrize("compression", [None, "zstd:3"])
def test_samples_are_read_with_their_captions(tmp_path, compression):
    folder = write_mds(tmp_path / "shards", range(40), compression=compression)
    before = sorted(folder.iterdir())
    assert [sample["caption"] for sample in read_samples([folder])] == [f"number {i}" for i in range(40)]
    assert sorted(folder.iterdir()) == before
