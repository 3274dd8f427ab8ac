"""Trains in each mode, with and without the leak, draws the curves, and prints what they show.

    python examples/contrastive/demo.py               # one seed
    python examples/contrastive/demo.py --seeds 3     # mean and standard deviation

Complete runs are not repeated. Delete the folder to start over.
"""

from __future__ import annotations

import argparse
import csv
import os
import statistics
import subprocess
import sys
from pathlib import Path

from tqdm import tqdm

TRAIN = Path(__file__).with_name("train.py")
MODES = ("local", "sync", "shuffle", "sample-shuffle")


def main(argv=None) -> int:
    parser = argparse.ArgumentParser(description="MoCo with and without the leak through batch statistics")
    parser.add_argument("--seeds", type=int, default=1, help="number of seeds, from 1 on")
    parser.add_argument("--epochs", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/demo-contrastive"))
    options = parser.parse_args(argv)
    if options.seeds < 1 or options.epochs < 1:
        parser.error("--seeds, --epochs: expected at least 1")
    options.out.mkdir(parents=True, exist_ok=True)
    seeds = range(1, options.seeds + 1)
    runs = [(bn, seed) for seed in seeds for bn in MODES]
    for bn, seed in tqdm(runs, desc="runs", unit="run", disable=None):
        run(bn, seed, options)
    curves = {bn: [read(options.out / f"{bn}-{seed}") for seed in seeds] for bn in MODES}
    plot(curves, options.out / "curves.png")
    print(table(curves))
    print(verdict(curves))
    print(f"curves: {options.out / 'curves.png'}")
    return 0


def run(bn: str, seed: int, options: argparse.Namespace) -> None:
    folder = options.out / f"{bn}-{seed}"
    if len(read(folder)) >= options.epochs:
        return
    command = [sys.executable, str(TRAIN), "--bn", bn, "--seed", str(seed), "--epochs", str(options.epochs)]
    command += ["--out", str(folder)] + (["--resume"] if (folder / "last.ckpt").exists() else [])
    # One thread: more threads do not help on images this small.
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=3600, check=False)
    if done.returncode != 0 or len(read(folder)) < options.epochs:
        raise SystemExit(f"demo.py: {' '.join(command[1:])} ended with exit code {done.returncode}; call demo.py again "
                         "to continue")  # fmt: skip


def read(folder: Path) -> list:
    try:
        with (folder / "epochs.csv").open(newline="") as file:
            return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    except FileNotFoundError:
        return []


def spread(values: list) -> str:
    mean = f"{statistics.mean(values):.3f}"
    return mean if len(values) == 1 else f"{mean} +- {statistics.stdev(values):.3f}"


def last(curves: dict, bn: str, name: str) -> list:
    return [rows[-1][name] for rows in curves[bn]]


def table(curves: dict) -> str:
    lines = ["| --bn | loss | pretext accuracy | kNN accuracy |", "|---|---|---|---|"]
    for bn in curves:
        cells = [spread(last(curves, bn, name)) for name in ("loss", "pretext", "knn")]
        lines.append(f"| {bn} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def verdict(curves: dict) -> str:
    """Compares `local` with each remedy: are its keys found more often, and are its features worse?"""
    words = []
    for remedy in ("shuffle", "sample-shuffle"):
        pretext = statistics.mean(last(curves, "local", "pretext")) - statistics.mean(last(curves, remedy, "pretext"))
        knn = statistics.mean(last(curves, remedy, "knn")) - statistics.mean(last(curves, "local", "knn"))
        noise = 0.0
        if len(curves[remedy]) > 1:
            noise = max(statistics.stdev(last(curves, bn, "knn")) for bn in ("local", remedy))
        if pretext > 0.1 and knn > noise:
            says = "the leak shows: local finds its keys more easily, and its features are worse"
        elif pretext > 0.1:
            says = "local finds its keys more easily, but these runs show no worse features"
        else:
            says = "these runs show no leak"
        words.append(f"local against {remedy}: pretext accuracy {pretext:+.3f}, kNN of {remedy} {knn:+.3f}; {says}.")
    return "\n".join(words)


def plot(curves: dict, path: Path) -> None:
    sys.path.append(str(TRAIN.parents[1]))
    import style

    colours = dict(zip(MODES, (style.LOCAL, style.SYNC, style.SHUFFLE, style.SAMPLES)))
    figure, axes = style.figure(10, 4, 2)
    titles = "pretext: the own key found among K + 1", "kNN on held-out images"
    for axis, name, title in zip(axes, ("pretext", "knn"), titles):
        epochs = [row["epoch"] for row in next(iter(curves.values()))[0]]
        series = {}
        for bn, runs in curves.items():
            values = [[rows[i][name] for rows in runs] for i in range(len(epochs))]
            series[bn, colours[bn]] = [(min(v), statistics.mean(v), max(v)) for v in values]
        style.lines(axis, epochs, series, labelled=axis is axes[1], band=True)
        axis.set(title=title, xlabel="epoch", ylabel="accuracy")
    seeds = len(curves["local"])
    own, cured = (statistics.mean(last(curves, bn, "pretext")) for bn in ("local", "sample-shuffle"))
    worse, better = (statistics.mean(last(curves, bn, "knn")) for bn in ("local", "sample-shuffle"))
    found = (
        f"local finds its keys in {own:.0%}, sample-shuffle in {cured:.0%}; kNN accuracy {worse:.3f} and {better:.3f}"
    )
    count = f"{seeds} seed{'s' if seeds > 1 else ''}"
    style.save(figure, path, found, f"{count}; lines are means, bands the least and the most", __file__)


if __name__ == "__main__":
    sys.exit(main())
