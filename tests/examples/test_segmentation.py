"""examples/segmentation: the data, the programs as a user calls them, and what they do with bad input."""

import os
import re
import shutil
import signal
import textwrap
import zipfile
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from places import SEGMENTATION
from segmentation_runs import Process, changed_train, lasting, rows, steps_of, truncate, wait_for

TINY = "--model fastscnn --aux --crop-size 32 --base-size 32 --batch-size 4 --test-batch-size 4".split()
TINY += ["--lr", "0.05", "--epochs", "1"]
TWO = "--cpus 2 --syncbn".split()
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("segmentation_modules")]


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """The programs set OMP_NUM_THREADS, which is nobody else's business when they run in this process."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="module")
def data(tmp_path_factory, segmentation_modules):
    """A set of 16 + 6 scenes."""
    from minidata import make_minidata

    root = tmp_path_factory.mktemp("data")
    make_minidata(str(root), 16, 6)
    return root


def train(folder, data, *options, timeout=100):
    """train.py to its end; returns (exit code, output)."""
    command = [SEGMENTATION / "train.py", *TINY, "--data-root", data, "--save-dir", folder / "run", *options]
    with Process(folder, *command) as process:
        code = process.wait(timeout)
        return code, process.output()


def pixels(path):
    with Image.open(path) as image:
        return np.array(image)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, data):
    """Folder of a finished run on two devices: 4 epochs of 4 steps."""
    folder = tmp_path_factory.mktemp("trained")
    code, output = train(folder, data, *TWO, "--epochs", "4", "--workers", "2")
    assert code == 0, output
    return folder / "run"


# -- scores ------------------------------------------------------------------------------------------------


def test_scores_against_the_definition(rng):
    import mxnet as mx
    from scores import Scores, best_constant

    truth = rng.randint(-1, 4, (3, 8, 8))  # 4 of 6 classes occur
    logits = rng.randn(3, 6, 8, 8).astype("float32")
    scores = Scores(6)
    for i in range(3):
        scores.update([mx.nd.array(truth[i : i + 1], dtype="int32")], [mx.nd.array(logits[i : i + 1])])
    prediction, known = logits.argmax(1), truth >= 0

    def definition(prediction):
        right = (prediction == truth)[known].mean()
        ious = [
            ((prediction == c) & (truth == c)).sum() / (((prediction == c) & known) | (truth == c)).sum()
            for c in range(4)
        ]
        return right, np.mean(ious)

    np.testing.assert_allclose(scores.get(), definition(prediction), rtol=1e-12)
    brute = np.array([definition(np.full_like(truth, c)) for c in range(6)])
    np.testing.assert_allclose(best_constant(scores.truth), brute.max(0), rtol=1e-12)


# -- training ----------------------------------------------------------------------------------------------


def test_training_on_two_devices_learns_and_keeps_records(trained):
    epochs, steps = rows(trained / "epochs.csv"), rows(trained / "steps.csv")
    assert [(row["epoch"], row["step"]) for row in steps] == [
        (str(e), str(s)) for e in range(1, 5) for s in range(1, 5)
    ]
    loss = [float(row["loss"]) for row in steps]
    assert np.mean(loss[-4:]) < 0.8 * np.mean(loss[:4])
    lr = [float(row["lr"]) for row in steps]
    np.testing.assert_allclose(lr, [0.05 * (1 - min(i, 15) / 15) ** 0.9 for i in range(1, 17)], atol=1e-6)
    assert [row["epoch"] for row in epochs] == ["1", "2", "3", "4"]
    for i, row in enumerate(epochs):
        np.testing.assert_allclose(float(row["train_loss"]), np.mean(loss[4 * i : 4 * i + 4]), rtol=1e-5)
        assert 0 <= float(row["mIoU"]) <= float(row["pixAcc"]) <= 1
        float(row["images_per_second"])  # a number
    assert not list(trained.glob("*.tmp"))
    best, last = (zipfile.ZipFile(trained / name) for name in ("best.ckpt", "last.ckpt"))
    assert set(best.namelist()) == {"model.params", "trainer.states", "state.json"}
    assert last.testzip() is None


def test_interrupted_and_resumed_is_the_same_as_uninterrupted(trained, tmp_path, data):
    """Ctrl-C in mid-epoch, then --resume with another number of workers: the same bits at the end."""
    save = tmp_path / "run"
    options = [*TINY, *TWO, "--epochs", "4", "--data-root", data, "--save-dir", save]
    program = changed_train(tmp_path / "program.py", lasting(1, 1))
    with Process(tmp_path, program, *options, "--workers", "2") as process:
        wait_for(lambda: not process.running() or steps_of(save) == 5)
        assert process.running(), process.output()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal sends it: to the workers as well
        assert process.wait() == 130, process.output()
        last_line = process.output().strip().splitlines()[-1]
    assert re.fullmatch(r"interrupted in epoch 2 after step 2 of 4; saved, continue with --resume .*", last_line)
    assert len(rows(save / "steps.csv")) == 6
    assert not processes_of(save), "a loader worker stayed behind"

    (save / f"best.ckpt.{os.uname().nodename}-{process.pid}.tmp").touch()  # as if it had been killed
    code, output = train(tmp_path, data, *TWO, "--epochs", "4", "--workers", "0", "--resume", save / "last.ckpt")
    assert code == 0, output
    assert not list(save.glob("*.tmp"))
    whole, parts = (zipfile.ZipFile(folder / "last.ckpt") for folder in (trained, save))
    assert whole.read("model.params") == parts.read("model.params")
    assert whole.read("trainer.states") == parts.read("trainer.states")
    assert rows(trained / "steps.csv") == rows(save / "steps.csv")
    for a, b in zip(rows(trained / "epochs.csv"), rows(save / "epochs.csv")):
        for name in ("epoch", "train_loss", "lr", "pixAcc", "mIoU"):
            assert a[name] == b[name]


def test_a_used_folder_is_not_overwritten_without_a_word(trained, tmp_path, data, capsys):
    from train import main

    run = tmp_path / "run"
    shutil.copytree(trained, run)
    before = {path.name: path.read_bytes() for path in run.iterdir()}
    line = fails(main, [*TINY, "--data-root", data, "--save-dir", run], capsys)
    assert f"--save-dir {run}: holds a run already; --resume {run / 'last.ckpt'} continues it" in line
    other = [*TINY, *TWO, "--epochs", "4", "--data-root", data, "--save-dir", run, "--resume", trained / "last.ckpt"]
    assert "holds a run already" in fails(main, other, capsys)
    assert {path.name: path.read_bytes() for path in run.iterdir()} == before

    options = [
        *TINY,
        "--data-root",
        data,
        "--save-dir",
        run,
        "--cpus",
        "1",
        "--workers",
        "0",
        "--no-val",
        "--overwrite",
    ]
    assert not main(list(map(str, options)))
    assert {path.name for path in run.iterdir()} == {"last.ckpt", "epochs.csv", "steps.csv"}  # nothing of the old run
    assert len(rows(run / "epochs.csv")) == 1


# MXNet leaves the file of the optimizer's states to the garbage collector.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_finished_run_takes_further_epochs(trained, tmp_path, data, capsys):
    from train import main

    run = tmp_path / "run"
    shutil.copytree(trained, run)
    options = [*TINY, *TWO, "--data-root", data, "--save-dir", run, "--resume", run / "last.ckpt"]
    assert not main(list(map(str, [*options, "--epochs", "6", "--workers", "0", "--no-val"])))
    assert "4 epochs are done; the learning rate continues as in a run of 6" in "".join(capsys.readouterr())
    steps = rows(run / "steps.csv")
    assert [row["epoch"] for row in steps] == [str(epoch) for epoch in range(1, 7) for _ in range(4)]
    assert steps[:16] == rows(trained / "steps.csv")
    # What GluonCV's "poly" has after each of 24 steps, in place of the 0 where 16 steps end.
    rates = [0.05 * (1 - min(step + 1, 23) / 23) ** 0.9 for step in range(16, 24)]
    np.testing.assert_allclose([float(row["lr"]) for row in steps[16:]], rates, rtol=1e-4, atol=1e-9)
    # An unfinished run, and one that asks for fewer, keep what they were begun with.
    assert "--epochs 5: the checkpoint" in fails(main, [*options, "--epochs", "5"], capsys)


def processes_of(folder):
    """Ids of processes that were called with this folder; workers share their parent's command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if os.fsencode(str(folder)) in path.read_bytes():
                found.append(int(path.parent.name))
        except OSError:  # it has just ended
            pass
    return found


