"""Runs of examples/segmentation as a user starts them, and what they leave."""

import csv
import os
import signal
import subprocess
import sys
import textwrap
import time

from environments import shell
from places import PACKAGE, SEGMENTATION


class Process:
    """One of the programs in a process group of its own, which is ended in any case."""

    def __init__(self, folder, *command, **environment):
        self._path = folder / "out.txt"
        self._out = open(self._path, "w")  # noqa: SIM115, closed in __exit__
        self._popen = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=folder,
            env=shell(PACKAGE.parent, OMP_NUM_THREADS=1, **environment),
            stdout=self._out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self.pid = self._popen.pid

    def __enter__(self):
        return self

    def __exit__(self, *_):
        if self._popen.poll() is None:
            os.killpg(self.pid, signal.SIGKILL)
            self._popen.wait()
        self._out.close()

    def wait(self, timeout=100):
        return self._popen.wait(timeout)

    def running(self):
        return self._popen.poll() is None

    def output(self):
        return self._path.read_text()  # by an open file of its own: the process writes where the common one stands


def changed_train(path, changes):
    """train.py with something else in it."""
    program = f"import sys; sys.path.insert(0, {str(SEGMENTATION)!r})\nimport train\n"
    program += "def change():\n    import numpy, os, time, dataset, processes, training\n"
    program += textwrap.indent(changes, "    ") + "\n"
    # As late as train.py itself imports these: under horovodrun it forks before.
    program += "train.prepare_mxnet, late = lambda args: (late(args), change()), train.prepare_mxnet\n"
    path.write_text(f"{program}from errors import run; sys.exit(run(train.main))\n")
    return path


def lasting(epoch, step):
    """A change: the step after these is not over before the signal has come, however fast the machine is."""
    return textwrap.dedent(f"""
        train_step = training.Run._train_step
        def lasting(run, images, masks, interrupt):
            while (run.epoch, run.step) == ({epoch}, {step}) and not interrupt.requested:
                time.sleep(0.01)
            return train_step(run, images, masks, interrupt)
        training.Run._train_step = lasting
    """)


def steps_of(folder):
    """How many steps a run that goes on has written down."""
    path = folder / "steps.csv"
    return len(rows(path)) if path.exists() else 0


def rows(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def wait_for(condition, seconds=100):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def truncate(path):
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
