"""The contrastive example: it trains in every mode, resumes exactly, and says what is wrong in one line."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

FOLDER = Path(__file__).parent.parent / "examples" / "contrastive"

pytest.importorskip("sklearn", reason="the digits and the kNN check come with scikit-learn")
Image = pytest.importorskip("PIL.Image", reason="pictures need Pillow")


def command(*arguments, script="train.py"):
    return [sys.executable, str(FOLDER / script), *map(str, arguments)]


def run(*arguments, script="train.py", limit=120):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command(*arguments, script=script), capture_output=True, text=True, timeout=limit, check=False, env=environment
    )


def rows(folder):
    with (folder / "epochs.csv").open(newline="") as file:
        return [{k: float(v) if v else None for k, v in row.items()} for row in csv.DictReader(file)]


@pytest.mark.parametrize("bn", ["local", "sync", "shuffle", "sample-shuffle"])
def test_each_mode_trains(bn, tmp_path):
    done = run("--bn", bn, "--epochs", 2, "--out", tmp_path, "--cpus", 2, "--virtual-devices", 4)
    assert done.returncode == 0, done.stderr
    assert "epoch 2: loss" in done.stdout
    first, second = rows(tmp_path)
    assert second["loss"] < np.log(513)  # what guessing among 513 keys costs
    assert first["loss"] != second["loss"]
    assert 0.3 < second["knn"] <= 1  # ten classes
    assert sorted(path.name for path in tmp_path.iterdir()) == ["epochs.csv", "last.ckpt"]


@pytest.mark.parametrize("bn", ["shuffle", "sample-shuffle"])
def test_interrupted_and_resumed_is_the_same(bn, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    settings = ["--bn", bn, "--epochs", 3, "--cpus", 2, "--virtual-devices", 2, "--queue", 128]
    assert run(*settings, "--out", whole).returncode == 0
    job = subprocess.Popen(command(*settings, "--out", parts), stderr=subprocess.PIPE, text=True)
    try:
        deadline = time.monotonic() + 60
        while not (parts / "epochs.csv").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        job.send_signal(signal.SIGINT)
        _, said = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 128 + signal.SIGINT, said
    done = len(rows(parts))
    assert done < 3, "it was too quick to be interrupted"
    assert f"stopped after epoch {done}; --resume goes on" in said
    resumed = run(*settings, "--out", parts, "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert rows(parts) == rows(whole)


def test_a_folder_of_images(tmp_path):
    random = np.random.RandomState(0)
    for name in ("cats", "dogs"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(12):
            pixels = random.randint(0, 255, (20 + i, 24, 3), dtype="uint8")
            Image.fromarray(pixels).save(tmp_path / "images" / name / f"{i}.png")
    settings = ["--data", tmp_path / "images", "--size", 12, "--batch-size", 8, "--virtual-devices", 2, "--queue", 32]
    done = run(*settings, "--epochs", 1, "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert rows(tmp_path / "run")[0]["knn"] is not None
    flat = run(*settings[2:], "--data", tmp_path / "images" / "cats", "--epochs", 1, "--out", tmp_path / "flat")
    assert flat.returncode == 0, flat.stderr
    assert "kNN no labels" in flat.stdout


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--batch-size", 4], "--batch-size: 4 was given, expected at least one image for each slot"),
        (["--queue", 16], "--queue: 16 was given, expected at least --batch-size, 32"),
        (["--virtual-devices", 1], "--bn shuffle: one slot in all, expected at least 2"),
        (["--queue", 0], "--queue: 0 was given, expected at least 1"),
        (["--momentum", 1.5], "--momentum: 1.5 was given, expected above 0 and below 1"),
        (["--data", "nowhere"], "--data nowhere: no such folder"),
        (["--batch-size", 2000, "--queue", 4000], "--batch-size: 2000 was given, expected at most 1437 images"),
        (["--resume"], "last.ckpt does not exist"),
    ],
)
def test_errors_are_one_line(arguments, text, tmp_path):
    done = run(*arguments, "--out", tmp_path)
    assert done.returncode == 2
    assert text in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_run_with_other_options_is_not_resumed(tmp_path):
    assert run("--epochs", 1, "--out", tmp_path).returncode == 0
    done = run("--epochs", 1, "--lr", 0.5, "--out", tmp_path, "--resume")
    assert done.returncode == 2
    assert "was made with --lr 0.02, not 0.5" in done.stderr


def test_the_comparison(tmp_path):
    done = run("--epochs", 1, "--out", tmp_path, script="demo.py")
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "curves.png").read_bytes().startswith(b"\x89PNG")
    assert "| sample-shuffle |" in done.stdout
    assert "local against shuffle: pretext accuracy" in done.stdout


def test_the_verdict_is_that_of_the_numbers():
    sys.path.insert(0, str(FOLDER))
    try:
        from demo import verdict
    finally:
        sys.path.remove(str(FOLDER))

    def curves(local, cure):
        def made(values):
            return [[{"loss": 1.0, "pretext": pretext, "knn": knn}] for pretext, knn in values]

        return {"local": made(local), "shuffle": made(cure), "sample-shuffle": made(cure)}

    assert "the leak shows" in verdict(curves([(0.9, 0.80), (0.92, 0.81)], [(0.3, 0.90), (0.32, 0.91)]))
    assert "no worse features" in verdict(curves([(0.9, 0.80), (0.92, 0.90)], [(0.3, 0.86), (0.32, 0.87)]))
    assert "no leak" in verdict(curves([(0.31, 0.80)], [(0.3, 0.90)]))
