"""The CPU kernels by themselves, on one thread, in each instruction set that the machine has, beside a copy.

`layers.py` times the layer; this says which of its kernels is far from what memory allows. They are compiled for it
from the sources in the checkout, with the flags of the core.

    python benchmarks/kernels.py             # writes benchmarks/results/kernels.{md,json,png}
    python benchmarks/kernels.py --quick     # a smoke test, its figures mean nothing
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

import _measuring
import _results
import numpy as np
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
import kernels_library

PASSES = {"moments": 1, "normalise": 2, "grad_sums": 2, "grad_input": 3}  # over the tensor; a copy takes two
# as [outer][channels][inner], of which `block` channels lie next to each other
LAYOUTS = {
    "NCHW": lambda n, c, hw: (n, c, hw, 1),
    "blocks of 16": lambda n, c, hw: (n, c, hw, 16),
    "NHWC": lambda n, c, hw: (n * hw, c, 1, 1),
}
SHAPES = [(4, 256, 3600), (2, 64, 4096)]
QUICK = [(2, 32, 64)]
BEHIND = {"nothing": 1.0, "ReLU": 0.0}  # the slope below 0
SETS_OF_ARRAYS = 6  # in turn, so that a call finds nothing in a small cache that the one before has left
FLAGS = ("-O3", "-fno-trapping-math")

EXPLANATION = """What each kernel takes for one pass over a float32 tensor, as a multiple of what a copy
(`numpy.copyto`) takes for one: 1 is as fast as memory allows, where the tensor does not fit into a
cache. On one thread; medians over interleaved rounds. *Moments* is one pass, *normalise* and
*grad_sums* two, *grad_input* three. *Behind* is the activation that the kernel does, too."""


def main(arguments: Sequence[str]) -> int:
    options = _measuring.options(__doc__, arguments)
    env = _results.environment(["benchmarks/kernels.py", *arguments])
    shapes, effort = (QUICK, (3, 1.0)) if options.quick else (SHAPES, (15, 15.0))
    cases: List[_measuring.Cell] = [
        {"shape": shape, "layout": layout, "behind": behind, "set": name}
        for name in kernels_library.here()
        for shape, layout, behind in itertools.product(shapes, LAYOUTS, BEHIND)
    ]
    samples, results = [], []
    # What the compiler makes better in a minute tells nothing in a smoke test: it takes what the tests compile.
    flags = () if options.quick else (FLAGS,)
    libraries = {name: kernels_library.build(name, *flags) for name in kernels_library.here()}
    for case in tqdm(cases, desc="kernels", unit="cell", disable=None):
        taken = _measuring.interleaved(steps(libraries[case["set"]], case), *effort)
        samples.append({**case, "seconds": taken})
        results.append({**case, "seconds": _results.summary(taken), "ratios": _results.summary(ratios(taken))})

    header = ["set", "tensor", "layout", "behind", "copy, GB/s", *PASSES]
    parts = [EXPLANATION, [header, *map(row, results)]]
    _results.write(options.out, "kernels", "The CPU kernels", parts, env, results, samples)
    return 0


def ratios(taken: _measuring.Rounds) -> _measuring.Rounds:
    return {
        name: [(time / PASSES[name]) / (copy / 2) for time, copy in zip(taken[name], taken["copy"])] for name in PASSES
    }


def row(result: Dict[str, Any]) -> List[str]:
    copied = 2 * 4 * np.prod(result["shape"]) / result["seconds"]["copy"]["median"] / 1e9
    tensor = " x ".join(map(str, result["shape"]))
    found = [f"{result['ratios'][name]['median']:.2f}" for name in PASSES]
    return [result["set"], tensor, result["layout"], result["behind"], f"{copied:.1f}", *found]


def steps(library: ctypes.CDLL, case: _measuring.Cell) -> Dict[str, Callable[[], Any]]:
    """Each kernel once, and a copy."""
    outer, channels, inner, block = LAYOUTS[case["layout"]](*case["shape"])
    shape = [0, *map(ctypes.c_int64, (outer, channels, inner, block)), 1]  # float32, and one thread
    random = np.random.RandomState(0)
    arrays = [
        [random.standard_normal(outer * channels * inner).astype(np.float32) for _ in range(3)]
        for _ in range(SETS_OF_ARRAYS)
    ]
    mean, m2, zeros = np.zeros(channels), np.zeros(channels), np.zeros(channels)
    ones = np.ones(channels)
    z = [
        pointer(zeros),
        pointer(ones),
        pointer(zeros),
        ctypes.c_double(BEHIND[case["behind"]]),
        ctypes.c_double(np.inf),
    ]
    out = pointer(mean), pointer(m2)
    calls: Dict[str, Callable[[Any, Any, Any], Any]] = {
        "copy": lambda x, dy, y: np.copyto(y, x),
        "moments": lambda x, dy, y: library.moments(pointer(x), *shape, *out),
        "normalise": lambda x, dy, y: library.normalise(pointer(x), *shape, *z, None, pointer(y)),
        "grad_sums": lambda x, dy, y: library.grad_sums(
            pointer(dy), pointer(x), *shape, *z, pointer(ones), None, None, *out
        ),
        "grad_input": lambda x, dy, y: library.grad_input(
            pointer(dy), pointer(x), *shape, *z, *[pointer(zeros)] * 3, pointer(y), 0
        ),
    }
    turns = itertools.cycle(arrays)

    def on_the_next(call: Callable[[Any, Any, Any], Any]) -> Callable[[], Any]:
        return lambda: call(*next(turns))

    return {name: on_the_next(call) for name, call in calls.items()}


def pointer(array: Any) -> ctypes.c_void_p:
    return array.ctypes.data_as(ctypes.c_void_p)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
