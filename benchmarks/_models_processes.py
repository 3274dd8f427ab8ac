"""What statistics between processes of one machine add to a training step: mode 'sync' beside mode 'local'."""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

import _measuring
import _results
from _networks import batch, criterion, network

MODELS: List[_measuring.Cell] = [
    {"model": "FastSCNN", "classes": 19, "crop": 128, "images": 2},
    {"model": "ResNet-18", "classes": 1000, "crop": 128, "images": 4},
]
EFFORT = {"rounds": 100, "budget_s": 180}
QUICK: List[_measuring.Cell] = [{"model": "FastSCNN", "classes": 19, "crop": 64, "images": 2}]
MODES = ("local", "sync")
# A ratio is that of the series to its yardstick. A series that is its own yardstick has no ratio.
YARDSTICKS = {"sync": "local", "sync, mean": "local, mean"}
YARDSTICKS.update({name: name for name in ("local", "local, mean", "gradients")})

EXPLANATION = """Forward, loss and backward of a training step in {processes} processes of one machine. Each process
has one CPU device and one thread for OpenMP. Crop and images are those of a process. Each process has the network
twice: with layers in mode `local`, which wait for nobody, and with layers in mode `sync`, whose statistics meet in
shared memory. The processes begin each step together. The two networks take turns, and each round begins with the
other one.

A step takes as long as its slowest process, because the exchange of gradients waits for the slowest process in either
mode. *Local* and *sync* are medians over the rounds. The ratio is the median of the rounds' ratios, with the 10th and
90th percentile in parentheses. *Share of statistics* is 1 - 1 / ratio: what the statistics take of the step in mode
`sync`. A share below zero is noise. *Mean of the processes* is the ratio of the mean times of the processes: there,
waiting for the slowest process counts as a cost of the statistics. *Gradients* is `trainer.step` with `kvstore("mpi")`.
It follows the step, and no other column contains it.

{table}"""


def main(script: str, options: argparse.Namespace, arguments: Sequence[str]) -> int:
    if options.child:
        child(json.loads(options.child))
        return 0
    env = _results.environment(["benchmarks/models.py", *arguments])
    effort = {**EFFORT, "rounds": 3} if options.quick else EFFORT
    samples = []
    for model in QUICK if options.quick else MODELS:
        cell = {**model, "processes": options.processes, **effort}
        command = [script, "--processes", str(options.processes)]
        samples.append({**cell, "seconds": _measuring.job("mpi", options.processes, command, cell)})

    results = [_results.compared(sample, YARDSTICKS) for sample in samples]
    header = ["model", "crop", "images", "processes", "rounds", "local, ms", "sync, ms", "sync / local"]
    header += ["share of statistics", "mean of the processes", "gradients, ms"]
    table = _results.table(header, [row(result) for result in results])
    print(table)
    text = EXPLANATION.format(processes=options.processes, table=table)
    title = "Training steps in several processes"
    _results.write(options.out, "models_processes", title, text, env, results, samples)
    plot(options.out / "models_processes.png", results, env)
    return 0


def row(result: _measuring.Cell) -> List[str]:
    seconds, ratios = result["seconds"], result["ratios"]
    texts = [result["model"], *(str(result[key]) for key in ("crop", "images", "processes"))]
    texts.append(str(seconds["sync"]["count"]))
    texts += [f"{seconds[mode]['median'] * 1e3:.1f}" for mode in MODES]
    texts.append(_results.median_and_range(ratios["sync"], 2))
    texts.append(f"{100 * (1 - 1 / ratios['sync']['median']):.1f} %")
    texts.append(_results.median_and_range(ratios["sync, mean"], 2))
    return [*texts, f"{seconds['gradients']['median'] * 1e3:.1f}"]


def child(cell: _measuring.Cell) -> None:
    """Measures the cell in this process of the job. Rank 0 prints one line of JSON."""
    import gluon_syncbn

    gluon_syncbn.configure(timeout=120)
    store = gluon_syncbn.kvstore("mpi")
    if store.why_not_in_memory is not None:
        raise SystemExit(f"the processes do not share memory: {store.why_not_in_memory}")
    taken = rounds(cell, {mode: step(cell, store, mode) for mode in MODES})
    if store.rank == 0:
        print(json.dumps(taken), flush=True)


def step(cell: _measuring.Cell, store: Any, mode: str) -> Callable[[Callable[[], None]], List[float]]:
    """Runs a step and gives the seconds of this process: until the backward ends, and those of the gradients."""
    import mxnet as mx
    from mxnet.gluon import Trainer, nn

    import gluon_syncbn

    mx.random.seed(0)
    net = gluon_syncbn.convert(network(cell, nn.BatchNorm), mode=mode, kvstore=store)
    net.initialize(mx.init.Xavier(), ctx=mx.cpu(), force_reinit=True)
    net.hybridize(static_alloc=True)
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3}, kvstore=store)
    loss = criterion(cell)
    mx.random.seed(1 + store.rank)  # each process has images of its own
    x, labels = batch(cell, mx.cpu())

    def run(together: Callable[[], None]) -> List[float]:
        taken = []
        together()
        start = time.perf_counter()
        with mx.autograd.record():
            value = loss(net(x), labels)
        value.backward()
        mx.nd.waitall()
        taken.append(time.perf_counter() - start)
        together()
        start = time.perf_counter()
        trainer.step(cell["images"] * store.num_workers)
        mx.nd.waitall()
        return [*taken, time.perf_counter() - start]

    return run


def rounds(cell: _measuring.Cell, steps: Dict[str, Callable[[Callable[[], None]], List[float]]]) -> _measuring.Rounds:
    """Seconds of each round: of the slowest process, and the mean over the processes."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    for _ in range(2):  # these build the graphs
        for run in steps.values():
            run(world.Barrier)
    taken: _measuring.Rounds = {name: [] for name in YARDSTICKS}
    begun = time.perf_counter()
    for done in range(cell["rounds"]):
        # Rank 0 decides for all processes, because their clocks differ.
        if done >= 2 and world.bcast(time.perf_counter() - begun > cell["budget_s"]):
            break
        for mode in sorted(steps, reverse=done % 2 == 1):
            of_steps, of_gradients = zip(*world.allgather(steps[mode](world.Barrier)))
            taken[mode].append(max(of_steps))
            taken[f"{mode}, mean"].append(sum(of_steps) / len(of_steps))
            if mode == "sync":
                taken["gradients"].append(max(of_gradients))
    return taken


def plot(path: Path, results: Sequence[_measuring.Cell], env: Dict[str, str]) -> None:
    labels = {"local": "mode='local': no waiting", "sync": "mode='sync'"}
    bars = [
        (labels[mode], _results.COLOURS[colour], [result["seconds"][mode]["median"] * 1e3 for result in results])
        for mode, colour in (("local", "local"), ("sync", "ours"))
    ]
    texts = [
        f"{result['model']}\n{result['images']} images of {result['crop']} pixels\nsync / local "
        f"{result['ratios']['sync']['median']:.2f}"
        for result in results
    ]
    note = f"{results[0]['processes']} processes; less is faster; {env['processor']}, {env['cores']} cores"
    _results.plot_bars(path, bars, texts, "ms of forward, loss and backward", note)
