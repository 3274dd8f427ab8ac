"""The CUDA kernels on one GPU: their bandwidth beside that of a copy, and their time beside PyTorch's.

Needs a CUDA GPU, CuPy (which compiles `kernels.cu`) and PyTorch, but no MXNet build for GPUs. The shapes are
those of `benchmarks/layers.py` with 16 images, and larger ones. All take turns on the same tensors.

    python benchmarks/gpu.py             # writes benchmarks/results/gpu.{md,json}
    python benchmarks/gpu.py --quick     # two shapes and few rounds
"""

import ctypes
import statistics
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

import _common
import numpy as np

SHAPES = [
    (16, 64, 8, 8),
    (16, 512, 15, 15),
    (16, 64, 64, 64),
    (16, 256, 60, 60),
    (16, 256, 120, 120),
    (16, 2048, 60, 60),
]
PACKAGE = Path(__file__).resolve().parents[1] / "gluon_syncbn"
BLOCK = 256

# Passes over the tensor that each kernel makes.
PASSES = {"moments": 1, "normalise": 2, "grad_sums": 2, "grad_input": 3}

EXPLANATION = """The first four columns are what each kernel moves per second over what `Tensor.copy_` moves on the
same tensor. *Forward* is the statistics and the normalisation, *backward* the sums and the gradient of the input;
their ratios are ours over PyTorch's SyncBN kernels (`torch.batch_norm_stats` ... `batch_norm_backward_elemt`) and over
`BatchNorm2d`, which synchronises nothing. Medians over interleaved rounds; above 1 is slower than PyTorch."""


class Ours:
    """The kernels of one tensor [N, C, H, W], in the grids that the layer uses."""

    def __init__(self, module: Any, x: Any, dy: Any) -> None:
        import torch

        self.module, self.x, self.dy, self.type = module, x, dy, str(x.dtype).split(".")[1]
        samples, channels, inner = x.shape[0], x.shape[1], x[0, 0].numel()
        plan = (ctypes.c_int64 * 6)()
        core = ctypes.CDLL(str(PACKAGE / "_core.so"))
        core.syncbn_cuda_plan(*map(ctypes.c_int64, (samples, 1, channels, inner, 1)), plan)
        tiles, slots, chunks, blocks, self.width, self.segment = plan
        self.reduce, self.each = (tiles, slots, chunks), (blocks, 1, 1) if inner > 1 else (tiles, slots, chunks)
        self.shape = [np.int64(n) for n in (samples, 1, channels, inner, 1)]
        double = {"dtype": torch.float64, "device": x.device}
        self.partial = torch.empty(chunks * 3 * channels, **double)
        self.statistics, self.pulls = torch.ones(2, channels, **double), torch.rand(3, channels, **double)
        self.gamma, self.beta = torch.rand(2, channels, device=x.device)
        self.out = torch.empty_like(x)

    def _launch(self, name: str, grid: Tuple, *arguments: Any) -> None:
        pointers = [np.uintp(a.data_ptr()) if hasattr(a, "data_ptr") else a for a in arguments]
        self.module.get_function(f"{name}_{self.type}")(grid, (BLOCK,), tuple(pointers))

    def moments(self) -> None:
        self._launch("moments", self.reduce, self.x, self.partial, *self.shape, np.int32(self.width))

    def normalise(self) -> None:
        self._launch(
            "normalise", self.each, self.x, self.statistics, self.gamma, self.beta, np.int32(0), self.out, np.int32(0),
            *self.shape, np.int32(self.width), np.int64(self.segment),
        )  # fmt: skip

    def grad_sums(self) -> None:
        arrays = self.dy, self.x, self.statistics, self.partial
        self._launch("grad_sums", self.reduce, *arrays, *self.shape, np.int32(self.width))

    def grad_input(self) -> None:
        self._launch(
            "grad_input", self.each, self.dy, self.x, self.statistics, self.pulls, self.gamma, np.int32(0), self.out,
            np.int32(0), *self.shape, np.int32(self.width), np.int64(self.segment),
        )  # fmt: skip


