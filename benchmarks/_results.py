"""What the benchmarks write: quantiles, tables, the environment; and aside, every sample."""

from __future__ import annotations

import datetime
import gzip
import importlib.metadata
import json
import os
import platform
import shlex
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence

from _measuring import Cell, Rounds

Series = Dict[str, float]  # what is kept of many values, by name
WIDTH = 120  # of a line of JSON, without the brackets that close


def quantiles(values: Sequence[float]) -> Series:
    """How many values there are, and where they lie."""
    low, high = min(values), max(values)
    cuts = [min(max(cut, low), high) for cut in statistics.quantiles(values, n=20)]  # which goes beyond a few values
    median = statistics.median(values)
    return {"count": len(values), "10%": cuts[1], "median": median, "90%": cuts[17]}


def summary(taken: Rounds) -> Dict[str, Series]:
    return {name: quantiles(values) for name, values in taken.items()}


def compared(sample: Cell, beside: Optional[Dict[str, str]] = None) -> Cell:
    """The cell with quantiles in place of its times, and with those of their ratios to plain BatchNorm's, or, where
    ``beside`` says so, to those of another.

    A ratio is that of two times of the same round, since a slow moment hits both: no quotient of medians.
    """
    taken = sample["seconds"]
    yardsticks = {name: (beside or {}).get(name, "plain") for name in taken}
    ratios = {
        name: [one / yardstick for one, yardstick in zip(taken[name], taken[other])]
        for name, other in yardsticks.items()
        if name not in ("plain", *yardsticks.values())
    }
    return {**sample, "seconds": summary(taken), "ratios": summary(ratios)}


def entry(result: Cell, name: str) -> str:
    """The ratio as it stands in a table, ``hang`` or ``error``, or ``-`` where a short run leaves contrib out."""
    if name in result["ratios"]:
        return median_and_range(result["ratios"][name], 2)
    if name == "contrib" and result.get("contrib") is False:
        return "-"
    return "hang" if result["problems"].get(name) == "hang" else "error"


def layers_row(result: Cell, names: Sequence[str]) -> List[str]:
    """Of a table of layers: shape, replicas, milliseconds of plain BatchNorm, and the ratios of the others."""
    plain = f"{result['seconds']['plain']['median'] * 1e3:.2f}" if result["seconds"] else "-"
    shape = " x ".join(map(str, result["shape"]))
    return [shape, str(result["replicas"]), plain, *(entry(result, name) for name in names)]


def median_and_range(series: Series, digits: int = 1) -> str:
    median, low, high = (f"{series[which]:.{digits}f}" for which in ("median", "10%", "90%"))
    return f"{median} ({low} to {high}; n = {series['count']})"


def report(results: Sequence[Cell], *keys: str) -> int:
    """Prints what went wrong; returns the exit code, 1 where that was not contrib's layer."""
    for result in results:
        for name, problem in result["problems"].items():
            print(*(result[key] for key in keys), name, problem, sep=", ", file=sys.stderr)
    return int(any("ours" in result["problems"] for result in results))


def occasion(command: Sequence[str]) -> Dict[str, str]:
    """When it was measured, with which version, and how to do so again."""
    now = datetime.datetime.now(datetime.timezone.utc)
    date = now.strftime("%Y-%m-%d %H:%M UTC")
    return {"date": date, "gluon_syncbn": _version(), "command": shlex.join(["python", *command])}


def environment(command: Sequence[str]) -> Dict[str, str]:
    """What a reader needs to judge the figures. The instruction set is that of the native core."""
    from gluon_syncbn import _native

    versions = {}
    for name in ("mxnet", "gluoncv", "numpy"):
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = "not installed"
    return {
        **occasion(command),
        "processor": _processor(),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        **versions,
        "native core": _native.instruction_set(),
        "load before": "{:.1f}, {:.1f}, {:.1f} (1, 5, 15 minutes)".format(*os.getloadavg()),
    }


def _version() -> str:
    """That of this package with the commit, and whether files differ from it."""
    from gluon_syncbn import __version__

    if not shutil.which("git"):
        return __version__
    command = ["git", "describe", "--always", "--dirty=, changed", "--exclude=*"]
    told = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return f"{__version__} ({told.stdout.strip() or 'no commit'})"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.machine()


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, padded so that it also reads as text; all columns but the first to the right."""
    widths = [max(len(str(row[i])) for row in [header, *rows]) for i in range(len(header))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (str(cell) for cell in cells)
        padded = [first.ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(others, widths[1:])]
        return "| " + " | ".join(padded) + " |"

    rule = "|" + "-" * (widths[0] + 2) + "|" + "|".join("-" * (width + 1) + ":" for width in widths[1:]) + "|"
    return "\n".join([line(header), rule, *map(line, rows)])


def write(
    out: Path, stem: str, title: str, parts: Sequence[Any], env: Dict[str, str], cells: Any, samples: Any = None
) -> None:
    """``stem.md``, ``stem.json`` and the picture of it, ``stem.png``; the samples in ``stem.raw.json.gz``.

    The parts of the page are texts, and tables as lists of rows, the header first. Tables are printed, too.
    """
    import _pictures

    out.mkdir(parents=True, exist_ok=True)
    tables = {at: table(rows[0], rows[1:]) for at, rows in enumerate(parts) if not isinstance(rows, str)}
    print(*tables.values(), sep="\n\n")
    text = "\n\n".join(tables.get(at, part) for at, part in enumerate(parts))
    facts = "\n".join(f"- {name}: {value}" for name, value in env.items())
    (out / f"{stem}.md").write_text(f"# {title}\n\n{text}\n\n![{title}]({stem}.png)\n\n## Environment\n\n{facts}\n")
    (out / f"{stem}.json").write_text(_lines({"environment": env, "cells": cells}) + "\n")
    _pictures.draw(out / f"{stem}.json")
    if samples is not None:
        raw = out / f"{stem}.raw.json.gz"
        with gzip.open(raw, "wt") as file:
            json.dump({"environment": env, "cells": samples}, file)
        print(f"every sample: {raw} (not for the repository)")


def _lines(data: Any, indent: int = 0, before: int = 0) -> str:
    """JSON with as many members on a line as fit. A member that takes several lines has them to itself.

    ``before`` characters stand on the first line already. A float has five significant digits, since no table and no
    plot shows more.
    """
    if not isinstance(data, (dict, list)):
        return json.dumps(float(f"{data:.5g}") if isinstance(data, float) else data)
    values = data.values() if isinstance(data, dict) else data
    keys = [f"{json.dumps(str(key))}: " for key in data] if isinstance(data, dict) else [""] * len(data)
    lines: List[str] = []
    for key, value in zip(keys, values):
        member = key + _lines(value, indent + 1, indent + 1 + len(key))
        room = WIDTH - (before if len(lines) == 1 else indent) - len("{, ,")
        if lines and "\n" not in lines[-1] + member and len(lines[-1]) + len(member) <= room:
            lines[-1] += f", {member}"
        else:
            lines.append(member)
    left, right = ("{", "}") if isinstance(data, dict) else ("[", "]")
    return left + f",\n{' ' * (indent + 1)}".join(lines) + right
