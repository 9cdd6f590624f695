"""The benchmark of shapes reads each bucket whole, and weighs the shapes' distances."""

import pytest
import torch
from shapes import averaged, images_of
from tiny_runs import TINY, bucket_settings

from ddm_lightning.config.load import load_experiment
from ddm_lightning.evaluation.metrics.features import KernelDistance
from ddm_lightning.members.run import Run
from ddm_lightning.shards.manifest import HELD_OUT, TRAIN


def test_all_images_of_a_bucket_have_its_shape_and_their_captions(bucket_run):
    run = Run(load_experiment(TINY, [f"run_dir={bucket_run}", *bucket_settings(bucket_run / "images")]))

    for bucket, clusters in zip(run.manifest.buckets, run.manifest.bucket_samples, strict=True):
        for side in (TRAIN, HELD_OUT):
            images, captions = images_of(run, bucket, side)
            num = sum(cluster.train if side == TRAIN else cluster.held_out for cluster in clusters)
            assert images.shape == (num, bucket.height, bucket.width, 3)
            assert len(captions) == num and all(caption.endswith(bucket.name) for caption in captions)


def test_shapes_weigh_as_much_as_their_held_out_images():
    distances = [KernelDistance(1.0, torch.tensor([1.0, 2.0])), KernelDistance(4.0, torch.tensor([3.0, 5.0]))]

    whole = averaged(distances, torch.tensor([0.25, 0.75]))

    assert whole.value == pytest.approx(3.25)
    assert whole.halves.tolist() == [2.5, 4.25]
