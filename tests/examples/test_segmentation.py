"""examples/segmentation: the data, the programs as a user calls them, and what they do with bad input."""

import os
import re
import shutil
import signal
import textwrap
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from places import SEGMENTATION
from segmentation_runs import Process, changed_train, lasting, rows, steps_of, truncate, wait_for

TINY = "--model fastscnn --aux --crop-size 32 --base-size 32 --batch-size 4 --test-batch-size 4".split()
TINY += ["--lr", "0.05", "--epochs", "1"]
# So few spaces that a run comes round to the first ones many times.
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


# -- the data ----------------------------------------------------------------------------------------------


def files(root):
    return {str(p.relative_to(root)): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_minidata_is_a_function_of_its_seed(tmp_path):
    from minidata import make_minidata

    for name, seed in (("a", 3), ("b", 3), ("c", 4)):
        assert make_minidata(str(tmp_path / name), 4, 2, seed)
    a, b, c = (files(tmp_path / name) for name in "abc")
    assert a == b
    pictures = [name for name in a if name.endswith((".jpg", ".png"))]
    assert len(pictures) == 12
    assert not any(a[name] == c[name] for name in pictures)


def test_minidata_has_the_layout_and_the_class_ids_of_ade20k(data):
    from gluoncv.data import ADE20KSegmentation

    base = data / "ADEChallengeData2016"
    seen = set()
    for split, part, count in (("training", "train", 16), ("validation", "val", 6)):
        names = sorted(p.stem for p in (base / "images" / split).iterdir())
        assert names == [f"ADE_{part}_{i:08d}" for i in range(1, count + 1)]
        for name in names:
            with Image.open(base / "images" / split / f"{name}.jpg") as image:
                assert image.format == "JPEG" and image.mode == "RGB"
                size = image.size
            with Image.open(base / "annotations" / split / f"{name}.png") as mask:
                assert mask.format == "PNG" and mask.mode == "L"
                assert mask.size == size
                seen |= set(np.unique(mask))
    names = {2: "building", 3: "sky", 5: "tree", 7: "road", 10: "grass", 13: "person", 21: "car"}
    assert seen == {0, *names}
    for label, name in names.items():
        assert ADE20KSegmentation.CLASSES[label - 1].split(",")[0] == name
    for split, count in (("train", 16), ("val", 6)):
        assert len(ADE20KSegmentation(str(data), split=split)) == count


def test_minidata_is_written_once_and_again_if_damaged(tmp_path):
    from errors import UserError
    from minidata import make_minidata

    image = tmp_path / "ADEChallengeData2016/images/training/ADE_train_00000001.jpg"
    (tmp_path / "ADEChallengeData2016.tmp-of-a-killed-process").mkdir()
    assert make_minidata(str(tmp_path), 2, 1)
    before = image.stat().st_mtime_ns
    assert not make_minidata(str(tmp_path), 2, 1)
    assert image.stat().st_mtime_ns == before
    image.unlink()
    assert make_minidata(str(tmp_path), 2, 1)
    assert image.exists()
    assert make_minidata(str(tmp_path), 3, 1), "another size is another set"

    (tmp_path / "ADEChallengeData2016/minidata.json").unlink()  # now it could be anybody's
    with pytest.raises(UserError, match="not written by minidata"):
        make_minidata(str(tmp_path), 2, 1)


def test_colour_and_light_differ_from_image_to_image():
    from scene import draw_scene

    images = np.array([np.asarray(draw_scene([0, 0, i])[0], float) for i in range(24)])
    means = images.mean((1, 2))  # image, channel
    within = images.std((1, 2)).mean()
    # Of a batch of many like images, means would differ by a small part of the spread inside an image.
    assert (means.std(0) > 0.5 * within).all(), (means.std(0), within)
    assert (means.max(0) - means.min(0) > 80).all()


def test_a_sample_depends_on_seed_epoch_and_index_alone(data):
    from dataset import Scenes

    def scenes(seed=1):
        return Scenes(str(data), "train", "train", 64, 64, seed)

    keys = [(0, 3), (0, 5), (1, 3)]
    first = {key: scenes()[key] for key in keys}
    again = scenes()
    for key in reversed(keys):
        for a, b in zip(first[key], again[key]):
            np.testing.assert_array_equal(a.asnumpy(), b.asnumpy())
    assert (first[0, 3][0] != first[1, 3][0]).asnumpy().any()
    assert (first[0, 3][0] != scenes(2)[0, 3][0]).asnumpy().any()
    assert again.images == sorted(again.images)


def test_order_of_the_batches():
    from dataset import Order

    order = Order(10, 4, seed=0, shuffle=True)
    first = list(order)
    assert [len(batch) for batch in first] == [4, 4] == [4] * len(order)
    assert len({index for batch in first for _, index in batch}) == 8
    order.first = 1
    assert list(order) == first[1:]
    order.epoch, order.first = 1, 0
    assert list(order) != first
    everything = [index for batch in Order(10, 4, 0, shuffle=False) for _, index in batch]
    assert everything == list(range(10))


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

    code, output = train(tmp_path, data, "--cpus", "1", "--workers", "0", "--no-val", "--overwrite")
    assert code == 0, output
    assert {path.name for path in run.iterdir()} == {"last.ckpt", "epochs.csv", "steps.csv"}  # nothing of the old run
    assert len(rows(run / "epochs.csv")) == 1


def test_a_finished_run_takes_further_epochs(trained, tmp_path, data, capsys):
    from train import main

    run = tmp_path / "run"
    shutil.copytree(trained, run)
    options = [*TWO, "--resume", run / "last.ckpt"]
    code, output = train(tmp_path, data, *options, "--epochs", "6", "--workers", "0", "--no-val")
    assert code == 0, output
    assert "4 epochs are done; the learning rate continues as in a run of 6" in output
    steps = rows(run / "steps.csv")
    assert [row["epoch"] for row in steps] == [str(epoch) for epoch in range(1, 7) for _ in range(4)]
    assert steps[:16] == rows(trained / "steps.csv")
    # What GluonCV's "poly" has after each of 24 steps, in place of the 0 where 16 steps end.
    rates = [0.05 * (1 - min(step + 1, 23) / 23) ** 0.9 for step in range(16, 24)]
    np.testing.assert_allclose([float(row["lr"]) for row in steps[16:]], rates, rtol=1e-4, atol=1e-9)
    # An unfinished run, and one that asks for fewer, keep what they were begun with.
    fewer = [*TINY, *options, "--epochs", "5", "--data-root", data, "--save-dir", run]
    assert "--epochs 5: the checkpoint" in fails(main, fewer, capsys)


def test_no_network_for_weights_is_one_line(tmp_path, data, capsys, monkeypatch):
    from train import main

    monkeypatch.setenv("MXNET_HOME", str(tmp_path / "mxnet"))
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")  # nobody is there
    options = ["--model", "fcn", "--pretrained-base", "--crop-size", "32", "--base-size", "32", "--batch-size", "4"]
    options += ["--cpus", "1", "--workers", "0", "--data-root", data, "--save-dir", tmp_path / "run"]
    line = fails(main, options, capsys)
    assert "--pretrained-base: GluonCV got no weights for the backbone of fcn with resnet50 (" in line
    assert f"{tmp_path}/mxnet/models" in line


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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_second_signal_ends_a_step_that_does_not_end(tmp_path, number):
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
        os.kill(process.pid, number)
        wait_for(lambda: "stopping after this step" in process.output())
        assert process.running()
        os.kill(process.pid, number)
        assert process.wait() == 128 + number


def test_a_kill_while_saving_leaves_the_old_checkpoint(tmp_path):
    program = """
        import os, signal, sys
        import checkpoint
        import mxnet as mx
        from mxnet import gluon

        net = gluon.nn.Dense(2, in_units=3)
        net.initialize()
        trainer = gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9}, kvstore=None)
        path = sys.argv[1]
        net.weight.set_data(mx.nd.ones((2, 3)))
        checkpoint.save_checkpoint([path], net, trainer, {"epoch": 1})
        net.weight.set_data(mx.nd.zeros((2, 3)))
        setattr(checkpoint.os, sys.argv[2], lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        checkpoint.save_checkpoint([path], net, trainer, {"epoch": 2})
    """
    from checkpoint import load_checkpoint, remove_strays

    (tmp_path / "program.py").write_text(
        f"import sys; sys.path.insert(0, {str(SEGMENTATION)!r})" + textwrap.dedent(program)
    )

    def killed_at(moment):
        (tmp_path / moment).mkdir()
        path = tmp_path / moment / "a.ckpt"
        with Process(tmp_path / moment, tmp_path / "program.py", path, moment) as process:
            # The first save calls them too, so the killing one is put in place after it.
            assert process.wait() == -signal.SIGKILL, process.output()
        return path

    with ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(killed_at, ("fsync", "replace")))
    for path in paths:
        found = load_checkpoint(str(path))
        assert found.state["epoch"] == 1
        assert (found.arrays["weight"].asnumpy() == 1).all()
        (stray,) = path.parent.glob("*.tmp")
        others = [f"a.ckpt.{name}.tmp" for name in (f"{os.uname().nodename}-{os.getppid()}", "elsewhere-1", "mine")]
        for other in others:
            (path.parent / other).touch()
        remove_strays(str(path.parent))
        assert {name.name for name in path.parent.glob("*.tmp")} == set(others), stray


