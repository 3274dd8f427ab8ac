"""What the modes cost: five layers in each mode, against plain BatchNorm.

As benchmarks/layers.py, with 16 images per replica, so that eight virtual devices hold two each.

    python benchmarks/modes.py             # writes benchmarks/results/modes.{md,json,png}
    python benchmarks/modes.py --quick     # a smoke test, its figures mean nothing
"""

import functools
import json
import sys
from typing import Any, Dict, Sequence

import _measuring
import _results
from layers import LAYERS, stack, training_steps
from tqdm import tqdm

SHAPES, REPLICAS = [(16, 64, 8, 8), (16, 64, 32, 32), (16, 128, 56, 56)], [1, 2, 4]
QUICK_SHAPES, QUICK_REPLICAS = [(4, 8, 8, 8)], [1, 2]
MODES: Dict[str, Dict[str, Any]] = {
    "sync": {},
    "local": {"mode": "local"},
    "local, V=8": {"mode": "local", "virtual_devices": 8},
    "shuffle, V=2": {"mode": "shuffle", "virtual_devices": 2},
    "shuffle, V=8": {"mode": "shuffle", "virtual_devices": 8},
}

EXPLANATION = f"""Forward and backward of {LAYERS} layers in a hybridized net, per step; shapes are those of one
replica, V is `virtual_devices`. *Plain* is `nn.BatchNorm` on the same contexts; the other columns are multiples of it,
the median over interleaved rounds. All slots of a device are worked on in the same passes over memory, so V=8 should
cost what V=1 does."""


def main(arguments: Sequence[str]) -> int:
    options = _measuring.options(__doc__, arguments, child)
    env = _results.environment(["benchmarks/modes.py", *arguments])
    shapes, replicas = (QUICK_SHAPES, QUICK_REPLICAS) if options.quick else (SHAPES, REPLICAS)
    effort = {"rounds": 3, "budget_s": 2} if options.quick else {"rounds": 15, "budget_s": 15}
    cells = [{"shape": shape, "replicas": n, "contrib": False, **effort} for shape in shapes for n in replicas]
    samples = []
    for cell, taken, problems in tqdm(
        _measuring.measure(__file__, cells, 150), total=len(cells), desc="modes", disable=None
    ):
        samples.append({**cell, "problems": problems, "seconds": taken})
    results = [_results.compared(sample) for sample in samples]
    header = ["shape", "replicas", "plain, ms", *MODES]
    parts = [EXPLANATION, [header, *(_results.layers_row(result, list(MODES)) for result in results)]]
    _results.write(options.out, "modes", "Modes and virtual devices", parts, env, results, samples)
    return _results.report(results, "shape", "replicas")


def child(cells: Sequence[_measuring.Cell]) -> None:
    """Measures the cells in turn and prints one line of JSON for each."""
    import gluon_syncbn

    contexts = gluon_syncbn.cpu_devices(max(cell["replicas"] for cell in cells))
    from mxnet.gluon import nn

    for cell in cells:
        shape, places = cell["shape"], contexts[: cell["replicas"]]
        nets = {"plain": stack(places, shape[1], nn.BatchNorm)}
        for name, settings in MODES.items():
            if settings.get("mode") != "shuffle" or settings["virtual_devices"] * cell["replicas"] > 1:
                nets[name] = stack(places, shape[1], functools.partial(gluon_syncbn.SyncBatchNorm, **settings))
        steps = training_steps(nets, shape, places)
        print(json.dumps(_measuring.interleaved(steps, cell["rounds"], cell["budget_s"])), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
