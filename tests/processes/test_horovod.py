"""Two processes on this machine that exchange statistics over Horovod, whose Trainer adds the gradients.

What a process does stands in dist_sync_worker.py.
"""

import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import mpi_job
import pytest
from environments import ended, shell
from places import PACKAGE, SUPPORT

pytestmark = mpi_job.needs_horovod
WORKER = str(SUPPORT / "dist_sync_worker.py")


@contextlib.contextmanager
def environments():
    """Of each process, while the store through which they meet is there."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    slots = get_host_assignments(parse_hosts("localhost:2"), 2)
    server = RendezvousServer()
    job = create_run_env_vars("127.0.0.1", ["lo"], server.start())
    server.init(slots)
    try:
        yield [{key: str(value) for key, value in {**job, **create_slot_env_vars(slot)}.items()} for slot in slots]
    finally:
        server.stop()
        server._httpd.server_close()


def outcome(*arguments, limit=90):
    """The exit codes of both processes, None for one that has not ended in time, and what they print and report."""
    with tempfile.TemporaryDirectory() as folder, environments() as own, contextlib.ExitStack() as stack:
        job = {"OMP_NUM_THREADS": 1, "MPI_WORKER_REPORTS": folder}
        running = []
        for rank in range(2):
            to = stack.enter_context(open(Path(folder, f"output {rank}"), "w"))
            environment = shell(SUPPORT, PACKAGE.parent, **job, **own[rank])
            command = [sys.executable, WORKER, *arguments]
            running.append(subprocess.Popen(command, env=environment, stdout=to, stderr=subprocess.STDOUT))
            stack.callback(running[-1].wait)
            stack.callback(running[-1].kill)
        end = time.monotonic() + limit
        for process in running:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, end - time.monotonic()))
        output = "".join(path.read_text() for path in sorted(Path(folder).iterdir()))
        return [process.poll() for process in running], output


@pytest.mark.parametrize("case", ["equals_one_device eager", "equals_one_device graph", "rows_arrive"])
def test_processes(case):
    name, *kind = case.split()
    codes, output = outcome(name, "horovod", *kind)
    assert codes == [0, 0], output
    assert len(set(re.findall("running (.*)", output))) == len(kind)  # the same bits


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
    codes, output = outcome("fault", "horovod", kind, limit=40 if kind == "hangs" else 60)
    assert re.search(text, mpi_job.failure_of(0, output)[1]), output
    assert None not in codes[: 1 if kind == "hangs" else 2]


def test_horovodrun():
    command = [str(mpi_job.BIN / "horovodrun"), "-np", "2", sys.executable, WORKER]
    done = ended(
        [*command, "equals_one_device", "horovod", "eager"],
        SUPPORT,
        PACKAGE.parent,
        OMP_NUM_THREADS=1,
        PATH=f"{mpi_job.BIN}:{os.environ['PATH']}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
