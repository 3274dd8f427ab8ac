"""Forward and backward of five normalisation layers: synchronised, not, contrib's, and the limit; and with ReLU, fused.

A hybridized net (`static_alloc`) of five layers in a row, with nothing between that would hide them, on CPU contexts
of one process; and such a net with ReLU behind each layer. All implementations take turns in the same process, and a
ratio is the median over the rounds. Contrib's layer may hang: where the time limit of a cell runs out, its entry says
so and the others are measured again without it.

    python benchmarks/layers.py             # writes benchmarks/results/layers.{md,json,png}
    python benchmarks/layers.py --quick     # a smoke test of a few seconds, its figures mean nothing
    python benchmarks/layers.py --eager     # prints what it costs to issue the calls of an eager net
"""

import functools
import gc
import json
import sys
import threading
import time
from typing import Any, Callable, Dict, List, Sequence, Tuple

import _measuring
import _results
from tqdm import tqdm

LAYERS = 5
SHAPES = [(2, 64, 8, 8), (2, 512, 15, 15), (2, 64, 64, 64), (4, 256, 60, 60)]  # of one replica
REPLICAS = [1, 2, 4, 8]
# Small, so that only the calls themselves count.
EAGER: _measuring.Cell = {"shape": (2, 16, 8, 8), "replicas": 2, "layers": 100, "rounds": 40, "budget_s": 30}
QUICK_SHAPES, QUICK_REPLICAS = [(2, 64, 8, 8), (2, 8, 16, 16)], [1, 2]

# What one layer must move when an activation does not fit into a cache, in passes over an activation:
# forward, x twice (statistics, normalise) and y; backward, x and dy twice (sums, dx) and dx. A copy is two.
PASSES = (2 + 1) + (2 * 2 + 1)

# What is compared with what, other than with plain BatchNorm.
BESIDE = {"ours + ReLU": "plain + ReLU", "fused": "plain + ReLU"}

EXPLANATION = f"""Forward and backward of {LAYERS} layers in a hybridized net, per step; shapes are those of
one replica. *Plain* is `nn.BatchNorm` on the same contexts, each with statistics of its own; the other
columns are multiples of it, the median over interleaved rounds. *Contrib* is
`mxnet.gluon.contrib.nn.SyncBatchNorm` (`hang`: it did not end within the time limit). *Limit* is the time of
{PASSES // 2} copies of the activations ({PASSES} passes over them), measured in the same rounds on all cores,
on arrays of the same sizes. *With ReLU* compares nets in which ReLU stands behind each layer: ours, and ours after
`convert(net, fuse=True)`, against plain BatchNorm and ReLU."""


def main(arguments: Sequence[str]) -> int:
    eager = {"action": "store_true", "help": "only what it costs to issue eager calls"}
    options = _measuring.options(__doc__, arguments, child, {"--eager": eager})
    if options.eager:
        cell = {**EAGER, "contrib": False, **({"layers": 5, "rounds": 2} if options.quick else {})}
        taken = _measuring.figures(__file__, cell, 150)
        ratios = _results.compared({"seconds": taken}, {"ours, with waits": "plain, with waits"})["ratios"]
        calls = cell["layers"] * cell["replicas"]
        rows = [
            [name, f"{_results.quantiles(taken[name])['median'] / calls * 1e6:.0f}", f"{ratios[name]['median']:.2f}"]
            for name in ratios
        ]
        print(_results.table(["eager, forward and backward", "us for a layer and replica", "/ plain"], rows))
        return 0

    env = _results.environment(["benchmarks/layers.py", *arguments])
    shapes, replicas = (QUICK_SHAPES, QUICK_REPLICAS) if options.quick else (SHAPES, REPLICAS)
    effort = {"rounds": 3, "budget_s": 2} if options.quick else {"rounds": 15, "budget_s": 15}
    # nets with ReLU in cells of their own: with contrib's, all of them together are too much for 23 GB
    kinds = [{"relu": False, "contrib": not options.quick}, {"relu": True, "contrib": False}]
    cells = [{"shape": s, "replicas": n, **kind, **effort} for s in shapes for n in replicas for kind in kinds]
    samples = []
    with tqdm(total=len(cells), desc="layers", unit="cell", disable=None) as progress:
        for cell, taken, problems in _measuring.measure(__file__, cells, 150):
            samples.append({**cell, "problems": problems, "seconds": taken})
            progress.set_postfix_str(f"{tuple(cell['shape'])} x {cell['replicas']}")
            progress.update()

    header = ["shape", "replicas", "plain, ms", "ours / plain", "contrib / plain", "limit / plain"]
    header += ["with ReLU: ours / plain", "fused / plain"]
    results = [_results.compared(sample, BESIDE) for sample in samples]
    rows = [
        _results.layers_row(alone, ["ours", "contrib", "limit"]) + [_results.entry(relu, name) for name in BESIDE]
        for alone, relu in zip(results[::2], results[1::2])
    ]
    parts = [EXPLANATION, [header, *rows]]
    _results.write(options.out, "layers", "Five normalisation layers", parts, env, results, samples)
    return _results.report(results, "shape", "replicas", "relu")


