"""Plain BatchNorm against SyncBatchNorm at 1 and 2 images per device, on four CPU devices.

    python examples/segmentation/compare.py

Trains FastSCNN on the drawn scenes, once for each seed, normalisation and number of images. Everything else
is the same: the network's initial values, the order and crops of the images, the learning rate. Each run is a
call of train.py. A JSON file keeps its result, so the next call continues a stopped comparison.
Writes runs/compare/{table.md,compare.png}.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import shutil
import subprocess
import sys
import time

from checkpoint import remove_strays, replace_file
from errors import UserError, run
from minidata import make_minidata
from options import Parser, number
from records import read_table
from tqdm import tqdm

DATA = os.path.join("runs", "minidata")
DEVICES = 4
IMAGES = (1, 2)  # per device
NORMS = {"BatchNorm": "", "SyncBatchNorm": "--syncbn"}
OPTIONS = (
    f"--model fastscnn --aux --aux-weight 0.4 --cpus {DEVICES} --crop-size 96 --base-size 120 "
    "--momentum 0.9 --weight-decay 1e-4 --workers 1 --test-batch-size 16 --no-progress"
)
# GluonCV's loss gives each device the gradient of the mean over its pixels. Trainer.step divides the sum of these
# gradients by the batch size. A learning rate proportional to the images per device gives both settings equal steps.
LR_PER_IMAGE = 0.05


def main(argv=None) -> int:
    parser = Parser(prog=os.path.basename(sys.argv[0]), description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=number(int, 2), default=3, metavar="N", help="number of runs of each kind (3)")
    parser.add_argument(
        "--epochs", type=number(int, 1), default=4, metavar="N", help="number of epochs, of 200 images each (4)"
    )
    parser.add_argument("--save-dir", default=os.path.join("runs", "compare"), metavar="DIR")
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar (as without a terminal)")
    args = parser.parse_args(argv)
    make_minidata(DATA)
    os.makedirs(args.save_dir, exist_ok=True)
    remove_strays(args.save_dir)
    jobs = list(itertools.product(range(args.seeds), IMAGES, NORMS))
    results = {}
    for seed, images, norm in tqdm(jobs, desc="runs", unit="run", disable=args.no_progress or None):
        result = results[seed, images, norm] = one_run(args, seed, images, norm)
        scores = "pixAcc {pixAcc:.3f} mIoU {mIoU:.3f} ({seconds:.0f} s)".format(**result)
        with tqdm.external_write_mode(sys.stdout):
            text = f"{norm}, {images} per device, seed {seed}"
            print(f"[{len(results)}/{len(jobs)}] {text}: {scores}", flush=True)
    text = table(results, args)
    with open(os.path.join(args.save_dir, "table.md"), "w") as file:
        file.write(text)
    draw(os.path.join(args.save_dir, "compare.png"), results)
    print("\n" + text)
    return 0


def one_run(args, seed: int, images: int, norm: str) -> dict:
    """The scores after the last epoch. The best epoch would be chosen by the validation images."""
    options = f"{OPTIONS} {NORMS[norm]} --batch-size {images * DEVICES} --lr {LR_PER_IMAGE * images}"
    options += f" --epochs {args.epochs} --seed {seed} --data-root {DATA}"
    name = os.path.join(args.save_dir, f"{norm}-{images}-{seed}")
    try:
        with open(name + ".json") as file:
            result = json.load(file)
        if result["options"] == options:
            return result
    except (OSError, ValueError):
        pass
    shutil.rmtree(name, ignore_errors=True)
    script = os.path.join(os.path.dirname(os.path.abspath(__file__)), "train.py")
    begin = time.time()
    with open(name + ".log", "w") as log:
        command = [sys.executable, script, *options.split(), "--save-dir", name]
        code = subprocess.call(command, stdout=log, stderr=subprocess.STDOUT)
    if code:
        raise UserError(f"train.py ended with {code}; see {name}.log")
    last = read_table(os.path.join(name, "epochs.csv"))[-1]
    result = {
        "options": options,
        "pixAcc": last["pixAcc"],
        "mIoU": last["mIoU"],
        "seconds": time.time() - begin,
    }

    def write(path):
        with open(path, "w") as file:
            json.dump(result, file)

    replace_file(name + ".json", write)
    return result


def column(results, images, norm, score):
    """One score of all seeds, in their order."""
    seeds = sorted({key[0] for key in results})
    return [results[seed, images, norm][score] for seed in seeds]


def mean_sd(values):
    """Mean and standard deviation of a sample."""
    import numpy as np

    return float(np.mean(values)), float(np.std(values, ddof=1))


def table(results, args) -> str:
    """Mean and spread of each kind of run, and one sentence for each number of images."""
    lines = [
        "| images per device | score | BatchNorm | SyncBatchNorm | difference |",
        "|---|---|---|---|---|",
    ]
    sentences = []
    for images in IMAGES:
        for score in ("pixAcc", "mIoU"):
            plain, sync = (column(results, images, norm, score) for norm in NORMS)
            differences = [b - a for a, b in zip(plain, sync)]
            cells = ["{:.3f} ± {:.3f}".format(*mean_sd(v)) for v in (plain, sync)]
            cells.append("{:+.3f} ± {:.3f}".format(*mean_sd(differences)))
            lines.append(f"| {images} | {score} | " + " | ".join(cells) + " |")
        sentences.append(sentence(images, differences))
    seconds = sum(result["seconds"] for result in results.values())
    lines += [
        "",
        f"Mean ± standard deviation over {args.seeds} seeds after {args.epochs} epochs of 200 images; "
        "the difference is taken seed by seed.",
        *sentences,
        f"{DEVICES} CPU devices on {os.cpu_count()} cores ({platform.machine()}), "
        f"Python {platform.python_version()}; {seconds / 60:.0f} min for {len(results)} runs.",
    ]
    return "\n".join(lines) + "\n"


def sentence(images: int, differences: list) -> str:
    """Sums up the mIoU differences, by a paired t-test at 5 %."""
    from scipy.stats import t

    mean, sd = mean_sd(differences)
    better = sum(d > 0 for d in differences)
    bound = t.ppf(0.975, len(differences) - 1) * sd / len(differences) ** 0.5
    text = (
        f"At {images} image{'s' if images > 1 else ''} per device SyncBatchNorm's mIoU was higher in "
        f"{better} of {len(differences)} seeds, on average by {mean:+.3f} "
        f"(95 % interval {mean - bound:+.3f} to {mean + bound:+.3f})"
    )
    if abs(mean) <= bound:
        return text + ": these runs do not show a difference."
    return text + (
        ": the seeds do not explain this difference." if mean > 0 else ": worse, and the seeds do not explain this."
    )


def draw(path: str, results) -> None:
    """Draws every run as a point, and the means as lines."""
    from pictures import new_figure

    figure = new_figure(7.5, 3.6)
    for axis, score in zip(figure.subplots(1, 2), ("mIoU", "pixAcc")):
        for at, images in enumerate(IMAGES):
            for offset, norm, colour in zip((-0.17, 0.17), NORMS, ("0.45", "C0")):
                values = column(results, images, norm, score)
                label = norm if at == 0 else None
                axis.plot([at + offset] * len(values), values, "o", color=colour, label=label, alpha=0.8)
                axis.hlines(mean_sd(values)[0], at + offset - 0.13, at + offset + 0.13, color=colour, linewidth=2)
        axis.set_xticks(range(len(IMAGES)), [str(i) for i in IMAGES])
        axis.set_xlabel("images on each device")
        axis.set_ylabel(f"validation {score}")
        axis.set_xlim(-0.5, len(IMAGES) - 0.5)
        axis.set_ylim(0, 1)
        axis.grid(axis="y", alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
    axis.legend(frameon=False, loc="lower right")
    figure.suptitle(f"FastSCNN on {DEVICES} devices: one point per seed, a line at the mean")
    figure.savefig(path)


if __name__ == "__main__":
    sys.exit(run(main))
