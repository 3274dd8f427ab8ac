"""What the gradients of several processes add to a training step, beside one bare sum of as many values.

The processes are of one machine, over the MPI beside this Python.

    python benchmarks/gradients.py             # writes benchmarks/results/gradients.{md,json,png}
    python benchmarks/gradients.py --quick     # a smoke test, its figures mean nothing
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Callable, Dict, List, Sequence

import _measuring
import _results
from tqdm import tqdm

NETS = {"ResNet-18": "resnet18_v1", "ResNet-50": "resnet50_v1", "MobileNetV2": "mobilenetv2_1.0"}
MODELS: List[_measuring.Cell] = [{"model": name, "crop": 64, "images": 4} for name in NETS]
WHOLE: _measuring.Cell = {"model": "ResNet-18", "crop": 128, "images": 4}
FAR = [{**MODELS[i], "processes": 2, "network": True} for i in (0, 2)]
EFFORT = {"rounds": 30, "budget_s": 20}
# A ratio is that of the series to its yardstick. A series that is its own yardstick has no ratio.
YARDSTICKS = {"exchange": "bare", "step": "step alone"}
YARDSTICKS.update({name: name for name in ("bare", "step alone", "contexts")})

EXPLANATION = """ResNets and MobileNetV2 with 1,000 classes, trained in several processes of one machine. Each process
has one CPU device and one thread for OpenMP. MPI takes the memory of the machine, or all messages, also bare ones, go
over TCP, as between machines. Times are in ms, of the slowest process, medians over the rounds.

*Exchange* is what `trainer.step` with `kvstore("mpi")` takes from the end of the backward to the end of the update,
less the same with `kvstore=None` in the same round. *Bare* is mpi4py's `Allreduce` of one float32 array with as many
values. Ratios are medians of the rounds' ratios, with the 10th and 90th percentile in parentheses. *Step* is a whole
training step, in which the exchange runs while the backward does, and *alone* is the same step without an exchange of
gradients. *Contexts* is the update in one process with as many CPU contexts and MXNet's own KVStore, less that with one
context."""


def main(arguments: Sequence[str]) -> int:
    options = _measuring.options(__doc__, arguments, child)
    env = {**_results.environment(["benchmarks/gradients.py", *arguments]), "processes over": _measuring.library()}
    effort = {"rounds": 3, "budget_s": 10} if options.quick else EFFORT
    models = MODELS[2:] if options.quick else [*MODELS, WHOLE]
    counts = [2] if options.quick else [2, 4]
    cells = [{**model, "processes": count, "network": False} for model in models for count in counts]
    cells += [] if options.quick else FAR
    samples = []
    for cell in tqdm(cells, disable=None):
        cell = {**cell, **effort}
        samples.append({**cell, **_measuring.job(cell["processes"], [__file__], cell, cell["network"])})
        if not cell["network"]:
            samples[-1]["seconds"].update(_measuring.job(1, [__file__], {**cell, "contexts": cell["processes"]}))
    results = [_results.compared(sample, YARDSTICKS) for sample in samples]
    header = ["model", "crop", "values, millions", "processes", "over", "exchange", "bare", "exchange / bare"]
    header += ["step", "alone", "step / alone", "contexts"]
    parts = [EXPLANATION, [header, *map(row, results)]]
    _results.write(options.out, "gradients", "Gradients between processes", parts, env, results, samples)
    return 0


def row(result: _measuring.Cell) -> List[str]:
    ms = {name: f"{series['median'] * 1e3:.1f}" for name, series in result["seconds"].items()}
    texts = [result["model"], str(result["crop"]), f"{result['values'] / 1e6:.1f}", str(result["processes"])]
    texts += [
        "TCP" if result["network"] else "memory",
        ms["exchange"],
        ms["bare"],
        _results.median_and_range(result["ratios"]["exchange"], 2),
    ]
    texts += [ms["step"], ms["step alone"], _results.median_and_range(result["ratios"]["step"], 2)]
    return [*texts, ms.get("contexts", "")]


def child(cell: _measuring.Cell) -> None:
    """Measures the cell in this process of the job. Rank 0 prints one line of JSON."""
    import mxnet as mx
    import numpy as np

    import gluon_syncbn

    contexts = [mx.cpu(i) for i in range(cell.get("contexts", 1))]
    if "contexts" in cell:
        alone, together = Net(cell, contexts[:1], None), Net(cell, contexts, "device")
        taken = slowest(cell, {"one": alone.update, "all": together.update})
        print(json.dumps({"contexts": [a - b for a, b in zip(taken["all"], taken["one"])]}), flush=True)
        return
    gluon_syncbn.configure(timeout=120, kvstore=None)
    store = gluon_syncbn.kvstore("mpi")
    together, alone = Net(cell, contexts, store), Net(cell, contexts, None)
    values = np.random.RandomState(store.rank).randn(together.values()).astype("float32")
    add = _measuring.bare_sum(values)

    def bare() -> float:
        start = time.perf_counter()
        add()
        return time.perf_counter() - start

    calls = {"bare": bare, "update": together.update}
    calls.update({"update alone": alone.update, "step": together.step, "step alone": alone.step})
    taken = slowest(cell, calls)
    without = taken.pop("update alone")
    taken["exchange"] = [a - b for a, b in zip(taken.pop("update"), without)]
    if store.rank == 0:
        print(json.dumps({"values": values.size, "seconds": taken}), flush=True)


def slowest(cell: _measuring.Cell, calls: Dict[str, Callable[[], float]]) -> _measuring.Rounds:
    taken = _measuring.in_processes(calls, cell["rounds"], cell["budget_s"])
    return {name: list(map(max, rounds)) for name, rounds in taken.items()}


class Net:
    """A network with plain BatchNorm on some contexts, and its Trainer."""

    def __init__(self, cell: _measuring.Cell, contexts: Sequence[Any], kvstore: Any) -> None:
        import mxnet as mx
        from mxnet.gluon.model_zoo.vision import get_model

        mx.random.seed(0)
        self._contexts, self._images = contexts, cell["images"]
        self._net = get_model(NETS[cell["model"]], classes=1000)
        self._net.initialize(mx.init.Xavier(), ctx=contexts)
        self._net.hybridize(static_alloc=True)
        shape = (cell["images"], 3, cell["crop"], cell["crop"])
        self._xs = [mx.nd.random.normal(shape=shape, ctx=context) for context in contexts]
        self._forward_and_backward()
        settings = {"learning_rate": 1e-4, "momentum": 0.9}
        self._trainer = mx.gluon.Trainer(self._net.collect_params(), "sgd", settings, kvstore=kvstore)

    def values(self) -> int:
        return sum(p.data(self._contexts[0]).size for p in self._net.collect_params().values() if p.grad_req != "null")

    def _forward_and_backward(self) -> None:
        import mxnet as mx

        with mx.autograd.record():
            losses = [self._net(x).square().mean() for x in self._xs]
        mx.autograd.backward(losses)

    def update(self) -> float:
        """Seconds from the end of the backward to the end of the update."""
        self._forward_and_backward()
        return self._timed(lambda: None)

    def step(self) -> float:
        return self._timed(self._forward_and_backward)

    def _timed(self, work: Callable[[], None]) -> float:
        import mxnet as mx

        mx.nd.waitall()
        _measuring.all_are_here()
        start = time.perf_counter()
        work()
        self._trainer.step(self._images)
        mx.nd.waitall()
        return time.perf_counter() - start


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
