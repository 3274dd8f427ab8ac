"""Memory of training on several CPU contexts of a process, beside plain BatchNorm on one.

Each case is measured in a process of its own: its resident set after 10 and after 60 steps, less what it has before the
net is made.

    python benchmarks/memory.py             # writes benchmarks/results/memory.{md,json,png}
    python benchmarks/memory.py --quick     # a smoke test, its figures mean nothing
"""

import sys
from typing import Any, Dict, List, Sequence

import _measuring
import _results
from tqdm import tqdm

CLASSES = 20
EARLY, LATE = 10, 60
CASES: List[_measuring.Cell] = [
    {"model": "six convolutions", "crop": 32, "images": 1},
    {"model": "ResNet-50", "crop": 64, "images": 2},
    {"model": "FastSCNN", "crop": 128, "images": 2},
    {"model": "CenterNet", "crop": 128, "images": 1},
    {"model": "SRGAN", "crop": 24, "images": 2},
]
QUICK: List[_measuring.Cell] = [{"model": "FastSCNN", "crop": 32, "images": 1}]
WAYS = {"plain": ("plain", 1), "1": ("ours", 1), "2": ("ours", 2), "4": ("ours", 4)}
LIMIT_S = 1200  # of one process

EXPLANATION = f"""Memory of a process after {LATE} training steps in eager mode, in MiB above what it had before the
net was made, with SyncBatchNorm on 1, 2 and 4 CPU contexts. Each context has the images of the column. *Ratio* is the
memory per context, divided by that of plain BatchNorm on one context. *Growth* is what the last {LATE - EARLY} steps
added, on 4 contexts. Six convolutions have 512 channels each. SRGAN trains a generator and a discriminator in turn."""


def main(arguments: Sequence[str]) -> int:
    options = _measuring.options(__doc__, arguments, quick="one small case: a smoke test")
    if options.child:
        return _measuring.answer(options.child, measured)
    env = _results.environment(["benchmarks/memory.py", *arguments])
    cases = QUICK if options.quick else CASES
    results = []
    with tqdm(total=len(WAYS) * len(cases), desc="memory", unit="process") as progress:
        for case in cases:
            result: Dict[str, Any] = dict(case)
            for name, (layer, contexts) in WAYS.items():
                progress.set_postfix_str(f"{case['model']}, {name}")
                cell = {**case, "layer": layer, "contexts": contexts}
                result[name] = _measuring.figures(__file__, cell, LIMIT_S, _measuring.GIVES_BACK)
                progress.update()
            results.append(result)
    header = ["model", "crop", "images", "plain, MiB", "1", "2", "4", "ratio, 1", "ratio, 2", "ratio, 4", "growth, MiB"]
    table = _results.table(header, [row(result) for result in results])
    print(table)
    title = "Memory of several CPU contexts"
    _results.write(options.out, "memory", title, f"{EXPLANATION}\n\n{table}", env, results, results)
    return 0


def row(result: Dict[str, Any]) -> List[str]:
    late = {name: result[name]["late_mib"] for name in WAYS}
    ratios = [late[name] / contexts / late["plain"] for name, (layer, contexts) in WAYS.items() if layer == "ours"]
    texts = [result["model"], str(result["crop"]), str(result["images"]), *(f"{value:.0f}" for value in late.values())]
    return [*texts, *(f"{ratio:.2f}" for ratio in ratios), f"{result['4']['late_mib'] - result['4']['early_mib']:.0f}"]


def measured(cell: _measuring.Cell) -> Dict[str, float]:
    import gluon_syncbn  # isort: skip  (before mxnet: it finds what MXNet needs)
    import mxnet as mx
    from mxnet.gluon import Trainer

    mx.random.seed(0)
    contexts = [mx.cpu(i) for i in range(cell["contexts"])]
    before = _measuring.resident_mib()
    nets = networks(cell)
    for net in nets:
        if cell["layer"] == "ours":
            gluon_syncbn.convert(net)
        net.initialize(mx.init.Xavier(), ctx=contexts, force_reinit=True)
    trainers = [Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-4, "momentum": 0.9}) for net in nets]
    channels = 512 if cell["model"] == "six convolutions" else 3
    found = {}
    for step in range(1, LATE + 1):
        for turn, trainer in enumerate(trainers):  # SRGAN's generator learns through its discriminator
            extent = cell["crop"] * (4 if turn else 1)
            shape = (cell["images"], channels, extent, extent)
            ys = [mx.nd.random.normal(shape=shape, ctx=context) for context in contexts]
            with mx.autograd.record():
                for net in nets[turn:]:
                    ys = [net(y) for y in ys]
                losses = [sum(output.square().mean() for output in outputs_of(y)) for y in ys]
            mx.autograd.backward(losses)
            trainer.step(cell["images"] * len(contexts))
        mx.nd.waitall()
        if step in (EARLY, LATE):
            found[step] = _measuring.resident_mib() - before
    return {"early_mib": found[EARLY], "late_mib": found[LATE]}


def outputs_of(y: Any) -> List[Any]:
    """All arrays that a net returns. The parameters of each get a gradient, as in training."""
    return [array for one in y for array in outputs_of(one)] if isinstance(y, (list, tuple)) else [y]


def networks(cell: _measuring.Cell) -> List[Any]:
    from gluoncv.model_zoo import get_model
    from gluoncv.model_zoo.fastscnn import FastSCNN
    from mxnet.gluon import nn
    from mxnet.gluon.contrib.nn import PixelShuffle2D

    def block(channels: int, strides: int = 1) -> List[Any]:
        return [nn.Conv2D(channels, 3, strides, padding=1), nn.BatchNorm(), nn.LeakyReLU(0.2)]

    def sequence(*layers: Any) -> Any:
        net = nn.Sequential()
        net.add(*layers)
        return net

    if cell["model"] == "six convolutions":
        return [sequence(*(layer for _ in range(6) for layer in block(512)))]
    if cell["model"] == "ResNet-50":
        return [get_model("resnet50_v1b", classes=CLASSES)]
    if cell["model"] == "FastSCNN":
        return [FastSCNN(CLASSES, crop_size=cell["crop"], norm_layer=nn.BatchNorm)]
    if cell["model"] == "CenterNet":
        return [get_model("center_net_resnet18_v1b_voc", pretrained_base=False)]
    larger = [layer for _ in range(2) for layer in (nn.Conv2D(256, 3, padding=1), PixelShuffle2D(2), nn.PReLU())]
    generator = sequence(*(layer for _ in range(12) for layer in block(64)), *larger, nn.Conv2D(3, 9, padding=4))
    widths = [(64, 1), (64, 2), (128, 1), (128, 2), (256, 1), (256, 2), (512, 1), (512, 2)]
    judged = [layer for width, strides in widths for layer in block(width, strides)]
    return [generator, sequence(*judged, nn.Dense(1024), nn.LeakyReLU(0.2), nn.Dense(1))]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
