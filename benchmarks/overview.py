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

NAMES = ("plain", "ours", "fused", "contrib")
MOST = 2.2  # of the axis: contrib's bars are cut there, and each says its value
DEVICES = 2

Bars = List[Tuple[str, Dict[str, float]]]  # a label, and the ratios to plain BatchNorm by name


def cells(name: str) -> List[Dict[str, Any]]:
    return json.loads((RESULTS / f"{name}.json").read_text())["cells"]


def layers() -> Bars:
    """Of each shape on two devices. Fused is compared with BatchNorm and ReLU, which it replaces."""
    found: Dict[str, Dict[str, float]] = {}
    for cell in cells("layers"):
        if cell["replicas"] == DEVICES:
            shape = found.setdefault(" x ".join(map(str, cell["shape"])), {})
            shape.update({name: one["median"] for name, one in cell["ratios"].items() if name in NAMES})
    return list(found.items())


def models() -> Bars:
    return [
        (cell["model"], {name: one["median"] for name, one in cell["ratios"].items() if name in NAMES})
        for cell in cells("models")
        if cell["devices"] == DEVICES
    ]


def miou() -> List[Tuple[str, str]]:
    """With one and with two images on a device: plain BatchNorm's, and ours."""
    page = (ROOT / "examples" / "segmentation" / "README.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| [12] \| mIoU \| (\S+) ± \S+ \| (\S+) ± ", page, re.MULTILINE)
    return [(f"{float(plain):.2f}", f"{float(ours):.2f}") for plain, ours in rows]


def between(bars: Bars, name: str) -> str:
    values = sorted(ratios[name] for _, ratios in bars if name in ratios)
    return f"{values[0]:.2f} to {values[-1]:.2f}"


def sentences() -> str:
    (one_plain, one_ours), (two_plain, two_ours) = miou()
    return f"""\
On generated scenes and four CPU devices, synchronised statistics raise FastSCNN's mIoU.
With one image per device, mIoU rises from {one_plain} to {one_ours}.
With two images per device, mIoU rises from {two_plain} to {two_ours}.

On two CPU devices, five layers take {between(layers(), "ours")} times as long as plain `nn.BatchNorm`.
Fused with ReLU, these layers take {between(layers(), "fused")} times as long as BatchNorm and ReLU.
Contrib's layer takes {between(layers(), "contrib")} times as long.
A training step of a network with fused layers takes {between(models(), "fused")} times as long as with plain BatchNorm.
With contrib's layer, a step takes {between(models(), "contrib")} times as long.
"""


def draw(path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = [("five layers, forward and backward", layers()), ("a training step", models())]
    figure, axes = plt.subplots(1, 2, figsize=(11, 3.6), sharey=True, gridspec_kw={"width_ratios": [4, 5]})
    width = 0.8 / len(NAMES)
    for axis, (title, bars) in zip(axes, groups):
        for k, name in enumerate(NAMES):
            for i, (_, ratios) in enumerate(bars):
                value = 1.0 if name == "plain" else ratios.get(name)
                if value is None:
                    continue
                place = i + width * (k - (len(NAMES) - 1) / 2)
                label = LABELS[name] if i == 0 and axis is axes[0] else None
                axis.bar(place, min(value, MOST), width=0.92 * width, color=COLOURS[name], label=label)
                text = f"{value:.1f}" if value > MOST else f"{value:.2f}"
                axis.annotate(
                    text, (place, min(value, MOST)), (0, 2), textcoords="offset points", ha="center", fontsize=7
                )
        axis.set_xticks(range(len(bars)), [label.replace("-R", "-\nR") for label, _ in bars], fontsize=8)
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("time, plain BatchNorm = 1")
    axes[0].set_ylim(0, 1.08 * MOST)
    figure.legend(loc="upper center", ncol=len(NAMES), frameon=False, fontsize=9)
    note = f"two CPU devices on two cores; fused stands beside BatchNorm and ReLU; bars above {MOST} are cut"
    figure.text(0.5, 0.01, note, ha="center", fontsize=8, color="0.4")
    figure.tight_layout(rect=(0, 0.04, 1, 0.93))
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    draw(ROOT / "docs" / "images" / "speed.png")
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    README.write_text(before + BEGIN + sentences() + END + rest.split(END)[1], encoding="utf-8")
