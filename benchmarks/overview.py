"""Draws docs/images/speed.png and writes figures into pages, from benchmarks/results. It measures nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any, Callable, Dict, List, Tuple

import _pictures

RESULTS = Path(__file__).resolve().parent / "results"
ROOT = RESULTS.parents[1]
PAGES = (ROOT / "README.md", ROOT / "docs" / "measured.md")
BLOCK = re.compile(
    r"(<!-- figures of (\w+): python benchmarks/overview.py -->\n).*?(<!-- end of figures -->\n)", re.DOTALL
)

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
    return f"{one['median']:.2f} ({one['10%']:.2f} to {one['90%']:.2f})"


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
    counts = [one["count"] for _, ratios in models() + layers() for one in ratios.values()]
    return f"""\
mIoU of [two small nets](examples/segmentation/README.md#plain-or-synchronised-a-comparison) on generated scenes, from
plain to synchronised statistics of four simulated devices (95 % interval of the change; {seeds} seeds, tuned rates).

{miou()}

Times on two CPU devices, divided by plain BatchNorm's: medians of {min(counts)} to {max(counts)} rounds (10 to 90 %
quantiles). Where 1 lies between the quantiles, no difference is shown. *Fused* is compared with BatchNorm and ReLU.

{rows()}

A layer that waits can be faster, because MXNet's BatchNorm is slow on CPUs: on one device, where nobody waits, ours
takes {low} to {high} of its time on large shapes. In a net, convolutions take the most: ResNet-18 takes {net} there.
"""


def table(header: List[str], rows: List[List[str]]) -> str:
    lines = [f"| {' | '.join(row)} |" for row in [header, *rows]]
    return "\n".join([lines[0], "|---" * len(header) + "|", *lines[1:]]) + "\n"


def by_shape() -> str:
    """A row for each shape, on all numbers of replicas."""
    found: Dict[Tuple[int, ...], Dict[int, Ratios]] = {}
    for cell in cells("layers"):
        found.setdefault(tuple(cell["shape"]), {}).setdefault(cell["replicas"], {}).update(cell["ratios"])
    replicas = sorted(next(iter(found.values())))
    rows = []
    for shape, ratios in found.items():
        ours = [f"{ratios[n]['ours']['median']:.2f}" for n in replicas]
        others = [_pictures.span([ratios[n][name]["median"] for n in replicas]) for name in ("fused", "contrib")]
        rows.append([" x ".join(map(str, shape)), *ours, *others])
    of_all = f"{replicas[0]} to {replicas[-1]}"
    header = ["shape per replica", *map(str, replicas[:-1]), f"{replicas[-1]} replicas"]
    return table([*header, f"fused, {of_all}", f"contrib, {of_all}"], rows)


def by_network() -> str:
    """A row for each network, on all numbers of devices."""
    found: Dict[str, Dict[int, Ratios]] = {}
    for cell in cells("models"):
        found.setdefault(cell["model"], {})[cell["devices"]] = cell["ratios"]
    devices = sorted(next(iter(found.values())))
    columns = {
        name: [n for n in devices if n > 1 or name in ("ours", "fused")]
        for name in ("ours", "fused", "local", "contrib")
    }
    rows = [
        [name, *(" / ".join(f"{ratios[n][column]['median']:.2f}" for n in on) for column, on in columns.items())]
        for name, ratios in found.items()
    ]
    words = {"ours": "`convert(net)`"}
    return table(["network", *(f"{words.get(k, k)}, {' / '.join(map(str, on))}" for k, on in columns.items())], rows)


def by_memory() -> str:
    """MiB of a step, on as many devices: plain BatchNorm, ours, fused."""
    found: Dict[str, List[str]] = {}
    for cell in cells("models"):
        found.setdefault(cell["model"], []).append(" / ".join(f"{one:.0f}" for one in cell["memory_mib"].values()))
    devices = [f"{n} devices" if n > 1 else "1 device" for n in sorted({cell["devices"] for cell in cells("models")})]
    return table(["network, MiB with plain / ours / fused", *devices], [[name, *row] for name, row in found.items()])


def on_gpu() -> str:
    """Forward and backward together, of medians."""
    rows = []
    for way, words in (("static", "in a static graph"), ("eager", "in eager mode")):
        found = [
            cell["seconds"]
            for cell in json.loads((RESULTS / "gpu.json").read_text())["cells"]["layers"]
            if cell["way"] == way
        ]
        taken = [
            {
                name: sum(one[f"{name} {d}"]["median"] for d in ("forward", "backward"))
                for name in ("ours", "fused", "plain", "two", "torch")
            }
            for one in found
        ]
        pairs = (("ours", "plain"), ("fused", "two"), ("ours", "torch"))
        rows.append([words, *(_pictures.span([one[a] / one[b] for one in taken]) for a, b in pairs)])
    header = ["this layer runs", "of `nn.BatchNorm` (cuDNN), run the same way", "with ReLU, of two layers"]
    return table([*header, "of eager `torch.nn.SyncBatchNorm`"], rows)


FIGURES: Dict[str, Callable[[], str]] = {
    "speed": figures,
    "layers": by_shape,
    "networks": by_network,
    "memory": by_memory,
    "gpus": on_gpu,
}


def written(page: str) -> str:
    """The text of a page, with the figures of the results."""
    return BLOCK.sub(lambda block: block[1] + FIGURES[block[2]]() + block[3], page)


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
    for page in PAGES:
        page.write_text(written(page.read_text(encoding="utf-8")), encoding="utf-8")
