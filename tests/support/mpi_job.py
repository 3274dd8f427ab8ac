"""A job of mpi_worker.py, or another worker, under ``mpiexec``."""

import importlib.util
import re
import sys
import tempfile
from pathlib import Path

import pytest
from environments import ended
from places import SUPPORT

WORKER = SUPPORT / "mpi_worker.py"
BIN = Path(sys.executable).parent
needs_horovod = pytest.mark.skipif(
    importlib.util.find_spec("horovod") is None, reason="Horovod is not installed; `make test-horovod` builds it"
)


def failure_of(rank, output, case=""):
    """(seconds from the beginning of the step, text) of the error that this process got; ``case``: of several."""
    found = re.search(rf"FAILED {case and case + ' '}rank {rank} after ([0-9.]+) s: (.*)", output)
    assert found, output
    return float(found[1]), found[2]


def assert_no_strange_error(output, known="OSError"):
    """No rank, also none that the test does not look at, has raised an exception but that of its scenario."""
    raised = re.findall(r"^([\w.]*(?:Error|Exception))(?::|$)", output, re.MULTILINE)
    assert set(raised) <= {known}, output


class Job:
    """A finished ``mpiexec``: exit code and output."""

    def __init__(self, processes, *arguments, limit=100, worker=WORKER, environment=()):
        command = [BIN / "mpiexec", "-n", processes, sys.executable, worker, *arguments]
        with tempfile.TemporaryDirectory() as reports:
            own = {"OMP_NUM_THREADS": "1", "MPI_WORKER_REPORTS": reports}
            done = ended(command, SUPPORT, timeout=limit, **{**own, **dict(environment)})
            self.code = done.returncode
            for path in Path(reports).glob("memory of *"):
                for name in path.read_text().split():
                    Path(name).unlink(missing_ok=True)
                path.unlink()
            self.output = done.stdout + done.stderr + "".join(p.read_text() for p in sorted(Path(reports).iterdir()))
        assert_no_strange_error(self.output)

    def succeeded(self, processes):
        return self.code == 0 and all(f"OK {rank}" in self.output for rank in range(processes))

    def failure_of(self, rank, case=""):
        return failure_of(rank, self.output, case)
