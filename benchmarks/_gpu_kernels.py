"""The CUDA kernels by themselves: beside a copy of the same tensor, and beside PyTorch's on the same tensors.

A process of its own, in whichever Python has CuPy and PyTorch: theirs need not be MXNet's. It prints one line of JSON.
Calls are recorded as a CUDA graph, so that the GPU's clock sees the kernels and not the host that launches them.
"""

import argparse
import json
import sys
from typing import Any, Callable, Dict, List, Sequence, Tuple

import numpy as np
from _kernel_arguments import BLOCK, few, filled, plan, source
from tqdm import tqdm

# Images, channels, height and width.
SHAPES = [
    (16, 64, 8, 8),
    (16, 512, 15, 15),
    (16, 64, 64, 64),
    (16, 256, 60, 60),
    (16, 256, 120, 120),
    (16, 2048, 60, 60),
]
CASES = [("NCHW", "float32"), ("NCHW", "float16"), ("NHWC", "float32"), ("NHWC", "float16")]
OPTIONS = ("--std=c++14",)
REPLICAS = 4  # whose statistics are put together
# Passes over the tensor that each kernel makes; a copy makes two.
PASSES = {"moments": 1, "normalise": 2, "grad_sums": 2, "grad_input": 3}


class Ours:
    """The kernels of one tensor [samples, extent, channels, inner], in the grids that the layer uses."""

    def __init__(self, cupy: Any, module: Any, shape: Tuple, dtype: str) -> None:
        self.module, self.type = module, dtype
        channels, inner = shape[2:]
        tiles, slots, chunks, blocks, width, segment = plan(shape, 1)
        self.reduce, self.each = (tiles, slots, chunks), (blocks, 1, 1) if inner > 1 else (tiles, slots, chunks)
        sizes = zip(("samples", "per_sample", "channels", "inner"), shape)
        self.tiling = dict(sizes, slots=1, segment=segment, width=width)
        random = np.random.RandomState(0)

        def on_gpu(values: np.ndarray, to: str) -> Any:
            array = cupy.empty(values.shape, to)
            array.set(values.astype(to))
            return array

        self.x, self.dy = (on_gpu(random.standard_normal(shape), dtype) for _ in range(2))
        self.out, self.partial = cupy.empty(shape, dtype), cupy.empty(chunks * (1 + 2 * channels), "float64")
        moments = random.rand(REPLICAS, 1 + 2 * channels) + 0.5
        self.moments_of_all, self.sums = (on_gpu(values, "float64") for values in (moments, moments[:, 1:]))
        self.saved = on_gpu(random.rand(5 * channels) + 0.5, "float64")
        vectors = (on_gpu(random.rand(channels) + 0.5, "float32") for _ in range(6))
        self.gamma, self.beta, self.mean, self.var, self.dgamma, self.dbeta = vectors
        self.told = on_gpu(np.zeros(3), "int64")

    def _launch(self, name: str, grid: Tuple, structure: str, **fields: Any) -> None:
        plain = (int, float, dict)
        numbers = {field: value if isinstance(value, plain) else value.data.ptr for field, value in fields.items()}
        arguments = filled(structure, tiling=self.tiling, **numbers)
        self.module.get_function(f"{name}_identity_{self.type}")(grid, (BLOCK,), (arguments,))

    def copy(self) -> None:
        self.out.data.copy_from_device_async(self.x.data, self.x.nbytes)

    def moments(self) -> None:
        self._launch("moments", self.reduce, "MomentsArguments", x=self.x, partial=self.partial)

    def normalise(self) -> None:
        pool = few([(0, REPLICAS)])  # one for all replicas
        statistics = {"gathered": self.moments_of_all, "used": pool, "fed": pool, "tracked": pool, "pools": 1}
        running = {"momentum": 0.9, "running_mean": self.mean, "running_var": self.var, "status": self.told}
        arrays = {"x": self.x, "y": self.out, "saved": self.saved, "affine": self.affine()}
        arguments: Dict[str, Any] = {**arrays, **statistics, **running, "epsilon": 1e-5}
        self._launch("normalise", self.each, "NormaliseArguments", **arguments)

    def grad_sums(self) -> None:
        arrays = {"dy": self.dy, "x": self.x, "saved": self.saved, "partial": self.partial}
        self._launch("grad_sums", self.reduce, "GradSumsArguments", **arrays)

    def grad_input(self) -> None:
        arrays = {"dy": self.dy, "x": self.x, "dx": self.out, "saved": self.saved, "gathered": self.sums}
        parameters = {"own": self.sums, "dgamma": self.dgamma, "dbeta": self.dbeta, "affine": self.affine()}
        users = few([(0, REPLICAS)])
        self._launch("grad_input", self.each, "GradInputArguments", users=users, **arrays, **parameters)

    def affine(self) -> Dict[str, int]:
        return {"gamma": self.gamma.data.ptr, "beta": self.beta.data.ptr}

    def steps(self) -> Dict[str, Callable[[], None]]:
        return {name: getattr(self, name) for name in ("copy", *PASSES)}


