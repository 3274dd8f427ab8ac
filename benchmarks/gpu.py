"""On GPUs: the CUDA kernels beside a copy and PyTorch's kernels, and the whole layer beside other layers.

The kernels take one GPU and CuPy, which compiles `kernels.cu`, and no MXNet build for GPUs; where PyTorch is installed
too, its SyncBN kernels and `BatchNorm2d` take turns with ours on the same tensors (`_gpu_kernels.py`). The layer takes
an MXNet with GPUs, and is measured on one and on all of them (`_gpu_layer.py`). What is not there is left out, which
the result says. The shapes are those of `benchmarks/layers.py`, and larger ones.

    python benchmarks/gpu.py                  # writes benchmarks/results/gpu.{md,json,png}
    python benchmarks/gpu.py --python OTHER   # CuPy and PyTorch are another Python's: theirs need a newer NumPy
    python benchmarks/gpu.py --quick          # small shapes and few rounds
"""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, List, Sequence

import _gpu_layer
import _measuring
import _results
import numpy as np
from _gpu_kernels import CASES, EMULATOR, PASSES, REPLICAS

COLOURS = {"moments": "#000000", "normalise": "#0072B2", "grad_sums": "#D55E00", "grad_input": "#009E73"}
AIM = 0.85

EMULATED = "**Measured on tests/cuda_emulator: the times mean nothing, on no line of this page.**"

WITHOUT_CODE = """MXNet has no machine code for this GPU, and its own kernels were skipped
(`tests/support/skip_launches.c`): of what is measured, `nn.BatchNorm` and ReLU are cuDNN's, and the layer's kernels are
compiled for the GPU."""

EXPLANATION = f"""The statistics are those of {REPLICAS} replicas, which every GPU puts together by itself. The columns
of the kernels are what each moves per second over what a copy of the same tensor moves. *Forward* is the statistics and
the normalisation, *backward* the sums and the gradient of the input; their ratios are ours over PyTorch's SyncBN
kernels (`torch.batch_norm_stats` ... `batch_norm_backward_elemt`) and over `BatchNorm2d`, which synchronises nothing:
above 1 is slower than PyTorch. Each is a CUDA graph of 100 calls: what the host takes to launch them is left out.
Medians over interleaved rounds, by the GPU's clock. A tensor that fits into the GPU's cache (50 MB on an H100) is read
from there, by a copy too."""


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


def plot(path: Path, results: Dict[str, List[_measuring.Cell]], gpu: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [name for name in ("kernels", "layers") if results[name]]
    figure = pyplot.figure(figsize=(3.6 * len(CASES), 3.6 * len(rows)))
    parts = np.atleast_1d(figure.subfigures(len(rows)))
    for name, part in zip(rows, parts):
        {"kernels": plot_kernels, "layers": plot_layers}[name](part, results[name])
    figure.text(0.995, 0.005, gpu, ha="right", fontsize=8, color="#666666")
    figure.savefig(path, dpi=120)


def plot_kernels(figure: Any, results: Sequence[_measuring.Cell]) -> None:
    axes = figure.subplots(1, len(CASES), sharey=True)
    figure.subplots_adjust(left=0.05, right=0.99, bottom=0.18, top=0.9, wspace=0.08)
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


def plot_layers(figure: Any, results: Sequence[_measuring.Cell]) -> None:
    """Forward and backward of a layer in a static graph, on the most GPUs."""
    shown = [one for one in results if one["way"] == "static" and one["gpus"] == results[-1]["gpus"]]
    axis = figure.subplots()
    figure.subplots_adjust(left=0.05, right=0.99, bottom=0.18, top=0.9)
    bars = [name for name in _gpu_layer.BARS if f"{name} forward" in shown[0]["seconds"]]
    width = 0.8 / len(bars)
    for at, name in enumerate(bars):
        label, colour = _gpu_layer.BARS[name]
        places = np.arange(len(shown)) + (at - (len(bars) - 1) / 2) * width
        times = [1e6 * sum(medians(one)[f"{name} {way}"] for way in _gpu_layer.DIRECTIONS) for one in shown]
        drawn = axis.bar(places, times, width, label=label, color=colour)
        axis.bar_label(drawn, [f"{time:.0f}" for time in times], fontsize=8)
    names = [f"{' x '.join(map(str, one['shape']))}\n{one['dtype']}" for one in shown]
    axis.set_xticks(range(len(shown)), names, fontsize=8)
    axis.set(title=f"a layer, forward and backward, {shown[0]['gpus']} GPU(s)", ylabel="microseconds")
    axis.grid(alpha=0.3, axis="y")
    axis.set_axisbelow(True)
    axis.margins(x=0.01, y=0.25)
    axis.legend(ncol=len(bars), loc="upper center", frameon=False)


def gpus(gluon_syncbn: Any) -> List[str]:
    """Those that MXNet can use, in words."""
    import mxnet as mx

    found = [gluon_syncbn.system.cuda.gpu(i) for i in range(mx.context.num_gpus())]
    return [f"{name}, compute capability {major}.{minor}" for name, (major, minor) in found]


def of_the_kernels(options: Any) -> Dict[str, Any]:
    """What `_gpu_kernels.py` prints."""
    command = [options.python, str(Path(__file__).with_name("_gpu_kernels.py"))]
    command += [flag for flag in ("--quick", "--no-progress") if getattr(options, flag[2:].replace("-", "_"))]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1800, check=False)  # errors are on stderr
    if done.returncode:
        sys.exit(f"benchmarks/gpu.py: {' '.join(command)} ended with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str]) -> int:
    options = _measuring.options(
        __doc__, arguments, quick="small shapes and few rounds: a smoke test", python="CuPy and PyTorch"
    )
    env, names = _results.occasion(["benchmarks/gpu.py", *arguments]), []
    absent: List[str] = []
    of_kernels: List[_measuring.Cell] = []
    of_layers: List[_measuring.Cell] = []
    gluon_syncbn: Any = None
    try:
        gluon_syncbn = importlib.import_module("gluon_syncbn")  # before CuPy: it finds the CUDA libraries
    except ImportError as error:
        absent.append(f"the layer: {error}")
    else:
        env = _results.environment(["benchmarks/gpu.py", *arguments])
        names = gpus(gluon_syncbn)
        if not names:
            absent.append("the layer: this build of MXNet finds no GPU (docs/platforms.md)")
    kernels = of_the_kernels(options)
    if "missing" in kernels:
        absent.append(f"the kernels by themselves: {kernels['missing']}")
    else:
        names = names or [kernels["gpu"]]
        env.update(kernels["environment"])
        of_kernels = kernels["samples"]
        absent += filter(None, [kernels["absent"]])
    if not names:
        sys.exit(f"benchmarks/gpu.py needs a GPU, and MXNet or CuPy for it. {'; '.join(absent)}")
    env["GPUs"] = "; ".join(names)
    emulated = names[0].startswith(EMULATOR)
    if emulated and not options.quick:
        sys.exit("benchmarks/gpu.py: on the emulator, whose times mean nothing, with --quick and --out only")
    if gluon_syncbn is not None and gpus(gluon_syncbn):
        shapes, rounds = (_gpu_layer.SMALL, 2) if options.quick else (_gpu_layer.SHAPES, 50)
        of_layers, missing = _gpu_layer.measure(shapes, rounds, emulated, options.python)
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
    if of_layers and "skip_launches" in os.environ.get("LD_PRELOAD", ""):
        parts.append(WITHOUT_CODE)
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
    plot(options.out / "gpu.png", results, env["GPUs"])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
