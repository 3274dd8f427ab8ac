"""What statistics and gradients between processes of one machine add to a whole training step."""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any, Callable, List, Sequence

import _measuring
import _results
from _networks import batch, criterion, network

MODELS: List[_measuring.Cell] = [
    {"model": "FastSCNN", "classes": 19, "crop": 128, "images": 2},
    {"model": "ResNet-18", "classes": 1000, "crop": 128, "images": 4},
]
EFFORT = {"rounds": 100, "budget_s": 180}
QUICK: List[_measuring.Cell] = [{"model": "FastSCNN", "classes": 19, "crop": 64, "images": 2}]
# Of each network: the mode of its layers, and whether its Trainer sums gradients over the processes.
NETS = {"alone": ("local", False), "local": ("local", True), "sync": ("sync", True)}
# A ratio is that of the series to its yardstick. A series that is its own yardstick has no ratio.
YARDSTICKS = {"sync": "local", "sync, mean": "local, mean", "gradients": "alone"}
YARDSTICKS.update({name: name for name in ("alone", "alone, mean", "local", "local, mean")})

EXPLANATION = """A whole training step (forward, loss, backward, `trainer.step`) in {processes} processes of one
machine. Each process has one CPU device and one thread for OpenMP. Crop and images are those of a process. Each process
has the network three times. *Sync* is the job as it runs: layers in mode
`sync`, and `kvstore("mpi")` for the gradients.
*Local* is the same with layers in mode `local`, which wait for nobody.
*Alone* is that without an exchange of gradients. The processes begin each step together. The networks take turns, and
each round begins with another one.

A step takes as long as its slowest process. Times are medians over the rounds. A ratio is the median of the rounds'
ratios, with the 10th and 90th percentile in parentheses. *Share of statistics* is 1 - 1 / ratio: what the statistics
take of the step in mode `sync`. A share below zero is noise. *Mean of the processes* is the ratio of the mean times of
the processes. There, the wait for the slowest process counts as a cost of the statistics. *Local / alone* is the price
of the gradients."""


def main(script: str, options: argparse.Namespace, arguments: Sequence[str]) -> int:
    env = _results.environment(["benchmarks/models.py", *arguments])
    effort = {**EFFORT, "rounds": 3} if options.quick else EFFORT
    samples = []
    for model in QUICK if options.quick else MODELS:
        cell = {**model, "processes": options.processes, **effort}
        command = [script, "--processes", str(options.processes)]
        samples.append({**cell, "seconds": _measuring.job(options.processes, command, cell)})

    results = [_results.compared(sample, YARDSTICKS) for sample in samples]
    header = ["model", "crop", "images", "processes", "rounds", *(f"{name}, ms" for name in NETS)]
    header += ["sync / local", "share of statistics", "mean of the processes", "local / alone"]
    parts = [EXPLANATION.format(processes=options.processes), [header, *map(row, results)]]
    title = "Training steps in several processes"
    _results.write(options.out, "models_processes", title, parts, env, results, samples)
    return 0


def row(result: _measuring.Cell) -> List[str]:
    seconds, ratios = result["seconds"], result["ratios"]
    texts = [result["model"], *(str(result[key]) for key in ("crop", "images", "processes"))]
    texts.append(str(seconds["sync"]["count"]))
    texts += [f"{seconds[name]['median'] * 1e3:.1f}" for name in NETS]
    texts.append(_results.median_and_range(ratios["sync"], 2))
    texts.append(f"{100 * (1 - 1 / ratios['sync']['median']):.1f} %")
    return [*texts, *(_results.median_and_range(ratios[name], 2) for name in ("sync, mean", "gradients"))]


def child(cell: _measuring.Cell) -> None:
    """Measures the cell in this process of the job. Rank 0 prints one line of JSON."""
    import gluon_syncbn

    gluon_syncbn.configure(timeout=120)
    store = gluon_syncbn.kvstore("mpi")
    steps = {name: step(cell, store, *what) for name, what in NETS.items()}
    seconds = _measuring.in_processes(steps, cell["rounds"], cell["budget_s"])
    taken = {name: list(map(max, rounds)) for name, rounds in seconds.items()}
    taken.update((f"{name}, mean", list(map(statistics.mean, rounds))) for name, rounds in seconds.items())
    taken["gradients"] = taken["local"]
    if store.rank == 0:
        print(json.dumps(taken), flush=True)


def step(cell: _measuring.Cell, store: Any, mode: Any, gradients: bool) -> Callable[[], float]:
    """Runs a whole step and gives the seconds of this process."""
    import mxnet as mx
    from mxnet.gluon import Trainer, nn

    import gluon_syncbn

    mx.random.seed(0)
    net = gluon_syncbn.convert(network(cell, nn.BatchNorm), mode=mode, kvstore=store)
    net.initialize(mx.init.Xavier(), ctx=mx.cpu(), force_reinit=True)
    net.hybridize(static_alloc=True)
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3}, kvstore=store if gradients else None)
    loss = criterion(cell)
    net(batch(cell, mx.cpu())[0])  # initialises all weights, alike in all processes
    mx.random.seed(1 + store.rank)  # each process has images of its own
    x, labels = batch(cell, mx.cpu())

    def run() -> float:
        start = time.perf_counter()
        with mx.autograd.record():
            value = loss(net(x), labels)
        value.backward()
        trainer.step(cell["images"] * store.num_workers)
        mx.nd.waitall()
        return time.perf_counter() - start

    return run
