"""A job of mpi_worker.py, or another worker, under ``mpiexec``, and programs that run side by side without it."""

import contextlib
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from environments import shell
from places import PACKAGE, SUPPORT

WORKER = SUPPORT / "mpi_worker.py"
BIN = Path(sys.executable).parent


def failure_of(rank, output):
    """(seconds from the beginning of the step, text) of the error that this process got."""
    found = re.search(rf"FAILED rank {rank} after ([0-9.]+) s: (.*)", output)
    assert found, output
    return float(found[1]), found[2]


def assert_no_strange_error(output):
    """No rank, also none that the test does not look at, has raised an exception but that of its scenario."""
    raised = re.findall(r"^([\w.]*(?:Error|Exception))(?::|$)", output, re.MULTILINE)
    assert set(raised) <= {"OSError"}, output


class Programs:
    """What runs side by side, each ended by its process id at the end of the block. Their output, and what they leave
    by ranks.py, is in one folder.
    """

    def __init__(self):
        self._stack = contextlib.ExitStack()
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        self._stack.callback(self._remove_memory)

    def start(self, name, command, environment):
        output = self._stack.enter_context(open(self.folder / name, "w"))  # noqa: SIM115
        common = {"OMP_NUM_THREADS": 1, "MPI_WORKER_REPORTS": self.folder}
        own = shell(SUPPORT, PACKAGE.parent, **{**common, **environment})
        process = subprocess.Popen(list(map(str, command)), env=own, stdout=output, stderr=subprocess.STDOUT)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def _remove_memory(self):
        for path in self.folder.glob(".memory of *"):
            for name in path.read_text().split():
                Path(name).unlink(missing_ok=True)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._stack.close()

    def output(self):
        return "".join(path.read_text() for path in sorted(self.folder.glob("[!.]*")))

    def wait(self, processes, limit=90):
        """Their exit codes; None where a process has not ended in time."""
        end = time.monotonic() + limit
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
        return [process.poll() for process in processes]


class Job:
    """A finished ``mpiexec``: exit code and output."""

    def __init__(self, processes, *arguments, limit=100, worker=WORKER, environment=()):
        command = [BIN / "mpiexec", "-n", processes, sys.executable, worker, *arguments]
        with Programs() as programs:
            (self.code,) = programs.wait([programs.start("job", command, dict(environment))], limit)
            self.output = programs.output()
        assert_no_strange_error(self.output)

    def succeeded(self, processes):
        return self.code == 0 and all(f"OK {rank}" in self.output for rank in range(processes))
