"""The table of docs/gluoncv.md, between two marks, with what it was made with."""

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
PACKAGES = ("mxnet", "gluoncv", "numpy", "onnx", "onnxruntime")


def table(results: Dict[str, Dict[str, str]], said: Dict[str, List[str]]) -> str:
    """Cells by model and column; ``said`` are notes to its training step. Notes and reasons stand below, once each."""
    notes: Dict[str, int] = {}

    def note(text: str) -> str:
        return f"({notes.setdefault(text, len(notes) + 1)})"

    rows = [["model", *COLUMNS.values()], ["---"] * (len(COLUMNS) + 1)]
    for name, cells in results.items():
        row = [name]
        for column in COLUMNS:
            text = cells.get(column, "not run")
            short, separator, why = text.partition(": ")
            if separator and column == "step" and short == "yes":
                text = why
            elif separator:
                text = f"{short} {note(why)}"
            row.append(" ".join([text, *map(note, said[name] if column == "step" else [])]))
        rows.append(row)
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([*lines, "", *(f"{number}. {note}" for note, number in notes.items())])


def environment() -> str:
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in PACKAGES)
    return f"`make gluoncv` with Python {platform.python_version()}, {versions}; {_native.instruction_set()} kernels."


def write(path: Path, text: str) -> None:
    """Puts it between the marks."""
    before, rest = path.read_text().split(BEGIN)
    _, after = rest.split(END)
    path.write_text(f"{before}{BEGIN}\n\n{text}\n\n{END}{after}")


def totals(results: Dict[str, Dict[str, Any]]) -> List[str]:
    """How many models pass each check."""
    good = {column: sum(cells.get(column, "").startswith("yes") for cells in results.values()) for column in COLUMNS}
    whole = sum(cells.get("convert", "").split(" of ")[0] == cells.get("layers") for cells in results.values())
    return [
        f"Of {len(results)} models, `convert` synchronises every layer of {whole}; *yes* for the training step of "
        f"{good['step']}, files and `revert` of {good['files']}, export of {good['export']}, ONNX of {good['onnx']}."
    ]
