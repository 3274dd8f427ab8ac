"""What it costs to put statistics together over processes: microseconds per exchange, and the share of a step.

Processes of this machine, over MPI or Horovod. *Bare* is mpi4py's ``Allreduce`` or Horovod's ``allreduce`` of the same
bytes in the same processes and run, which never give up waiting; MPI matches by the order of the calls.

    python benchmarks/exchange.py                   # writes benchmarks/results/exchange.{md,json,png}
    python benchmarks/exchange.py --over horovod    # where Horovod is: exchange_horovod.{md,json,png}
    python benchmarks/exchange.py --quick           # a smoke test, its figures mean nothing
"""

import json
import sys
import time
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

import _measuring
import _results
from tqdm import tqdm

SIZES = [1024, 2048, 4096, 8192, 16384]  # bytes
PROCESSES = {"mpi": [2, 4, 8], "horovod": [2, 4]}
ROUNDS = {"mpi": 1000, "horovod": 300}
BARE = {"mpi": "mpi4py's `Allreduce`", "horovod": "Horovod's `allreduce`"}

EXPLANATION = """Microseconds for the sum of a float64 vector over the processes of one machine, the median over
{rounds} calls on rank 0 (10 % and 90 % in brackets). *Bare* is {bare} in the same run, *added* is what
the exchange costs beyond it: labels, time limit, errors. With more processes than cores, a wait is mostly for the
scheduler.

{table}

A training step of FastSCNN ({crop} pixels, {batch} images per process) on {processes} processes spends {share:.0%} of
its time in the exchange of statistics and {gradients:.0%} in that of gradients, of {step:.2f} s in all. Both include
waiting for the other process, whose forward and backward are not equally fast."""


def main(arguments: Sequence[str]) -> int:
    options = _measuring.options(__doc__, arguments, quick="few calls on two processes: a smoke test", over=list(BARE))
    if options.child:
        child(options.over, json.loads(options.child))
        return 0
    env = _results.environment(["benchmarks/exchange.py", *arguments])
    over = options.over
    script = [__file__, "--over", over]
    processes, rounds = ([2], 50) if options.quick else (PROCESSES[over], ROUNDS[over])
    samples: List[_measuring.Cell] = []
    for count in tqdm(processes, desc="exchange", unit="job", disable=options.no_progress or None):
        samples += _measuring.job(over, count, script, {"sizes": SIZES, "rounds": rounds})["sizes"]
    measured = {"crop": 64 if options.quick else 128, "batch": 2, "steps": 2 if options.quick else 8}
    step = _measuring.job(over, 2, script, {"step": measured})

    cells = [{**sample, "microseconds": _results.summary(sample["microseconds"])} for sample in samples]
    header = ["bytes", "processes", "bare, us", "ours, us", "added, us"]
    table = _results.table(header, [row(cell) for cell in cells])
    print(table)
    text = EXPLANATION.format(table=table, rounds=rounds, processes=2, bare=BARE[over], **step)
    stem = "exchange" if over == "mpi" else f"exchange_{over}"
    print(text.rpartition("\n\n")[2])
    results = {"sizes": cells, "step": step}
    _results.write(options.out, stem, "Exchange between processes", text, env, results, {**results, "sizes": samples})
    plot(options.out / f"{stem}.png", over, cells, env)
    return 0


def row(cell: _measuring.Cell) -> List[str]:
    bare, ours = (cell["microseconds"][name] for name in ("bare", "ours"))
    added = f"{ours['median'] - bare['median']:.1f}"
    return [str(cell["bytes"]), str(cell["processes"]), *map(_results.median_and_range, (bare, ours)), added]


def child(over: str, work: Dict[str, Any]) -> None:
    import gluon_syncbn

    gluon_syncbn.configure(timeout=120)
    store = gluon_syncbn.kvstore(over)
    result = sizes(over, store, work) if "sizes" in work else {**step(store, **work["step"]), **work["step"]}
    if store.rank == 0:
        print(json.dumps(result), flush=True)


def bare_sum(over: str, values: Any) -> Callable[[], None]:
    import numpy as np

    if over == "mpi":
        from mpi4py import MPI

        out = np.empty_like(values)
        return lambda: MPI.COMM_WORLD.Allreduce(values, out)
    import horovod.mxnet as hvd
    import mxnet as mx

    array = mx.nd.array(values, dtype=values.dtype)
    return lambda: hvd.allreduce(array, op=hvd.Sum, name=f"bare {values.size}").wait_to_read()


