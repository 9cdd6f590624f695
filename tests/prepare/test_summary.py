"""The last stage with the real report; the other tests of ``prepare`` put a light one in its place."""

import json

import numpy as np
import pytest
from PIL import Image
from prepare.tiny_experiment import tiny_experiment

from ddm_lightning.prepare.prepared import Prepared
from ddm_lightning.prepare.report import page as report
from ddm_lightning.prepare.report.page import write_report
from ddm_lightning.prepare.stages import prepare
from ddm_lightning.shards.verify import verify_shards


@pytest.mark.slow
def test_report_and_manifest_agree_with_the_files(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(
        report, "write_report", lambda *args, **options: (told.append((args, options)), write_report(*args, **options))
    )
    manifest = prepare(tiny_experiment(), tmp_path)
    prepared = Prepared(tmp_path / "prepared")
    (((folder, data), options),) = told
    assert folder == tmp_path / "prepared" / "report" and "tiny" in options["title"] and "blobs" in options["title"]
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert page.lstrip().lower().startswith("<!doctype html") and "pooled-pixels" in page
    for image in [*folder.glob("*.png"), tmp_path / "prepared" / "clusters.png"]:
        with Image.open(image) as image:
            image.verify()
    assert data.num_samples == manifest.num_samples == 60 and data.num_clusters == 2
    np.testing.assert_array_equal(data.counts, np.bincount(prepared.clusters))
    assert data.column_bytes["x_0"] == 60 * 3 * 8 * 8 and data.column_bytes["text"] == 60 * 8 * 2
    facts = json.loads((tmp_path / "prepared" / "partition.json").read_text())
    assert list(data.displaced) == facts["displaced"]
    for row, caption in zip(data.thumbnail_rows.tolist(), data.captions, strict=True):
        assert caption == prepared.texts("captions")[row]
    for name, digest in manifest.index_sha256.items():
        cluster, split = name.removeprefix("cluster-").split("/")
        expected = manifest.clusters[int(cluster)]
        number = verify_shards(prepared.shards / name, index_sha256=digest)
        assert number == (expected.train if split == "train" else expected.held_out)