def test_the_second_signal_ends_a_step_that_does_not_end(tmp_path):
    program = """
        import ctypes
        from interrupt import Interrupt
        with Interrupt() as interrupt:
            print("ready", flush=True)
            while True:  # never back in Python for long, as in a wait for the engine
                ctypes.CDLL(None).sleep(60)
    """
    (tmp_path / "program.py").write_text(
        f"import sys; sys.path.insert(0, {str(SEGMENTATION)!r})" + textwrap.dedent(program)
    )
    with Process(tmp_path, tmp_path / "program.py") as process:
        wait_for(lambda: "ready" in process.output())
        os.kill(process.pid, signal.SIGTERM)
        wait_for(lambda: "stopping after this step" in process.output())
        assert process.running()
        os.kill(process.pid, signal.SIGINT)
        assert process.wait() == 128 + signal.SIGINT


def test_evaluate_repeats_the_score_of_training(trained, data, capsys):
    from errors import run
    from evaluate import main

    common = ["--resume", str(trained / "best.ckpt"), "--data-root", str(data), "--workers", "0", "--cpus", "3"]
    assert run(main, [*common, "--test-batch-size", "4"]) == 0  # six images: the last batch has two
    best = max(rows(trained / "epochs.csv"), key=lambda row: float(row["mIoU"]))
    head, constant = capsys.readouterr().out.splitlines()
    assert head == f"6 images: pixAcc {float(best['pixAcc']):.4f}, mIoU {float(best['mIoU']):.4f}"
    assert constant.startswith("best constant prediction: pixAcc 0.")
    assert run(main, [*common, "--testval", "--flip", "--scales", "0.75", "1"]) == 0
    assert re.match(r"6 images: pixAcc 0\.\d+, mIoU 0\.\d+", capsys.readouterr().out)


