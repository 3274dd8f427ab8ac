"""Two processes on this machine that exchange statistics over Horovod, whose Trainer adds the gradients.

What a process does stands in dist_sync_worker.py.
"""

import os
import re
import sys

import mpi_job
import pytest
from environments import ended
from places import PACKAGE, SUPPORT

pytest.importorskip("horovod", reason="Horovod is not installed; `make test-horovod` builds it")
WORKER = str(SUPPORT / "dist_sync_worker.py")


class Two(mpi_job.Programs):
    """Processes, and the store through which they meet."""

    def __init__(self, *arguments):
        from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
        from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
        from horovod.runner.http.http_server import RendezvousServer

        super().__init__()
        slots = get_host_assignments(parse_hosts("localhost:2"), 2)
        server = RendezvousServer()
        of_job = create_run_env_vars("127.0.0.1", ["lo"], server.start())
        server.init(slots)
        self._stack.callback(server._httpd.server_close)
        self._stack.callback(server.stop)
        command = [sys.executable, WORKER, *arguments]
        self.workers = [
            self.start(f"worker {slot.rank}", command, {**of_job, **create_slot_env_vars(slot)}) for slot in slots
        ]


def test_processes():
    with Two("equals_one_device+rows_arrive", "horovod") as job:
        assert job.wait(job.workers) == [0, 0], job.output()
        assert len(set(re.findall("running (.*)", job.output()))) == 1  # the same bits


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("skips", "Horovod has been shut down"),
        ("raises", "Horovod has been shut down"),
        ("killed", "Horovod has been shut down"),
        ("hangs", "the forward of call 3: not every rank has come within 4 s. Horovod does not say which"),
        ("other net", "momentum.* on rank 0 and SyncBatchNorm"),
    ],
)
def test_a_process_that_is_not_like_the_other(kind, text):
    with Two("fault", "horovod", kind) as job:
        codes = job.wait(job.workers, 40 if kind == "hangs" else 60)
        assert re.search(text, mpi_job.failure_of(0, job.output())[1]), job.output()
    assert None not in codes[: 1 if kind == "hangs" else 2]


def test_horovodrun():
    command = [str(mpi_job.BIN / "horovodrun"), "-np", "2", sys.executable, WORKER]
    done = ended(
        [*command, "equals_one_device", "horovod"],
        SUPPORT,
        PACKAGE.parent,
        OMP_NUM_THREADS=1,
        PATH=f"{mpi_job.BIN}:{os.environ['PATH']}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
