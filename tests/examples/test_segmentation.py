"""examples/segmentation: the programs as a user calls them, in one process and in two, and bad input."""

import csv
import importlib
import os
import re
import shutil
import signal
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
from environments import ended
from PIL import Image
from places import PACKAGE, SEGMENTATION
from thread_transport import Job, everywhere

TINY = "--model fastscnn --aux --crop-size 32 --base-size 40 --batch-size 4 --test-batch-size 4 --lr 0.05 --epochs 2"
TINY = TINY.split()
TWO = "--cpus 2 --syncbn".split()
FILES = {"last.ckpt", "best.ckpt", "epochs.csv", "steps.csv"}
IMAGE, MASK = (
    f"ADEChallengeData2016/{name}"
    for name in ("images/training/ADE_train_{}.jpg", "annotations/training/ADE_train_{}.png")
)
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("segmentation_modules")]


def train(*options, program=SEGMENTATION / "train.py", launcher=(), code=0):
    """What train.py, or a program in its place, prints until it ends with this exit code."""
    command = [*launcher, sys.executable, program, *options]
    done = ended(command, PACKAGE.parent, code=code, timeout=100, OMP_NUM_THREADS=1)
    return done.stdout + done.stderr


# train.py, and Ctrl-C in one of its steps, as a terminal sends it: to the workers as well. The step is not over before
# the signal has come.
INTERRUPTED = f"""
import contextlib, os, signal, sys, time
with contextlib.suppress(PermissionError):  # mpiexec's processes lead groups already
    os.setpgrp()
sys.path.insert(0, {str(SEGMENTATION)!r})
import train
from errors import run
def change():
    import numpy, training
    train_step = training.Run._train_step
    def interrupted(run, images, masks, interrupt):
        if (run.epoch, run.step) == {{at}}:
            os.killpg(0, signal.SIGINT)
            while not interrupt.requested:
                time.sleep(0.01)
        return train_step(run, images, masks, interrupt)
    training.Run._train_step = interrupted
    {{more}}
# As late as train.py itself imports these.
train.prepare_mxnet, late = lambda args: (late(args), change()), train.prepare_mxnet
sys.exit(run(train.main))
"""


def interrupted(path, at, more=""):
    path.write_text(INTERRUPTED.format(at=at, more=more))
    return path


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def pixels(path):
    with Image.open(path) as image:
        return np.array(image)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The programs set OMP_NUM_THREADS, which is nobody else's business when they run in this process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def data(tmp_path_factory, segmentation_modules):
    """A set of 16 + 5 scenes: of the last batch in validation, one of two processes has nothing."""
    from minidata import make_minidata

    root = tmp_path_factory.mktemp("data")
    make_minidata(str(root), 16, 5)
    return root


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data):
    """Folder of a finished run on two devices: 2 epochs of 4 steps."""
    folder = tmp_path_factory.mktemp("trained")
    train(*TINY, *TWO, "--workers", "2", "--data-root", data, "--save-dir", folder / "run")
    return folder / "run"


@pytest.fixture
def call(capsys):
    """Calls a program in this process: its exit code, and what it prints."""

    def called(name, *options):
        from errors import run

        try:
            code = run(importlib.import_module(name).main, list(map(str, options)))
        except SystemExit as end:  # argparse's way
            code = end.code
        return code, "".join(capsys.readouterr())

    return called


@pytest.fixture
def refused(call):
    """Calls train.py with bad input: the one line that it prints."""

    def said(*options):
        code, line = call("train", *TINY, *options)
        assert code == 2 and line.count("\n") == 1 and " error: " in line, (code, line)
        return line

    return said


def test_scores_against_the_definition(rng):
    import mxnet as mx
    from scores import Scores, best_constant

    truth = rng.randint(-1, 4, (3, 8, 8))  # 4 of 6 classes occur
    logits = rng.randn(3, 6, 8, 8).astype("float32")
    scores = Scores(6)
    for i in range(3):
        scores.update([mx.nd.array(truth[i : i + 1], dtype="int32")], [mx.nd.array(logits[i : i + 1])])
    known = truth >= 0

    def definition(prediction):
        pairs = [((prediction == c) & known, truth == c) for c in range(4)]
        return (prediction == truth)[known].mean(), np.mean([(a & b).sum() / (a | b).sum() for a, b in pairs])

    np.testing.assert_allclose(scores.get(), definition(logits.argmax(1)), rtol=1e-12)
    brute = np.array([definition(np.full_like(truth, c)) for c in range(6)])
    np.testing.assert_allclose(best_constant(scores.truth), brute.max(0), rtol=1e-12)