def test_predict_writes_a_picture_and_a_mask(trained, data, tmp_path, capsys):
    from errors import run
    from predict import main

    image = data / "ADEChallengeData2016/images/validation/ADE_val_00000001.jpg"
    Image.fromarray(pixels(image)[:93, :117]).save(tmp_path / "odd size.jpg")
    arguments = [str(image), str(tmp_path / "odd size.jpg"), "--output-dir", str(tmp_path / "out"), "--cpus", "1"]
    assert run(main, ["--resume", str(trained / "best.ckpt"), *arguments]) == 0, capsys.readouterr().err
    for stem, shape in (("ADE_val_00000001", pixels(image).shape[:2]), ("odd size", (93, 117))):
        mask = pixels(tmp_path / "out" / f"{stem}_mask.png")
        assert mask.shape == shape
        assert 1 <= mask.min() <= mask.max() <= 150
        picture = pixels(tmp_path / "out" / f"{stem}_picture.png")
        assert len(np.unique(picture.reshape(-1, picture.shape[2]), axis=0)) > 100


# -- bad input ---------------------------------------------------------------------------------------------


def fails(main, options, capsys):
    """The one line that the program says, with exit code 2."""
    from errors import run

    try:
        code = run(main, [str(option) for option in options])
    except SystemExit as end:  # argparse's way
        code = end.code
    said = capsys.readouterr()
    assert code == 2, said
    lines = said.err.splitlines()
    assert len(lines) == 1, said.err
    assert " error: " in lines[0]
    return lines[0]