def theirs(torch: Any, ours: Ours, shape: Sequence[int], layout: str) -> Dict[str, Callable[[], Any]]:
    """PyTorch's kernels on the same memory."""

    def see(array: Any) -> Any:
        if layout == "NCHW":
            return torch.from_dlpack(array).view(shape)
        images, channels, height, width = shape
        return torch.from_dlpack(array).view(images, height, width, channels).permute(0, 3, 1, 2)

    x, dy = see(ours.x), see(ours.dy)
    weight, bias = torch.from_dlpack(ours.gamma), torch.from_dlpack(ours.beta)
    mean, invstd = torch.batch_norm_stats(x, 1e-5)
    count = torch.tensor([x.numel() // shape[1]], dtype=torch.int32, device="cuda")
    plain = torch.nn.BatchNorm2d(shape[1], device="cuda")
    leaf = x.detach().requires_grad_()
    output = plain(leaf)

    def backward() -> None:
        sums = torch.batch_norm_backward_reduce(dy, x, mean, invstd, weight, True, True, True)[:2]
        torch.batch_norm_backward_elemt(dy, x, mean, invstd, weight, *sums, count)

    def forward() -> None:
        torch.batch_norm_stats(x, 1e-5)
        torch.batch_norm_elemt(x, weight, bias, mean, invstd, 1e-5)

    return {
        "torch forward": forward,
        "torch backward": backward,
        "plain forward": lambda: plain(leaf),
        "plain backward": lambda: torch.autograd.grad(output, leaf, dy, retain_graph=True),
    }


class Recorder:
    """Makes many calls one: a graph of them, on a stream that both libraries work on."""

    def __init__(self, cupy: Any, torch: Any, calls: int) -> None:
        self.cupy, self.torch, self.calls = cupy, torch, calls
        self.stream = cupy.cuda.Stream(non_blocking=True)
        if torch is not None:
            self.view = torch.cuda.ExternalStream(self.stream.ptr)

    def __enter__(self) -> "Recorder":
        self.stream.__enter__()
        if self.torch is not None:
            self._entered = self.torch.cuda.stream(self.view)
            self._entered.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        if self.torch is not None:
            self._entered.__exit__(*error)
        self.stream.__exit__(*error)

    def ours(self, step: Callable[[], None]) -> Callable[[], None]:
        step()  # what is made at the first call is no part of a graph
        self.stream.begin_capture()
        for _ in range(self.calls):
            step()
        return self.stream.end_capture().launch

    def pytorch(self, step: Callable[[], Any]) -> Callable[[], None]:
        step()
        graph = self.torch.cuda.CUDAGraph()
        with self.torch.cuda.graph(graph, stream=self.view):
            for _ in range(self.calls):
                step()
        return graph.replay

    def timed(self, steps: Dict[str, Callable[[], None]], rounds: int) -> Dict[str, List[float]]:
        """Seconds of a call, by round, in which all take turns."""
        taken: Dict[str, List[float]] = {name: [] for name in steps}
        for done in range(rounds + 1):  # the first warms up
            for name, step in steps.items():
                begin, end = self.cupy.cuda.Event(), self.cupy.cuda.Event()
                begin.record()
                step()
                end.record()
                end.synchronize()
                if done:
                    taken[name].append(self.cupy.cuda.get_elapsed_time(begin, end) / 1e3 / self.calls)
        return taken


def measure(cupy: Any, torch: Any, quick: bool) -> List[Dict[str, Any]]:
    module = cupy.RawModule(code=source(), options=OPTIONS, backend="nvrtc")
    shapes, rounds, calls = (SHAPES[:1], 3, 2) if quick else (SHAPES, 15, 100)
    samples = []
    for shape in tqdm(shapes, desc="kernels", unit="shape", disable=None):
        images, channels, height, width = shape
        for layout, dtype in CASES:
            inner = height * width
            spread = (images, 1, channels, inner) if layout == "NCHW" else (images, inner, channels, 1)
            with Recorder(cupy, torch, calls) as recorder:
                ours = Ours(cupy, module, spread, dtype)
                steps = {name: recorder.ours(step) for name, step in ours.steps().items()}
                if torch is not None:
                    more = theirs(torch, ours, shape, layout)
                    steps.update((name, recorder.pytorch(step)) for name, step in more.items())
                taken = recorder.timed(steps, rounds)
            samples.append({"shape": shape, "layout": layout, "dtype": dtype, "seconds": taken})
    return samples


def torch_here() -> Tuple[Any, str]:
    """PyTorch, or None and why."""
    try:
        import torch
    except ImportError:
        return None, "PyTorch is not installed"
    return (torch, "") if torch.cuda.is_available() else (None, f"PyTorch {torch.__version__} finds no GPU")


def main(arguments: Sequence[str]) -> Dict[str, Any]:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args(arguments)
    try:
        import cupy
    except ImportError as error:
        return {"missing": f"CuPy is missing ({error}; pip install cupy-cuda11x, or cupy-cuda12x)"}
    runtime = cupy.cuda.runtime
    try:
        device = runtime.getDeviceProperties(runtime.getDevice())
    except runtime.CUDARuntimeError as error:
        return {"missing": f"CuPy finds no GPU ({error})"}
    gpu = f"{device['name'].decode()}, compute capability {device['major']}.{device['minor']}"
    torch, why = torch_here()
    environment = {
        "CUDA of the driver": str(runtime.driverGetVersion()),
        "cupy": cupy.__version__,
        "torch": torch.__version__ if torch is not None else why,
        "python of both": sys.version.split()[0],
    }
    samples = measure(cupy, torch, options.quick)
    return {
        "gpu": gpu,
        "environment": environment,
        "absent": f"PyTorch's kernels: {why}" if why else "",
        "samples": samples,
    }


if __name__ == "__main__":
    print(json.dumps(main(sys.argv[1:])))