def test_training_on_two_devices_learns_and_keeps_records(trained):
    epochs, steps = rows(trained / "epochs.csv"), rows(trained / "steps.csv")
    assert [(row["epoch"], row["step"]) for row in steps] == [(str(e), str(s)) for e in (1, 2) for s in range(1, 5)]
    loss = np.array([float(row["loss"]) for row in steps])
    assert np.mean(loss[4:]) < 0.8 * np.mean(loss[:4])
    rates = [0.05 * (1 - min(i, 7) / 7) ** 0.9 for i in range(1, 9)]
    np.testing.assert_allclose([float(row["lr"]) for row in steps], rates, atol=1e-6)
    assert [row["epoch"] for row in epochs] == ["1", "2"]
    np.testing.assert_allclose([float(row["train_loss"]) for row in epochs], loss.reshape(2, 4).mean(1), rtol=1e-5)
    for row in epochs:
        assert 0 <= float(row["mIoU"]) <= float(row["pixAcc"]) <= 1
        float(row["images_per_second"])  # a number
    assert {path.name for path in trained.iterdir()} == FILES
    best, last = (zipfile.ZipFile(trained / name) for name in ("best.ckpt", "last.ckpt"))
    assert set(best.namelist()) == {"model.params", "trainer.states", "state.json"}
    assert last.testzip() is None


def test_two_processes_interrupted_and_resumed_train_as_one_does(trained, tmp_path, data):
    """Ctrl-C in mid-epoch, then --resume with another number of workers: the same bits at the end as one process has
    with two devices. The second process is to write nothing, and to take the first weights from the first.
    """
    pytest.importorskip("mpi4py", reason="processes need mpi4py")
    save, never = tmp_path / "run", 99
    options = [*TINY, "--syncbn", "--kvstore", "mpi", "--cpus", "1", "--data-root", data]
    other_seed = "training.seed_all = lambda seed: numpy.random.seed(99)"

    def job(at, *more, code=0):
        first = interrupted(tmp_path / "first.py", at)
        second = interrupted(tmp_path / "second.py", at, other_seed)
        launcher = [Path(sys.executable).with_name("mpiexec"), "-n", "1", sys.executable, first, *options, *more]
        launcher += ["--save-dir", save, ":", "-n", "1"]
        return train(*options, *more, "--save-dir", tmp_path / "never", program=second, launcher=launcher, code=code)

    said = job((1, 1), "--workers", "1", code=130)  # and no worker stays, which would hold stdout
    assert said.count("stopping after this step") == 1, said
    assert said.count("interrupted in epoch 2 after step 2 of 4; saved, continue with --resume") == 1, said
    assert len(rows(save / "steps.csv")) == 6

    gone = ended(["sh", "-c", "echo $$"]).stdout.strip()
    (save / f"best.ckpt.{os.uname().nodename}-{gone}.tmp").touch()  # as if a process had been killed
    said = job((never, 0), "--workers", "0", "--resume", save / "last.ckpt")
    assert said.count("epoch 2/2: loss") == 1
    assert {path.name for path in save.iterdir()} == FILES
    assert not (tmp_path / "never").exists(), "the second process has written something"
    assert rows(save / "steps.csv") == rows(trained / "steps.csv")  # two terms have one sum, and MPI adds nothing else
    whole, parts = (zipfile.ZipFile(folder / "last.ckpt").read("model.params") for folder in (trained, save))
    assert whole == parts
    for a, b in zip(rows(save / "epochs.csv"), rows(trained / "epochs.csv")):
        for name in ("train_loss", "pixAcc", "mIoU"):
            np.testing.assert_allclose(float(a[name]), float(b[name]), rtol=1e-2, atol=1e-3)


def test_a_used_folder_is_not_overwritten_without_a_word(trained, tmp_path, data, call, refused):
    run, options = tmp_path / "run", ["--data-root", data, "--save-dir", tmp_path / "run"]
    shutil.copytree(trained, run)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    line = refused(*options)
    assert f"--save-dir {run}: holds a run already; --resume {run / 'last.ckpt'} continues it" in line
    assert "holds a run already" in refused(*TWO, *options, "--resume", trained / "last.ckpt")
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before

    short = "--epochs 1 --cpus 1 --workers 0 --no-val --overwrite".split()
    assert call("train", *TINY, *options, *short)[0] == 0
    assert {path.name for path in run.iterdir()} == {"last.ckpt", "epochs.csv", "steps.csv"}  # nothing of the old run
    assert len(rows(run / "epochs.csv")) == 1


