"""Checks a small member of each of GluonCV's model families, and writes the table of benchmarks/results/gluoncv.md.

    make gluoncv
    make gluoncv ARGS="--only resnet18_v1b fastscnn"      # prints their rows

Each check of a model runs in a process of its own with a time limit.
"""

import argparse
import importlib.metadata
import os
import platform
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Dict, List

from tqdm import tqdm

from gluon_syncbn import _native

from .models import BY_NAME

PAGE = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "gluoncv.md"
BEGIN, END = "<!-- made by `make gluoncv` -->", "<!-- end -->"
COLUMNS = {
    "layers": "layers",
    "norm_layer": "`norm_layer=` alone",
    "convert": "`convert(net)`",
    "step": "training step",
    "files": "files, `revert`",
    "export": "export",
    "onnx": "ONNX",
}
LIMIT = 600  # seconds that a check may take
PACKAGES = ("mxnet", "gluoncv", "numpy", "onnx", "onnxruntime")


def main() -> None:
    parser = argparse.ArgumentParser(prog="families", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(BY_NAME), metavar="MODEL", help="these models")
    options = parser.parse_args()
    cells = [(name, column) for name in options.only or BY_NAME for column in COLUMNS]
    rows: Dict[str, Dict[str, str]] = {name: {} for name, _ in cells}
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        texts = pool.map(lambda cell: examined(*cell), cells)
        for (name, column), text in tqdm(zip(cells, texts), total=len(cells), unit="check", disable=None):
            rows[name][column] = text
    text = f"{table(rows)}\n\n{totals(rows)}"
    print(text)
    if not options.only:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


def examined(name: str, check: str) -> str:
    text = child(name, check)
    if text.startswith("no: ") and check in ("export", "onnx"):  # what a plain net fails, too, is not our failure
        plain = child(name, check, "--plain")
        if plain.startswith("no: "):
            return f"no, and plain BatchNorm fails too{text[len('no') :]}"
    return text


def child(*arguments: str) -> str:
    """What the process printed last, or how it ended."""
    command = [sys.executable, "-W", "ignore", "-m", "families.checks", *arguments]
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT)
    except subprocess.TimeoutExpired:
        return f"no: not finished after {LIMIT} s"
    if ran.returncode < 0:
        return f"no: ended by {signal.Signals(-ran.returncode).name}"
    said = (ran.stderr if ran.returncode else ran.stdout).strip().splitlines() or [f"exit code {ran.returncode}"]
    return f"no: {said[-1]}" if ran.returncode else said[-1]


def table(results: Dict[str, Dict[str, str]]) -> str:
    """Each note and each reason stands below the table once."""
    notes: Dict[str, int] = {}

    def note(text: str) -> str:
        return f"({notes.setdefault(text, len(notes) + 1)})"

    rows: List[Any] = [["model", *COLUMNS.values()], ["---"] * (len(COLUMNS) + 1)]
    for name, cells in results.items():
        rows.append([name])
        for column in COLUMNS:
            text = cells[column]
            short, separator, why = text.partition(": ")
            if separator:
                text = why if (column, short) == ("step", "yes") else f"{short} {note(why)}"
            rows[-1].append(" ".join([text, *map(note, BY_NAME[name].notes() if column == "step" else [])]))
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", *(f"{number}. {note}" for note, number in notes.items())])


def totals(results: Dict[str, Dict[str, str]]) -> str:
    """How many models pass each check, and what made the table."""
    good = {column: sum(cells[column].startswith("yes") for cells in results.values()) for column in COLUMNS}
    whole = sum(cells["convert"].split(" of ")[0] == cells["layers"] for cells in results.values())
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    versions += f" and {_native.instruction_set()} kernels"
    return (
        f"`convert` synchronises every layer of {whole} of the {len(results)} models. These models pass: training step "
        f"{good['step']}, files and `revert` {good['files']}, export {good['export']}, ONNX {good['onnx']}.\n\n"
        f"`make gluoncv` ran with Python {platform.python_version()}, {versions}."
    )


if __name__ == "__main__":
    main()
