"""A training step of whole GluonCV networks on two CPU devices: synchronised, not synchronised, contrib's.

One step is the forward, the loss, the backward and `trainer.step` of a hybridized network, on both devices.
All implementations take turns in the same process, and a ratio is the median over the rounds. Contrib's
layer may hang: where the time limit runs out, its entry says so and the others are measured without it.

    python benchmarks/models.py             # writes benchmarks/results/models.{md,json,png}
    python benchmarks/models.py --quick     # a smoke test, its figures mean nothing
"""

import functools
import gc
import json
import sys
from pathlib import Path
from typing import Any, Callable, Dict, List, Sequence

import _measuring
import _results
from tqdm import tqdm

DEVICES = 2
CLASSES = 150  # as in ADE20K
CASES: List[_measuring.Cell] = [
    {"model": "FastSCNN", "crop": 128, "images": 4, "rounds": 12, "budget_s": 60},
    {"model": "PSPNet-ResNet50", "crop": 96, "images": 2, "rounds": 12, "budget_s": 100},
]
QUICK: List[_measuring.Cell] = [{"model": "FastSCNN", "crop": 64, "images": 1, "rounds": 2, "budget_s": 1}]

EXPLANATION = f"""One training step (forward, loss, backward, `trainer.step`) on {DEVICES} CPU devices, with
{CLASSES} classes and the auxiliary loss; images are per device. *Plain* is `nn.BatchNorm` on the same
devices, each with statistics of its own; the other columns are multiples of it, the median over interleaved
rounds. *Contrib* is `mxnet.gluon.contrib.nn.SyncBatchNorm` (`hang`: it did not end within the time limit)."""


def main(arguments: Sequence[str]) -> int:
    options = _measuring.options(__doc__, arguments, quick="one small case: a smoke test")
    if options.child:
        child(json.loads(options.child))
        return 0

    env = _results.environment(["benchmarks/models.py", *arguments])
    cells = [{**case, "contrib": True} for case in (QUICK if options.quick else CASES)]
    samples = []
    with tqdm(total=len(cells), desc="models", unit="model", disable=options.no_progress or None) as progress:
        for cell in cells:
            progress.set_postfix_str(cell["model"])
            # a process for each: MXNet keeps the temporary space that a network needed
            measured = _measuring.measure(__file__, [cell], 90 if options.quick else 240)
            ((_, taken, problems),) = measured
            samples.append({**cell, "problems": problems, "seconds": taken})
            progress.update()

    header = ["model", "crop", "images", "plain, s", "images / s", "ours / plain", "contrib / plain"]
    results = [_results.compared(sample) for sample in samples]
    table = _results.table(header, [row(result) for result in results])
    print(table)
    text = f"{EXPLANATION}\n\n{table}"
    _results.write(options.out, "models", "Training steps of whole networks", text, env, results, samples)
    plot(options.out / "models.png", results, env)
    return _results.report(results, "model")


def row(result: Dict[str, Any]) -> List[str]:
    texts = [result["model"], str(result["crop"]), str(result["images"])]
    if result["seconds"]:
        plain = result["seconds"]["plain"]["median"]
        texts += [f"{plain:.2f}", f"{DEVICES * result['images'] / plain:.1f}"]
    else:
        texts += ["-", "-"]
    return texts + [_results.entry(result, name) for name in ("ours", "contrib")]


def child(cells: Sequence[_measuring.Cell]) -> None:
    """Measures the cells in turn and prints one line of JSON for each."""
    import gluon_syncbn

    contexts = gluon_syncbn.cpu_devices(DEVICES, temp_copies=2048)
    import mxnet as mx

    for cell in cells:
        taken = _measuring.interleaved(steps(cell, contexts), cell["rounds"], cell["budget_s"])
        print(json.dumps(taken), flush=True)
        gc.collect()  # the networks of this cell
        mx.nd.waitall()