# MXNet leaves the file of the optimizer's states to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_finished_run_takes_further_epochs(trained, tmp_path, data, call, refused):
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    options = [*TWO, "--data-root", data, "--save-dir", run, "--resume", run / "last.ckpt"]
    code, said = call("train", *TINY, *options, "--epochs", "3", "--workers", "0", "--no-val")
    assert code == 0 and "2 epochs are done; the learning rate continues as in a run of 3" in said
    steps = rows(run / "steps.csv")
    assert [row["epoch"] for row in steps] == [str(epoch) for epoch in (1, 2, 3) for _ in range(4)]
    assert steps[:8] == rows(trained / "steps.csv")
    # What GluonCV's "poly" has after each of 12 steps, in place of the 0 where 8 steps end.
    rates = [0.05 * (1 - min(step, 11) / 11) ** 0.9 for step in range(9, 13)]
    np.testing.assert_allclose([float(row["lr"]) for row in steps[8:]], rates, rtol=1e-4, atol=1e-9)
    # An unfinished run, and one that asks for fewer, keep what they were begun with.
    assert "--epochs 2: the checkpoint" in refused(*options)


# Never back in Python for long, as in a wait for the engine.
TWO_SIGNALS = f"""
import ctypes, os, signal, sys, threading, time
sys.path.insert(0, {str(SEGMENTATION)!r})
from interrupt import Interrupt
def send():
    os.kill(os.getpid(), signal.SIGTERM)
    while not interrupt.requested:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)
with Interrupt() as interrupt:
    threading.Thread(target=send).start()
    while True:
        ctypes.CDLL(None).sleep(60)
"""


def test_the_second_signal_ends_a_step_that_does_not_end():
    done = ended([sys.executable, "-c", TWO_SIGNALS], code=128 + signal.SIGINT, timeout=100)
    assert "stopping after this step" in done.stderr


def test_evaluate_repeats_the_score_of_training(trained, data, call):
    common = ["--resume", trained / "best.ckpt", "--data-root", data, "--workers", "0", "--cpus", "3"]
    code, said = call("evaluate", *common, "--test-batch-size", "4")  # five images: the last batch has one
    best = max(rows(trained / "epochs.csv"), key=lambda row: float(row["mIoU"]))
    head, constant = said.splitlines()
    assert code == 0 and head == f"5 images: pixAcc {float(best['pixAcc']):.4f}, mIoU {float(best['mIoU']):.4f}"
    assert constant.startswith("best constant prediction: pixAcc 0.")
    code, said = call("evaluate", *common, "--testval", "--flip", "--scales", "0.75", "1")
    assert code == 0 and re.match(r"5 images: pixAcc 0\.\d+, mIoU 0\.\d+", said)


def test_predict_writes_a_picture_and_a_mask(trained, data, tmp_path, call):
    image = data / "ADEChallengeData2016/images/validation/ADE_val_00000001.jpg"
    Image.fromarray(pixels(image)[:93, :117]).save(tmp_path / "odd size.jpg")
    images = [image, tmp_path / "odd size.jpg"]
    code, said = call("predict", "--resume", trained / "best.ckpt", *images, "--output-dir", tmp_path, "--cpus", "1")
    assert code == 0, said
    for path in images:
        mask, picture = (pixels(tmp_path / f"{path.stem}_{name}.png") for name in ("mask", "picture"))
        assert mask.shape == pixels(path).shape[:2]
        assert 1 <= mask.min() <= mask.max() <= 150
        assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 100


@pytest.mark.parametrize(
    "options, expected",
    [
        ("--model vgg", "--model vgg: unknown; expected one of fcn, psp,"),
        ("--crop-size 100", "--crop-size 100: fastscnn needs a multiple of 32"),
        ("--batch-size 3 --cpus 2", "--batch-size 3: expected a multiple of the 2 devices"),
        ("--ngpus 64", r"--ngpus 64: MXNet sees \d+ GPUs"),
        ("--lr -1", "--lr: expected a number above 0, got '-1'"),
        ("--epochs 2 --start-epoch 1", "--start-epoch: only with --resume FILE.params"),
        ("--resume nothing.ckpt", "--resume nothing.ckpt: no such file"),
    ],
)
def test_bad_option(options, expected, data, tmp_path, refused):
    line = refused("--data-root", data, "--save-dir", tmp_path / "run", *options.split())
    assert re.search(expected, line), line
    assert not (tmp_path / "run").exists(), "nothing was begun"


