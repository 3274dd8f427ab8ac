"""Memory and time of a training step with `gluon_syncbn.recompute` and without.

Each case is measured in a process of its own, on one CPU device: the most memory that the process has had at once (the
kernel's high-water mark of its resident set), less what it had before the first step.

    python benchmarks/recompute.py             # writes benchmarks/results/recompute.{md,json,png}
    python benchmarks/recompute.py --quick     # a smoke test, its figures mean nothing
"""

import json
import sys
import time
from typing import Any, Dict, List, Sequence

import _measuring
import _results
from _networks import batch, criterion, network
from tqdm import tqdm

STEPS = 2
CASES: List[_measuring.Cell] = [
    {"model": "ResNet-50", "crop": 224, "images": 16},
    {"model": "PSPNet-ResNet50", "crop": 240, "images": 2},
]
QUICK: List[_measuring.Cell] = [{"model": "ResNet-50", "crop": 32, "images": 1}]
LIMIT_S = 400  # of one process

EXPLANATION = f"""The most memory that a process had at once in {STEPS} training steps (forward, loss, backward,
`trainer.step`) on one CPU device, in MiB above what it had with parameters and gradients before the first step, with
SyncBatchNorm in eager mode. *Recomputed* are all residual units of the ResNet, each by itself, with
`gluon_syncbn.recompute`; the seconds are those of the last step, and of one run each."""


def main(arguments: Sequence[str]) -> int:
    options = _measuring.options(__doc__, arguments, child)
    env = _results.environment(["benchmarks/recompute.py", *arguments])
    cases = QUICK if options.quick else CASES
    results = []
    with tqdm(total=2 * len(cases), desc="recompute", unit="process") as progress:
        for case in cases:
            result: Dict[str, Any] = dict(case)
            for name, recomputed in (("kept", False), ("recomputed", True)):
                progress.set_postfix_str(f"{case['model']}, {name}")
                cell = {**case, "recomputed": recomputed}
                result[name] = _measuring.figures(__file__, cell, LIMIT_S, _measuring.GIVES_BACK)
                progress.update()
            results.append(result)
    header = ["model", "crop", "images", "kept, MiB", "recomputed, MiB", "ratio", "kept, s", "recomputed, s"]
    title = "Memory of a training step, with activations kept or recomputed"
    parts = [EXPLANATION, [header, *map(row, results)]]
    _results.write(options.out, "recompute", title, parts, env, results, results)
    return 0


def row(result: Dict[str, Any]) -> List[str]:
    kept, recomputed = result["kept"], result["recomputed"]
    texts = [result["model"], str(result["crop"]), str(result["images"])]
    texts += [f"{one['peak_mib']:.0f}" for one in (kept, recomputed)]
    texts += [f"{recomputed['peak_mib'] / kept['peak_mib']:.2f}"]
    return texts + [f"{one['step_s']:.1f}" for one in (kept, recomputed)]


def child(cells: Sequence[_measuring.Cell]) -> None:
    """Measures the only cell, and prints a line of JSON."""
    import mxnet as mx
    from mxnet.gluon import Trainer

    import gluon_syncbn

    (cell,) = cells
    mx.random.seed(0)
    net, loss = network(cell, gluon_syncbn.SyncBatchNorm), criterion(cell)
    x, labels = batch(cell, mx.cpu())
    net.initialize(mx.init.Xavier(), force_reinit=True)
    net(x[:1])  # which fixes the shapes
    if cell["recomputed"]:
        for stage in (net.layer1, net.layer2, net.layer3, net.layer4):
            for unit in stage:
                gluon_syncbn.recompute(unit)
    trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3, "momentum": 0.9})
    mx.nd.waitall()
    before = _measuring.resident_mib()
    for _ in range(STEPS):
        begin = time.perf_counter()
        with mx.autograd.record():
            value = loss(net(x), labels)
        value.backward()
        trainer.step(cell["images"])
        mx.nd.waitall()
        seconds = time.perf_counter() - begin
    peak = _measuring.peak_mib()
    print(json.dumps({"before_mib": before, "peak_mib": peak - before, "step_s": seconds}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
