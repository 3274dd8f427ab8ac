"""The contrastive example: it trains in every mode, resumes exactly, and says what is wrong in one line."""

import csv
import re
import signal
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from environments import ended
from places import CONTRASTIVE

pytest.importorskip("sklearn", reason="the digits and the kNN check come with scikit-learn")
Image = pytest.importorskip("PIL.Image", reason="pictures need Pillow")

MPIEXEC = [Path(sys.executable).with_name("mpiexec"), "-n", "2"]
SMALL = ["--size", 12, "--batch-size", 10, "--virtual-devices", 2, "--queue", 32]


def run(*arguments, script=CONTRASTIVE / "train.py", launcher=(), code=0):
    """A program after its end with this exit code."""
    return ended([*launcher, sys.executable, script, *arguments], code=code, OMP_NUM_THREADS=1)


def rows(folder):
    with (folder / "epochs.csv").open(newline="") as file:
        return [{k: float(v) if v else None for k, v in row.items()} for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """A folder of 24 images in two classes."""
    folder, random = tmp_path_factory.mktemp("images"), np.random.RandomState(0)
    for name in ("cats", "dogs"):
        (folder / name).mkdir()
        for i in range(12):
            pixels = random.randint(0, 255, (20 + i, 24, 3), dtype="uint8")
            Image.fromarray(pixels).save(folder / name / f"{i}.png")
    return folder


@pytest.fixture(scope="module")
def trained(images, tmp_path_factory):
    """The folder of a run of two epochs on two devices."""
    folder = tmp_path_factory.mktemp("trained")
    run(*SMALL, "--epochs", 2, "--cpus", 2, "--data", images, "--out", folder)
    return folder


@pytest.fixture
def train(contrastive_modules, capsys):
    """Calls train.py in this process: its exit code, and what it prints."""
    from train import main

    return lambda *options: (main(list(map(str, options))), "".join(capsys.readouterr()))


# train.py, and Ctrl-C while it looks at its first batch: no machine is so fast that it comes too late.
INTERRUPTED = f"""
import os, signal, sys
sys.path.insert(0, {str(CONTRASTIVE)!r})
import train
view = train.view
def interrupted(*arguments):
    train.view = view
    os.kill(os.getpid(), signal.SIGINT)
    return view(*arguments)
train.view = interrupted
sys.exit(train.main())
"""


@pytest.mark.parametrize("bn", ["sample-shuffle", pytest.param("local", marks=pytest.mark.slow)])
def test_two_processes_are_one_process_with_two_devices(bn, trained, images, tmp_path):
    """To the bit, also if they are interrupted and resumed, with slots of different size."""
    pytest.importorskip("mpi4py", reason="processes need mpi4py")
    one, two = trained, tmp_path / "two"
    settings = [*SMALL, "--bn", bn, "--epochs", 2, "--data", images]
    if bn == "local":
        one = tmp_path / "one"
        run(*settings, "--cpus", 2, "--out", one)
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    job = [*settings, "--kvstore", "mpi", "--out", two]
    run(*job, script=tmp_path / "interrupted.py", launcher=MPIEXEC, code=128 + signal.SIGINT)
    assert len(rows(two)) == 1
    run(*job, "--resume", launcher=MPIEXEC)
    assert rows(two) == rows(one)
    queues = [zipfile.ZipFile(two / f"last-{rank}.ckpt").read("queue.npz") for rank in range(2)]
    assert queues[0] == queues[1]


def test_the_knn_check_needs_classes(trained, images, tmp_path, train):
    assert rows(trained)[0]["knn"] is not None
    code, said = train(*SMALL, "--epochs", 1, "--data", images / "cats", "--out", tmp_path)
    assert code == 0 and "kNN no labels" in said


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("--batch-size 4", "--batch-size: 4 was given, expected at least one image for each slot"),
        ("--virtual-devices 1", "--bn sample-shuffle: one slot in all, expected at least 2"),
        ("--data nowhere", "--data nowhere: no such folder"),
        ("--resume", "last.ckpt does not exist"),
    ],
)
def test_errors_are_one_line(options, text, tmp_path, train):
    code, said = train(*options.split(), "--out", tmp_path)
    assert code == 2 and text in said and said.count("\n") == 1


def test_a_run_with_other_options_is_not_resumed(trained, images, train):
    before = (trained / "epochs.csv").read_bytes()
    options = [*SMALL, "--epochs", 2, "--cpus", 2, "--data", images, "--lr", 0.5, "--out", trained, "--resume"]
    code, said = train(*options)
    assert code == 2 and "was made with --lr 0.02, not 0.5" in said and said.count("\n") == 1
    assert (trained / "epochs.csv").read_bytes() == before


@pytest.mark.parametrize("loss", ["simclr", pytest.param("supervised", marks=pytest.mark.slow)])
def test_a_loss_over_the_batch_of_two_processes_is_that_of_one(loss):
    """Of 17 images, on two contexts each; contrastive.gather is all that connects their features."""
    pytest.importorskip("mpi4py", reason="processes need mpi4py")
    options = f"--loss {loss} --compare --cpus 2 --forwards 2 --batch-size 17 --steps 4".split()
    done = run(*options, script=CONTRASTIVE / "whole_batch.py", launcher=MPIEXEC)
    apart = re.search(r"2 processes with 2 contexts and one process: (\S+) apart", done.stdout)
    assert apart and 0 < float(apart[1]) < 1e-11, done.stdout
