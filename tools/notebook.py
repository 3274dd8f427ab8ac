"""Makes examples/quickstart/quickstart.ipynb of quickstart.py and runs it, after `pip install nbclient ipykernel`.

Writes losses.png, too.
"""

import ast
import base64
import io
import os
import sys
import tempfile
from pathlib import Path

import nbclient
import nbformat
from nbformat import v4
from PIL import Image, PngImagePlugin

sys.path.append(str(Path(__file__).resolve().parents[1] / "examples"))
import style

SCRIPT = Path(__file__).resolve().parents[1] / "examples" / "quickstart" / "quickstart.py"
#: What stands above the cell that begins so.
SAID = {
    "from pathlib": "# Two devices train as one\n\nThe cells are those of [quickstart.py](quickstart.py). "
    "The [README](README.md) says what they show.",
    "def network": "A net with plain `BatchNorm`, and a loop that calls all devices before it reads a result:",
    "mx.random.seed": "All nets start with the same parameters:",
    "nets =": "`convert` makes the layers synchronised. The losses of two devices are then those of one:",
    "net = nets": "`summary` says which layers are synchronised, and over which contexts:",
    "net.save_parameters": "Files are those of plain `BatchNorm`, and `revert` makes the net plain again:",
    "figure, axes": "How far the losses of two devices are from that of one:",
}


def cells(text: str) -> list:
    """The statements of the script, a cell for each comment of `SAID`."""
    lines, found = text.split("\n"), []
    starts = [node.lineno - 1 for node in ast.parse(text).body[1:]]  # without the docstring
    begins = [at for at in starts if lines[at].startswith(tuple(SAID))]
    for at, end in zip(begins, [*begins[1:], len(lines)]):
        (said,) = [said for begin, said in SAID.items() if lines[at].startswith(begin)]
        found += [v4.new_markdown_cell(said), v4.new_code_cell("\n".join(lines[at:end]).strip())]
    return found


if __name__ == "__main__":
    os.environ["PYTHONWARNINGS"] = "ignore"
    notebook = v4.new_notebook(cells=cells(SCRIPT.read_text(encoding="utf-8")))
    notebook.metadata.kernelspec = {"display_name": "Python 3", "language": "python", "name": "python3"}
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"  # the same in each run
    with tempfile.TemporaryDirectory() as folder:
        # A script prints no value of an expression.
        arguments = ["--InteractiveShell.ast_node_interactivity=none", "--IPKernelApp.matplotlib=inline"]
        resources = {"metadata": {"path": folder}}
        nbclient.NotebookClient(notebook, extra_arguments=arguments, resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.clear()  # of the times of this run
    nbformat.write(notebook, SCRIPT.with_suffix(".ipynb"))
    (picture,) = [out.data["image/png"] for cell in notebook.cells for out in cell.get("outputs", ()) if "data" in out]
    marked = PngImagePlugin.PngInfo()
    marked.add_text(style.DRAWN_FROM, style.mark(SCRIPT))
    Image.open(io.BytesIO(base64.b64decode(picture))).save(SCRIPT.with_name("losses.png"), pnginfo=marked)
