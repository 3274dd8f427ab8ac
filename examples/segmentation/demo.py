"""A small segmentation job: FastSCNN with SyncBatchNorm on two CPU devices, on drawn scenes.

    python examples/segmentation/demo.py

Writes a small data set once (runs/minidata) and trains for 6 epochs of 25 steps, by train.py with the options below.
Prints the scores next to those of the best constant prediction. Writes runs/demo/predictions.png and
runs/demo/curves.png. Writes and checks runs/demo/fastscnn.onnx, if ONNX is installed (requirements/onnx.txt). Ctrl-C
saves the run, and the next call continues it. A further call shows a finished demo again, in seconds. --restart trains
anew.
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
JOB = (  # on two devices, of one process or of two processes (distributed.py)
    "--model fastscnn --syncbn --aux --aux-weight 0.4 --crop-size 128 --base-size 160 "
    "--batch-size 8 --lr 0.2 --momentum 0.9 --weight-decay 1e-4"
)
OPTIONS = f"{JOB} --cpus 2 --epochs 6"
SHOWN = 5  # number of validation images in the picture


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
    options = OPTIONS.split() + ["--data-root", DATA, "--save-dir", SAVE, "--workers", given.workers]
    options += given.options.split()
    args = train_parser().parse_args(options)
    check_train(args)
    prepare_mxnet(args)

    from training import train

    earlier = earlier_state(args)
    if earlier:
        args.resume = os.path.join(SAVE, "last.ckpt")
    if earlier and earlier["epoch"] >= args.epochs:
        print(f"the demo is already finished (--restart trains anew); its result, from {SAVE}:")
    else:
        print("training: python examples/segmentation/train.py " + " ".join(options), flush=True)
        code = train(args)
        if code == EXIT_INTERRUPTED:
            print("call the demo again to continue", file=sys.stderr)
        if code:
            return code
    better = show(args)
    print(f"{time.time() - begin:.0f} s in all, at most {peak_memory():.1f} GB of memory")
    return 0 if better else 1


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


def show(args) -> bool:
    """Print the scores of the best epoch, draw both pictures and write the ONNX file.

    Return False if a constant is as good.
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

    devices = [mx.cpu(i) for i in range(args.cpus)]
    checkpoint = load_checkpoint(os.path.join(SAVE, "best.ckpt"))
    net = load_network(args, checkpoint, devices)
    scores = crop_scores(args, net, devices)
    pix_acc, miou = scores.get()
    constant = best_constant(scores.truth)

    data = Scenes(args.data_root, "val", "val", args.base_size, args.crop_size, seed=0)
    predictor = Predictor(net, devices[:1], args.base_size, args.crop_size)
    rows = []
    for i in np.linspace(0, len(data) - 1, SHOWN).astype(int):
        image = read_image(data.images[i])
        rows.append((image, read_mask(data.masks[i]).astype(np.int32) - 1, predictor.labels(image)))
    pictures = [os.path.join(SAVE, name) for name in ("predictions.png", "curves.png")]
    draw_predictions(pictures[0], rows, f"FastSCNN, SyncBatchNorm on {len(devices)} devices")
    tables = [read_table(os.path.join(SAVE, name)) for name in ("epochs.csv", "steps.csv")]
    draw_curves(pictures[1], *tables, constant=constant)

    print(f"{'':26}pixAcc   mIoU")
    print(f"{'FastSCNN, SyncBatchNorm':26}{pix_acc:6.3f} {miou:6.3f}")
    print(f"{'best constant prediction':26}{constant[0]:6.3f} {constant[1]:6.3f}")
    print("\n".join(pictures))
    corner = image.crop((0, 0, args.crop_size, args.crop_size))
    print(write_onnx(net, SAVE, args.model, normalised(corner).as_in_context(devices[0]).expand_dims(0)))
    return miou > constant[1] and pix_acc > constant[0]


def peak_memory() -> float:
    """In GB. The reader processes share nearly all of their memory with this process."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


if __name__ == "__main__":
    sys.exit(run(main))
