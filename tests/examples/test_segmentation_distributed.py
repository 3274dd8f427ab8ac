"""examples/segmentation in several processes: the training of one process, its end and its errors."""

import json
import os
import shutil
import signal
import sys
import tempfile
import threading
import zipfile
from pathlib import Path

import numpy as np
import pytest
from places import SEGMENTATION
from replicas import in_threads
from segmentation_runs import Process, changed_train, lasting, rows, steps_of, truncate, wait_for

TINY = "--model fastscnn --aux --crop-size 32 --base-size 40 --batch-size 4 --test-batch-size 4 --syncbn".split()
TINY += "--lr 0.05 --epochs 2".split()
FILES = {"last.ckpt", "best.ckpt", "epochs.csv", "steps.csv"}
pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("segmentation_modules")]


@pytest.fixture(scope="module")
def data(tmp_path_factory, segmentation_modules):
    """A set of 16 + 5 scenes: of the last batch in validation, one process has nothing."""
    from minidata import make_minidata

    root = tmp_path_factory.mktemp("data")
    make_minidata(str(root), 16, 5)
    return root


class Job(Process):
    """Two processes, each with a program and options of its own, and what all of them say."""

    def __init__(self, folder, options, own):
        options = [*options, "--kvstore", "mpi", "--cpus", "1", "--workers", "1"]
        command = [Path(sys.executable).with_name("mpiexec")]
        for program, *rest in own:
            command += [":", "-n", "1", sys.executable, program, *options, *rest]
        del command[1]
        super().__init__(folder, "-c", EXEC, *command)


# Process starts Python; mpiexec takes its place.
EXEC = "import os, sys; os.execv(sys.argv[1], sys.argv[1:])"


OTHER_SEED = "training.seed_all = lambda seed: numpy.random.seed(99)"


def two_processes(folder, data, *options, both="", other=OTHER_SEED):
    """train.py; the second process is to write nothing, and to take the first weights from the first process."""
    options = [*TINY, "--data-root", data, *options]
    first = changed_train(folder / "first.py", both) if both else SEGMENTATION / "train.py"
    second = changed_train(folder / "second.py", f"{both}\n{other}")
    own = [[first, "--save-dir", folder / "run"], [second, "--save-dir", folder / "never"]]
    return Job(folder, options, own)


def test_two_processes_train_as_one_does(tmp_path, data):
    """2 processes with a device each against 1 with two: interrupted in the middle, and resumed."""
    whole = tmp_path / "whole"
    options = [*TINY, "--cpus", "2", "--workers", "1", "--data-root", data, "--save-dir", whole]
    run, one = tmp_path / "run", tmp_path / "one"
    one.mkdir()
    with Process(one, SEGMENTATION / "train.py", *options) as process:  # beside the others
        with two_processes(tmp_path, data, both=lasting(0, 2)) as job:
            wait_for(lambda: not job.running() or steps_of(run) == 2)
            assert job.running(), job.output()
            os.kill(job.pid, signal.SIGINT)  # mpiexec passes it on to both
            assert job.wait() == 130, job.output()
            said = job.output().strip().splitlines()
        assert process.wait() == 0, process.output()
    assert sum("stopping after this step" in line for line in said) == 1, said
    assert sum("saved, continue with --resume" in line for line in said) == 1, said
    assert len(rows(run / "steps.csv")) == 3
    state = json.loads(zipfile.ZipFile(run / "last.ckpt").read("state.json"))
    assert (state["epoch"], state["step"]) == (0, 3)

    with two_processes(tmp_path, data, "--resume", run / "last.ckpt") as job:
        assert job.wait() == 0, job.output()
        said = job.output()
    assert said.count("epoch 2/2: loss") == 1
    assert {path.name for path in run.iterdir()} == FILES
    assert not (tmp_path / "never").exists(), "the second process has written something"

    ours, theirs = rows(run / "steps.csv"), rows(whole / "steps.csv")
    assert [(row["epoch"], row["step"], row["lr"]) for row in ours] == [
        (row["epoch"], row["step"], row["lr"]) for row in theirs
    ]
    loss, expected = (np.array([float(row["loss"]) for row in table]) for table in (ours, theirs))
    assert len(loss) == 8
    # Two terms have one sum, and MPI adds nothing else.
    np.testing.assert_allclose(loss, expected, rtol=0)
    for a, b in zip(rows(run / "epochs.csv"), rows(whole / "epochs.csv")):
        for name in ("train_loss", "pixAcc", "mIoU"):
            np.testing.assert_allclose(float(a[name]), float(b[name]), rtol=1e-2, atol=1e-3)
    ours, theirs = (parameters(folder / "last.ckpt") for folder in (run, whole))
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        error = np.linalg.norm(ours[name] - value) / max(np.linalg.norm(value), 1e-3 * value.size**0.5)
        assert error < 5e-2, (name, error)