def test_statistics_of_each_device_survive_a_checkpoint(contexts, tmp_path):
    """Plain BatchNorm on several devices has as many running statistics; their mean is the network's."""
    from checkpoint import load_checkpoint, save_checkpoint, set_arrays
    from mxnet import gluon

    net = gluon.nn.BatchNorm(in_channels=2)
    net.initialize(ctx=contexts[:3])
    for i, context in enumerate(contexts[:3]):
        net.running_mean.data(context)[:] = 0.1 * i
    trainer = gluon.Trainer(net.collect_params(), "sgd", {"momentum": 0.9}, kvstore=None)
    save_checkpoint([str(tmp_path / "a.ckpt")], net, trainer, {})
    found = load_checkpoint(str(tmp_path / "a.ckpt"))
    np.testing.assert_allclose(found.arrays["running_mean"].asnumpy(), 0.1, rtol=1e-6)
    assert not [name for name in found.devices if "running_var" in name]
    again = gluon.nn.BatchNorm(in_channels=2)
    again.initialize(ctx=contexts[:3])
    set_arrays(again, found.arrays, found.devices)
    for i, context in enumerate(contexts[:3]):
        assert (again.running_mean.data(context).asnumpy() == np.float32(0.1 * i)).all()


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


@pytest.mark.parametrize("length", [64, 65, 100, 128, 300])
def test_windows_cover_an_image_and_stay_inside(length):
    from predictor import window_starts

    covered = np.zeros(length, int)
    for start in window_starts(length, 64):
        assert 0 <= start <= length - 64
        covered[start : start + 64] += 1
    assert covered.min() >= 1


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
        ("--dataset coco", "--dataset coco: unknown; expected ade20k"),
        ("--crop-size 16", "--crop-size 16: fastscnn needs at least 32"),
        ("--crop-size 100", "--crop-size 100: fastscnn needs a multiple of 32"),
        ("--model psp --crop-size 100", "--crop-size 100: psp needs a multiple of 8"),
        ("--model icnet", "--aux: icnet has no auxiliary head"),
        ("--batch-size 1 --cpus 2", "--batch-size 1: expected at least one for each of 2 devices"),
        ("--batch-size 3 --cpus 2", "--batch-size 3: expected a multiple of the 2 devices"),
        ("--batch-size 400", "--batch-size 400: there are only 16 training images"),
        ("--ngpus 64", r"--ngpus 64: MXNet sees \d+ GPUs"),
        ("--ngpus 2 --cpus 2", "--cpus 2 and --ngpus 2: give one of them"),
        ("--lr -1", "--lr: expected a number above 0, got '-1'"),
        ("--lr nan", "--lr: expected a number above 0, got 'nan'"),
        ("--epochs 0", "--epochs: expected a whole number from 1, got '0'"),
        ("--epochs 2.5", "--epochs: expected a whole number from 1, got '2.5'"),
        ("--momentum 1.5", "--momentum: expected a number from 0 to 1, got '1.5'"),
        ("--epochs 2 --warmup-epochs 2", "--warmup-epochs 2: must be less than --epochs 2"),
        ("--epochs 2 --start-epoch 1", "--start-epoch: only with --resume FILE.params"),
        ("--resume nothing.ckpt", "--resume nothing.ckpt: no such file"),
        ("--eval", "--eval: needs --resume FILE"),
        ("--no-such-option", "unrecognized arguments: --no-such-option"),
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
        (lambda root: shutil.rmtree(root / BASE / "images/training"), "images/training: no such folder"),
        (lambda root: shutil.rmtree(root / BASE / "annotations"), "annotations/training: no such folder"),
        (
            lambda root: [path.unlink() for path in (root / BASE / "images/validation").iterdir()],
            "images/validation: no .jpg files",
        ),
        (lambda root: (root / MASK).unlink(), f"{MASK}: missing .image without its mask."),
        (lambda root: (root / IMAGE).unlink(), f"{IMAGE}: missing .mask without its image."),
        (lambda root: truncate(root / IMAGE), f"{IMAGE}: not a readable image"),
        (lambda root: (root / IMAGE).write_text("hello"), f"{IMAGE}: not a readable image"),
        (lambda root: truncate(root / MASK), f"{MASK}: not a readable mask"),
        (lambda root: set_class(root / MASK, 151), rf"{MASK}: class id 151; expected 0 .other. to 150"),
        (
            lambda root: Image.fromarray(np.stack([pixels(root / MASK)] * 3, 2)).save(root / MASK),
            f"{MASK}: 3 channels; expected one channel of class ids",
        ),
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


