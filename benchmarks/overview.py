"""Draws docs/images/speed.png and writes the README's figures, from benchmarks/results. It measures nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Dict, List, Tuple

import _pictures

RESULTS = Path(__file__).resolve().parent / "results"
ROOT = RESULTS.parents[1]
README = ROOT / "README.md"
BEGIN, END = "<!-- figures: python benchmarks/overview.py -->\n", "<!-- end of figures -->\n"

NAMES = ("contrib", "ours", "fused")
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
    return f"{one['median']:.2f} ({one['10%']:.2f} to {one['90%']:.2f}; n = {one['count']})"


def rows() -> str:
    lines = ["| | contrib's layer | `convert(net)` | fused |", "|---|---|---|---|"]
    labelled = [(f"a step of {label}", ratios) for label, ratios in models()]
    labelled += [(f"five layers, {label} per device", ratios) for label, ratios in layers()]
    for label, ratios in labelled:
        lines.append(f"| {label} | " + " | ".join(entry(ratios[name]) for name in NAMES) + " |")
    return "\n".join(lines)


def compared() -> str:
    """The page that has the table of ``make compare``."""
    return (ROOT / "examples" / "segmentation" / "README.md").read_text(encoding="utf-8")


def miou() -> str:
    """A row for each network."""
    row = r"^\| (\S+) \| (\d+) \| mIoU \| (\S+) ± \S+ \| (\S+) ± \S+ \| \S+ ± \S+ \| (\S+) to (\S+) \|$"
    gains: Dict[str, Dict[str, str]] = {}
    for net, images, plain, ours, low, high in re.findall(row, compared(), re.MULTILINE):
        interval = f"({float(low):+.2f} to {float(high):+.2f})"
        gains.setdefault(net, {})[images] = f"{float(plain):.2f} to {float(ours):.2f} {interval}"
    (columns,) = {tuple(one) for one in gains.values()}
    lines = ["| images per device | " + " | ".join(columns) + " |", "|---" * (len(columns) + 1) + "|"]
    return "\n".join(lines + [f"| {net} | " + " | ".join(one.values()) + " |" for net, one in gains.items()])


def alone() -> Tuple[List[str], List[str]]:
    """Of plain BatchNorm's time on one replica, which waits for nobody: large layers in order, and a net."""
    large = [cell for cell in cells("layers") if cell["replicas"] == 1 and "ours" in cell["ratios"]][1:]
    one = [cell for cell in cells("models") if cell["devices"] == 1 and cell["model"].startswith("ResNet")]
    first, second = ([f"{cell['ratios']['ours']['median']:.2f}" for cell in part] for part in (large, one))
    return sorted(first), second


def figures() -> str:
    (seeds,) = re.findall(r"over (\d+) seeds", compared())
    (low, *_, high), (net,) = alone()
    return f"""\
mIoU of [two small nets](examples/segmentation/README.md#plain-or-synchronised-a-comparison) on generated scenes, with
plain and with synchronised statistics of four simulated devices, and 95 % intervals ({seeds} seeds, tuned rates).

{miou()}

Times on two CPU devices, as multiples of plain BatchNorm: medians, and in parentheses 10 to 90 % quantiles of n rounds.
Where 1 lies between them, no difference is shown. *Fused* is compared with BatchNorm and ReLU.

{rows()}

A layer that waits can be faster, because MXNet's BatchNorm is slow on CPUs: on one device, where nobody waits, ours
takes {low} to {high} of its time on large shapes. In a net, convolutions take the most: ResNet-18 takes {net} there.
"""


def picture() -> _pictures.Picture:
    methods = [_pictures.METHODS[name] for name in NAMES]
    panels = []
    for title, groups in (("five layers in a chain, forward and backward", layers()), ("a training step", models())):
        series = {label: [_pictures.point(one.get(name)) for _, one in groups] for name, label in zip(NAMES, methods)}
        panels.append((title, [label.replace("-R", "-\nR") for label, _ in groups], series))
    spans = [
        [_pictures.span([one[name]["median"] for _, one in groups]) for name in ("ours", "fused", "contrib")]
        for groups in (layers(), models())
    ]
    counts = [one["count"] for _, ratios in layers() + models() for one in ratios.values()]
    several = f"n = {min(counts)} to {max(counts)} rounds; {_pictures.style.QUANTILES}"
    note = f"fused beside BatchNorm and ReLU; {several}; {_pictures.LESS}"
    of_layers, of_steps = (
        f"{ours} with SyncBatchNorm, {fused} fused, {contrib} contrib's" for ours, fused, contrib in spans
    )
    found = f"On two CPU devices, of plain BatchNorm's time:\nfive layers take {of_layers}; a training step {of_steps}"
    return _pictures.Picture(panels, "", _pictures.OF_PLAIN, found, note, reference=_pictures.PLAIN)


def draw(path: Path) -> None:
    sources = [RESULTS / f"{name}.json" for name in ("layers", "models")]
    env = json.loads(sources[1].read_text())["environment"]
    _pictures.render(picture(), env, path, __file__, *sources)


if __name__ == "__main__":
    draw(ROOT / "docs" / "images" / "speed.png")
    before, rest = README.read_text(encoding="utf-8").split(BEGIN)
    README.write_text(before + BEGIN + figures() + END + rest.split(END)[1], encoding="utf-8")
