"""benchmarks/gpu.py on the emulator: it runs to its end, and says what its times are worth."""

import itertools
import json
import os
import sys
from importlib.util import find_spec

import mxnet as mx
import pytest
from environments import ended
from places import BENCHMARKS

pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
if "CUDA_EMULATOR" not in os.environ or not mx.context.num_gpus():
    pytest.skip("for the emulator (`make test-gpu-emulated`); a GPU's owner runs it by hand", allow_module_level=True)


def run(out):
    done = ended([sys.executable, str(BENCHMARKS / "gpu.py"), "--quick", "--out", str(out)])
    assert done.returncode == 0, done.stderr
    return (out / "gpu.md").read_text(), json.loads((out / "gpu.json").read_text())["cells"]


@pytest.mark.slow
def test_it_runs_and_says_what_was_left_out(tmp_path):
    text, cells = run(tmp_path)
    assert "**Measured on tests/cuda_emulator: the times mean nothing, on no line of this page.**" in text
    assert "MXNet's nn.BatchNorm: its kernels do not run on the emulator" in text
    ways = itertools.product((1, 4), ("eager", "static"))
    assert {(cell["gpus"], cell["way"]) for cell in cells["layers"]} == set(ways)
    for cell in cells["layers"]:
        assert all(cell["seconds"][f"ours {way}"]["median"] > 0 for way in ("forward", "backward"))
    assert ("the kernels by themselves: CuPy is missing" in text) == (find_spec("cupy") is None)
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
    assert "- GPUs: CUDA emulator 0, compute capability 8.0; " in text
