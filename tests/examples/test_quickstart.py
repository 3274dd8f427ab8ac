"""The quick start: two devices are one, and every way of handing the net on keeps what it knows."""

import ast
import json
import re
import sys

import pytest
from environments import ended
from places import PACKAGE, QUICKSTART

pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
pytest.importorskip("matplotlib", reason="it draws a picture")


def test_two_devices_train_as_one(tmp_path):
    command = [sys.executable, "-W", "ignore", QUICKSTART / "quickstart.py"]
    ran = ended(command, PACKAGE.parent, code=0, cwd=tmp_path, OMP_NUM_THREADS=1)
    rows = {
        name: list(map(float, values.split()))
        for name, values in re.findall(r"^(\w+ .*Norm) +([-\d. ]+)$", ran.stdout, re.M)
    }
    one, apart, together = (rows[name] for name in rows if "device" in name)
    assert together[:3] == pytest.approx(one[:3], rel=1e-4)
    assert apart[0] != pytest.approx(one[0], rel=1e-3)
    assert together[-1] == together[-2] and apart[-1] != apart[-2]  # running means on both devices
    assert re.search(r"batch normalisation: 2, synchronised: 2", ran.stdout)
    right = dict(re.findall(r"^(.*\S) +([\d.]+) of 597 other digits are right$", ran.stdout, re.M))
    assert len(right) == 5
    ours = {right[name] for name in right if name not in ("one device, BatchNorm", "two devices, BatchNorm")}
    assert len(ours) == 1 and float(*ours) > 0.7
    written = {path.name for path in (tmp_path / "runs" / "quickstart").iterdir()}
    assert written == {"losses.png", "start.params", "net.params", "net-symbol.json", "net-0000.params"}
    assert '"op": "BatchNorm"' in (tmp_path / "runs" / "quickstart" / "net-symbol.json").read_text(encoding="utf-8")


def test_the_notebook_is_the_script_and_has_run():
    notebook = json.loads((QUICKSTART / "quickstart.ipynb").read_text(encoding="utf-8"))
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    script = ast.parse((QUICKSTART / "quickstart.py").read_text(encoding="utf-8")).body[1:]  # without the docstring
    pasted = ast.parse("\n".join("".join(cell["source"]) for cell in code)).body
    assert list(map(ast.dump, pasted)) == list(map(ast.dump, script)), "run python tools/notebook.py"
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1))
    outputs = [output for cell in code for output in cell["outputs"]]
    kinds = {output["output_type"] for output in outputs}
    assert kinds == {"stream", "display_data"}  # no error
    assert "synchronised: 2" in "".join(text for output in outputs for text in output.get("text", ()))