def steps(cell: _measuring.Cell, contexts: Sequence[Any]) -> Dict[str, Callable[[], None]]:
    """One training step of each implementation on the same images and labels."""
    import mxnet as mx
    from gluoncv.loss import MixSoftmaxCrossEntropyLoss
    from gluoncv.model_zoo.fastscnn import FastSCNN
    from gluoncv.model_zoo.pspnet import PSPNet
    from mxnet.gluon import Trainer, nn
    from mxnet.gluon.contrib.nn import SyncBatchNorm as Contrib

    import gluon_syncbn

    models = {"FastSCNN": FastSCNN, "PSPNet-ResNet50": functools.partial(PSPNet, backbone="resnet50")}
    layers: Dict[str, Any] = {"plain": nn.BatchNorm, "ours": gluon_syncbn.SyncBatchNorm}
    if cell["contrib"]:
        # not through norm_kwargs: FastSCNN makes two of its layers without them, and a wrong number hangs
        layers["contrib"] = functools.partial(Contrib, num_devices=len(contexts))

    crop, images = cell["crop"], cell["images"]
    mx.random.seed(0)
    xs = [mx.nd.random.normal(shape=(images, 3, crop, crop), ctx=ctx) for ctx in contexts]
    labels = [mx.nd.random.randint(0, CLASSES, (images, crop, crop), ctx=ctx) for ctx in contexts]
    labels = [label.astype("float32") for label in labels]
    criterion = MixSoftmaxCrossEntropyLoss(aux=True, aux_weight=0.4)

    def training_step(net: Any) -> Callable[[], None]:
        trainer = Trainer(net.collect_params(), "sgd", {"learning_rate": 1e-3, "momentum": 0.9})

        def step() -> None:
            with mx.autograd.record():
                losses = [criterion(*net(x), label) for x, label in zip(xs, labels)]
            mx.autograd.backward(losses)
            trainer.step(images * len(contexts))
            mx.nd.waitall()

        return step

    made = {}
    for name, layer in layers.items():
        net = models[cell["model"]](CLASSES, aux=True, pretrained_base=False, crop_size=crop, norm_layer=layer)
        net.initialize(mx.init.Xavier(), ctx=list(contexts), force_reinit=True)
        # Static shapes keep PSPNet's temporary space at 8 GB (without, 24 GB were not enough). On CPU contexts MXNet's
        # queue gets stuck with them after some hundreds of steps, more than are run here.
        net.hybridize(static_alloc=True, static_shape=True)
        made[name] = training_step(net)
    return made


def plot(path: Path, results: Sequence[Dict[str, Any]], env: Dict[str, str]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, len(results), figsize=(3.6 * len(results) + 1, 3.6), sharey=True, squeeze=False)
    names = ("plain", "ours", "contrib")
    ticks = ["nn.BatchNorm\n(not synchronised)", "gluon_syncbn", "contrib"]
    for axis, result in zip(axes[0], results):
        taken = result["seconds"]
        heights = [_results.ratio(result, name) if name in taken else 0 for name in names]
        axis.bar(names, heights, color=[_results.COLOURS[name] for name in names], width=0.65)
        for place, (name, height) in enumerate(zip(names, heights)):
            text = _results.entry(result, name)
            if name == "plain" and taken:
                text = f"{taken[name]['median']:.2f} s"
            axis.annotate(text, (place, height), (0, 3), textcoords="offset points", ha="center", fontsize=9)
        title = f"{result['model']}, crop {result['crop']}, {DEVICES} x {result['images']} images"
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xticks(range(len(names)), ticks, fontsize=9)
        axis.margins(y=0.12)
    axes[0][0].set_ylabel("time of a training step,\nas a multiple of nn.BatchNorm's")
    note = f"{env['processor']}, {env['cores']} cores, {env['native core']}"
    figure.text(0.5, 0.01, note, ha="center", fontsize=8, color="0.4")
    figure.tight_layout(rect=(0, 0.05, 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
