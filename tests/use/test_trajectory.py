"""The heat map, the strip and the GIF: what is drawn where."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence
from tiny_runs import settings

from ddm_lightning.cli.parser import main
from ddm_lightning.ensemble.routing import Trace
from ddm_lightning.use.samples import weights_chart, write_trajectory

ALL = (253, 231, 36)
NONE = (68, 1, 84)  # ends of viridis
KEYS = [("a", 0), ("b", 0)]


def trace_of(num_steps, size=8):
    """Images that are black at first and grow brighter; their estimates are white all along."""
    trace = Trace(KEYS, KEYS)
    trace.times = torch.linspace(1, 0, num_steps + 1)
    for k, key in enumerate(KEYS):
        trace.weights[key] = torch.eye(2)[k].expand(num_steps, 2)
        trace.x_t[key] = torch.linspace(0, 1, num_steps + 1).reshape(-1, 1, 1, 1).expand(-1, 3, size, size)
        trace.x_0[key] = torch.ones(num_steps + 1, 3, size, size)

    return trace


def decode(x_0):
    return (255 * x_0).byte().permute(0, 2, 3, 1).numpy()


def drawn(path, size=8, **options):
    return write_trajectory(
        path, trace_of(50, size), ["expert-0", "expert-1"], dict.fromkeys(KEYS, "a"), decode, **options
    )


def cells(image, colour):
    return (np.abs(np.asarray(image.convert("RGB")).astype(int) - colour) <= 2).all(2)


@pytest.mark.parametrize("num_steps", [1, 2, 50])
def test_time_runs_to_the_right_and_the_first_expert_is_on_top(num_steps):
    late = (torch.arange(num_steps) >= num_steps // 2).float()
    image = weights_chart(torch.linspace(1, 0, num_steps + 1), {"mean": torch.stack([1 - late, late], 1)}, ["a", "b"])
    bright, dark = (np.argwhere(cells(image, colour)[:, :-160]) for colour in (ALL, NONE))  # without the colour bar
    assert len(bright) > 1000 and len(bright) == pytest.approx(len(dark), rel=0.1)
    if num_steps > 1:
        rising = np.corrcoef(bright.T)[0, 1]  # from the upper left to the lower right
        assert rising > 0.5 and np.corrcoef(dark.T)[0, 1] < -0.5


def test_a_panel_for_each_title_and_room_for_every_expert():
    times = torch.linspace(1, 0, 11)
    weights = torch.full((10, 8), 1 / 8)
    names = [f"expert-{k}" for k in range(8)]
    one, three = (weights_chart(times, {f"{i}": weights for i in range(num)}, names) for num in (1, 3))
    assert three.height == pytest.approx(3 * one.height, rel=0.2) and three.width == one.width
    assert one.height / 8 > 20  # pixels for a name


@pytest.mark.parametrize("size", [8, 40, 64])
def test_the_strip_leads_from_noise_to_the_image_with_a_heading_of_its_own_for_each_column(tmp_path, size):
    files = drawn(tmp_path / "grid.png", size)

    assert {kind: path.name for kind, path in files.items()} == {
        "weights": "grid-weights.png",
        "trajectory": "grid-trajectory.png",
    }
    strip = np.asarray(Image.open(files["trajectory"]))
    cell = size * max(1, 72 // size)
    black = (strip == 0).all(2)
    left = np.flatnonzero(black.sum(0) == 2 * cell)[0]  # x_t of both images begins black
    top = np.flatnonzero(black[:, left])[0]
    columns = range(left, left + 10 * (cell + 4), cell + 4)  # gaps of 4 pixels
    row = strip[top + cell // 2, [x + cell // 2 for x in columns], 0]
    assert (np.diff(row.astype(int)) > 0).all() and row[-1] == 255
    headings = [strip[top - 17 : top - 1, x : x + cell] for x in columns]
    assert len({heading.tobytes() for heading in headings}) == 10 and all((one < 200).any() for one in headings)


def test_the_gif_holds_the_finished_image(tmp_path):
    with Image.open(drawn(tmp_path / "grid.png", gif=True)["animation"]) as gif:
        dark = [(np.asarray(frame.convert("L")) < 5).sum() for frame in ImageSequence.Iterator(gif)]
        assert len(dark) == 30 and gif.info["loop"] == 0

    assert dark[0] - dark[-1] >= 2 * 72 * 72


def test_sample_writes_them_beside_the_grid(finished_run, tmp_path, capsys):
    run = [*settings(finished_run), "--prompt", "red disc", "--num", "2", "sample.num_steps=3"]
    for options, num_frames in ((["--strategy", "bayes", "--gif"], 4), ([], 0)):
        assert main(["sample", *run, "--out", str(tmp_path / "a.png"), *options]) == 0

        printed = capsys.readouterr().out
        files = {"weights": "a-weights.png", "trajectory": "a-trajectory.png", "animation": "a.gif"}
        for name, file in files.items():
            is_there = num_frames > 0 or name != "animation"
            assert (f"{name}: {tmp_path / file}\n" in printed) == is_there == (tmp_path / file).exists()

        if num_frames:
            with Image.open(tmp_path / "a.gif") as gif:
                assert gif.n_frames == num_frames

        (tmp_path / "a.gif").unlink(missing_ok=True)


def test_nothing_is_drawn_of_a_strategy_that_tells_nothing(tmp_path):
    assert write_trajectory(tmp_path / "grid.png", Trace(KEYS, KEYS), ["a"], {}, decode) == {}
    assert list(tmp_path.iterdir()) == []