def timed(steps: Dict[str, Callable[[], Any]], rounds: int) -> Dict[str, float]:
    """The median over the rounds, by the GPU's own clock; a round is 20 calls of each in turn."""
    import torch

    taken: Dict[str, List[float]] = {name: [] for name in steps}
    for done in range(rounds + 1):  # the first warms up
        for name, step in steps.items():
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            for _ in range(20):
                step()
            end.record()
            end.synchronize()
            if done:
                taken[name].append(begin.elapsed_time(end) / 20e3)
    return {name: statistics.median(values) for name, values in taken.items()}


def measure(shape: Tuple, dtype: str, module: Any, rounds: int) -> Dict[str, float]:
    import torch

    x, dy, other = (torch.randn(shape, device="cuda").to(getattr(torch, dtype)) for _ in range(3))
    ours, plain = Ours(module, x, dy), torch.nn.BatchNorm2d(shape[1], device="cuda")
    mean, invstd = torch.batch_norm_stats(x, 1e-5)
    count = torch.tensor([x.numel() // shape[1]], dtype=torch.int32, device="cuda")
    weight, bias = ours.gamma, ours.beta
    leaf = x.detach().requires_grad_()
    output = plain(leaf)
    sums = torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, True, True)[:2]

    def theirs_backward() -> None:
        a, b, _, _ = torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, True, True)
        torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, a, b, count)

    return timed(
        {
            "copy": lambda: other.copy_(x),
            "moments": ours.moments,
            "normalise": ours.normalise,
            "grad_sums": ours.grad_sums,
            "grad_input": ours.grad_input,
            "torch stats": lambda: torch.batch_norm_stats(x, 1e-5),
            "torch elemt": lambda: torch.batch_norm_elemt(x, weight, bias, mean, invstd, 1e-5),
            "torch backward": theirs_backward,
            "torch input": lambda: torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, *sums, count),
            "plain forward": lambda: plain(x),
            "plain backward": lambda: torch.autograd.grad(output, leaf, dy, retain_graph=True),
        },
        rounds,
    )


def row(shape: Tuple, dtype: str, seconds: Dict[str, float]) -> List[str]:
    bandwidth = [f"{PASSES[name] / 2 * seconds['copy'] / seconds[name]:.2f}" for name in PASSES]
    forward, backward = seconds["moments"] + seconds["normalise"], seconds["grad_sums"] + seconds["grad_input"]
    return [
        f"{' x '.join(map(str, shape))} {dtype}",
        *bandwidth,
        f"{forward / (seconds['torch stats'] + seconds['torch elemt']):.2f}",
        f"{backward / seconds['torch backward']:.2f}",
        f"{forward / seconds['plain forward']:.2f}",
        f"{backward / seconds['plain backward']:.2f}",
    ]


def main(arguments: Sequence[str]) -> int:
    options = _common.options(__doc__, arguments, quick="two shapes and few rounds: a smoke test")
    try:
        import cupy
        import torch
    except ImportError as error:
        sys.exit(f"benchmarks/gpu.py needs CuPy and PyTorch with CUDA ({error}): pip install cupy-cuda12x torch")
    if not torch.cuda.is_available():
        sys.exit("benchmarks/gpu.py needs a CUDA GPU, and PyTorch finds none")
    module = cupy.RawModule(code=(PACKAGE / "kernels.cu").read_text(), options=("--std=c++14",), backend="nvrtc")
    cupy.cuda.ExternalStream(torch.cuda.current_stream().cuda_stream).use()
    results = []
    for shape in SHAPES[:2] if options.quick else SHAPES:
        for dtype in ("float32", "float16"):
            taken = measure(shape, dtype, module, rounds=3 if options.quick else 15)
            results.append({"shape": shape, "dtype": dtype, "seconds": taken})
            print(shape, dtype, flush=True)
    header = ["tensor", *PASSES, "forward / torch", "backward / torch", "forward / plain", "backward / plain"]
    rows = [row(**result) for result in results]
    env = {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "cupy": cupy.__version__}
    env["driver"] = str(cupy.cuda.runtime.driverGetVersion())
    text = EXPLANATION + "\n\n" + _common.table(header, rows)
    _common.write(options.out, "gpu", "The CUDA kernels", text, env, results)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
