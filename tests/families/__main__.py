"""Checks a small member of each of GluonCV's model families, and writes the table of benchmarks/results/gluoncv.md.

    make gluoncv
    make gluoncv ARGS="--only resnet18_v1b fastscnn"      # prints their rows

Each model runs in a process of its own with a time limit.
"""

import argparse
import importlib.metadata
import json
import platform
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Iterator, List, Tuple

from tqdm import tqdm

from gluon_syncbn import _native

from .child import CHECKS
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
PACKAGES = ("mxnet", "gluoncv", "numpy", "onnx", "onnxruntime")


def main() -> None:
    parser = argparse.ArgumentParser(prog="families", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", choices=sorted(BY_NAME), metavar="MODEL", help="these models")
    parser.add_argument("--limit", type=float, default=600, help="seconds that a model may take (600)")
    options = parser.parse_args()
    rows: Dict[str, Dict[str, str]] = {}
    for name in tqdm(options.only or BY_NAME, unit="model", disable=None):
        rows[name] = {column: text for cells in examine(name, options.limit) for column, text in cells.items()}
    text = f"{table(rows)}\n\n{totals(rows)}"
    print(text)
    if not options.only:
        before, rest = PAGE.read_text().split(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{rest.split(END)[1]}")


def examine(name: str, limit: float) -> Iterator[Dict[str, str]]:
    """The cells of each check. After a check that ends the process, a new process continues with the next check."""
    checks = list(CHECKS)
    while checks:
        records, end = child([name, *checks], limit)
        if len(records) < len(checks):
            records.append({checks[len(records)]: f"no: {end}"})
        for check, cells in zip(checks, records):
            if cells.get(check, "").startswith("no: "):  # what a plain net fails, too, is not the package's failure
                plain, _ = child([name, "--plain", check], limit)
                if not plain or plain[0][check] != "yes":
                    cells[check] = f"no, and plain BatchNorm fails too{cells[check][len('no') :]}"
            yield cells
        checks = checks[len(records) :]


def child(arguments: List[str], limit: float) -> Tuple[List[Dict[str, str]], str]:
    """The cells that the process printed, and how the process ended."""
    command = [sys.executable, "-W", "ignore", "-m", "families.child", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        out, err = process.communicate(timeout=limit)
        said = err.strip().splitlines() or [f"exit code {process.returncode}"]
        end = f"ended by {signal.Signals(-process.returncode).name}" if process.returncode < 0 else said[-1]
    except subprocess.TimeoutExpired:
        process.kill()
        out, _ = process.communicate()
        end = f"not finished after {limit:.0f} s"
    return [json.loads(line) for line in out.splitlines() if line.startswith("{")], end


def table(results: Dict[str, Dict[str, str]]) -> str:
    """Each note and each reason stands below the table once."""
    notes: Dict[str, int] = {}

    def note(text: str) -> str:
        return f"({notes.setdefault(text, len(notes) + 1)})"

    rows: List[Any] = [["model", *COLUMNS.values()], ["---"] * (len(COLUMNS) + 1)]
    for name, cells in results.items():
        rows.append([name])
        for column in COLUMNS:
            text = cells.get(column, "not run")
            short, separator, why = text.partition(": ")
            if separator:
                text = why if (column, short) == ("step", "yes") else f"{short} {note(why)}"
            rows[-1].append(" ".join([text, *map(note, BY_NAME[name].notes() if column == "step" else [])]))
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", *(f"{number}. {note}" for note, number in notes.items())])


def totals(results: Dict[str, Dict[str, str]]) -> str:
    """How many models pass each check, and what made the table."""
    good = {column: sum(cells.get(column, "").startswith("yes") for cells in results.values()) for column in COLUMNS}
    whole = sum(cells.get("convert", "").split(" of ")[0] == cells.get("layers") for cells in results.values())
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    versions += f" and {_native.instruction_set()} kernels"
    return (
        f"`convert` synchronises every layer of {whole} of the {len(results)} models. These models pass: training step "
        f"{good['step']}, files and `revert` {good['files']}, export {good['export']}, ONNX {good['onnx']}.\n\n"
        f"`make gluoncv` ran with Python {platform.python_version()}, {versions}."
    )


if __name__ == "__main__":
    main()
