"""On GPUs: the CUDA kernels beside a copy and PyTorch's kernels, and the whole layer beside other layers.

The kernels take one GPU and CuPy, which compiles `kernels.cu`, and no MXNet build for GPUs; where PyTorch is installed
too, its SyncBN kernels and `BatchNorm2d` take turns with ours on the same tensors. The layer takes an MXNet with GPUs,
and is measured on one and on all of them (`_gpu_layer.py`). What is not there is left out, which the result says. The
shapes are those of `benchmarks/layers.py`, and larger ones.

    python benchmarks/gpu.py             # writes benchmarks/results/gpu.{md,json,png}
    python benchmarks/gpu.py --quick     # small shapes and few rounds
"""

import argparse
import ctypes
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence, Tuple

import _gpu_layer
import _measuring
import _results
import numpy as np
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
PACKAGE = Path(__file__).resolve().parents[1] / "src" / "gluon_syncbn"
CORE = ctypes.CDLL(str(PACKAGE / "_core.so"))
BLOCK, SLOTS = CORE.syncbn_cuda_block(), CORE.syncbn_cuda_slots()
NULL = np.uint64(0)  # a pointer
ACTIVATION = np.float64(1), np.float64(np.inf)  # none: slope and ceiling
OPTIONS = ("--std=c++14", f"-DSYNCBN_BLOCK={BLOCK}", f"-DSYNCBN_SLOTS={SLOTS}")
REPLICAS = 4  # whose statistics are put together

# Passes over the tensor that each kernel makes; a copy makes two.
PASSES = {"moments": 1, "normalise": 2, "grad_sums": 2, "grad_input": 3}
COLOURS = {"moments": "#000000", "normalise": "#0072B2", "grad_sums": "#D55E00", "grad_input": "#009E73"}
AIM = 0.85

EMULATED = "**Measured on tests/cuda_emulator: the times mean nothing, on no line of this page.**"

EXPLANATION = f"""The statistics are those of {REPLICAS} replicas, which every GPU puts together by itself. The columns
of the kernels are what each moves per second over what a copy of the same tensor moves. *Forward* is the statistics and
the normalisation, *backward* the sums and the gradient of the input; their ratios are ours over PyTorch's SyncBN
kernels (`torch.batch_norm_stats` ... `batch_norm_backward_elemt`) and over `BatchNorm2d`, which synchronises nothing:
above 1 is slower than PyTorch. Medians over interleaved rounds, by the GPU's clock."""


class Ours:
    """The kernels of one tensor [samples, extent, channels, inner], in the grids that the layer uses."""

    def __init__(self, cupy: Any, module: Any, shape: Tuple, dtype: str) -> None:
        self.module, self.type = module, dtype
        channels, inner = shape[2:]
        plan = (ctypes.c_int64 * 6)()
        CORE.syncbn_cuda_plan(*map(ctypes.c_int64, (*shape, 1)), plan)
        tiles, slots, chunks, blocks, width, segment = plan
        self.reduce, self.each = (tiles, slots, chunks), (blocks, 1, 1) if inner > 1 else (tiles, slots, chunks)
        self.sizes = [*map(np.int64, (*shape, 1)), np.int32(width)]
        self.segment = np.int64(segment)
        random = np.random.RandomState(0)

        def on_gpu(values: np.ndarray, to: str) -> Any:
            array = cupy.empty(values.shape, to)
            array.set(values.astype(to))
            return array

        self.x, self.dy = (on_gpu(random.standard_normal(shape), dtype) for _ in range(2))
        self.out, self.partial = cupy.empty(shape, dtype), cupy.empty(chunks * (1 + 2 * channels), "float64")
        moments = random.rand(REPLICAS, 1 + 2 * channels) + 0.5
        self.moments_of_all, self.sums = (on_gpu(values, "float64") for values in (moments, moments[:, 1:]))
        self.kept = on_gpu(random.rand(1 + 4 * channels) + 0.5, "float64")
        vectors = (on_gpu(random.rand(channels) + 0.5, "float32") for _ in range(6))
        self.gamma, self.beta, self.mean, self.var, self.dgamma, self.dbeta = vectors
        self.told = on_gpu(np.zeros(3), "int64")
        names = [(name, "i4") for name in ("kind", "own", "begin", "end")]
        self.pools = np.zeros((), [*names, ("table", "i4", SLOTS)])  # one for all replicas
        self.pools["end"] = REPLICAS

    def _launch(self, name: str, grid: Tuple, *arguments: Any) -> None:
        self.module.get_function(f"{name}_{self.type}")(grid, (BLOCK,), arguments)

    def copy(self) -> None:
        self.out.data.copy_from_device_async(self.x.data, self.x.nbytes)

    def moments(self) -> None:
        self._launch("moments", self.reduce, self.x, self.partial, *self.sizes)

    def normalise(self) -> None:
        source = self.moments_of_all, self.pools, np.int32(0), np.float64(1e-5)
        affine = self.gamma, self.beta, np.int32(0)
        running = np.float64(0.9), self.mean, self.var, NULL, np.int32(1), np.int32(0), np.int32(0), self.told
        into = self.out, np.int32(0), self.kept, *running, *self.sizes, self.segment
        self._launch("normalise", self.each, self.x, *source, *affine, *into, NULL, *ACTIVATION)

    def grad_sums(self) -> None:
        affine = self.gamma, self.beta, np.int32(0), *ACTIVATION, NULL, NULL
        self._launch("grad_sums", self.reduce, self.dy, self.x, self.kept, self.partial, *self.sizes, *affine)

    def grad_input(self) -> None:
        add = np.int32(0)
        arrays = self.dy, self.x, self.kept, self.sums, self.pools, self.sums, self.gamma, np.int32(0)
        into = self.out, add, self.dgamma, add, self.dbeta, add
        self._launch("grad_input", self.each, *arrays, *into, *self.sizes, self.segment, NULL, *ACTIVATION)

    def steps(self) -> Dict[str, Callable[[], None]]:
        return {name: getattr(self, name) for name in ("copy", *PASSES)}


