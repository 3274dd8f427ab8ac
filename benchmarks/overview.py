"""Draws docs/images/speed.png and writes the README's figures, from benchmarks/results. It measures nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Dict, List, Tuple

from _results import COLOURS, LABELS

RESULTS = Path(__file__).resolve().parent / "results"
ROOT = RESULTS.parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: python benchmarks/overview.py -->\n", "<!-- end of figures -->\n"

NAMES = ("ours", "fused", "contrib")
DEVICES = 2

Ratios = Dict[str, Dict[str, float]]  # to plain BatchNorm: quantiles by name
Groups = List[Tuple[str, Ratios]]  # with a label


def cells(name: str) -> List[Dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())["cells"]


def layers() -> Groups:
    """Of each shape on two devices. Fused is compared with BatchNorm and ReLU, which it replaces."""
    found: Dict[str, Ratios] = {}
    for cell in cells("layers"):
        if cell["replicas"] == DEVICES:
            shape = found.setdefault(" x ".join(map(str, cell["shape"])), {})
            shape.update({name: one for name, one in cell["ratios"].items() if name in NAMES})
    return list(found.items())


def models() -> Groups:
    return [
        (cell["model"], {name: one for name, one in cell["ratios"].items() if name in NAMES})
        for cell in cells("models")
        if cell["devices"] == DEVICES
    ]


def entry(one: Dict[str, float]) -> str:
    """The median, or *no difference* where plain BatchNorm's time lies between the quantiles; and these."""
    between = f"({one['10%']:.2f} to {one['90%']:.2f})"
    return f"no difference {between}" if one["10%"] <= 1 <= one["90%"] else f"{one['median']:.2f} {between}"


def rows() -> str:
    lines = ["| | `convert(net)` | fused | contrib's layer |", "|---|---|---|---|"]
    for label, ratios in models():
        lines.append(f"| a step of {label} | " + " | ".join(entry(ratios[name]) for name in NAMES) + " |")
    extremes = []
    for name in NAMES:
        ordered = sorted((ratios[name] for _, ratios in layers()), key=lambda one: one["median"])
        extremes.append(f"{entry(ordered[0])}, up to {entry(ordered[-1])}")
    lines.append("| five layers, by their shape | " + " | ".join(extremes) + " |")
    return "\n".join(lines)


def compared() -> str:
    """The page that has the table of ``make compare``."""
    return (ROOT / "examples" / "segmentation" / "README.md").read_text(encoding="utf-8")


def miou() -> str:
    """A sentence for each network."""
    row = r"^\| (\S+) \| [12] \| mIoU \| (\S+) ± \S+ \| (\S+) ± \S+ \| \S+ ± \S+ \| (\S+) to (\S+) \|$"
    gains: Dict[str, List[str]] = {}
    for net, plain, ours, low, high in re.findall(row, compared(), re.MULTILINE):
        interval = f"({float(low):+.2f} to {float(high):+.2f})"
        gains.setdefault(net, []).append(f"from {float(plain):.2f} to {float(ours):.2f} {interval}")
    return "\n".join(f"{net}: with one image per device {one}, with two {two}." for net, (one, two) in gains.items())


def figures() -> str:
    counts = [one["count"] for _, ratios in layers() + models() for one in ratios.values()]
    (seeds,) = re.findall(r"over (\d+) seeds", compared())
    return f"""\
mIoU on generated scenes, with plain and with synchronised statistics of four devices, and the 95 % interval of gains. \
These are means over {seeds} seeds, with a learning rate tuned for each side.
{miou()}

Times on two CPU devices, as multiples of plain BatchNorm: medians of {min(counts)} to {max(counts)} rounds,
and 10 to 90 % quantiles. *No difference*: 1 lies between them. Fused layers are compared with BatchNorm and ReLU.

{rows()}
"""


def draw(path: Path) -> None:
    """Medians as points, and the 10 and 90 % quantiles as whiskers."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.ticker import FixedLocator, NullLocator

    both = [("five layers, forward and backward", layers()), ("a training step", models())]
    figure, axes = plt.subplots(1, 2, figsize=(11, 4), sharey=True, gridspec_kw={"width_ratios": [4, 5]})
    for axis, (title, groups) in zip(axes, both):
        axis.axhline(1, color=COLOURS["plain"], linewidth=1, label=LABELS["plain"])
        for k, name in enumerate(NAMES):
            found = [(i + 0.27 * (k - 1), ratios[name]) for i, (_, ratios) in enumerate(groups) if name in ratios]
            places, medians = [place for place, _ in found], [one["median"] for _, one in found]
            ends = [[abs(one["median"] - one[end]) for _, one in found] for end in ("10%", "90%")]
            axis.errorbar(places, medians, ends, fmt="o", capsize=3, color=COLOURS[name], label=LABELS[name])
            for place, one in found:
                text = f"{one['median']:.2f}"
                axis.annotate(text, (place, one["90%"]), (0, 4), textcoords="offset points", ha="center", fontsize=7)
        axis.set_xticks(range(len(groups)), [label.replace("-R", "-\nR") for label, _ in groups], fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_yscale("log")
        axis.grid(axis="y", alpha=0.25)
    ticks = (0.2, 0.5, 1, 2, 5, 10)
    axes[0].yaxis.set_major_locator(FixedLocator(ticks))
    axes[0].yaxis.set_minor_locator(NullLocator())
    axes[0].set_yticklabels([f"{tick:g}" for tick in ticks])
    axes[0].set_ylim(0.17, 14)
    axes[0].set_ylabel("time, plain BatchNorm = 1")
    figure.legend(*axes[0].get_legend_handles_labels(), loc="upper center", ncol=4, frameon=False, fontsize=9)
    note = "two CPU devices on two cores; median, 10 and 90 % quantiles; fused stands beside BatchNorm and ReLU"
    figure.text(0.5, 0.01, note, ha="center", fontsize=8, color="0.4")
    figure.tight_layout(rect=(0, 0.04, 1, 0.93))
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    draw(ROOT / "docs" / "images" / "speed.png")
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    README.write_text(before + BEGIN + figures() + END + rest.split(END)[1], encoding="utf-8")