@pytest.mark.parametrize("options", [[], ["--kvstore", "local"]])
def test_processes_that_would_not_know_of_each_other(options, refused, monkeypatch):
    monkeypatch.setenv("PMI_SIZE", "2")
    assert "mpiexec has started 2 processes; expected --kvstore mpi" in refused(*options)


def set_class(path, value):
    mask = pixels(path)
    mask[:10] = value
    Image.fromarray(mask).save(path)


def crop(path):
    Image.fromarray(pixels(path)[:40, :50]).save(path)


@pytest.mark.parametrize(
    "file, damage, expected",
    [
        ("ADEChallengeData2016", shutil.rmtree, "--data-root: .*{}: no such folder"),
        (MASK, Path.unlink, "{}: missing .image without its mask."),
        (IMAGE, truncate, "{}: not a readable image"),
        (MASK, lambda path: set_class(path, 151), "{}: class id 151; expected 0 .other. to 150"),
        (MASK, crop, "{}: 50x40 pixels, its image has"),
    ],
)
def test_bad_data(file, damage, expected, data, tmp_path, refused):
    shutil.copytree(data, tmp_path / "data")
    file = file.format("00000002")
    damage(tmp_path / "data" / file)
    line = refused("--data-root", tmp_path / "data", "--save-dir", tmp_path / "run")
    assert re.search(expected.format(file), line), line
    assert not (tmp_path / "run").exists(), "nothing was begun"


def test_a_broken_file_that_a_worker_reads(data, tmp_path, refused, monkeypatch):
    """In a big set, files are read first when they are trained on."""
    import dataset

    monkeypatch.setattr(dataset, "CHECK_CONTENTS_UP_TO", 0)
    shutil.copytree(data, tmp_path / "data")
    for i in range(16):
        truncate(tmp_path / "data" / IMAGE.format(f"{i + 1:08d}"))
    options = ["--data-root", tmp_path / "data", "--save-dir", tmp_path / "run", "--cpus", "1", "--workers", "1"]
    assert "not a readable image" in refused(*options)


def test_bad_checkpoint(trained, data, tmp_path, refused):
    common = ["--data-root", data, "--save-dir", tmp_path / "run", "--syncbn", "--resume"]
    best, bad = trained / "best.ckpt", tmp_path / "bad.ckpt"
    line = refused(*common, best, "--model", "psp")
    assert "a checkpoint of fastscnn, but --model and --backbone ask for psp with resnet50" in line
    line = refused(*common, best, "--lr", "0.1")
    assert "--lr 0.1: the checkpoint" in line and "was made with 0.05" in line
    shutil.copy(best, bad)
    truncate(bad)
    assert "bad.ckpt: neither a checkpoint nor a .params file, or truncated" in refused(*common, bad)
    damaged = bytearray(best.read_bytes())
    damaged[100000] ^= 1
    bad.write_bytes(damaged)
    assert "damaged or truncated" in refused(*common, bad)


def test_a_loss_that_is_not_finite_stops_the_run(data, tmp_path, call):
    options = "--lr 1e18 --cpus 1 --workers 0 --no-val".split()
    code, said = call("train", *TINY, *options, "--data-root", data, "--save-dir", tmp_path / "run")
    assert code == 3
    assert re.search(r"error: the loss is (nan|inf) in epoch 1, step \d: .* lower --lr", said), said
    assert not (tmp_path / "run/last.ckpt").exists()


def in_two(work):
    """What two processes return, or the errors that they raise."""
    from processes import Processes

    return everywhere(Job(2).stores, lambda store: work(Processes(store)))


@pytest.mark.parametrize("bad", [(), (0,), (1,), (0, 1)])
def test_an_error_in_one_process_is_said_once_and_ends_all(bad):
    from errors import ElsewhereError, NotFiniteError

    def items(rank):
        yield 1
        if rank in bad:
            raise NotFiniteError("the own")
        yield 2

    ends = in_two(lambda processes: list(processes.each(items(processes.rank))))
    if bad:
        kinds = [NotFiniteError if rank == bad[0] else ElsewhereError for rank in range(2)]
        assert [(type(end), end.exit_code) for end in ends] == [(kind, 3) for kind in kinds]
    else:
        assert ends == [[1, 2], [1, 2]]


def test_what_is_not_the_same_in_two_processes():
    from errors import ElsewhereError, UserError

    assert in_two(lambda processes: processes.check_same("--lr", 0.1)) == [None, None]
    first, second = in_two(lambda processes: processes.check_same("--lr", 0.1 + processes.rank))
    assert type(first) is UserError and "--lr: not the same in processes 0 and 1" in str(first)
    assert type(second) is ElsewhereError
