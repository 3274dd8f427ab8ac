"""Plain BatchNorm against SyncBatchNorm at 1 to 8 images per device, on four devices.

    python examples/segmentation/compare.py

Trains two networks on drawn scenes (`trial.py`). First, each network, normalisation and number of images gets the
learning rate of RATES with the best mIoU, by a seed and scenes that serve nothing else. Then it trains once for each
seed. Both normalisations have the same initial values, and the same order and crops of the images.
A JSON file keeps the result of each run, so the next call continues a stopped comparison.
Writes runs/compare/{table.md,compare.png}.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import sys
import time

sys.path.append(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
from errors import run
from options import Parser, number
from tqdm import tqdm

RATES = {"FastSCNN": (0.01, 0.03, 0.1, 0.3, 1.0), "FCN-ResNet20": (0.003, 0.01, 0.03, 0.1, 0.3)}
NETS = tuple(RATES)
IMAGES = (1, 2, 4, 8)  # per device
NORMS = ("BatchNorm", "SyncBatchNorm")
SCENES = {"training": 200, "validation": 50, "tuning": 50}
TUNING = -1  # in the place of a seed
SAVED = "mIoU as saved"  # the others have `constant_channels_kept`
SCORES = ("pixAcc", "mIoU", SAVED)


def main(argv=None) -> int:
    parser = Parser(prog=os.path.basename(sys.argv[0]), description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=number(int, 2), default=5, metavar="N", help="number of runs of each kind (5)")
    parser.add_argument(
        "--epochs", type=number(int, 1), default=3, metavar="N", help="number of epochs, of 200 images each (3)"
    )
    parser.add_argument("--save-dir", default=os.path.join("runs", "compare"), metavar="DIR")
    parser.add_argument("--no-progress", action="store_true", help="show no progress bar (as without a terminal)")
    args = parser.parse_args(argv)
    os.makedirs(args.save_dir, exist_ok=True)
    trials = Trials(args)
    kinds = list(itertools.product(NETS, IMAGES, NORMS))
    tunings = [(*kind, rate) for kind in kinds for rate in RATES[kind[0]]]
    with tqdm(total=len(tunings) + len(kinds) * args.seeds, unit="run", disable=args.no_progress or None) as bar:
        tuned = {tuning: trials.result(*tuning, TUNING, bar)["mIoU"] for tuning in tunings}
        rates = {kind: max(RATES[kind[0]], key=lambda rate, kind=kind: tuned[(*kind, rate)]) for kind in kinds}
        results = {
            (*kind, seed): trials.result(*kind, rates[kind], seed, bar) for seed in range(args.seeds) for kind in kinds
        }
    text = table(results, rates, args)
    with open(os.path.join(args.save_dir, "table.md"), "w", encoding="utf-8") as file:
        file.write(text)
    draw(os.path.join(args.save_dir, "compare.png"), results)
    print("\n" + text)
    return 0


class Trials:
    """Runs, and the files of their results."""

    def __init__(self, args):
        self.args = args
        self._scenes = {}

    def result(self, net: str, images: int, norm: str, rate: float, seed: int, bar) -> dict:
        """The scores after the last epoch. The best epoch would be chosen by the validation images."""
        kind = {"net": net, "images": images, "norm": norm, "rate": rate, "seed": seed}
        path = os.path.join(self.args.save_dir, "-".join(map(str, kind.values())) + ".json")
        kind.update(epochs=self.args.epochs, scenes=SCENES)
        result = self._read(path, kind)
        if result is None:
            result = {**kind, **self._run(net, images, norm, rate, seed)}
            with open(path + ".tmp", "w") as file:
                json.dump(result, file)
            os.replace(path + ".tmp", path)
        with tqdm.external_write_mode(sys.stdout):
            scores = "pixAcc {pixAcc:.3f} mIoU {mIoU:.3f} ({seconds:.0f} s)".format(**result)
            name = "tuning" if seed == TUNING else f"seed {seed}"
            print(f"{net}, {norm}, {images} per device, rate {rate}, {name}: {scores}", flush=True)
        bar.update()
        return result

    @staticmethod
    def _read(path: str, kind: dict) -> dict | None:
        try:
            with open(path) as file:
                result = json.load(file)
        except FileNotFoundError:
            return None
        return result if kind.items() <= result.items() else None

    def _run(self, net, images, norm, rate, seed) -> dict:
        import mxnet as mx
        import trial

        if not self._scenes:
            for part, (name, count) in enumerate(SCENES.items()):
                self._scenes[name] = trial.Scenes(part, count)
        begin = time.time()
        first = seed if seed >= 0 else 2**31 - 1  # NumPy takes no negative seed
        scenes = self._scenes["training"], self._scenes["tuning" if seed == TUNING else "validation"]
        batch = images * trial.DEVICES
        arrays = trial.trained(
            net, trial.NORMS[norm], batch, rate, first, self.args.epochs, scenes[0], contexts=[mx.cpu()]
        )
        return {**trial.scores(net, arrays, scenes[1]), "seconds": time.time() - begin}


def column(results, kind, score):
    """One score of all seeds, in their order."""
    return [result[score] for key, result in results.items() if key[:3] == kind]


def mean_sd(values):
    """Mean and standard deviation of a sample."""
    import numpy as np

    return float(np.mean(values)), float(np.std(values, ddof=1))


def table(results, rates, args) -> str:
    """Mean and spread of each kind of run and of the differences, and the rates."""
    lines = [
        "| network | images per device | score | BatchNorm | SyncBatchNorm | difference | 95 % interval |",
        "|---|---|---|---|---|---|---|",
    ]
    for net, images, score in itertools.product(NETS, IMAGES, SCORES):
        plain, sync = pair = [column(results, (net, images, norm), score) for norm in NORMS]
        if score == SAVED and pair == [column(results, (net, images, norm), "mIoU") for norm in NORMS]:
            continue  # no channel was constant in training
        differences = [b - a for a, b in zip(plain, sync)]
        cells = ["{:.3f} ± {:.3f}".format(*mean_sd(v)) for v in (plain, sync)]
        cells += ["{:+.3f} ± {:.3f}".format(*mean_sd(differences)), "{:+.3f} to {:+.3f}".format(*interval(differences))]
        lines.append(f"| {net} | {images} | {score} | " + " | ".join(cells) + " |")
    lines += ["", "| network | images per device | rate of BatchNorm | rate of SyncBatchNorm |", "|---|---|---|---|"]
    for net, images in itertools.product(NETS, IMAGES):
        lines.append(f"| {net} | {images} | " + " | ".join(str(rates[net, images, norm]) for norm in NORMS) + " |")
    minutes = sum(result["seconds"] for result in results.values()) / 60
    lines += [
        "",
        f"Mean ± standard deviation over {args.seeds} seeds after {args.epochs} epochs of {SCENES['training']} images; "
        f"the difference is taken seed by seed. {os.cpu_count()} cores ({platform.machine()}), "
        f"Python {platform.python_version()}; {minutes:.0f} min for these {len(results)} runs.",
    ]
    return "\n".join(lines) + "\n"


def interval(differences: list) -> tuple:
    """Of the mean, by a paired t-test at 5 %."""
    from scipy.stats import t

    mean, sd = mean_sd(differences)
    bound = t.ppf(0.975, len(differences) - 1) * sd / len(differences) ** 0.5
    return mean - bound, mean + bound


def effect(results, net: str, images: int) -> str:
    """What synchronised statistics do, where the interval of the differences leaves 0 out."""
    plain, sync = (column(results, (net, images, norm), "mIoU") for norm in NORMS)
    low, high = interval([b - a for a, b in zip(plain, sync)])
    return "gain" if low > 0 else "loss" if high < 0 else "no difference"


EFFECTS = ("gain", "loss", "no difference")


def draw(path: str, results) -> None:
    """Means and ranges over the seeds. The title says from which number of images on no net shows a difference."""
    import style

    some = [images for images in IMAGES if {effect(results, net, images) for net in NETS} != {"no difference"}]
    title = f"With more than {max(some, default=0)} images on each of four devices, these runs show no difference"

    figure, axes = style.figure(8.5, 4, len(NETS), sharey=True)
    for axis, net in zip(axes, NETS):
        series = {}
        for norm, colour in zip(NORMS, (style.PLAIN, style.SYNC)):
            values = [column(results, (net, images, norm), "mIoU") for images in IMAGES]
            series[norm, colour] = [(min(one), mean_sd(one)[0], max(one)) for one in values]
        axis.set_xscale("log", base=2)
        style.lines(axis, IMAGES, series, labelled=net == NETS[-1])
        axis.set_xlabel("images on each device")
        effects = {images: effect(results, net, images) for images in IMAGES}
        found = [(word, [str(images) for images in IMAGES if effects[images] == word]) for word in EFFECTS]
        axis.set_title(f"{net}\n" + ", ".join(f"{word} with {' and '.join(n)}" for word, n in found if n), fontsize=9)
    axes[0].set_ylabel("validation mIoU")
    axes[0].set_ylim(bottom=0)
    seeds = len({key[-1] for key in results})
    note = f"n = {seeds} seeds; points are means, whiskers the least and the most; drawn scenes, few epochs"
    style.save(figure, path, title, note, __file__)


if __name__ == "__main__":
    sys.exit(run(main))
