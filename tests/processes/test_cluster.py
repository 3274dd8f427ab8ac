"""Several workers on this machine that MXNet's own cluster introduces: what they compute, and what they learn of each
other.

What a worker does stands in mpi_worker.py and gradients_worker.py: it is the same for every transport.
"""

import contextlib
import itertools
import os
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
from exchanges import assert_sound
from mpi_job import assert_no_strange_error, failure_of, left
from places import PACKAGE, SUPPORT

import gluon_syncbn


class Cluster:
    """A job: the scheduler, servers and workers, each ended by its process id at the end of the block."""

    def __init__(self, workers, script, *arguments, servers=1, raises="OSError", **settings):
        self._stack, self._numbers, self._raises = contextlib.ExitStack(), itertools.count(), raises
        self.folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        # The scheduler may listen at the port, because it sets this, too; nobody else is given it as a free one.
        held = self._stack.enter_context(socket.socket())
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        job = {
            "DMLC_PS_ROOT_URI": "127.0.0.1",
            "DMLC_PS_ROOT_PORT": held.getsockname()[1],
            "DMLC_NUM_WORKER": workers,
            "DMLC_NUM_SERVER": servers,
            "DMLC_NODE_HOST": "127.0.0.1",
            "OMP_NUM_THREADS": 1,
            "MPI_WORKER_REPORTS": self.folder,
            "GLUON_SYNCBN_TEST_TRANSPORT": "dist_sync",
            **settings,
        }
        others = [sys.executable, "-c", "import light, gluon_syncbn"]
        self.scheduler = self._start("scheduler", others, job)
        self.servers = [self._start("server", others, job) for _ in range(servers)]
        command = [sys.executable, *map(str, [script if script == "-c" else SUPPORT / script, *arguments])]
        self.workers = [
            self._start("worker", command, {**job, "MPI_WORKER_MACHINES": machine})
            for machine in ["first", "first", "second"][:workers]
        ]

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
        codes = self.wait([*self.workers, *self.servers, self.scheduler], limit)
        output = self.output()
        assert codes == [0] * len(codes), f"{codes}\n{output}"
        assert all(f"OK {rank}" in output for rank in range(len(self.workers))), output


@pytest.mark.parametrize(
    ("workers", "program", "scenario"),
    [
        (3, "gradients_worker.py", "rows_of_any_type+pushpull_and_broadcast+resumes"),
        pytest.param(2, "mpi_worker.py", "equals_the_specification", marks=pytest.mark.slow),
        pytest.param(2, "mpi_worker.py", "same_bits_on_repetition", marks=pytest.mark.slow),
        pytest.param(3, "mpi_worker.py", "gathers+gradients_in_any_order+shuffled_keys", marks=pytest.mark.slow),
    ],
)
def test_several_workers(workers, program, scenario):
    """What they compute; all processes of the job end by themselves."""
    with Cluster(workers, program, scenario, GLUON_SYNCBN_SHARED_MEMORY="off") as job:
        job.check_success()


def test_in_shared_memory():
    with Cluster(3, "gradients_worker.py", "two_machines+trains_two_nets") as job:
        job.check_success()


@pytest.mark.slow
def test_layers_in_any_order():
    settings = {"GLUON_SYNCBN_SHARED_MEMORY": "off", "MPI_WORKER_CONTEXTS": 2}
    with Cluster(2, "groups_worker.py", "layers_in_any_order", 300, **settings) as job:
        job.check_success(660)


@pytest.mark.parametrize(
    "case",
    [
        "step/twice/1/later",
        *(pytest.param(case, marks=pytest.mark.slow) for case in ("step/skipped/0/now", "join/skipped/1/later")),
    ],
)
def test_a_worker_that_makes_other_calls(case):
    """Of the table, whose other cases test_exchanges.py has by messages of the same kind. All processes end."""
    with Cluster(2, "exchanges_worker.py", "dist_sync", case, GLUON_SYNCBN_SHARED_MEMORY="off") as job:
        assert None not in job.wait([*job.workers, *job.servers, job.scheduler])
        assert_sound(job.output(), 2, [case])


