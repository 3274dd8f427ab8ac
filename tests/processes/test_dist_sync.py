"""Workers of MXNet's own cluster on this machine: statistics and gradients of all, and what they learn of each other.

What a worker does stands in dist_sync_worker.py.
"""

import contextlib
import itertools
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mxnet as mx
import pytest
from environments import shell
from mpi_job import assert_no_strange_error, failure_of
from places import PACKAGE, SUPPORT

import gluon_syncbn


class Cluster:
    """A job: the scheduler, servers and workers, each ended by its process id at the end of the block."""

    def __init__(self, *arguments, raises="OSError", servers=1):
        self._stack, self._numbers, self._raises = contextlib.ExitStack(), itertools.count(), raises
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        # The scheduler may listen at the port, because it sets this, too; nobody else is given it as a free one.
        held = self._stack.enter_context(socket.socket())
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        job = {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": held.getsockname()[1],
            "DMLC_NUM_WORKER": 2,
            "DMLC_NUM_SERVER": servers,
            "DMLC_NODE_HOST": "127.0.0.1",
            "OMP_NUM_THREADS": 1,
            "MPI_WORKER_REPORTS": self.folder,
        }
        others = [sys.executable, "-c", "import light, gluon_syncbn"]
        self.scheduler = self._start("scheduler", others, job)
        self.servers = [self._start("server", others, job) for _ in range(servers)]
        command = [sys.executable, str(SUPPORT / "dist_sync_worker.py"), *arguments]
        self.workers = [self._start("worker", command, {**job, "WORKER": i}) for i in range(2)]

    def _start(self, role, command, job):
        output = self._stack.enter_context(open(Path(self.folder, f"{role} {next(self._numbers)}"), "w"))  # noqa: SIM115
        environment = shell(SUPPORT, PACKAGE.parent, **job, DMLC_ROLE=role)
        process = subprocess.Popen(command, env=environment, stdout=output, stderr=subprocess.STDOUT)
        self._stack.callback(process.wait)
        self._stack.callback(process.kill)
        return process

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        with self._stack:
            if kind is None:
                assert_no_strange_error(self.output(), self._raises)

    def output(self):
        return "".join(path.read_text() for path in sorted(self.folder.glob("[!.]*")))

    def wait(self, processes, limit=90):
        """Their exit codes; None where a process has not ended in time."""
        end = time.monotonic() + limit
        for process in processes:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
        return [process.poll() for process in processes]

    def check_success(self, limit=180):
        """All workers succeed, and all processes end by themselves."""
        codes = self.wait(self.workers, limit)
        codes += self.wait([*self.servers, self.scheduler], 0 if any(codes) else limit)
        output = self.output()
        assert codes == [0] * len(codes), f"{codes}\n{output}"
        assert all(f"OK {rank}" in output for rank in range(len(self.workers))), output


@pytest.mark.parametrize(
    "arguments",
    [
        ("equals_one_device", "object", "eager"),
        ("equals_one_device", "dist_device_sync", "graph"),
        ("rows_arrive", "dist_sync"),
        ("refuses", "dist_sync"),
    ],
)
def test_workers(arguments):
    with Cluster(*arguments) as job:
        job.check_success()
        running = re.findall("running (.*)", job.output())
        assert len(set(running)) == (arguments[0] == "equals_one_device")  # the same bits


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("killed", "SyncBatchNorm 'batchnorm.*': the forward of call 3: not every worker has come after 4 s"),
        pytest.param("hangs", "MXNet's store does not say which worker is missing", marks=pytest.mark.slow),
        pytest.param("skips", "the forward of call [35]: not every worker has come after 4 s", marks=pytest.mark.slow),
        ("raises", "the forward of call 3: not every worker has come after 4 s"),
        ("no step", "the sums of the gradients: not every worker has come after 4 s"),
        ("another order", "rank 1 has come with the forward of call 10, rank 0 with the forward of call 3"),
        ("other net", "rank 0 and SyncBatchNorm .* 'momentum': 0.5.* on rank 1|momentum 0.9.* on rank 0 and"),
    ],
)
def test_a_worker_that_is_not_like_the_other(kind, text):
    """The other one gets an error within the limit, and all workers end."""
    with Cluster("fault", "dist_sync", kind, raises="ValueError") as job:
        codes = job.wait(job.workers, 30 if kind == "hangs" else 90)
        seconds, error = failure_of(0, job.output())
        assert re.search(text, error), error
        assert seconds < 30
        assert codes.count(None) == (kind == "hangs") and 0 not in codes


def test_a_worker_that_is_killed_while_another_waits_at_its_end():
    with Cluster("fault", "dist_sync", "killed at the end") as job:
        assert set(job.wait(job.workers, 60)) == {-signal.SIGKILL, 1}
        assert "rank 0 of 2 has come to its end. There, not every worker has come in time" in job.output()


def test_no_scheduler(monkeypatch):
    for name, value in {"ROLE": "worker", "PS_ROOT_URI": "127.0.0.1", "NUM_WORKER": 1, "NUM_SERVER": 1}.items():
        monkeypatch.setenv("DMLC_" + name, str(value))
    monkeypatch.delenv("DMLC_PS_ROOT_PORT", raising=False)
    with pytest.raises(mx.MXNetError, match="kvstore 'dist_sync': DMLC_PS_ROOT_PORT is not set"):
        gluon_syncbn.SyncBatchNorm(kvstore="dist_sync")