def child(cells: Sequence[_measuring.Cell]) -> None:
    """Measures the cells in turn and prints one line of JSON for each."""
    import gluon_syncbn

    replicas = max(cell["replicas"] for cell in cells)
    contexts = gluon_syncbn.cpu_devices(replicas)
    import mxnet as mx

    for cell in cells:
        if "layers" in cell:
            print(json.dumps(issued(cell, contexts[: cell["replicas"]])), flush=True)
            continue
        taken = _measuring.interleaved(steps(cell, contexts[: cell["replicas"]]), cell["rounds"], cell["budget_s"])
        print(json.dumps(taken), flush=True)
        gc.collect()  # the arrays of this cell
        mx.nd.waitall()


def steps(cell: _measuring.Cell, contexts: Sequence[Any]) -> Dict[str, Callable[[], None]]:
    """One training step of each implementation."""
    from mxnet.gluon import nn
    from mxnet.gluon.contrib.nn import SyncBatchNorm as Contrib

    import gluon_syncbn

    makes: Dict[str, Callable[..., Any]] = {"plain": nn.BatchNorm, "ours": gluon_syncbn.SyncBatchNorm}
    if cell["contrib"]:
        makes["contrib"] = lambda **kwargs: Contrib(num_devices=len(contexts), **kwargs)

    shape = tuple(cell["shape"])
    if cell["relu"]:
        nets = {f"{name} + ReLU": stack(contexts, shape[1], makes[name], relu=True) for name in ("plain", "ours")}
        nets["fused"] = gluon_syncbn.convert(stack(contexts, shape[1], nn.BatchNorm, relu=True), fuse=True)
        return training_steps(nets, shape, contexts)
    made = training_steps({name: stack(contexts, shape[1], make) for name, make in makes.items()}, shape, contexts)
    made["limit"] = copies(shape, len(contexts))
    return made


def inputs(shape: Sequence[int], contexts: Sequence[Any]) -> Tuple[List[Any], List[Any]]:
    """One for each context, and head gradients."""
    import mxnet as mx

    xs = [mx.nd.random.normal(k, 1 + k, tuple(shape), ctx=ctx) for k, ctx in enumerate(contexts)]
    for x in xs:
        x.attach_grad()
    return xs, [mx.nd.random.normal(shape=tuple(shape), ctx=ctx) for ctx in contexts]


def training_steps(
    nets: Dict[str, Any], shape: Sequence[int], contexts: Sequence[Any]
) -> Dict[str, Callable[[], None]]:
    """One step of each net, on the same inputs and head gradients."""
    import mxnet as mx

    xs, heads = inputs(shape, contexts)

    def step(net: Any) -> None:
        with mx.autograd.record():
            outputs = [net(x) for x in xs]
        mx.autograd.backward(outputs, heads)
        mx.nd.waitall()

    return {name: functools.partial(step, net) for name, net in nets.items()}


def issued(cell: _measuring.Cell, contexts: Sequence[Any]) -> _measuring.Rounds:
    """Seconds in which the thread that issues an eager step computes, and those until all of it has been computed."""
    import mxnet as mx
    from mxnet.gluon import nn

    import gluon_syncbn

    xs, heads = inputs(cell["shape"], contexts)
    makes: Dict[str, Any] = {"plain": nn.BatchNorm, "ours": gluon_syncbn.SyncBatchNorm}
    nets = {name: stack(contexts, cell["shape"][1], make, layers=cell["layers"]) for name, make in makes.items()}
    for net in nets.values():
        net.hybridize(active=False)
    taken: _measuring.Rounds = {f"{name}{what}": [] for name in nets for what in ("", ", with waits")}
    for done in range(cell["rounds"] + 1):
        for name, net in nets.items():
            began, start = time.perf_counter(), time.thread_time()
            with mx.autograd.record():
                outputs = [net(x) for x in xs]
            mx.autograd.backward(outputs, heads)
            issuing = time.thread_time() - start
            mx.nd.waitall()
            if done:  # the first one warms up
                taken[name].append(issuing)
                taken[f"{name}, with waits"].append(time.perf_counter() - began)
    return taken


def stack(
    contexts: Sequence[Any], channels: int, make: Callable[..., Any], relu: bool = False, layers: int = LAYERS
) -> Any:
    """A hybridized net of so many layers."""
    from mxnet.gluon import nn

    net = nn.HybridSequential()
    for _ in range(layers):
        net.add(make(in_channels=channels))
        if relu:
            net.add(nn.Activation("relu"))
    net.initialize(ctx=list(contexts))
    net.hybridize(static_alloc=True)
    return net


def copies(shape: Tuple[int, ...], replicas: int) -> Callable[[], None]:
    """The copies that move as many bytes as the layers must, shared out evenly to one thread per core.

    Below a megabyte it takes longer to start the threads than to copy.
    """
    import os

    import numpy as np

    size = replicas * int(np.prod(shape))
    workers = len(os.sched_getaffinity(0)) if 4 * size >= 2**20 else 1
    # every layer has arrays of its own, which are not in a cache because another layer used them
    sources = [np.ones(size, np.float32) for _ in range(LAYERS)]
    targets = [np.zeros(size, np.float32) for _ in range(LAYERS)]
    bounds = np.linspace(0, size, workers + 1).astype(int)

    def work(low: int, high: int) -> None:
        for source, target in zip(sources, targets):
            for _ in range(PASSES // 2):
                np.copyto(target[low:high], source[low:high])  # without the interpreter's lock

    if workers == 1:
        return lambda: work(0, size)

    def step() -> None:
        threads = [threading.Thread(target=work, args=span) for span in zip(bounds, bounds[1:])]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return step


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
