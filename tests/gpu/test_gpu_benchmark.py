"""benchmarks/gpu.py on the emulator: it runs to its end, and says what its times are worth."""

import itertools
import json
import os
import re
import sys
import textwrap

import mxnet as mx
import pytest
from environments import ended
from places import BENCHMARKS

pytest.importorskip("cupy", reason="the kernels need CuPy")
pytest.importorskip("matplotlib", reason="the plot needs matplotlib")
if "CUDA_EMULATOR" not in os.environ or not mx.context.num_gpus():
    pytest.skip("for the emulator (`make test-gpu-emulated`); a GPU's owner runs it by hand", allow_module_level=True)

# What the benchmark asks of PyTorch, in a process for each GPU. Nothing is computed.
TORCH = """
    import sys, types
    __version__ = "0.0"
    float32 = float16 = None
    here = types.SimpleNamespace
    cuda = here(is_available=lambda: sys.argv[0].endswith("_gpu_layer.py"), set_device=abs, synchronize=lambda: None)

    class Tensor:
        grad = None
        def requires_grad_(self): return self
        def backward(self, dy): assert isinstance(dy, Tensor)

    def tensor(values, dtype, device):
        assert device == "cuda"
        return Tensor()

    class SyncBatchNorm:
        running_mean = running_var = weight = bias = eps = momentum = None
        def __init__(self, channels, device): assert channels == 3
        def __call__(self, x): return Tensor()
        def parameters(self): return []
        @staticmethod
        def apply(x, weight, bias, running_mean, running_var, eps, momentum, group, size):
            assert group == "all" and size == 1
            return Tensor()

    def init_process_group(backend, init_method, rank, world_size):
        assert backend == "nccl" and 0 <= rank < world_size

    distributed = here(init_process_group=init_process_group, group=here(WORLD="all"))
    nn = here(SyncBatchNorm=SyncBatchNorm, modules=here(_functions=here(SyncBatchNorm=SyncBatchNorm)))
"""


def run(out, *paths):
    done = ended([sys.executable, str(BENCHMARKS / "gpu.py"), "--quick", "--out", str(out)], *paths)
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
    layouts = itertools.product(["NCHW", "NHWC"], ["float32", "float16"])
    assert [(cell["layout"], cell["dtype"]) for cell in cells["kernels"]] == list(layouts)
    for cell in cells["kernels"]:
        assert {"copy", "moments", "normalise", "grad_sums", "grad_input"} <= cell["seconds"].keys()
    assert (tmp_path / "gpu.png").read_bytes().startswith(b"\x89PNG")
    assert "- GPUs: CUDA emulator 0, compute capability 8.0; " in text


@pytest.mark.slow
def test_pytorch_has_a_process_for_each_gpu(tmp_path):
    (tmp_path / "torch.py").write_text(textwrap.dedent(TORCH))
    text, cells = run(tmp_path / "out", tmp_path)
    assert "torch.nn.SyncBatchNorm:" not in text
    for cell in cells["layers"]:
        assert cell["ratios"].keys() == {"torch forward", "torch backward"}
    assert re.search(r"\| 4 +\|.*- \| +- \| +\d+\.\d\d \| +\d+\.\d\d \| +- \| +- \|", text)