def theirs(torch: Any, ours: Ours, shape: Tuple, layout: str) -> Dict[str, Callable[[], Any]]:
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


def timed(cupy: Any, steps: Dict[str, Callable[[], Any]], rounds: int, calls: int) -> _measuring.Rounds:
    """Seconds of a call, by round; in a round each makes its `calls` in turn."""
    taken: _measuring.Rounds = {name: [] for name in steps}
    for done in range(rounds + 1):  # the first warms up
        for name, step in steps.items():
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            begin.record()
            for _ in range(calls):
                step()
            end.record()
            end.synchronize()
            if done:
                taken[name].append(cupy.cuda.get_elapsed_time(begin, end) / 1e3 / calls)
    return taken


def medians(result: _measuring.Cell) -> Dict[str, float]:
    return {name: series["median"] for name, series in result["seconds"].items()}


def bandwidth(seconds: Dict[str, float], name: str) -> float:
    return PASSES[name] / 2 * seconds["copy"] / seconds[name]


def row(result: _measuring.Cell) -> List[str]:
    shape, layout, dtype, seconds = result["shape"], result["layout"], result["dtype"], medians(result)
    forward, backward = seconds["moments"] + seconds["normalise"], seconds["grad_sums"] + seconds["grad_input"]
    size = np.prod(shape) * np.dtype(dtype).itemsize
    others = [
        f"{mine / seconds[f'{whose} {way}']:.2f}" if f"{whose} {way}" in seconds else "-"
        for whose in ("torch", "plain")
        for way, mine in (("forward", forward), ("backward", backward))
    ]
    return [
        f"{' x '.join(map(str, shape))} {layout} {dtype}",
        f"{size / 1e6:.3g}",
        f"{2 * size / seconds['copy'] / 1e9:.0f}",
        *(f"{bandwidth(seconds, name):.2f}" for name in PASSES),
        *others,
    ]


def plot(path: Path, results: Sequence[Dict[str, Any]], gpu: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(CASES), figsize=(3.6 * len(CASES), 3.6), sharey=True)
    for axis, (layout, dtype) in zip(axes, CASES):
        mine = [one for one in results if (one["layout"], one["dtype"]) == (layout, dtype)]
        sizes = [np.prod(one["shape"]) * np.dtype(dtype).itemsize / 1e6 for one in mine]
        for name, colour in COLOURS.items():
            axis.plot(sizes, [bandwidth(medians(one), name) for one in mine], "o-", color=colour, label=name)
        axis.axhline(AIM, color="#666666", linewidth=1, linestyle="--")
        axis.set(title=f"{layout}, {dtype}", xlabel="MB", xscale="log", ylim=(0, None))
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("bandwidth over that of a copy")
    axes[0].legend()
    figure.text(0.5, 0.0, gpu, ha="center", fontsize=8, color="#666666")
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=120)


