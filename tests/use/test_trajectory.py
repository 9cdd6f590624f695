"""The heat map, the strip and the GIF: what is drawn where."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image, ImageSequence
from tiny_runs import settings

from ddm_lightning.cli.parser import main
from ddm_lightning.ensemble.routing import Trace
from ddm_lightning.use.samples import weights_chart, write_trajectory

ALL, NONE = (253, 231, 36), (68, 1, 84)  # ends of viridis
KEYS = [("a", 0), ("b", 0)]


def trace_of(num_steps: int, size: int = 8) -> Trace:
    """Images that are black at first and grow brighter; their estimates are white all along."""
    trace = Trace(KEYS, KEYS)
    trace.times = torch.linspace(1, 0, num_steps + 1)
    for k, key in enumerate(KEYS):
        trace.weights[key] = torch.eye(2)[k].expand(num_steps, 2)
        trace.x_t[key] = torch.linspace(0, 1, num_steps + 1).reshape(-1, 1, 1, 1).expand(-1, 3, size, size)
        trace.x_0[key] = torch.ones(num_steps + 1, 3, size, size)
    return trace


def decode(x_0: torch.Tensor) -> np.ndarray:
    return (255 * x_0).byte().permute(0, 2, 3, 1).numpy()


def drawn(path: Path, size: int = 8, **options: bool) -> dict[str, Path]:
    return write_trajectory(
        path, trace_of(50, size), ["expert-0", "expert-1"], dict.fromkeys(KEYS, "a"), decode, **options
    )


def cells(image: Image.Image, colour: tuple[int, ...]) -> np.ndarray:
    return (np.abs(np.asarray(image.convert("RGB")).astype(int) - colour) <= 2).all(2)


@pytest.mark.parametrize("num_steps", [1, 2, 50])
def test_time_runs_to_the_right_and_the_first_expert_is_on_top(num_steps: int) -> None:
    late = (torch.arange(num_steps) >= num_steps // 2).float()
    image = weights_chart(torch.linspace(1, 0, num_steps + 1), {"mean": torch.stack([1 - late, late], 1)}, ["a", "b"])
    bright, dark = (np.argwhere(cells(image, colour)[:, :-160]) for colour in (ALL, NONE))  # without the colour bar
    assert len(bright) > 1000 and len(bright) == pytest.approx(len(dark), rel=0.1)
    if num_steps > 1:
        rising = np.corrcoef(bright.T)[0, 1]  # from the upper left to the lower right
        assert rising > 0.5 and np.corrcoef(dark.T)[0, 1] < -0.5


def test_a_panel_for_each_title_and_room_for_every_expert() -> None:
    times, weights = torch.linspace(1, 0, 11), torch.full((10, 8), 1 / 8)
    names = [f"expert-{k}" for k in range(8)]
    one, three = (weights_chart(times, {f"{i}": weights for i in range(num)}, names) for num in (1, 3))
    assert three.height == pytest.approx(3 * one.height, rel=0.2) and three.width == one.width
    assert one.height / 8 > 20  # pixels for a name


def test_the_strip_leads_from_noise_to_the_image(tmp_path: Path) -> None:
    files = drawn(tmp_path / "grid.png")
    assert {name: path.name for name, path in files.items()} == {
        "weights": "grid-weights.png",
        "trajectory": "grid-trajectory.png",
    }
    strip = np.asarray(Image.open(files["trajectory"]))
    left = np.flatnonzero((strip == 0).all(2).sum(0) == 2 * 72)[0]  # x_t of both images begins black
    top = np.flatnonzero((strip[:, left] == 0).all(1))[0]
    row = strip[top + 36, left + 36 :: 76, 0]  # cells of 72 pixels and gaps of 4
    assert len(row) == 10 and (np.diff(row.astype(int)) > 0).all() and row[-1] == 255


@pytest.mark.parametrize("size", [8, 40, 64])
def test_each_column_of_the_strip_has_a_heading_of_its_own(tmp_path: Path, size: int) -> None:
    strip = np.asarray(Image.open(drawn(tmp_path / "grid.png", size)["trajectory"]))
    cell = size * max(1, 72 // size)
    black = (strip == 0).all(2)
    left = np.flatnonzero(black.sum(0) == 2 * cell)[0]
    top = np.flatnonzero(black[:, left])[0]
    above = [strip[top - 17 : top - 1, x : x + cell] for x in range(left, left + 10 * (cell + 4), cell + 4)]
    assert len({heading.tobytes() for heading in above}) == 10 and all((heading < 200).any() for heading in above)


def test_the_gif_holds_the_finished_image(tmp_path: Path) -> None:
    with Image.open(drawn(tmp_path / "grid.png", gif=True)["animation"]) as gif:
        dark = [(np.asarray(frame.convert("L")) < 5).sum() for frame in ImageSequence.Iterator(gif)]
        assert len(dark) == 30 and gif.info["loop"] == 0
    assert dark[0] - dark[-1] >= 2 * 72 * 72


def test_sample_writes_them_beside_the_grid(
    finished_run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [
        "sample",
        *settings(finished_run),
        "--prompt",
        "red disc",
        "--num",
        "2",
        "--out",
        str(tmp_path / "a.png"),
    ]
    assert main([*options, "sample.num_steps=3", "--strategy", "bayes", "--gif"]) == 0
    printed = capsys.readouterr().out
    for name, file in {"weights": "a-weights.png", "trajectory": "a-trajectory.png", "animation": "a.gif"}.items():
        assert f"{name}: {tmp_path / file}\n" in printed and (tmp_path / file).stat().st_size > 500
    with Image.open(tmp_path / "a.gif") as gif:
        assert gif.n_frames == 4
    (tmp_path / "a.gif").unlink()
    assert main(options) == 0 and "animation" not in capsys.readouterr().out
    assert not (tmp_path / "a.gif").exists()


def test_nothing_is_drawn_of_a_strategy_that_tells_nothing(tmp_path: Path) -> None:
    assert write_trajectory(tmp_path / "grid.png", Trace(KEYS, KEYS), ["a"], {}, decode) == {}
    assert list(tmp_path.iterdir()) == []