def parameters(checkpoint):
    import mxnet as mx

    with zipfile.ZipFile(checkpoint) as archive, tempfile.TemporaryDirectory() as folder:
        return {name: value.asnumpy() for name, value in mx.nd.load(archive.extract("model.params", folder)).items()}


def test_a_broken_file_that_one_process_reads_ends_both(data, tmp_path):
    image = "ADEChallengeData2016/images/training/ADE_train_{:08d}.jpg"
    shutil.copytree(data, tmp_path / "data")
    for i in range(16):
        truncate(tmp_path / "data" / image.format(i + 1))
    program = changed_train(tmp_path / "program.py", "dataset.CHECK_CONTENTS_UP_TO = 0  # as in a big set")
    options = [*TINY, "--save-dir", tmp_path / "run"]
    own = [[program, "--data-root", root] for root in (data, tmp_path / "data")]
    with Job(tmp_path, options, own) as job:
        assert job.wait() == 2, job.output()
        lines = job.output().strip().splitlines()
    assert len(lines) == 1, lines
    assert "not a readable image" in lines[0] and str(tmp_path / "data") in lines[0]


def in_two_processes(work):
    """What work(processes) returns or raises in either of two processes, which are threads here."""
    from processes import Processes

    parts, barrier, results = [None, None], threading.Barrier(2, timeout=60), [None, None]

    class Threads(Processes):
        def __init__(self, rank):
            super().__init__()
            self.rank, self.size = rank, 2

        def sum(self, values):
            parts[self.rank] = np.asarray(values, np.float64)
            barrier.wait()
            total = parts[0] + parts[1]
            barrier.wait()
            return total

    def target(rank):
        try:
            results[rank] = work(Threads(rank))
        except Exception as error:
            results[rank] = error

    in_threads(target, 2)
    return results


def test_an_error_in_one_process_is_said_once_and_ends_all():
    from errors import ElsewhereError, NotFiniteError, UserError

    def read(bad):
        def items(rank):
            yield 1
            if rank in bad:
                raise NotFiniteError(f"in {rank}")
            yield 2

        def work(processes):
            seen = []
            try:
                for item in processes.each(items(processes.rank)):
                    seen.append(item)
            except UserError as error:
                seen.append(error)
            return seen

        return in_two_processes(work)

    assert read(()) == [[1, 2], [1, 2]]
    for bad, speaker in (((1,), 1), ((0,), 0), ((0, 1), 0)):
        results = read(bad)
        assert [result[0] for result in results] == [1, 1] and {len(result) for result in results} == {2}
        assert str(results[speaker][1]) == f"in {speaker}"
        assert isinstance(results[1 - speaker][1], ElsewhereError)
        assert {result[1].exit_code for result in results} == {3}
    assert in_two_processes(lambda processes: processes.check_same("--lr", 0.1)) == [None, None]
    error, other = in_two_processes(lambda processes: processes.check_same("--lr", processes.rank))
    assert str(error) == "--lr: not the same in processes 0 and 1"
    assert isinstance(other, ElsewhereError)


@pytest.mark.parametrize(
    ("variable", "text"),
    [
        ("PMI_SIZE", "mpiexec has started 2 processes; expected --kvstore mpi"),
    ],
)
@pytest.mark.parametrize("options", [[], ["--kvstore", "local"]])
def test_processes_that_would_not_know_of_each_other(options, variable, text, monkeypatch, capsys):
    from errors import run
    from train import main

    monkeypatch.setenv(variable, "2")
    assert run(main, [*TINY, *options]) == 2
    assert text in capsys.readouterr().err