def kernels(cupy: Any, options: argparse.Namespace) -> Tuple[List[_measuring.Cell], Dict[str, str], List[str]]:
    """The samples, what is worth knowing of the environment, and what was left out and why."""
    absent, theirs_too = [], False
    try:
        import torch
    except ImportError:
        torch = None
        absent.append("PyTorch's kernels: PyTorch is not installed")
    else:
        theirs_too = torch.cuda.is_available()
        if not theirs_too:
            absent.append(f"PyTorch's kernels: PyTorch {torch.__version__} finds no GPU")
    source = (PACKAGE / "csrc" / "cuda" / "kernels.cu").read_text()
    module = cupy.RawModule(code=source, options=OPTIONS, backend="nvrtc")
    env = {
        "CUDA of the driver": str(cupy.cuda.runtime.driverGetVersion()),
        "cupy": cupy.__version__,
        "torch": torch.__version__ if torch is not None else "not installed",
    }
    shapes, rounds, calls = (SHAPES[:1], 3, 2) if options.quick else (SHAPES, 15, 20)
    samples = []
    for shape in tqdm(shapes, desc="kernels", unit="shape", disable=options.no_progress or None):
        images, channels, height, width = shape
        for layout, dtype in CASES:
            inner = height * width
            spread = (images, 1, channels, inner) if layout == "NCHW" else (images, inner, channels, 1)
            ours = Ours(cupy, module, spread, dtype)
            steps = {**ours.steps(), **(theirs(torch, ours, shape, layout) if theirs_too else {})}
            taken = timed(cupy, steps, rounds, calls)
            samples.append({"shape": shape, "layout": layout, "dtype": dtype, "seconds": taken})
    return samples, env, absent


def gpus(gluon_syncbn: Any) -> List[str]:
    """Those that MXNet can use, in words."""
    import mxnet as mx

    found = [gluon_syncbn.cuda.gpu(i) for i in range(mx.context.num_gpus())]
    return [f"{name}, compute capability {major}.{minor}" for name, (major, minor) in found]


def main(arguments: Sequence[str]) -> int:
    options = _measuring.options(__doc__, arguments, quick="small shapes and few rounds: a smoke test")
    env, names = _results.occasion(["benchmarks/gpu.py", *arguments]), []
    absent: List[str] = []
    of_kernels: List[_measuring.Cell] = []
    of_layers: List[_measuring.Cell] = []
    try:
        import gluon_syncbn  # before mxnet and CuPy: it finds the CUDA libraries
    except ImportError as error:
        gluon_syncbn = None
        absent.append(f"the layer: {error}")
    else:
        env = _results.environment(["benchmarks/gpu.py", *arguments])
        names = gpus(gluon_syncbn)
        if not names:
            absent.append("the layer: this build of MXNet finds no GPU (docs/gpu.md)")
    try:
        import cupy
    except ImportError as error:
        cupy = None
        absent.append(
            f"the kernels by themselves: CuPy is missing ({error}; pip install cupy-cuda11x, or cupy-cuda12x)"
        )
    else:
        device = cupy.cuda.runtime.getDeviceProperties(cupy.cuda.runtime.getDevice())
        names = names or [f"{device['name'].decode()}, compute capability {device['major']}.{device['minor']}"]
    if not names:
        sys.exit(f"benchmarks/gpu.py needs a GPU, and MXNet or CuPy for it. {'; '.join(absent)}")
    env["GPUs"] = "; ".join(names)
    emulated = names[0].startswith("CUDA emulator")
    if emulated and not options.quick:
        sys.exit("benchmarks/gpu.py: on the emulator, whose times mean nothing, with --quick and --out only")
    if cupy is not None:
        of_kernels, more, missing = kernels(cupy, options)
        env.update(more)
        absent += missing
    if gluon_syncbn is not None and gpus(gluon_syncbn):
        shapes, rounds = (_gpu_layer.SMALL, 2) if options.quick else (_gpu_layer.SHAPES, 50)
        of_layers, missing = _gpu_layer.measure(shapes, rounds, emulated)
        absent += missing
    samples = {"kernels": of_kernels, "layers": of_layers}
    results: Dict[str, List[_measuring.Cell]] = {
        "kernels": [{**one, "seconds": _results.summary(one["seconds"])} for one in of_kernels],
        "layers": [
            {
                **one,
                "seconds": _results.summary(one["seconds"]),
                "ratios": _results.summary(_gpu_layer.ratios(one["seconds"])),
            }
            for one in of_layers
        ],
    }
    parts = [EMULATED] if emulated else []
    if absent:
        parts.append("Left out: " + "; ".join(absent) + ".")
    if of_layers:
        table = _results.table(_gpu_layer.HEADER, [_gpu_layer.row(result) for result in results["layers"]])
        parts += ["## The layer", _gpu_layer.EXPLANATION, table]
    if of_kernels:
        header = ["tensor", "MB", "copy, GB/s", *PASSES]
        header += ["forward / torch", "backward / torch", "forward / plain", "backward / plain"]
        parts += ["## The kernels", EXPLANATION, _results.table(header, [row(result) for result in results["kernels"]])]
    text = "\n\n".join(parts)
    print(text)
    _results.write(options.out, "gpu", "The layer and its kernels on GPUs", text, env, results, samples)
    plot(options.out / "gpu.png", results["kernels"], env["GPUs"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
