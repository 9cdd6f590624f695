import numpy as np
from split import read_split
from tiny_runs import TINY

from ddm_lightning.config.load import load_experiment
from ddm_lightning.encoders.captions import HashedWords
from ddm_lightning.encoders.images import Pixels
from ddm_lightning.members.run import Run
from ddm_lightning.prepare.prepared import Prepared
from ddm_lightning.prepare.sources.toys import Blobs
from ddm_lightning.shards.manifest import HELD_OUT, TRAIN


def test_both_sides_are_the_whole_source_with_its_images_clusters_and_texts(tiny_prepared):
    run = Run(load_experiment(TINY, [f"run_dir={tiny_prepared.parent}"]))
    source = Blobs(num_samples=96, image_size=8)
    records = []
    for part in source.parts():
        records += source.read(part)
    numbers_by_image = {record.image.tobytes(): number for number, record in enumerate(records)}
    texts = HashedWords(size=16).vectors([record.caption for record in records])

    sides = [read_split(run, side) for side in (TRAIN, HELD_OUT)]

    numbers = []
    for side in sides:
        ids = [numbers_by_image[image.tobytes()] for image in Pixels().decode(side.x_0)]
        assert ids == sorted(ids)
        assert side.clusters.tolist() == Prepared(run.folder.prepared).clusters[ids].tolist()
        assert side.labels.tolist() == [records[number].label for number in ids]
        np.testing.assert_allclose(side.texts.numpy(), texts[ids], rtol=1e-3)
        numbers += ids
    assert sorted(numbers) == list(range(96))
    assert len(sides[1]) == sum(cluster.held_out for cluster in run.manifest.clusters)