def sizes(over: str, store: Any, work: Dict[str, Any]) -> Dict[str, Any]:
    import numpy as np

    from gluon_syncbn.exchange.store import Label

    cells = []
    for size in work["sizes"]:
        values = np.ones(size // 8)
        calls = iter(range(10**9))

        def ours(values: Any = values, size: int = size, calls: Any = calls) -> None:
            store._transport.allreduce(Label("statistics", size, call=next(calls), what="a benchmark"), values)

        steps: Dict[str, Callable[[], None]] = {"bare": bare_sum(over, values), "ours": ours}
        taken: _measuring.Rounds = {name: [] for name in steps}
        for call in steps.values():
            for _ in range(20):
                call()
        for _ in range(10):  # in turn, so that a slow moment hits both
            for name, call in steps.items():
                for _ in range(work["rounds"] // 10):
                    start = time.perf_counter()
                    call()
                    taken[name].append((time.perf_counter() - start) * 1e6)
        cells.append({"bytes": size, "processes": store.num_workers, "microseconds": taken})
    return {"sizes": cells}


def step(store: Any, crop: int, batch: int, steps: int) -> Dict[str, float]:
    """Seconds of a step, and the shares of it that statistics and gradients take."""
    import gluoncv
    import mxnet as mx
    from mxnet import autograd, gluon, nd

    import gluon_syncbn

    mx.random.seed(0)
    gluon_syncbn.configure(kvstore=store)
    net = gluoncv.model_zoo.get_model(
        "fastscnn_citys", pretrained_base=False, norm_layer=gluon_syncbn.SyncBatchNorm, crop_size=crop, base_size=crop
    )
    net.initialize(mx.init.Xavier(), ctx=mx.cpu())
    net.hybridize(static_alloc=True)
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"learning_rate": 0.01}, kvstore=store)
    loss = gluoncv.loss.MixSoftmaxCrossEntropyLoss(aux=True, aux_weight=0.4)
    spent = {"add": 0.0, "pushpull": 0.0}
    for name in spent:
        original = getattr(store, name)

        def timed(*args: Any, original: Any = original, name: str = name, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - start

        setattr(store, name, timed)
    x = nd.random.normal(shape=(batch, 3, crop, crop))
    labels = nd.zeros((batch, crop, crop))
    for k in range(steps + 1):
        if k == 1:  # the first step builds the graph
            start = time.perf_counter()
            spent.update(add=0.0, pushpull=0.0)
        with autograd.record():
            value = loss(*net(x), labels).sum()
        value.backward()
        mx.nd.waitall()  # so that the time of the gradients is theirs alone
        trainer.step(batch * store.num_workers)
        mx.nd.waitall()
    seconds = time.perf_counter() - start
    return {"step": seconds / steps, "share": spent["add"] / seconds, "gradients": spent["pushpull"] / seconds}


def plot(path: Path, over: str, cells: Sequence[Dict[str, Any]], env: Dict[str, str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    processes = sorted({cell["processes"] for cell in cells})
    figure, axes = pyplot.subplots(1, len(processes), figsize=(4 * len(processes), 3.6), sharey=True, squeeze=False)
    for axis, count in zip(axes[0], processes):
        mine = [cell for cell in cells if cell["processes"] == count]
        labels = (("bare", "#000000", BARE[over].replace("`", "")), ("ours", "#0072B2", f"kvstore('{over}')"))
        for name, colour, label in labels:
            axis.plot(
                [cell["bytes"] / 1024 for cell in mine],
                [cell["microseconds"][name]["median"] for cell in mine],
                "o-",
                color=colour,
                label=label,
            )
        axis.set(title=f"{count} processes", xlabel="size of the vector, KiB", xscale="log", yscale="log")
        axis.set_xticks([cell["bytes"] / 1024 for cell in mine])
        axis.yaxis.set_major_locator(matplotlib.ticker.LogLocator(subs=(1, 2, 5)))
        for one in (axis.xaxis, axis.yaxis):
            one.set_major_formatter(matplotlib.ticker.ScalarFormatter())
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    axes[0][0].set_ylabel("microseconds per sum over all processes")
    axes[0][0].legend()
    figure.text(
        0.5, 0.0, f"less is faster; {env['processor']}, {env['cores']} cores", ha="center", fontsize=8, color="0.3"
    )
    figure.tight_layout(rect=(0, 0.03, 1, 1))
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