def wait_until_running(job, workers):
    """The process ids of the workers and of their children, by rank, once they train."""
    return [[int(number) for number in left(job, f"running {rank}").split()] for rank in range(workers)]


@pytest.mark.parametrize(("faulty", "memory"), [(1, "off"), (0, "off"), pytest.param(1, "on", marks=pytest.mark.slow)])
def test_a_worker_that_is_killed(faulty, memory):
    """The others hear of it at once, also if it has left a child, or had the relay; and they end."""
    steps = ("mpi_worker.py", "steps_until_one_fails", "none", 60, "child")
    with Cluster(3, *steps, GLUON_SYNCBN_SHARED_MEMORY=memory) as job:
        pids = wait_until_running(job, 3)
        os.kill(pids[faulty][0], signal.SIGKILL)
        try:
            for rank in {0, 1, 2} - {faulty}:
                seconds, error = failure_of(rank, left(job, rank))
                killed = f"rank {faulty} of 3 has ended without a word (process {pids[faulty][0]}; was it killed?)"
                assert killed in error
                assert seconds < 30
            assert sorted(job.wait(job.workers)) == [-9, 3, 3]
        finally:
            with contextlib.suppress(ProcessLookupError):  # a child whose parent was not killed
                os.kill(pids[1][1], signal.SIGKILL)


@pytest.mark.parametrize("which", ["a server", pytest.param("the scheduler", marks=pytest.mark.slow)])
def test_a_server_or_the_scheduler_is_killed(which):
    """The workers train to the end, where an error says that the cluster has not ended."""
    with Cluster(2, "mpi_worker.py", "steps_until_one_fails", "none", 3, GLUON_SYNCBN_SHARED_MEMORY="off") as job:
        wait_until_running(job, 2)
        process = job.servers[0] if which == "a server" else job.scheduler
        os.kill(process.pid, signal.SIGKILL)
        Path(job.folder, "end").touch()
        assert job.wait(job.workers) == [0, 0]
        output = job.output()
        assert all(f"OK {rank}" in output for rank in (0, 1)), output
        assert "MXNet's servers and scheduler have not ended" in output


def test_a_worker_that_does_not_come():
    program = "import light, gluon_syncbn; gluon_syncbn.configure(timeout=3); gluon_syncbn.kvstore('dist_sync')"
    with Cluster(2, "-c", program, raises="mxnet.base.MXNetError") as job:
        job.workers[1].kill()
        assert job.wait(job.workers[:1]) == [1]
        assert "not connected within 3 s: the scheduler at" in job.output()
        missing = "not all of 2 workers (DMLC_NUM_WORKER) and 1 servers (DMLC_NUM_SERVER) have come"
        assert f"is there, but {missing}" in job.output()


def test_no_scheduler(monkeypatch):
    for name, value in {"ROLE": "worker", "PS_ROOT_URI": "127.0.0.1", "NUM_WORKER": 1, "NUM_SERVER": 1}.items():
        monkeypatch.setenv("DMLC_" + name, str(value))
    monkeypatch.delenv("DMLC_PS_ROOT_PORT", raising=False)
    with pytest.raises(mx.MXNetError, match="kvstore 'dist_sync': DMLC_PS_ROOT_PORT is not set"):
        gluon_syncbn.kvstore("dist_sync")
    gluon_syncbn.configure(timeout=3)
    expected = r"not connected within 3 s: the scheduler is not there: nobody listens at 127.0.0.1:\d+ \(DMLC_PS_ROOT_"
    with socket.socket() as unused, pytest.raises(mx.MXNetError, match=expected):
        unused.bind(("127.0.0.1", 0))
        monkeypatch.setenv("DMLC_PS_ROOT_PORT", str(unused.getsockname()[1]))
        gluon_syncbn.kvstore("dist_sync")
