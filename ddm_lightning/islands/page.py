"""``status --html``: one page with the table of all members and their curves, without scripts or network."""

from __future__ import annotations

import io
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeAlias

import matplotlib as mpl
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from ddm_lightning.core import remote
from ddm_lightning.core.errors import first_line, note, redacted
from ddm_lightning.core.files import atomic_write_text, inside
from ddm_lightning.islands.status import NOTES, Seen, rows_of
from ddm_lightning.members.run import Run

Curves: TypeAlias = dict[str, tuple[list[int], list[float]]]
"""Steps and values by tag."""
_MAX_POINTS = 1000
_FEW_POINTS = 3
_BY_NOISE_LEVEL = "4_"
"""Begins the tags of curves at one t, which are too many for one page."""
_STYLE: Any = {"svg.fonttype": "none", "font.size": 8, "axes.spines.top": False, "axes.spines.right": False}


def write_page(path: Path, members: Sequence[Seen], run: Run) -> None:
    """Write the page.

    Args:
        path: the HTML file.
        members: as they are now.
        run: holds the TensorBoard files, at its URL if it has one.

    Raises:
        UserError: the URL cannot be read.
    """
    curves = {seen.status.member: read_curves(seen.status.member, run) for seen in members}
    colours = {name: to_hex(f"C{number}") for number, name in enumerate(curves)}
    tags = {tag for found in curves.values() for tag in found}
    figures = dict.fromkeys(map(_figure_of, sorted(tags)))
    pages = Environment(loader=PackageLoader(__package__), autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    page = pages.get_template("status.html.j2").render(
        title=run.experiment.name,
        place=redacted(run.url or str(run.folder.root)),
        time=f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC",
        rows=rows_of(members),
        colours=colours,
        notes={seen.health: NOTES[seen.health] for seen in members if seen.health in NOTES},
        charts=[(figure, Markup(_chart(figure, curves))) for figure in figures],
    )
    atomic_write_text(path, page)


def read_curves(name: str, run: Run) -> Curves:
    """Read a member's curves from its TensorBoard files; empty if there are none, or if they cannot be read.

    Raises:
        UserError: the URL cannot be read.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = run.folder.member(name) / "tensorboard"
    with TemporaryDirectory() as scratch:
        if run.url is not None:
            folder = Path(scratch)
            url = f"{run.url}/members/{name}/tensorboard"
            with remote.reaching():
                for file in remote.files(url):
                    remote.get(f"{url}/{file}", inside(folder, file, Path(url)))

        if not folder.is_dir():
            return {}

        parts: defaultdict[str, list[dict[int, float]]] = defaultdict(list)
        for path in sorted(folder.glob("*tfevents*")):
            events = EventAccumulator(str(path), size_guidance={"scalars": _MAX_POINTS})
            try:
                events.Reload()
                for tag in events.Tags()["scalars"]:
                    if not tag.startswith(_BY_NOISE_LEVEL):
                        parts[tag].append({one.step: one.value for one in events.Scalars(tag)})
            except Exception as error:  # noqa: BLE001  # damaged or a stranger's; TensorBoard raises its own
                note(f"{name}: its curves cannot be read ({first_line(error)})")

    curves = {}
    for tag, found in parts.items():
        values: dict[int, float] = {}
        # By first step, not by file name: names hold times, and an earlier island's clock may have been ahead.
        for part in sorted(found, key=min):
            values |= part

        curves[tag] = sorted(values), [values[step] for step in sorted(values)]

    return curves


class CurvesFigure(Figure):
    """A figure that notebooks show, also before anything has imported pyplot."""

    def _repr_png_(self) -> bytes:
        stream = io.BytesIO()
        self.savefig(stream, format="png")
        return stream.getvalue()


def losses_figure(run: Run) -> CurvesFigure:
    """Draw the losses of all members that have started: those of experts, and the router's.

    Raises:
        UserError: the URL cannot be read.
    """
    curves = {name: read_curves(name, run) for name in run.started}
    with mpl.rc_context(_STYLE):
        figure = CurvesFigure(figsize=(9.6, 3.0), layout="constrained")
        for axes, loss in zip(figure.subplots(1, 2), ("loss", "cross_entropy"), strict=True):
            axes.set_title(loss)
            _draw(axes, loss, curves)
            if axes.lines:
                axes.legend()

    return figure


def _figure_of(tag: str) -> str:
    """What a curve shows: its tag without its group, and without the split."""
    return re.sub(r"^(\d_\w+/)?((train|held_out)/)?", "", tag)


def _chart(figure: str, curves: Mapping[str, Curves]) -> str:
    """Draw one figure of all members as SVG."""
    with mpl.rc_context(_STYLE):
        drawing = Figure(figsize=(4.4, 2.3), layout="constrained")
        _draw(drawing.add_subplot(), figure, curves)
        stream = io.StringIO()
        drawing.savefig(stream, format="svg", metadata={"Date": None})

    text = stream.getvalue()
    return text[text.index("<svg") :]


def _draw(axes: Axes, figure: str, curves: Mapping[str, Curves]) -> None:
    """Draw one figure of all members: held-out values with dots, and faint those of training beside them."""
    for number, (name, found) in enumerate(curves.items()):
        for tag, (steps, values) in found.items():
            if _figure_of(tag) != figure:
                continue

            line = "o-" if "held_out/" in tag else "-"
            if len(steps) < _FEW_POINTS:  # a line would pretend to a curve
                line = "o"

            is_faint = "train/" in tag and tag.replace("train/", "held_out/") in found
            alpha = 0.4 if is_faint else 1.0
            label = f"_{name}" if is_faint else name  # the legend skips names that begin so
            axes.plot(steps, values, line, color=f"C{number}", alpha=alpha, linewidth=1.0, markersize=2.5, label=label)

    axes.grid(axis="y", color="0.9")
    axes.set_xlabel("optimizer step")
