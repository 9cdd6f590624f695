"""Aspect buckets in ``prepare``, against plain loops over the images and Streaming's own reader."""

import json
from collections import Counter

import numpy as np
import pytest
from PIL import Image
from source_files import lanczos
from streaming import StreamingDataset

from ddm_lightning.core.buckets import Bucket
from ddm_lightning.encoders.interfaces import parse_encoding
from ddm_lightning.shards.manifest import ClusterSamples, Manifest

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
