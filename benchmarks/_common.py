"""What the benchmarks share: cells measured in a process of their own, timing, environment, tables."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import json
import os
import platform
import queue
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any, Callable, Dict, Iterator, List, Optional, Sequence, Tuple

RESULTS = Path(__file__).resolve().parent / "results"

Cell = Dict[str, Any]
Rounds = Dict[str, List[float]]  # seconds of one step, by implementation and round

# Colours that stay apart in print and for the colour-blind (Okabe and Ito).
COLOURS = {"plain": "#000000", "ours": "#0072B2", "contrib": "#D55E00", "limit": "#009E73"}
LABELS = {
    "plain": "nn.BatchNorm, not synchronised",
    "ours": "gluon_syncbn.SyncBatchNorm",
    "contrib": "gluon.contrib.nn.SyncBatchNorm",
    "limit": "memory-traffic limit",
}


def options(doc: Optional[str], arguments: Sequence[str], quick: str, over: Sequence[str] = ()) -> argparse.Namespace:
    """The command line that every benchmark has; `quick` says what its short run is, `over` are the transports."""
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help=quick)
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for the results")
    if over:
        parser.add_argument("--over", choices=over, default=over[0], help=f"what carries the messages ({over[0]})")
    parser.add_argument("--child", help=argparse.SUPPRESS)  # the cells to measure, as JSON
    return parser.parse_args(arguments)


def interleaved(steps: Dict[str, Callable[[], Any]], rounds: int, budget_s: float, sample_s: float = 0.05) -> Rounds:
    """Seconds per call of each step: one sample of each in turn, so that a slow minute hits all of them.

    A sample is as many calls as last about `sample_s`. After two rounds (and a warm-up) it ends early where
    `budget_s` is spent.
    """
    calls = {}
    for name, step in steps.items():
        step()
        start = time.perf_counter()
        step()
        calls[name] = max(1, round(sample_s / (time.perf_counter() - start)))
    taken: Rounds = {name: [] for name in steps}
    begun = time.perf_counter()
    for done in range(rounds):
        if done >= 2 and time.perf_counter() - begun > budget_s:
            break
        for name, step in steps.items():
            start = time.perf_counter()
            for _ in range(calls[name]):
                step()
            taken[name].append((time.perf_counter() - start) / calls[name])
    return taken


def ratio(taken: Rounds, name: str) -> float:
    """The median over the rounds of this implementation's time over plain BatchNorm's in the same round."""
    return statistics.median(one / plain for one, plain in zip(taken[name], taken["plain"]))


def measure(script: str, cells: Sequence[Cell], limit_s: float) -> Iterator[Tuple[Cell, Rounds, Dict[str, str]]]:
    """Yields each cell with its times, and with what went wrong by implementation.

    Where a cell with ``"contrib": True`` fails, it is measured again without: the problem was contrib's then.
    """
    for cell, taken, problem in _children(script, cells, limit_s):
        problems = {}
        if problem and cell["contrib"]:
            problems["contrib"] = problem
            ((_, taken, problem),) = _children(script, [{**cell, "contrib": False}], limit_s)
        if problem:
            problems["ours"] = problem
        yield cell, taken, problems


def _children(script: str, cells: Sequence[Cell], limit_s: float) -> Iterator[Tuple[Cell, Rounds, str]]:
    """Runs ``script --child`` on the cells; one process measures all of them in turn.

    Where a cell does not end within `limit_s`, the process is ended and a new one goes on with the next.
    """
    pending = list(cells)
    while pending:
        with tempfile.TemporaryFile("w+") as errors:
            # a session of its own, so that whatever it starts ends with it
            child = subprocess.Popen(
                [sys.executable, script, "--child", json.dumps(pending)],
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
            lines: queue.Queue[str] = queue.Queue()
            reader = threading.Thread(target=_pass_on, args=(child.stdout, lines), daemon=True)
            reader.start()
            try:
                while pending:
                    line = lines.get(timeout=limit_s)
                    if line.startswith("{"):  # GluonCV prints, too
                        yield pending.pop(0), json.loads(line), ""
                    elif not line:
                        code = child.wait()
                        errors.seek(0)
                        said = [text.strip() for text in errors if text.strip()]
                        yield pending.pop(0), {}, said[-1] if said else f"exit code {code}"
                        break
            except queue.Empty:
                yield pending.pop(0), {}, "hang"
            finally:
                if child.poll() is None:
                    os.killpg(child.pid, signal.SIGKILL)
                child.wait()
                reader.join()


def _pass_on(stream: IO[str], lines: queue.Queue[str]) -> None:
    with stream:
        for line in stream:
            lines.put(line)
    lines.put("")  # the end


def entry(result: Dict[str, Any], name: str) -> str:
    """The ratio as it stands in a table, or ``hang`` or ``error``."""
    if name in result["seconds"]:
        return f"{ratio(result['seconds'], name):.2f}"
    return "hang" if result["problems"].get(name) == "hang" else "error"


def report(results: Sequence[Dict[str, Any]], *keys: str) -> int:
    """Prints what went wrong; returns the exit code, 1 where that was not contrib's layer."""
    for result in results:
        for name, problem in result["problems"].items():
            print(*(result[key] for key in keys), name, problem, sep=", ", file=sys.stderr)
    return int(any("ours" in result["problems"] for result in results))


def occasion(command: Sequence[str]) -> Dict[str, str]:
    """When it was measured, and how to do so again."""
    now = datetime.datetime.now(datetime.timezone.utc)
    return {"date": now.strftime("%Y-%m-%d %H:%M UTC"), "command": shlex.join(["python", *command])}


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


def write(out: Path, stem: str, title: str, text: str, env: Dict[str, str], data: Any) -> None:
    """``stem.md`` and ``stem.json``, beside which the caller puts ``stem.png``."""
    out.mkdir(parents=True, exist_ok=True)
    facts = "\n".join(f"- {name}: {value}" for name, value in env.items())
    (out / f"{stem}.md").write_text(f"# {title}\n\n{text}\n\n![{title}]({stem}.png)\n\n## Environment\n\n{facts}\n")
    (out / f"{stem}.json").write_text(json.dumps({"environment": env, "cells": data}, indent=1) + "\n")
