import json

import dataloader
import numpy as np
import pytest
import torch
from common import Report
from dataloader_sides import BATCH_SIZE, SIDES, WRITERS, Data

pytestmark = [
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),
    # Of the plain StreamingDataset, once a process.
    pytest.mark.filterwarnings("ignore:The given NumPy array is not writable:UserWarning"),
    pytest.mark.filterwarnings("ignore:Exception ignored in. <_io.FileIO:pytest.PytestUnraisableExceptionWarning"),
]


def speeds_of(**best):
    return {(side, workers): [best[side] / 2] * 3 for side in SIDES for workers in dataloader.WORKERS} | {
        (side, 1): [best[side] * factor for factor in (0.9, 1.0, 5.0)] for side in SIDES
    }


def test_a_ratio_is_of_medians_at_each_sides_best_number_of_workers():
    report = Report("", [])
    speeds = speeds_of(ours=30.0, local=80.0, streaming=20.0, webdataset=10.0, litdata=40.0)
    dataloader.add(report, Data("latents", 1, 0), speeds)
    dataloader.add(report, Data("latents and text", 1, 768), speeds)
    for end in ("", "_text"):
        assert report.figures[f"ours_over_streaming{end}"] == 1.5
        assert report.figures[f"local_over_streaming{end}"] == 4
        assert report.figures[f"local_over_webdataset{end}"] == 8
        assert report.figures[f"local_over_litdata{end}"] == 2
    assert report.rows[0] == [
        "latents",
        "ours, streaming back end",
        "15 (15 to 15)",
        "30 (27 to 150)",
        "15 (15 to 15)",
        "30",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("text_size", [0, 5])
def test_all_sides_give_the_same_samples(tmp_path, text_size):
    pytest.importorskip("litdata")
    pytest.importorskip("webdataset")
    data = Data("few", 2 * BATCH_SIZE, text_size)
    for name, write in WRITERS.items():
        write(data, tmp_path / name)
    written = {sample["sample_id"]: sample for sample in data.samples()}
    for side in SIDES.values():
        seen = []
        for batch in side.build(data, tmp_path / side.format, 0):
            assert set(batch) == set(data.columns())
            for row, sample_id in enumerate(torch.as_tensor(batch["sample_id"]).tolist()):
                seen.append(sample_id)
                for name, value in written[sample_id].items():
                    found = batch[name][row].numpy() if name in ("x_0", "text") else int(batch[name][row])
                    assert np.array_equal(found, value, equal_nan=name == "x_0"), (side.title, name)
        assert sorted(seen) == list(range(2 * BATCH_SIZE)), side.title
        assert seen != sorted(seen), side.title


@pytest.mark.slow
@pytest.mark.long
def test_quick_ends_with_every_figure(tmp_path):
    pytest.importorskip("litdata")
    pytest.importorskip("webdataset")
    out = tmp_path / "dataloader.json"
    dataloader.main(["--quick", "--folder", str(tmp_path), "--json", str(out)])
    figures = json.loads(out.read_text())["figures"]
    ratios = ("ours_over_streaming", "local_over_streaming", "local_over_webdataset", "local_over_litdata")
    assert all(figures[f"{ratio}{end}"] > 0 for ratio in ratios for end in ("", "_text"))
    assert {path.name for path in tmp_path.iterdir()} == {"dataloader.json", "dataloader.md"}
