"""Two processes on this machine with statistics over MPI, and gradients by Horovod's Trainer.

What a process does stands in dist_sync_worker.py.
"""

import re

import mpi_job
import pytest
from places import SUPPORT

pytest.importorskip("horovod", reason="Horovod is not installed; `make test-horovod` builds it")
WORKER = SUPPORT / "dist_sync_worker.py"


def test_processes():
    job = mpi_job.Job(2, "equals_one_device", "horovod", worker=WORKER)
    assert job.succeeded(2), job.output
    assert len(set(re.findall("running (.*)", job.output))) == 1  # the same bits


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("skips", "rank 1 of 2 has ended"),
        ("raises", "rank 1 of 2 has failed: OSError left the recorded step"),
        ("hangs", "rank 0 of 2 waits for rank 1 in the forward of call 3 of SyncBatchNorm .* after 4 s"),
    ],
)
def test_a_process_that_is_not_like_the_other(kind, text):
    job = mpi_job.Job(2, "fault", "horovod", kind, worker=WORKER)
    assert re.search(text, mpi_job.failure_of(0, job.output)[1]), job.output
    assert job.code not in (0, None)
