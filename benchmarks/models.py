"""A training step of whole networks on 1, 2 and 4 CPU devices: not synchronised, synchronised, fused, contrib's.

One step is the forward, a loss, the backward and `trainer.step` of a hybridized network, on all devices. All
implementations take turns in the same process, and a ratio is the median over the rounds. Contrib's layer may hang:
where the time limit runs out, its entry says so and the others are measured without it. The most memory that a step
takes is measured in processes of their own.

    python benchmarks/models.py             # writes benchmarks/results/models.{md,json,png}
    python benchmarks/models.py --devices 2 # on two devices only
    python benchmarks/models.py --quick     # a smoke test, its figures mean nothing

With `--processes N`, it measures what statistics between processes add to a step (see `_models_processes.py`).

    python benchmarks/models.py --processes 2 # writes benchmarks/results/models_processes.{md,json,png}
"""

from __future__ import annotations

import functools
import gc
import json
import os
import sys
import tempfile
from typing import Any, Callable, Dict, List, Optional, Sequence

import _measuring
import _models_processes
import _results
from _networks import CLASSES, batch, criterion, network
from tqdm import tqdm

MODELS: List[_measuring.Cell] = [
    {"model": "FastSCNN", "crop": 128, "images": 4},
    {"model": "PSPNet-ResNet50", "crop": 128, "images": 2},
    {"model": "ResNet-18", "crop": 64, "images": 8},
    {"model": "MobileNetV2", "crop": 96, "images": 8},
    {"model": "depthwise chain", "crop": 56, "images": 4},
]
DEVICES = [1, 2, 4]
EFFORT = {"rounds": 15, "budget_s": 60}
LIMIT_S = 1200  # of a cell
QUICK: List[_measuring.Cell] = [{"model": "depthwise chain", "crop": 16, "images": 1}]
OURS = ("ours", "fused")
NAMES = ("plain", *OURS, "contrib")
BESIDE = {"local": "plain beside local"}  # in a process of their own: five networks are too many for 24 GB
STEPS = 3  # until the memory no longer grows
# What the profiler calls them: ReLU6 is `clip`.
LAYERS = {"BatchNorm", "Activation", "LeakyReLU", "clip", "elemwise_add", "broadcast_add", "_plus"}

EXPLANATION = f"""One training step (forward, loss, backward, `trainer.step`) on CPU devices of one process; crop and
images are those of a device. FastSCNN and PSPNet have {CLASSES} classes and the auxiliary loss, ResNet-18 and
MobileNetV2 are GluonCV's `resnet18_v1` and `mobilenetv2_1.0`, the depthwise chain is four times depthwise
convolution, BatchNorm and ReLU on 64 channels. *Plain* is `nn.BatchNorm` on the same devices, each with statistics of
its own; the other columns are multiples of its time, the median over interleaved rounds and, in parentheses, the 10th
and 90th percentile. *Fused* is `convert(net, fuse=True)`, *local* the same with `mode="local"`, whose layers wait for
nobody: what lies between the two is the price of waiting for each other at every layer. *Contrib* is
`mxnet.gluon.contrib.nn.SyncBatchNorm` (`hang`: it did not end within the time limit). *Share* is what BatchNorm,
activations and additions take of the plain step, by MXNet's profiler, whose sums of gradients are not counted: 1 less
that is what a layer that took no time would come to. Memory is what a process grows by in {STEPS} steps at most, in a
process for each. On several devices, operators with plain BatchNorm wait for each other's temporary space, so that few
devices compute losses at once, and ours do not: with `MXNET_CPU_TEMP_COPY=2048`, plain FastSCNN takes 927 MiB on
four."""


def main(arguments: Sequence[str]) -> int:
    places: Dict[str, Dict[str, Any]] = {
        "--devices": {"type": int, "nargs": "+", "default": DEVICES, "help": f"how many ({DEVICES})"},
        "--processes": {"type": int, "help": "how many processes meet over MPI, in place of devices"},
    }
    options = _measuring.options(__doc__, arguments, child, places)
    if options.processes:
        return _models_processes.main(__file__, options, arguments)

    env = _results.environment(["benchmarks/models.py", *arguments])
    models, devices = (QUICK, [2]) if options.quick else (MODELS, options.devices)
    effort = {"rounds": 2, "budget_s": 1} if options.quick else EFFORT
    least = {2: 2 if options.quick else 10}  # of two devices, which the README has
    cells = [
        {**model, "devices": n, "contrib": n > 1 and not options.quick, **effort, "least": least.get(n, 2)}
        for model in models
        for n in devices
    ]
    samples = []
    with tqdm(total=len(cells), desc="models", unit="cell", disable=None) as progress:
        for cell in cells:
            progress.set_postfix_str(f"{cell['model']} x {cell['devices']}")
            # a process for each: MXNet keeps the temporary space that a network needed
            ((_, taken, problems),) = _measuring.measure(__file__, [cell], LIMIT_S)
            if cell["devices"] > 1:  # on one, local is what fused is
                two = {**cell, "contrib": False, "names": ["plain", "local"]}
                ((_, beside, failed),) = _measuring.measure(__file__, [two], LIMIT_S)
                if failed:
                    problems["local"] = failed["ours"]
                elif taken:
                    taken.update({"local": beside["local"], BESIDE["local"]: beside["plain"]})
            more = {"memory_mib": memory(cell), "share": figure(cell, share_of="plain")}
            samples.append({**cell, "problems": problems, "seconds": taken, **more})
            progress.update()

    header = ["model", "crop", "images", "devices", "plain, s", "images / s", "ours / plain", "fused / plain"]
    header += ["local / plain", "contrib / plain", "share", "memory, MiB: plain", "ours", "fused"]
    results = [_results.compared(sample, BESIDE) for sample in samples]
    parts = [EXPLANATION, [header, *map(row, results)]]
    _results.write(options.out, "models", "Training steps of whole networks", parts, env, results, samples)
    return _results.report(results, "model", "devices")


