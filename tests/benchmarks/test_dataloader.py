import dataloader
from common import GRIDS
from shards.mds import WARNINGS

pytestmark = WARNINGS


def test_an_epoch_of_nine_shapes_is_compared_with_as_many_batches_of_one(monkeypatch):
    seen = []
    monkeypatch.setattr(dataloader, "BATCH_SIZE", 4)
    monkeypatch.setattr(dataloader, "NUM_THREADS", (0,))
    monkeypatch.setattr(
        dataloader, "epoch", lambda loader: seen.append(sorted(tuple(batch["x_0"].shape) for batch in loader))
    )

    report = dataloader.compare_shapes(4 * 9, 1)

    mixed = sorted((4, 8, 4 * rows, 4 * columns) for rows, columns in GRIDS)
    square = 9 * [(4, 8, 32, 32)]
    assert seen == [mixed, mixed, square, square, mixed, square]  # the first four warm up
    assert report.figures.keys() == {"shapes_over_one_0_threads", "shapes_over_one_0_threads_cpu_seconds"}
