"""The table of benchmarks/results/gluoncv.md, between two marks, with the versions that made it."""

import importlib.metadata
import platform
from pathlib import Path
from typing import Any, Dict, List

from gluon_syncbn import _native

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
MEASURED = ("step",)  # where *yes* has figures
PACKAGES = ("mxnet", "gluoncv", "numpy", "onnx", "onnxruntime")


def table(results: Dict[str, Dict[str, str]], said: Dict[str, List[str]]) -> str:
    """Makes the table from cells by model and column. ``said`` holds notes on the training steps.

    Each note and each reason stands below the table once.
    """
    notes: Dict[str, int] = {}

    def note(text: str) -> str:
        return f"({notes.setdefault(text, len(notes) + 1)})"

    rows = [["model", *COLUMNS.values()], ["---"] * (len(COLUMNS) + 1)]
    for name, cells in results.items():
        row = [name]
        for column in COLUMNS:
            text = cells.get(column, "not run")
            short, separator, why = text.partition(": ")
            if separator and column in MEASURED and short == "yes":
                text = why
            elif separator:
                text = f"{short} {note(why)}"
            row.append(" ".join([text, *map(note, said[name] if column == "step" else [])]))
        rows.append(row)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", *(f"{number}. {note}" for note, number in notes.items())])


def environment() -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    kernels = f"{_native.instruction_set()} kernels"
    return f"`make gluoncv` ran with Python {platform.python_version()}, {versions} and {kernels}."


def write(path: Path, text: str) -> None:
    """Puts the text between the marks."""
    before, rest = path.read_text().split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def totals(results: Dict[str, Dict[str, Any]]) -> List[str]:
    """How many models pass each check."""
    good = {column: sum(cells.get(column, "").startswith("yes") for cells in results.values()) for column in COLUMNS}
    whole = sum(cells.get("convert", "").split(" of ")[0] == cells.get("layers") for cells in results.values())
    return [
        f"`convert` synchronises every layer of {whole} of the {len(results)} models. These models pass: training step "
        f"{good['step']}, files and `revert` {good['files']}, export {good['export']}, "
        f"ONNX {good['onnx']}."
    ]