def row(result: Dict[str, Any]) -> List[str]:
    texts = [result["model"], *(str(result[key]) for key in ("crop", "images", "devices"))]
    if result["seconds"]:
        plain = result["seconds"]["plain"]["median"]
        texts += [f"{plain:.3f}", f"{result['devices'] * result['images'] / plain:.1f}"]
    else:
        texts += ["-", "-"]
    texts += [_results.entry(result, name) for name in OURS]
    texts += [_results.entry(result, name) if result["devices"] > 1 else "" for name in ("local", "contrib")]
    texts.append(f"{result['share']:.3f}")
    return texts + [f"{result['memory_mib'][name]:.0f}" for name in ("plain", *OURS)]


def memory(cell: _measuring.Cell) -> Dict[str, float]:
    """MiB that a process grows by in steps of each implementation."""
    return {name: figure(cell, _measuring.GIVES_BACK, memory_of=name) for name in ("plain", *OURS)}


def figure(cell: _measuring.Cell, environment: Optional[Dict[str, str]] = None, **what: str) -> float:
    return _measuring.figures(__file__, {**cell, **what}, 240, environment)["figure"]


def child(cells: Any) -> None:
    """Measures the cells in turn and prints one line of JSON for each; or one cell, in this process of a job."""
    if isinstance(cells, dict):
        _models_processes.child(cells)
        return
    if "share_of" in cells[0]:
        os.environ["MXNET_EXEC_BULK_EXEC_TRAIN"] = "0"  # else the profiler sees many operators as one
    import gluon_syncbn

    contexts = gluon_syncbn.cpu_devices(cells[0]["devices"])
    import mxnet as mx

    taken: Dict[str, Any]
    for cell in cells:
        if "memory_of" in cell:
            before = _measuring.resident_mib()
            (step,) = steps(cell, contexts, [cell["memory_of"]]).values()
            for _ in range(STEPS):
                step()
            taken = {"figure": _measuring.peak_mib() - before}
        elif "share_of" in cell:
            (step,) = steps(cell, contexts, [cell["share_of"]]).values()
            taken = {"figure": share(step)}
        else:
            made = steps(cell, contexts, cell.get("names") or (NAMES if cell["contrib"] else NAMES[:-1]))
            taken = _measuring.interleaved(made, cell["rounds"], cell["budget_s"], cell["least"])
        print(json.dumps(taken), flush=True)
        gc.collect()  # the networks of this cell
        mx.nd.waitall()


def share(step: Callable[[], None]) -> float:
    """What of the time in operators is that of BatchNorm, activations and additions."""
    import mxnet as mx

    for _ in range(STEPS):
        step()
    with tempfile.TemporaryDirectory() as folder:  # MXNet writes there when the process ends, or not at all
        mx.profiler.set_config(
            profile_symbolic=True, profile_imperative=True, aggregate_stats=True, filename=f"{folder}/profile.json"
        )
        mx.profiler.set_state("run")
        for _ in range(STEPS):
            step()
        mx.profiler.set_state("stop")
        operators = json.loads(mx.profiler.dumps(reset=True, format="json"))["Time"]["operator"]
    total = {name: times["Total"] for name, times in operators.items()}
    return sum(total[name] for name in total if name.replace("_backward_", "") in LAYERS) / sum(total.values())


def steps(cell: _measuring.Cell, contexts: Sequence[Any], names: Sequence[str]) -> Dict[str, Callable[[], None]]:
    """One training step of each implementation on the same images and labels."""
    import mxnet as mx
    from mxnet.gluon import Trainer, nn
    from mxnet.gluon.contrib.nn import SyncBatchNorm as Contrib

    import gluon_syncbn

    layers: Dict[str, Any] = dict.fromkeys(("plain", "fused", "local"), nn.BatchNorm)
    layers["ours"] = gluon_syncbn.SyncBatchNorm
    # not through norm_kwargs: FastSCNN makes two of its layers without them, and a wrong number hangs
    layers["contrib"] = functools.partial(Contrib, num_devices=len(contexts))
    mx.random.seed(0)
    batches = [batch(cell, context) for context in contexts]
    loss = criterion(cell)

    def training_step(net: Any) -> Callable[[], None]:
        trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3, "momentum": 0.9})

        def step() -> None:
            with mx.autograd.record():
                losses = [loss(net(x), labels) for x, labels in batches]
            mx.autograd.backward(losses)
            trainer.step(cell["images"] * len(contexts))
            mx.nd.waitall()

        return step

    made = {}
    for name in names:
        net = network(cell, layers[name])
        net.initialize(mx.init.Xavier(), ctx=list(contexts), force_reinit=True)
        if name in ("fused", "local"):
            gluon_syncbn.convert(net, fuse=True, mode="local" if name == "local" else "sync")
        net.hybridize(static_alloc=True, static_shape=True)
        made[name] = training_step(net)
    return made


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