def test_a_broken_file_found_by_a_worker_ends_the_run(data, tmp_path):
    """In a big set nobody reads every file first: the error must find its way from the worker."""
    shutil.copytree(data, tmp_path / "data")
    truncate(tmp_path / "data" / IMAGE)
    program = changed_train(tmp_path / "program.py", "dataset.CHECK_CONTENTS_UP_TO = 0")
    options = [*TINY, *TWO, "--workers", "2", "--data-root", tmp_path / "data", "--save-dir", tmp_path / "run"]
    with Process(tmp_path, program, *options) as process:
        assert process.wait() == 2, process.output()
        lines = process.output().strip().splitlines()
    assert re.search(f"error: .*{IMAGE}: not a readable image", lines[-1]), lines
    assert len(lines) == 1
    assert not processes_of(tmp_path / "run")


def test_a_class_id_that_only_training_sees(data, tmp_path):
    from dataset import Scenes
    from errors import UserError

    shutil.copytree(data, tmp_path / "data")
    set_class(tmp_path / "data" / MASK, 200)
    scenes = Scenes(str(tmp_path / "data"), "train", "val", 64, 64, 0)
    with pytest.raises(UserError, match=f"{MASK}: class id 200"):
        scenes[0, 1]


def test_bad_checkpoint(trained, data, tmp_path, capsys):
    from evaluate import main as evaluate
    from train import main as train

    common = [*TINY, "--data-root", data, "--save-dir", tmp_path / "run", "--epochs", "4", "--syncbn", "--resume"]
    best = trained / "best.ckpt"
    line = fails(train, [*common, best, "--model", "psp"], capsys)
    assert "a checkpoint of fastscnn, but --model and --backbone ask for psp with resnet50" in line
    line = fails(train, [*common, best, "--lr", "0.1"], capsys)
    assert "--lr 0.1: the checkpoint" in line and "was made with 0.05" in line
    line = fails(evaluate, ["--resume", best, "--model", "fcn", "--data-root", data], capsys)
    assert "a checkpoint of fastscnn, but" in line

    shutil.copy(best, tmp_path / "short.ckpt")
    truncate(tmp_path / "short.ckpt")
    line = fails(train, [*common, tmp_path / "short.ckpt"], capsys)
    assert "short.ckpt: neither a checkpoint nor a .params file, or truncated" in line
    damaged = bytearray(best.read_bytes())
    damaged[100000] ^= 1
    (tmp_path / "damaged.ckpt").write_bytes(damaged)
    assert "damaged or truncated" in fails(train, [*common, tmp_path / "damaged.ckpt"], capsys)

    with zipfile.ZipFile(best) as archive:
        archive.extract("model.params", tmp_path)
    other = ["--model", "fcn", "--no-val", "--resume", tmp_path / "model.params"]
    line = fails(train, [*common[:-1], *other], capsys)
    assert "model.params: not the parameters of fcn with resnet50" in line
    truncate(tmp_path / "model.params")
    line = fails(train, [*common, tmp_path / "model.params"], capsys)
    assert "model.params: damaged or truncated parameters" in line


def test_a_loss_that_is_not_finite_stops_the_run(data, tmp_path):
    code, output = train(tmp_path, data, "--lr", "1e18", "--epochs", "2", "--workers", "0", "--no-val")
    assert code == 3
    assert re.search(r"error: the loss is (nan|inf) in epoch 1, step \d: .* lower --lr", output), output
    assert not (tmp_path / "run/last.ckpt").exists()
