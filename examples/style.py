"""The style of all pictures: a colour for each method, a title that says what was found, and what it follows from."""

from __future__ import annotations

import hashlib
import os
import textwrap
from pathlib import Path
from typing import Any, Dict, List, Sequence, Tuple

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

ROOT = Path(__file__).resolve().parents[1]
DRAWN_FROM = "Drawn from"  # in the metadata of a picture

# They stay apart in print and for the colour-blind (Okabe and Ito).
PLAIN, LOCAL, SYNC, FUSED = "#7F7F7F", "#000000", "#0072B2", "#56B4E9"
CONTRIB, SHUFFLE, SAMPLES, LIMIT = "#D55E00", "#009E73", "#CC79A7", "#B0A000"
OTHER = "#7A3E00"  # of other libraries
BLUES = ("#08306B", "#2171B5", "#6BAED6", "#9ECAE1")  # parts of our layer
QUANTILES = "points are medians, whiskers 10 to 90 % quantiles, or below ten rounds the least and the most"

Series = Dict[Tuple[str, str], Any]  # by label and colour: points of three values, low, middle and high


def figure(width: float, height: float, columns: int = 1, rows: int = 1, **kwargs: Any) -> Tuple[Figure, Sequence[Any]]:
    """A figure that needs no window system, and its axes, row by row."""
    drawn = Figure(figsize=(width, height), dpi=130, layout="constrained")
    FigureCanvasAgg(drawn)
    axes = drawn.subplots(rows, columns, squeeze=False, **kwargs).ravel()
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.grid(axis="y", alpha=0.25)
        axis.set_axisbelow(True)
    return drawn, axes


def lines(axis: Any, xs: Sequence[float], series: Series, labelled: bool = True, band: bool = False) -> None:
    """The points of each series over `xs`, joined, and its name at its end if there is room. A point may be None. Low
    and high are the ends of whiskers, or of a band.
    """
    ends = []
    for (name, colour), points in series.items():
        there = [(x, *point) for x, point in zip(xs, points) if point is not None]
        if there:
            x, low, middle, high = (list(column) for column in zip(*there))
            if band:
                axis.plot(x, middle, color=colour, label=name)
                axis.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
            else:
                ends_of = _whiskers(low, middle, high)
                axis.errorbar(x, middle, ends_of, fmt="o-", ms=4, capsize=2, color=colour, label=name)
            ends.append((name, colour, x[-1], middle[-1]))
    ticks = xs[:: 1 + len(xs) // 8]
    axis.set_xticks(ticks, [f"{x:g}" for x in ticks])
    axis.xaxis.set_minor_locator(NullLocator())
    axis.ends = ends if labelled else ()


def dots(axis: Any, texts: Sequence[str], series: Series, digits: int = 2) -> None:
    """Beside each other at each of `texts`, a point of each series, with its number beside it."""
    for k, ((name, colour), points) in enumerate(series.items()):
        place = 0.8 * ((k + 0.5) / len(series) - 0.5)
        there = [(i + place, *point) for i, point in enumerate(points) if point is not None]
        if there:
            x, low, middle, high = (list(column) for column in zip(*there))
            axis.errorbar(x, middle, _whiskers(low, middle, high), fmt="o", ms=5, capsize=2, color=colour, label=name)
        for x, _, middle, _ in there:
            text = f"{middle:.{digits}f}"
            axis.annotate(text, (x, middle), (4, 3), textcoords="offset points", va="center", fontsize=7, color=colour)
    axis.set_xticks(range(len(texts)), texts, fontsize=8)
    axis.set_xlim(-0.5, len(texts) - 0.4)
    axis.tick_params(axis="x", length=0)


def legend(axis: Any) -> None:
    """Names the series above the axis, in their colours."""
    axis.legend(loc="lower left", bbox_to_anchor=(0, 1.05), ncols=5, frameon=False, fontsize=8, labelcolor="linecolor")


def _whiskers(low: Sequence[float], middle: Sequence[float], high: Sequence[float]) -> List[List[float]]:
    return [[m - a for m, a in zip(middle, low)], [b - m for m, b in zip(middle, high)]]


def logarithmic(axis: Any) -> None:
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_locator(NullLocator())


def save(drawn: Figure, path: Any, finding: str, note: str, *sources: Any) -> None:
    """Writes a picture with a title and an explanation, and with a mark of the files that it follows from."""
    drawn.suptitle(finding, fontsize=11)
    lines = [line for given in note.split("\n") for line in textwrap.wrap(given, int(13 * drawn.get_figwidth()))]
    drawn.supxlabel("\n".join(lines), fontsize=8, color="0.35")
    drawn.canvas.draw()  # settles the limits
    for axis in drawn.axes:
        _name_ends(axis, getattr(axis, "ends", ()))
    drawn.savefig(path, metadata={DRAWN_FROM: mark(*sources)})


def _name_ends(axis: Any, ends: Sequence[Tuple[str, str, float, float]]) -> None:
    """Writes the names of lines beside their ends, and apart from each other."""
    to_axis, before = axis.transData + axis.transAxes.inverted(), -1.0
    for height, name, colour in sorted((to_axis.transform((x, y))[1], name, colour) for name, colour, x, y in ends):
        before = max(height, before + 0.065)
        axis.text(1.02, before, name, color=colour, fontsize=8, va="center", transform=axis.transAxes)


def mark(*sources: Any) -> str:
    """The names of files and of this one, and the digest of their contents."""
    paths = [Path(source).resolve() for source in (__file__, *sources)]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()[:16]
    return " ".join([*(Path(os.path.relpath(path, ROOT)).as_posix() for path in paths), digest])
