"""Workers of MXNet's own cluster on this machine: statistics and gradients of all, and what they learn of each other.

What a worker does stands in dist_sync_worker.py.
"""

import re
import signal
import socket
import sys

import mxnet as mx
import pytest
from mpi_job import Programs, assert_no_strange_error, failure_of
from places import SUPPORT

import gluon_syncbn


class Cluster(Programs):
    """A job: the scheduler, a server and two workers."""

    def __init__(self, *arguments):
        super().__init__()
        # The scheduler may listen at the port, because it sets this, too; nobody else is given it as a free one.
        held = self._stack.enter_context(socket.socket())
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        of_job = {"PS_ROOT_URI": "127.0.0.1", "PS_ROOT_PORT": held.getsockname()[1], "NODE_HOST": "127.0.0.1"}
        of_job.update(NUM_WORKER=2, NUM_SERVER=1)
        idle = [sys.executable, "-c", "import light, gluon_syncbn"]
        worker = [sys.executable, SUPPORT / "dist_sync_worker.py", *arguments]

        def start(role, command, number=0):
            variables = {f"DMLC_{name}": value for name, value in {**of_job, "ROLE": role}.items()}
            return self.start(f"{role} {number}", command, {**variables, "WORKER": number})

        self.others = [start(role, idle) for role in ("server", "scheduler")]
        self.workers = [start("worker", worker, number) for number in range(2)]

    def __exit__(self, kind, *_):
        with self._stack:
            if kind is None:
                assert_no_strange_error(self.output())


def test_workers():
    """All processes end by themselves."""
    with Cluster("equals_one_device+rows_arrive+refuses", "object") as job:
        codes = job.wait(job.workers, 180)
        codes += job.wait(job.others, 0 if any(codes) else 180)
        output = job.output()
    assert codes == [0] * 4 and "OK 0" in output and "OK 1" in output, f"{codes}\n{output}"
    assert len(set(re.findall("running (.*)", output))) == 1  # the same bits


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        pytest.param("hangs", "MXNet's store does not say which worker is missing", marks=pytest.mark.slow),
        pytest.param("skips", "the forward of call [35]: not every worker has come after 4 s", marks=pytest.mark.slow),
        ("raises", "SyncBatchNorm 'batchnorm.*': the forward of call 3: not every worker has come after 4 s"),
        ("no step", "the sums of the gradients: not every worker has come after 4 s"),
        ("another order", "rank 1 has come with the forward of call 10, rank 0 with the forward of call 3"),
        ("other net", "rank 0 and SyncBatchNorm .* 'momentum': 0.5.* on rank 1|momentum 0.9.* on rank 0 and"),
    ],
)
def test_a_worker_that_is_not_like_the_other(kind, text):
    """The other one gets an error within the limit, and all workers end."""
    with Cluster("fault", "dist_sync", kind) as job:
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
