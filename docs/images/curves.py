"""Draw the README's curves from the TensorBoard files of a run.

python docs/images/curves.py runs/emoji_4x docs/images/curves.png
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator


def curves(folder: Path) -> dict[str, tuple[list[int], list[float]]]:
    """Read steps and values of every scalar of one member, by tag."""
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    scalars = {tag: events.Scalars(tag) for tag in events.Tags()["scalars"]}
    return {  # without the group in front, which older runs lack
        tag.partition("/")[2] if tag[0].isdigit() else tag: ([one.step for one in found], [one.value for one in found])
        for tag, found in scalars.items()
    }


def tidy(axes: Axes, title: str, unit: str) -> None:
    """Set the titles and remove the frame."""
    axes.set_title(title, loc="left", fontsize=10)
    axes.set(xlabel="optimizer step", ylabel=unit)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9")
    axes.legend(frameon=False, fontsize=8)


def main(run: Path, out: Path) -> None:
    """Draw losses of the experts (left) and accuracies of the router (right)."""
    plt.rcParams["font.size"] = 9
    figure, (left, right) = plt.subplots(1, 2, figsize=(8, 3), layout="constrained")
    for number, folder in enumerate(sorted((run / "members").glob("expert-*"))):
        found = curves(folder / "tensorboard")
        left.plot(*found["train/loss"], color=f"C{number}", linewidth=0.8, alpha=0.35)
        left.plot(*found["held_out/loss"], color=f"C{number}", marker="o", markersize=3, label=folder.name)
    tidy(left, "Experts: held-out loss (faint: training loss)", "mean squared error of the velocity")
    left.set_ylim(0, 0.5)
    found = curves(run / "members" / "router" / "tensorboard")
    for t in ("0.062", "0.312", "0.562", "0.812"):
        right.plot(*found[f"held_out/accuracy_t{t}"], marker="o", markersize=3, label=f"t = {t}")
    tidy(right, "Router: held-out accuracy by noise level", "accuracy (chance 0.25)")
    figure.savefig(out, dpi=130)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
