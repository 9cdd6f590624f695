import dataclasses
import json

import pytest

from ddm_lightning.config.experiment import PluginConfig
from ddm_lightning.core.errors import UserError
from ddm_lightning.shards.manifest import ClusterSamples, Manifest, manifest_path


def manifest():
    return Manifest(
        format_version=3,
        source={"name": "blobs", "params": {"num_samples": 10}},
        attribution="drawn by nobody",
        images={"size": 8, "aspect": "crop"},
        image_encoder=PluginConfig("pixels"),
        stores="x_0",
        x_shape=(3, 8, 8),
        normalisation={"scale": 1 / 127.5, "shift": [127.5, 127.0, 0.0]},
        statistics={"mean": [0.1, 0.0, -0.2], "std": [1.0, 0.9, 1.1]},
        caption_encoder=None,
        text_size=0,
        token_shape=(3, 4),
        columns={"x_0": "ndarray:uint8:3,8,8", "label": "int32"},
        num_classes=4,
        features=PluginConfig("pooled-pixels"),
        provenance={"image_encoder": {}, "features": {"weights_sha256": "ef"}},
        num_read=12,
        broken={"empty file": 2},
        num_samples=10,
        num_without_caption=2,
        clusters=(ClusterSamples(5, 1), ClusterSamples(3, 1)),
        priors=(0.6, 0.4),
        seed=3,
        index_sha256={"cluster-0/train": "ab"},
        partition_sha256="cd",
        versions={"torch": "2"},
        class_names=["disc", "square", "ring", "star"],
        class_counts=[[6, 0, 0, 0], [1, 1, 1, 1]],
    )


def test_a_written_manifest_is_read(tmp_path):
    manifest().write(tmp_path)
    read = Manifest.read(tmp_path)

    assert read == manifest()
    assert read.num_clusters == 2
    assert read.format_version == 3


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (None, "is missing; run prepare first"),
        ("not json", "cannot be read"),
        ({"format_version": ...}, "'format_version' is missing"),
        ({"format_version": 99}, "'format_version' = 99: must be 3"),
        ({"format_version": 1}, r"'format_version' = 1: must be 3 \(.* the release .*\); delete it and run prepare"),
        ({"surprise": 1}, "unknown key 'surprise'"),
        ({"x_shape": [1, 2]}, "'x_shape'"),
        ({"clusters": [{"train": 1}]}, r"'clusters\[0\]\.held_out' is missing"),
        ({"x_shape": [3, 10**6, 10**6]}, "'x_shape'"),
        ({"x_shape": [3, 8, 16]}, "'columns' gives x_0 another shape than 3,8,16"),
        ({"stores": "posterior"}, "x_0 another shape than 6,8,8"),
        ({"text_size": 10**30}, "'text_size'"),
        ({"columns": {"x_0": "ndarray:uint8:3,8,8", "text": "ndarray:float16:512"}}, "text another shape than 0"),
        ({"columns": {"x_0": "ndarray:uint8:3,8,8", "text_tokens": "ndarray:float16:9,9"}}, "text_tokens"),
        ({"token_shape": [10**9, 10**9]}, "'token_shape'"),
        ({"clusters": []}, "'priors'"),
        ({"clusters": [{"train": -1, "held_out": 1}] * 2}, r"'clusters\[0\]\.train'"),
        ({"priors": [2, -1]}, "'priors"),
        ({"priors": [1]}, "'priors'"),
        ({"num_classes": "many"}, "'num_classes'"),
        ({"normalisation": {"scale": [1, 1], "shift": 0}}, "'normalisation' has 2 numbers of scale for 3 channels"),
        ({"normalisation": {"scale": 10**400, "shift": 0}}, "'normalisation"),
        ({"index_sha256": {"cluster-0/train": 1}}, "'index_sha256"),
        ({"class_counts": [[1, 1, 1, 1]]}, "'class_counts' has another shape"),
        ({"class_counts": [[1, 1, 1], [1, 1, 1]]}, "'class_counts' has another shape"),
        ({"class_counts": [[1, 1, 1, -1]] * 2}, "'class_counts"),
    ],
    ids=str,
)
def test_a_manifest_that_cannot_be_read_or_contradicts_itself_is_one_line(tmp_path, change, problem):
    path = manifest_path(tmp_path)
    if change is not None:
        path.parent.mkdir()
        if isinstance(change, dict):
            stored = dataclasses.asdict(manifest()) | change
            change = json.dumps({key: value for key, value in stored.items() if value is not ...})

        path.write_text(change)

    with pytest.raises(UserError, match=problem) as refusal:
        Manifest.read(tmp_path)

    assert str(path) in str(refusal.value)
    assert "\n" not in str(refusal.value)
