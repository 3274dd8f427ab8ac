"""A job of mpi_worker.py, or another worker, under ``mpiexec``."""

import re
import sys
import tempfile
from pathlib import Path

from environments import ended
from places import SUPPORT

WORKER = SUPPORT / "mpi_worker.py"
BIN = Path(sys.executable).parent


class Job:
    """A finished ``mpiexec``: exit code and output."""

    def __init__(self, processes, *arguments, limit=100, worker=WORKER, environment=()):
        command = [BIN / "mpiexec", "-n", processes, sys.executable, worker, *arguments]
        with tempfile.TemporaryDirectory() as reports:
            own = {"OMP_NUM_THREADS": "1", "MPI_WORKER_REPORTS": reports}
            done = ended(command, SUPPORT, timeout=limit, **{**own, **dict(environment)})
            self.code = done.returncode
            self.output = done.stdout + done.stderr + "".join(p.read_text() for p in sorted(Path(reports).iterdir()))

    def succeeded(self, processes):
        return self.code == 0 and all(f"OK {rank}" in self.output for rank in range(processes))

    def failure_of(self, rank):
        """(seconds from the beginning of the step, text) of the error that this process got."""
        found = re.search(rf"FAILED rank {rank} after ([0-9.]+) s: (.*)", self.output)
        assert found, self.output
        return float(found[1]), found[2]
