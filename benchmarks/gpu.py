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
from _gpu_kernels import PASSES, REPLICAS

EMULATOR = "CUDA emulator"
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


def gpus(gluon_syncbn: Any) -> List[str]:
    """Those that MXNet can use, in words."""
    import mxnet as mx

    found = [gluon_syncbn.system.cuda.gpu(i) for i in range(mx.context.num_gpus())]
    return [f"{name}, compute capability {major}.{minor}" for name, (major, minor) in found]


def of_the_kernels(options: Any) -> Dict[str, Any]:
    """What `_gpu_kernels.py` prints."""
    command = [options.python, str(Path(__file__).with_name("_gpu_kernels.py"))]
    command += ["--quick"] if options.quick else []
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=1800, check=False)  # errors are on stderr
    if done.returncode:
        sys.exit(f"benchmarks/gpu.py: {' '.join(command)} ended with exit code {done.returncode}")
    return json.loads(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str]) -> int:
    python = {"default": sys.executable, "help": "the Python that has CuPy and PyTorch (this one)"}
    options = _measuring.options(__doc__, arguments, more={"--python": python})
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
    parts: List[Any] = [EMULATED] if emulated else []
    if absent:
        parts.append("Left out: " + "; ".join(absent) + ".")
    if of_layers and "skip_launches" in os.environ.get("LD_PRELOAD", ""):
        parts.append(WITHOUT_CODE)
    if of_layers:
        rows = map(_gpu_layer.row, results["layers"])
        parts += ["## The layer", _gpu_layer.EXPLANATION, [_gpu_layer.HEADER, *rows]]
    if of_kernels:
        header = ["tensor", "MB", "copy, GB/s", *PASSES]
        header += ["forward / torch", "backward / torch", "forward / plain", "backward / plain"]
        parts += ["## The kernels", EXPLANATION, [header, *map(row, results["kernels"])]]
    _results.write(options.out, "gpu", "The layer and its kernels on GPUs", parts, env, results, samples)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