@pytest.mark.parametrize(
    "options, expected",
    [
        ("--model vgg", "--model vgg: unknown; expected one of fcn, psp,"),
        ("--model psp --backbone resnet18", "--backbone resnet18: psp expects one of resnet50"),
        ("--crop-size 100", "--crop-size 100: fastscnn needs a multiple of 32"),
        ("--model icnet", "--aux: icnet has no auxiliary head"),
        ("--batch-size 1 --cpus 2", "--batch-size 1: expected at least one for each of 2 devices"),
        ("--batch-size 3 --cpus 2", "--batch-size 3: expected a multiple of the 2 devices"),
        ("--batch-size 400", "--batch-size 400: there are only 16 training images"),
        ("--ngpus 64", r"--ngpus 64: MXNet sees \d+ GPUs"),
        ("--lr -1", "--lr: expected a number above 0, got '-1'"),
        ("--epochs 0", "--epochs: expected a whole number from 1, got '0'"),
        ("--momentum 1.5", "--momentum: expected a number from 0 to 1, got '1.5'"),
        ("--epochs 2 --warmup-epochs 2", "--warmup-epochs 2: must be less than --epochs 2"),
        ("--epochs 2 --start-epoch 1", "--start-epoch: only with --resume FILE.params"),
        ("--resume nothing.ckpt", "--resume nothing.ckpt: no such file"),
        ("--eval", "--eval: needs --resume FILE"),
    ],
)
def test_bad_option(options, expected, data, tmp_path, capsys):
    from train import main

    line = fails(main, [*TINY, "--data-root", data, "--save-dir", tmp_path / "run", *options.split()], capsys)
    assert re.search(expected.replace("[", r"\["), line), line
    assert not (tmp_path / "run").exists(), "nothing was begun"


BASE = "ADEChallengeData2016"
IMAGE = f"{BASE}/images/training/ADE_train_00000002.jpg"
MASK = f"{BASE}/annotations/training/ADE_train_00000002.png"


def set_class(path, value):
    mask = pixels(path)
    mask[:10] = value
    Image.fromarray(mask).save(path)


@pytest.mark.parametrize(
    "damage, expected",
    [
        (lambda root: shutil.rmtree(root / BASE), rf"--data-root: .*{BASE}: no such folder"),
        (lambda root: (root / MASK).unlink(), f"{MASK}: missing .image without its mask."),
        (lambda root: (root / IMAGE).unlink(), f"{IMAGE}: missing .mask without its image."),
        (lambda root: truncate(root / IMAGE), f"{IMAGE}: not a readable image"),
        (lambda root: truncate(root / MASK), f"{MASK}: not a readable mask"),
        (lambda root: set_class(root / MASK, 151), rf"{MASK}: class id 151; expected 0 .other. to 150"),
        (
            lambda root: Image.fromarray(pixels(root / MASK)[:40, :50]).save(root / MASK),
            f"{MASK}: 50x40 pixels, its image has",
        ),
    ],
)
def test_bad_data(damage, expected, data, tmp_path, capsys):
    from train import main

    shutil.copytree(data, tmp_path / "data")
    damage(tmp_path / "data")
    line = fails(main, [*TINY, "--data-root", tmp_path / "data", "--save-dir", tmp_path / "run"], capsys)
    assert re.search(expected, line), line
    assert not (tmp_path / "run").exists(), "nothing was begun"


def test_bad_checkpoint(trained, data, tmp_path, capsys):
    from train import main as train

    common = [*TINY, "--data-root", data, "--save-dir", tmp_path / "run", "--epochs", "4", "--syncbn", "--resume"]
    best = trained / "best.ckpt"
    line = fails(train, [*common, best, "--model", "psp"], capsys)
    assert "a checkpoint of fastscnn, but --model and --backbone ask for psp with resnet50" in line
    line = fails(train, [*common, best, "--lr", "0.1"], capsys)
    assert "--lr 0.1: the checkpoint" in line and "was made with 0.05" in line
    shutil.copy(best, tmp_path / "short.ckpt")
    truncate(tmp_path / "short.ckpt")
    line = fails(train, [*common, tmp_path / "short.ckpt"], capsys)
    assert "short.ckpt: neither a checkpoint nor a .params file, or truncated" in line
    damaged = bytearray(best.read_bytes())
    damaged[100000] ^= 1
    (tmp_path / "damaged.ckpt").write_bytes(damaged)
    assert "damaged or truncated" in fails(train, [*common, tmp_path / "damaged.ckpt"], capsys)


def test_a_loss_that_is_not_finite_stops_the_run(data, tmp_path):
    code, output = train(tmp_path, data, "--lr", "1e18", "--epochs", "2", "--workers", "0", "--no-val")
    assert code == 3
    assert re.search(r"error: the loss is (nan|inf) in epoch 1, step \d: .* lower --lr", output), output
    assert not (tmp_path / "run/last.ckpt").exists()
