"""Draws the pictures of the results, each from its JSON file.

python benchmarks/_pictures.py                            # all in benchmarks/results
python benchmarks/_pictures.py benchmarks/results/*.json  # some
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Sequence, Tuple

RESULTS = Path(__file__).resolve().parent / "results"
sys.path.append(str(RESULTS.parents[1] / "examples"))

import style  # noqa: E402

Cells = List[Dict[str, Any]]
PLAIN = "nn.BatchNorm, not synchronised"
METHODS = {
    "contrib": ("contrib's SyncBatchNorm", style.CONTRIB),
    "ours": ("SyncBatchNorm", style.SYNC),
    "fused": ("fused with ReLU", style.FUSED),
    "local": ("fused, mode='local'", style.LOCAL),
    "limit": ("memory limit", style.LIMIT),
}
OF_PLAIN = "time of a step,\nas a multiple of nn.BatchNorm's"
OF_A_REPLICA = "above each plot images x channels x height x width of a replica"
LESS = "less is faster"


class Picture(NamedTuple):
    """Panels of lines have numbers for ticks, others texts."""

    panels: Sequence[Any]  # title, ticks, series
    below: str  # of the x axis
    measure: str  # of the y axis
    finding: str
    note: str
    logarithmic: bool = True
    digits: int = 2
    reference: str = ""  # what 1 is


def point(series: Any, factor: float = 1) -> Any:
    """Of quantiles, or of one value."""
    if series is None or isinstance(series, (int, float)):
        return series and (series * factor,) * 3
    return tuple(factor * series[name] for name in ("10%", "median", "90%"))


def span(values: Sequence[float]) -> str:
    low, high = (f"{value:.2g}" if value < 0.095 else f"{value:.2f}" for value in (min(values), max(values)))
    return f"{low} to {high}"


def medians(cells: Cells, name: str) -> List[float]:
    return [cell["ratios"][name]["median"] for cell in cells if name in cell["ratios"]]


def grouped(cells: Cells, key: Callable[[Dict[str, Any]], str]) -> Iterator[Tuple[str, Cells]]:
    for title in dict.fromkeys(map(key, cells)):
        yield title, [cell for cell in cells if key(cell) == title]


def shape(cell: Dict[str, Any]) -> str:
    return " x ".join(map(str, cell["shape"]))


def ratios(cells: Cells, at: str, methods: Dict[str, Tuple[str, str]], key: Callable) -> List[Any]:
    panels = []
    for title, mine in grouped(cells, key):
        ticks = sorted({cell[at] for cell in mine})
        series = {}
        for name, label in methods.items():
            found = {cell[at]: point(cell["ratios"][name]) for cell in mine if name in cell["ratios"]}
            series[label] = [found.get(tick) for tick in ticks]
        panels.append((title, ticks, series))
    return panels


def rounds(cells: Cells) -> str:
    counts = [one["count"] for cell in cells for one in cell["seconds"].values()]
    return f"n = {' to '.join(map(str, sorted({min(counts), max(counts)})))} rounds; {style.QUANTILES}; {LESS}"


def layers(cells: Cells) -> Picture:
    two = [cell for cell in cells if cell["replicas"] == 2] or cells
    ours, contrib = span(medians(two, "ours") + medians(two, "fused")), medians(two, "contrib")
    beside = f", contrib's {span(contrib)}" if contrib else ""
    methods = {name: METHODS[name] for name in ("contrib", "ours", "fused", "limit")}
    note = f"{OF_A_REPLICA}; fused beside BatchNorm and ReLU; {rounds(cells)}"
    found = f"On {two[0]['replicas']} replicas, the layer takes {ours} of plain BatchNorm's time{beside}"
    panels = ratios(cells, "replicas", methods, shape)
    return Picture(panels, "replicas, one on each CPU context", OF_PLAIN, found, note, reference=PLAIN)


def models(cells: Cells) -> Picture:
    two = [cell for cell in cells if cell["devices"] == 2] or cells
    contrib = medians(two, "contrib")
    beside = f", with contrib's {span(contrib)}" if contrib else ""
    fused = span(medians(two, "fused"))
    found = f"On {two[0]['devices']} devices, a step with fused layers takes {fused} of plain's{beside}"
    methods = {name: METHODS[name] for name in ("contrib", "ours", "fused", "local")}
    panels = ratios(cells, "devices", methods, lambda one: f"{one['model']}\n{one['images']} x {one['crop']} pixels")
    return Picture(
        panels, "CPU devices", OF_PLAIN, found, f"images x pixels of a device; {rounds(cells)}", reference=PLAIN
    )


def modes(cells: Cells) -> Picture:
    colours = (style.SYNC, style.LOCAL, "#5A5A5A", style.SHUFFLE, "#7CCDB5")  # lighter with more slots
    names = dict.fromkeys(name for cell in cells for name in cell["ratios"])
    methods = {name: (name.replace("V=", "slots: "), colour) for name, colour in zip(names, colours)}
    eight = [b / a for a, b in zip(medians(cells, "local"), medians(cells, "local, V=8"))]
    found = f"Eight slots cost {span(eight)} of what one costs" if eight else "Modes"
    note = f"{OF_A_REPLICA}; {rounds(cells)}"
    panels = ratios(cells, "replicas", methods, shape)
    return Picture(panels, "replicas, one on each CPU context", OF_PLAIN, found, note, reference=PLAIN)


def exchange(cells: Any) -> Picture:
    cells = cells["sizes"]
    methods = {
        "bare": ("bare", style.PLAIN),
        "ours": ("ours, in shared memory", style.SYNC),
        "bare over TCP": ("bare over TCP", style.OTHER),
        "ours over TCP": ("ours over TCP", style.SHUFFLE),
    }
    methods = {name: label for name, label in methods.items() if name in cells[0]["microseconds"]}
    panels = [
        (
            f"{title} processes",
            [cell["bytes"] / 1024 for cell in mine],
            {label: [point(cell["microseconds"][name]) for cell in mine] for name, label in methods.items()},
        )
        for title, mine in grouped(cells, lambda cell: str(cell["processes"]))
    ]
    taken = [one["microseconds"]["ours"]["median"] / one["microseconds"]["bare"]["median"] for one in cells]
    note = f"n = {cells[0]['microseconds']['ours']['count']} sums; {style.QUANTILES}; {LESS}"
    found = f"In shared memory, a sum of statistics takes {span(taken)} of the bare transport's time"
    return Picture(panels, "KiB of a vector", "microseconds", found, note)


def kernels(cells: Cells) -> Picture:
    first = cells[0]
    shown = [one for one in cells if (one["set"], one["shape"]) == (first["set"], first["shape"])]
    names = list(first["ratios"])
    series = {(name, colour): [point(one["ratios"][name]) for one in shown] for name, colour in zip(names, style.BLUES)}
    middle = [value for name in names for value in medians(shown, name)]
    found = f"A kernel's pass over memory takes {span(middle)} times as long as a copy's"
    note = f"{shape(first)}, float32, {first['set']}, one thread; {rounds(shown)}"
    texts = [f"{one['layout']}\nbehind: {one['behind']}" for one in shown]
    return Picture([("", texts, series)], "", "time of a pass, of a copy's", found, note, False, reference="a copy")


def models_processes(cells: Cells) -> Picture:
    labels = {
        "alone": ("nothing exchanged", style.PLAIN),
        "local": ("gradients", style.LOCAL),
        "sync": ("gradients and statistics", style.SYNC),
    }
    series = {label: [point(one["seconds"][name], 1e3) for one in cells] for name, label in labels.items()}
    texts = [f"{one['model']}\n{one['images']} images of {one['crop']} pixels" for one in cells]
    found = (
        f"Statistics between {cells[0]['processes']} processes cost {span(medians(cells, 'sync'))} of a step without"
    )
    return Picture([("", texts, series)], "", "ms of a whole step", found, rounds(cells), False, 0)


def recompute(cells: Cells) -> Picture:
    labels = {"kept": ("activations kept", style.PLAIN), "recomputed": ("recomputed", style.SYNC)}
    series = {label: [point(one[name]["peak_mib"]) for one in cells] for name, label in labels.items()}
    texts = [f"{one['model']}\n{one['images']} x {one['crop']} pixels" for one in cells]
    less = [one["recomputed"]["peak_mib"] / one["kept"]["peak_mib"] for one in cells]
    slow = [one["recomputed"]["step_s"] / one["kept"]["step_s"] for one in cells]
    found = f"Recomputing takes {span(less)} of the memory and {span(slow)} of the time"
    return Picture([("", texts, series)], "", "most memory in a step, MiB", found, "one run each", False, 0)


def over_tcp(cell: Any) -> str:
    return "\nover TCP" if cell.get("network") else ""


def gradients(cells: Cells) -> Picture:
    labels = {
        "bare": ("the transport, bare", style.PLAIN),
        "exchange": ("kvstore(...)", style.SYNC),
    }
    labels = {name: label for name, label in labels.items() if name in cells[0]["seconds"]}
    series = {label: [point(one["seconds"][name], 1e3) for one in cells] for name, label in labels.items()}
    texts = [f"{one['model']}\n{one['crop']} pixels\n{one['processes']} processes{over_tcp(one)}" for one in cells]
    found = f"A sum of gradients takes {span(medians(cells, 'exchange'))} of the bare transport's time"
    note = f"kvstore(...): how much longer a step takes than one without, which may be below 0; {rounds(cells)}"
    return Picture([("", texts, series)], "", "ms to sum the gradients", found, note, False, 0)


def scaling(cells: Any) -> Picture:
    processes = [8 * 2**k for k in range(len(next(iter(cells.values()))))]
    panels = []
    for title, end in (("processes with CPUs", ""), ("processes with GPUs", ", with GPUs")):
        names = {name: f"{name}{end}" for name in cells if "GPUs" not in name}
        colours = zip(names, style.BLUES[::2])
        series = {(name, colour): [point(value, 1e3) for value in cells[names[name]]] for name, colour in colours}
        panels.append((title, processes, series))
    most = [f"{1e3 * costs[-1]:.0f}" for name, costs in cells.items() if "GPUs" not in name]
    found = f"By a model, statistics over {processes[-1]} processes cost {' and '.join(most)} ms of a step"
    note = "a model of the messages, from one measured message and published times of GPUs; no such job was measured"
    return Picture(panels, "processes", "ms of a step for statistics", found, note)


def gpu(cells: Any) -> Picture:
    labels = {
        "plain": (PLAIN, style.PLAIN),
        "torch": ("torch.nn.SyncBatchNorm", style.OTHER),
        "ours": ("SyncBatchNorm", style.SYNC),
        "two": ("nn.BatchNorm and ReLU", style.LOCAL),
        "fused": ("SyncBatchNorm with ReLU", style.FUSED),
    }
    if not cells["layers"]:  # MXNet cannot use the GPU
        names = zip(("moments", "normalise", "grad_sums", "grad_input"), style.BLUES)
        times = {(name, blue): [point(one["seconds"][name], 1e6) for one in cells["kernels"]] for name, blue in names}
        texts = [f"{shape(one)}\n{one['layout']}, {one['dtype']}" for one in cells["kernels"]]
        return Picture([("", texts, times)], "", "microseconds", "The kernels of the layer", LESS, False, 0)
    most = cells["layers"][-1]["gpus"]
    shown = [one for one in cells["layers"] if one["way"] == "static" and one["gpus"] == most]
    taken = [
        {name: sum(one["seconds"][f"{name} {way}"]["median"] for way in ("forward", "backward")) for name in labels
         if f"{name} forward" in one["seconds"]}
        for one in shown
    ]  # fmt: skip
    series = {label: [point(one.get(name), 1e6) for one in taken] for name, label in labels.items()}
    beside = [f"{span([one['ours'] / one[name] for one in taken])} of {labels[name][0].partition(',')[0]}'s"
              for name in ("torch", "plain") if name in taken[0]]  # fmt: skip
    found = f"On {most} GPU{'s' if most > 1 else ''}, a layer takes {' and '.join(beside) or 'some'} time"
    texts = [f"{shape(one)}\n{one['dtype']}" for one in shown]
    note = f"forward and backward of a layer in a static graph; medians; {LESS}"
    return Picture([("", texts, series)], "", "microseconds", found, note, False, 0)


DRAWN = {
    **{one.__name__: one for one in (exchange, gpu, gradients, kernels, layers, models)},
    **{one.__name__: one for one in (models_processes, modes, recompute, scaling)},
    "layers_avx2": layers,
}


def draw(results: Path) -> None:
    """Draws the picture beside a JSON file of results."""
    data = json.loads(results.read_text())
    picture = DRAWN[results.stem](data["cells"])
    render(picture, data["environment"], results.with_suffix(".png"), results)


def render(picture: Picture, env: Dict[str, str], path: Path, *sources: Any) -> None:
    count, texts = len(picture.panels), sum(len(ticks) for _, ticks, _ in picture.panels)
    are_texts = isinstance(picture.panels[0][1][0], str)
    width = max(7, (0.4 * len(picture.panels[0][2]) + 0.3) * texts + 1) if are_texts else 2.6 * count + 2.4
    widths = [len(ticks) if are_texts else 1 for _, ticks, _ in picture.panels]
    drawn, axes = style.figure(width, 4.4, count, sharey=True, width_ratios=widths)
    for axis, (title, ticks, series) in zip(axes, picture.panels):
        if are_texts:
            style.dots(axis, ticks, series, picture.digits)
        else:
            axis.set_xscale("log", base=2)
            style.lines(axis, ticks, series, labelled=axis is axes[-1])
        if (axis is axes[0]) if are_texts else series.keys() != picture.panels[-1][2].keys():
            style.legend(axis)
        if picture.reference:
            axis.axhline(1, color=style.PLAIN, linestyle="--", linewidth=1)
        axis.set_title(title, fontsize=9)
        axis.set_xlabel(picture.below)
        if picture.logarithmic:
            style.logarithmic(axis)
        elif not picture.reference:
            axis.set_ylim(bottom=min(0, axis.get_ylim()[0]))
    axes[0].set_ylabel(picture.measure)
    reference = f"dashed: {picture.reference}; " if picture.reference else ""
    machine = env.get("GPUs") or f"{env['processor']}, {env['cores']} cores"
    note = f"{reference}{picture.note}\n{machine}; gluon_syncbn {env['gluon_syncbn']}"
    style.save(drawn, path, picture.finding, note, __file__, *sources)


if __name__ == "__main__":
    for one in map(Path, sys.argv[1:]) if sys.argv[1:] else sorted(RESULTS.glob("*.json")):
        draw(one)
