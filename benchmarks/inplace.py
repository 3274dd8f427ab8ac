"""Memory of a training step with `inplace=True`: networks whose ReLUs have been made leaky.

Each case is measured in a process of its own, on one CPU device: by the most memory that the process has had at once
(the kernel's high-water mark of its resident set), and by what MXNet's profiler counts as allocated, both less what
there was before the first step.

    python benchmarks/inplace.py             # writes benchmarks/results/inplace.{md,json,png}
    python benchmarks/inplace.py --quick     # a smoke test, its figures mean nothing
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from typing import Any, Dict, List, Sequence

import _measuring
import _results
import models
from tqdm import tqdm

STEPS = 3  # until the memory no longer grows
SLOPE = 0.01
MODELS: List[_measuring.Cell] = [
    {"model": "FastSCNN", "crop": 256, "images": 4},
    {"model": "PSPNet-ResNet50", "crop": 128, "images": 2},
    {"model": "ResNet-50", "crop": 160, "images": 8},
    {"model": "depthwise chain", "crop": 112, "images": 8},
]
QUICK: List[_measuring.Cell] = [{"model": "depthwise chain", "crop": 16, "images": 1}]
WAYS: Dict[str, Dict[str, bool]] = {"dynamic": {}, "static": {"static_alloc": True, "static_shape": True}}
NAMES = {"plain": "nn.BatchNorm, LeakyReLU", "fused": "fused", "inplace": "fused, in place"}
LIMIT_S = 400  # of one process

EXPLANATION = f"""What a training step (forward, loss, backward, `trainer.step` without momentum) adds to the memory of
a process with one CPU device, gradients of the parameters and temporary space included, in MiB; every ReLU of the
network has been made a `LeakyReLU({SLOPE})`, which can be inverted. *Plain* is `nn.BatchNorm`, *fused* is `convert(net,
fuse=True)`, *in place* `convert(net, fuse=True, inplace=True)`. In each cell: by the resident set of the
process, and by MXNet's own count of what it has allocated. *Dynamic* is `net.hybridize()`, *static* that with
`static_alloc=True, static_shape=True`. *Layers* are those in place, which are not before an addition, of all.
Seconds are those of the last step, of one run."""


def main(arguments: Sequence[str]) -> int:
    options = _measuring.options(__doc__, arguments, quick="one small case: a smoke test")
    if options.child:
        with tempfile.TemporaryDirectory() as folder:
            return _measuring.answer(options.child, lambda cell: measured(cell, folder))
    env = _results.environment(["benchmarks/inplace.py", *arguments])
    cells = [{**model, "way": way} for model in (QUICK if options.quick else MODELS) for way in WAYS]
    results = []
    with tqdm(total=len(cells) * len(NAMES), desc="inplace", disable=options.no_progress or None) as progress:
        for cell in cells:
            result: Dict[str, Any] = dict(cell)
            for name in NAMES:
                progress.set_postfix_str(f"{cell['model']}, {cell['way']}, {name}")
                result[name] = in_a_process({**cell, "name": name})
                progress.update()
            results.append(result)
    header = [
        "model",
        "crop",
        "images",
        "graph",
        *(f"{name}, MiB" for name in ("plain", "fused", "in place")),
        "in place / plain",
        "layers",
    ]
    table = _results.table([*header, "seconds"], [row(result) for result in results])
    print(table)
    text = f"{EXPLANATION}\n\n{table}"
    _results.write(options.out, "inplace", "Memory of a training step in place", text, env, results, results)
    return 0


def row(result: Dict[str, Any]) -> List[str]:
    def both(form: str, values: Sequence[float]) -> str:
        return ", ".join(form.format(value) for value in values)

    keys = ("resident_mib", "counted_mib")
    texts = [result["model"], *(str(result[key]) for key in ("crop", "images")), result["way"]]
    texts += [both("{:.0f}", [result[name][key] for key in keys]) for name in NAMES]
    texts += [both("{:.2f}", [result["inplace"][key] / result["plain"][key] for key in keys])]
    texts += ["{} of {}".format(*result["inplace"]["layers"])]
    return [*texts, both("{:.2f}", [result[name]["step_s"] for name in NAMES])]


def in_a_process(cell: _measuring.Cell) -> Any:
    return _measuring.figures(__file__, cell, LIMIT_S, _measuring.GIVES_BACK)


def measured(cell: _measuring.Cell, folder: str) -> Dict[str, Any]:
    """``folder`` is for the file that MXNet's profiler replaces, whether it is wanted or not."""
    import mxnet as mx
    from mxnet.gluon import Trainer, nn

    import gluon_syncbn

    mx.random.seed(0)
    if cell["model"] == "ResNet-50":
        from gluoncv.model_zoo import get_model

        net = get_model("resnet50_v1b", classes=models.CLASSES)
    else:
        net = models.network(cell, nn.BatchNorm)
    make_leaky(net)
    net.initialize(mx.init.Xavier(), force_reinit=True)
    if cell["name"] != "plain":
        gluon_syncbn.convert(net, fuse=True, inplace=cell["name"] == "inplace")
    net.hybridize(**WAYS[cell["way"]])
    x, labels = models.batch(cell, mx.cpu())
    loss = models.criterion(cell)
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3})
    mx.nd.waitall()
    mx.profiler.set_config(profile_memory=True, aggregate_stats=True, filename=f"{folder}/profile.json")
    mx.profiler.set_state("run")
    before = _measuring.resident_mib()
    for _ in range(STEPS):
        begin = time.perf_counter()
        with mx.autograd.record():
            value = loss(net(x), labels)
        value.backward()
        trainer.step(cell["images"])
        mx.nd.waitall()
        seconds = time.perf_counter() - begin
    resident = _measuring.peak_mib() - before
    mx.profiler.set_state("stop")
    (counter,) = json.loads(mx.profiler.dumps(format="json"))["Memory"]["Device Storage"].values()  # in kB
    return {
        "resident_mib": resident,
        "counted_mib": counter["Max"] * 1000 / 2**20,
        "step_s": seconds,
        "layers": layers_in_place(net),
    }


def make_leaky(block: Any) -> None:
    from mxnet.gluon import nn

    for name, child in list(block._children.items()):
        if isinstance(child, nn.Activation) and child._act_type == "relu":
            block.register_child(nn.LeakyReLU(SLOPE), name)
            for attribute, value in list(vars(block).items()):
                if value is child:
                    object.__setattr__(block, attribute, block._children[name])
        else:
            make_leaky(child)


def layers_in_place(net: Any) -> List[int]:
    """How many, and of how many."""
    from gluon_syncbn.mxnet_side.patches import running_graph

    nodes = running_graph(net)[2]["nodes"]
    given = [node["attrs"] for node in nodes if node.get("attrs", {}).get("op_type") == "gluon_syncbn"]
    return [sum(attributes["inplace"] == "1" for attributes in given), len(given)]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
