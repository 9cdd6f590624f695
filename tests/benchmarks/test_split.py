import numpy as np
import pytest
from split import read_split
from tiny_runs import TINY

from ddm_lightning.config.load import load_experiment
from ddm_lightning.encoders.captions import HashedWords
from ddm_lightning.encoders.images import Pixels
from ddm_lightning.members.run import Run
from ddm_lightning.prepare.prepared import Prepared
from ddm_lightning.prepare.sources.toys import Blobs
from ddm_lightning.shards.manifest import HELD_OUT, TRAIN


@pytest.fixture
def run(tiny_prepared):
    return Run(load_experiment(TINY, [f"run_dir={tiny_prepared.parent}"]))


def test_both_sides_are_the_whole_source_with_its_images_clusters_and_texts(run):
    prepared = Prepared(run.folder.prepared)
    source = Blobs(num_samples=96, image_size=8)
    records = [record for part in source.parts() for record in source.read(part)]
    images, texts = np.stack([r.image for r in records]), HashedWords(size=16).vectors([r.caption for r in records])
    sides = [read_split(run, side) for side in (TRAIN, HELD_OUT)]
    assert sum(len(side) for side in sides) == run.manifest.num_samples
    assert len(sides[1]) == sum(cluster.held_out for cluster in run.manifest.clusters)
    of_pixels = {image.tobytes(): number for number, image in enumerate(images)}
    numbers = []
    for side in sides:
        ids = np.array([of_pixels[image.tobytes()] for image in Pixels().decode(side.x_0)])
        assert (np.diff(ids) > 0).all()
        numbers += ids.tolist()
        assert np.array_equal(side.clusters.numpy(), prepared.clusters[ids])
        assert side.labels.tolist() == [records[i].label for i in ids]
        np.testing.assert_allclose(side.texts.numpy(), texts[ids], rtol=1e-3)
    assert sorted(numbers) == list(range(96))
