"""Time of a prediction with BatchNorm, and with `gluon_syncbn.fold(net)`, on one CPU device.

Each network is measured in a process of its own, where both take turns.

    python benchmarks/fold.py             # writes benchmarks/results/fold.{md,json,png}
    python benchmarks/fold.py --quick     # a smoke test, its figures mean nothing
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any, Dict, List, Sequence

import _measuring
import _results
from tqdm import tqdm

CLASSES = 150
CASES: List[_measuring.Cell] = [
    {"model": "FastSCNN", "crop": 256, "images": 1},
    {"model": "PSPNet-ResNet50", "crop": 128, "images": 1},
    {"model": "ResNet-50", "crop": 224, "images": 1},
    {"model": "ResNet-50 v2", "crop": 224, "images": 1},
    {"model": "MobileNetV2", "crop": 224, "images": 1},
]
QUICK: List[_measuring.Cell] = [{"model": "MobileNetV2", "crop": 32, "images": 1}]
ROUNDS, BUDGET_S = 40, 40.0
LIMIT_S = 400  # of one process

EXPLANATION = """A prediction of one image in float32, on one CPU device, with `net.hybridize(static_alloc=True,
static_shape=True)`: the median in milliseconds (10 % to 90 %), with BatchNorm and folded, and the median of the ratios
of neighbouring times. *Folded* counts the layers of batch normalisation that are in the weights, of all. In ResNet v2,
BatchNorm also stands before convolutions, and stays there."""

BUSY = "Other programs ran on these cores: the times are too long, and only the ratios say something."


def main(arguments: Sequence[str]) -> int:
    options = _measuring.options(__doc__, arguments, quick="one small case: a smoke test")
    if options.child:
        return _measuring.answer(options.child, measured)
    env = _results.environment(["benchmarks/fold.py", *arguments])
    samples = []
    cases = QUICK if options.quick else CASES
    with tqdm(cases, desc="fold", disable=options.no_progress or None) as progress:
        for case in progress:
            progress.set_postfix_str(case["model"])
            samples.append({**case, **_measuring.figures(__file__, case, LIMIT_S)})
    results = [_results.compared(sample) for sample in samples]
    header = ["model", "crop", "folded", "BatchNorm, ms", "folded, ms", "ratio"]
    table = _results.table(header, [row(result) for result in results])
    print(table)
    text = f"{EXPLANATION}\n\n{table}"
    if float(env["load before"].split(",")[0]) > int(env["cores"]):
        text += f"\n\n{BUSY}"
    _results.write(options.out, "fold", "Time of a prediction, before and after `fold`", text, env, results, samples)
    plot(options.out / "fold.png", results, env)
    return 0


def row(result: Dict[str, Any]) -> List[str]:
    milliseconds = [{key: 1e3 * value for key, value in one.items()} for one in result["seconds"].values()]
    return [
        result["model"],
        str(result["crop"]),
        f"{result['folded']} of {result['layers']}",
        *map(_results.median_and_range, milliseconds),
        f"{_results.ratio(result, 'ours'):.2f}",
    ]


def measured(cell: _measuring.Cell) -> Dict[str, Any]:
    import mxnet as mx
    from gluoncv.model_zoo import get_model
    from gluoncv.model_zoo.fastscnn import FastSCNN
    from gluoncv.model_zoo.pspnet import PSPNet

    import gluon_syncbn
    from gluon_syncbn.mxnet_side import blocks

    mx.random.seed(0)
    crop = cell["crop"]
    if cell["model"] == "FastSCNN":
        net = FastSCNN(CLASSES, aux=False, pretrained_base=False, crop_size=crop)
    elif cell["model"] == "PSPNet-ResNet50":
        net = PSPNet(CLASSES, aux=False, pretrained_base=False, crop_size=crop, backbone="resnet50")
    else:
        names = {"ResNet-50": "resnet50_v1b", "ResNet-50 v2": "resnet50_v2", "MobileNetV2": "mobilenetv2_1.0"}
        net = get_model(names[cell["model"]])
    net.initialize(mx.init.Xavier(), force_reinit=True)
    x = mx.nd.random.normal(shape=(cell["images"], 3, crop, crop))
    net(x)  # which fixes the shapes
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what stays
        copy = gluon_syncbn.fold(net)

    def step(block: Any) -> Any:
        block.hybridize(static_alloc=True, static_shape=True)

        def predict() -> None:
            outputs = block(x)
            (outputs[0] if isinstance(outputs, (tuple, list)) else outputs).wait_to_read()

        return predict

    taken = _measuring.interleaved({"plain": step(net), "ours": step(copy)}, ROUNDS, BUDGET_S)
    layers = sum(map(blocks.is_batch_norm, blocks.iterate(net)))
    left = sum(node.operator in blocks.OPERATORS for node in blocks.recorded(copy))
    return {"layers": layers, "folded": layers - left, "seconds": taken}


def plot(path: Path, results: Sequence[Dict[str, Any]], env: Dict[str, str]) -> None:
    labels = {"plain": "with BatchNorm", "ours": "folded"}
    bars = [
        (label, _results.COLOURS[name], [1e3 * one["seconds"][name]["median"] for one in results])
        for name, label in labels.items()
    ]
    texts = [f"{one['model']}\ncrop {one['crop']}" for one in results]
    note = f"{env['processor']}, {env['cores']} cores, one CPU device"
    _results.plot_bars(path, bars, texts, "prediction, ms (median)", note, 1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
