"""The same segmentation job with plain and with synchronised batch normalisation: four devices, an image on each.

    python examples/segmentation/demo.py

Writes a small data set once (runs/minidata). Trains FastSCNN with each normalisation for 4 epochs of 50 steps on four
CPU devices, by train.py with the options below. Prints the scores next to those of the best constant prediction. Writes
runs/demo/predictions.png and runs/demo/curves.png. Writes and checks runs/demo/fastscnn.onnx, if ONNX is installed
(requirements/onnx.txt). Ctrl-C saves the run, and the next call continues it. A further call shows a finished demo
again, in seconds. --restart trains anew.
"""

from __future__ import annotations

import os
import shutil
import sys
import time

from devices import prepare_mxnet
from errors import EXIT_INTERRUPTED, run
from minidata import make_minidata
from options import RUN_OPTIONS, Parser, check_train, train_parser

DATA = os.path.join("runs", "minidata")
SAVE = os.path.join("runs", "demo")
OPTIONS = (
    "--model fastscnn --cpus 4 --batch-size 4 --crop-size 96 --base-size 120 --epochs 4 --momentum 0.9 "
    "--weight-decay 1e-4"
)
# Each with the learning rate that compare.py found to be its best, by scenes that serve nothing else.
NORMS = {"BatchNorm": "--lr 0.3", "SyncBatchNorm": "--syncbn --lr 0.1"}
SHOWN = 5  # number of validation images in the picture
TITLE = "FastSCNN on four devices with one image each"


def main(argv=None) -> int:
    parser = Parser(prog=os.path.basename(sys.argv[0]), description=__doc__.splitlines()[0])
    parser.add_argument("--restart", action="store_true", help="delete an earlier demo and train anew")
    parser.add_argument("--workers", default="2", help="number of reader processes (2)")
    parser.add_argument("--options", default="", help="further options of train.py, in one string")
    given = parser.parse_args(argv)
    if given.restart:
        shutil.rmtree(SAVE, ignore_errors=True)

    begin = time.time()
    if make_minidata(DATA):
        print(f"wrote 200 + 50 scenes to {DATA}")
    jobs = {name: arguments(name, given) for name in NORMS}
    prepare_mxnet(jobs["SyncBatchNorm"])
    for name, args in jobs.items():
        code = trained(name, args)
        if code == EXIT_INTERRUPTED:
            print("call the demo again to continue", file=sys.stderr)
        if code:
            return code
    better = show(jobs)
    print(f"{time.time() - begin:.0f} s in all, at most {peak_memory():.1f} GB of memory")
    return 0 if better else 1


def arguments(name: str, given):
    """Those of train.py, with this normalisation."""
    options = f"{OPTIONS} {NORMS[name]} --data-root {DATA} --save-dir {os.path.join(SAVE, name)}"
    args = train_parser().parse_args(f"{options} --workers {given.workers} {given.options}".split())
    check_train(args)
    args.line = f"python examples/segmentation/train.py {options}"
    return args


def trained(name: str, args) -> int:
    """Train to the end, from where an earlier call has stopped. Return the exit code."""
    from training import train

    earlier = earlier_state(args)
    if earlier and earlier["epoch"] >= args.epochs:
        print(f"{name}: trained by an earlier call (--restart trains anew)")
        return 0
    if earlier:
        args.resume = os.path.join(args.save_dir, "last.ckpt")
    print(f"{name}: {args.line}", flush=True)
    return train(args)


def earlier_state(args) -> dict | None:
    """Return the saved state of an earlier run with the same options. Remove a run with other options."""
    from checkpoint import load_checkpoint

    last = os.path.join(args.save_dir, "last.ckpt")
    if not os.path.exists(last):
        return None
    state = load_checkpoint(last).state
    if all(state["options"][name] == getattr(args, name) for name in RUN_OPTIONS):
        return state
    print(f"{args.save_dir} holds a run with other options; training anew")
    shutil.rmtree(args.save_dir)
    return None


def show(jobs: dict) -> bool:
    """Print the scores of the best epochs, draw both pictures and write the ONNX file.

    Return False if synchronised statistics are no better than plain ones, or than a constant.
    """
    import mxnet as mx
    import numpy as np
    from checkpoint import load_checkpoint
    from dataset import Scenes, read_image, read_mask
    from deploy import write_onnx
    from evaluate import crop_scores
    from pictures import draw_curves, draw_predictions
    from predictor import Predictor, load_network, normalised
    from records import read_table
    from scores import best_constant

    args = jobs["SyncBatchNorm"]
    devices = [mx.cpu(i) for i in range(args.cpus)]
    data = Scenes(args.data_root, "val", "val", args.base_size, args.crop_size, seed=0)
    images = [read_image(data.images[i]) for i in np.linspace(0, len(data) - 1, SHOWN).astype(int)]
    truths = [read_mask(data.masks[i]).astype(np.int32) - 1 for i in np.linspace(0, len(data) - 1, SHOWN).astype(int)]
    found, predictions, tables = {}, {}, {}
    for name, job in jobs.items():
        net = load_network(job, load_checkpoint(os.path.join(job.save_dir, "best.ckpt")), devices)
        scores = crop_scores(job, net, devices)
        found[name] = scores.get()
        predictor = Predictor(net, devices[:1], job.base_size, job.crop_size)
        predictions[f"{name}: mIoU {found[name][1]:.2f}"] = [predictor.labels(image) for image in images]
        tables[name] = [read_table(os.path.join(job.save_dir, part)) for part in ("epochs.csv", "steps.csv")]
    found["best constant prediction"] = constant = best_constant(scores.truth)
    pictures = [os.path.join(SAVE, name) for name in ("predictions.png", "curves.png")]
    draw_predictions(pictures[0], images, truths, predictions, TITLE)
    draw_curves(pictures[1], tables, constant, TITLE)

    print(f"{'':26}pixAcc   mIoU")
    for name, (pix_acc, miou) in found.items():
        print(f"{name:26}{pix_acc:6.3f} {miou:6.3f}")
    print("\n".join(pictures))
    corner = images[0].crop((0, 0, args.crop_size, args.crop_size))
    print(write_onnx(net, SAVE, args.model, normalised(corner).as_in_context(devices[0]).expand_dims(0)))
    others = [found[name] for name in found if name != "SyncBatchNorm"]
    return all(ours > other for one in others for ours, other in zip(found["SyncBatchNorm"], one))


def peak_memory() -> float:
    """In GB. The reader processes share nearly all of their memory with this process."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    sys.exit(run(main))
