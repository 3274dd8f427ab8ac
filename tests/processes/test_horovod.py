"""Several processes on this machine that meet through Horovod: what they compute, and what they learn of each other.

What a process does stands in mpi_worker.py and gradients_worker.py, as far as it is the same for every transport, and
in horovod_worker.py.
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
from exchanges import assert_sound
from places import PACKAGE, SUPPORT

pytestmark = mpi_job.needs_horovod


@contextlib.contextmanager
def environments(processes):
    """Of each process, while the store through which they meet is there."""
    from horovod.runner.common.util.hosts import get_host_assignments, parse_hosts
    from horovod.runner.gloo_run import create_run_env_vars, create_slot_env_vars
    from horovod.runner.http.http_server import RendezvousServer

    slots = get_host_assignments(parse_hosts(f"localhost:{processes}"), processes)
    server = RendezvousServer()
    job = create_run_env_vars("127.0.0.1", ["lo"], server.start())
    server.init(slots)
    try:
        yield [{key: str(value) for key, value in {**job, **create_slot_env_vars(slot)}.items()} for slot in slots]
    finally:
        server.stop()
        server._httpd.server_close()


class Job(mpi_job.Job):
    """Processes that have ended: exit codes by rank and output. After a failure of rank 0 the others have 10 s to end
    too, and get None for an exit code where they do not."""

    def __init__(self, processes, script, *arguments, limit=90, **settings):
        self.codes = [None] * processes
        with tempfile.TemporaryDirectory() as reports, contextlib.ExitStack() as stack:
            own = {
                "OMP_NUM_THREADS": "1",
                "MPI_WORKER_REPORTS": reports,
                "GLUON_SYNCBN_TEST_TRANSPORT": "horovod",
                "GLUON_SYNCBN_SHARED_MEMORY": "off",
                **settings,
            }
            command = [sys.executable, str(SUPPORT / script), *map(str, arguments)]
            outputs = [stack.enter_context(open(Path(reports, f"output of {i}"), "w+")) for i in range(processes)]
            running = [
                subprocess.Popen(
                    command,
                    env=shell(SUPPORT, PACKAGE.parent, **{**own, **env}),
                    stdout=output,
                    stderr=subprocess.STDOUT,
                )
                for env, output in zip(stack.enter_context(environments(processes)), outputs)
            ]
            try:
                self.codes[0] = running[0].wait(limit)
                end = time.monotonic() + (10 if self.codes[0] else limit)
                for i in range(1, processes):
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        self.codes[i] = running[i].wait(max(0.1, end - time.monotonic()))
            finally:
                for process in running:
                    process.kill()
                    process.wait()
            self.output = "".join(p.read_text() for p in sorted(Path(reports).iterdir()))
        mpi_job.assert_no_strange_error(self.output)

    def succeeded(self):
        return all(code == 0 for code in self.codes) and all(f"OK {i}" in self.output for i in range(len(self.codes)))


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_equal_the_specification(processes):
    """All modes, types and ways of running, 1 and 2 devices in turn, names that differ."""
    job = Job(processes, "mpi_worker.py", "equals_the_specification", limit=150)
    assert job.succeeded(), job.output


@pytest.mark.parametrize(
    ("processes", "program", "scenario"),
    [
        (2, "gradients_worker.py", "trains_two_nets"),
        (3, "mpi_worker.py", "pushpull_and_broadcast"),
        (3, "mpi_worker.py", "gathers+gradients_in_any_order+shuffled_keys"),
        (2, "horovod_worker.py", "beside_distributed_trainer"),
        (2, "horovod_worker.py", "initialised_by_the_script"),
        (1, "horovod_worker.py", "another_thread"),
    ],
)
def test_several_processes(processes, program, scenario):
    job = Job(processes, program, scenario)
    assert job.succeeded(), job.output


@pytest.mark.parametrize("settings", [{}, {"GLUON_SYNCBN_SHARED_MEMORY": "", "MACHINES": "aab"}])
def test_large_sums(settings):
    """Of processes that are each by itself, and of two machines."""
    job = Job(3, "horovod_worker.py", "large_sums", **settings)
    assert job.succeeded(), job.output


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("late", r"rank 0 of 3 waits for rank 1, 2 .*round 1|rank 2 of 3 has failed: rank 2 of 3 waits for rank"),
        ("stuck", r"rank 0 of 3 waits for rank 1, 2 .*round 1|rank ([12]) of 3 has failed: rank \1 of 3 waits"),
        ("killed", r"rank 1 of 3 has ended without a word \(process"),
        ("ends", "rank 1 of 3 has ended: .*(rank 0 was in sum|rank 2 was in sum)"),
        ("without Horovod", "rank 1 of 3 has failed: Horovod could not add gradients: .* not been initialized"),
        ("raises", "rank 1 of 3 has failed: Horovod could not add gradients: 'str' object is not callable"),
    ],
)
def test_a_fault_while_horovod_adds(fault, text):
    job = Job(3, "horovod_worker.py", "fault_in_a_sum", fault)
    seconds, error = job.failure_of(0)
    assert re.search(text, error), error
    assert seconds < 30
    assert job.codes[0] not in (0, None)
    assert job.codes[2] not in (0, None)


def test_horovodrun():
    command = [str(mpi_job.BIN / "horovodrun"), "-np", "2", sys.executable, str(SUPPORT / "mpi_worker.py")]
    path = f"{mpi_job.BIN}:{os.environ['PATH']}"
    own = {"GLUON_SYNCBN_TEST_TRANSPORT": "horovod", "OMP_NUM_THREADS": "1", "PATH": path}
    with tempfile.TemporaryDirectory() as reports:
        own["MPI_WORKER_REPORTS"] = reports
        done = ended([*command, "pushpull_and_broadcast"], SUPPORT, PACKAGE.parent, **own)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "OK 0" in done.stdout
    assert "OK 1" in done.stdout


@pytest.mark.parametrize("case", ["step/twice/1/later", "join/skipped/1/later"])
def test_a_process_that_makes_other_calls(case):
    job = Job(2, "exchanges_worker.py", "horovod", case)
    assert None not in job.codes
    assert_sound(job.output, 2, [case])


def test_interrupt_in_the_main_thread():
    job = Job(2, "mpi_worker.py", "interrupted_sum")
    said = "rank 0 of 2 has failed: rank 0 of 2 waits .* in exchange 0, round 1, and the process was asked"
    assert re.search(said, job.failure_of(1)[1]), job.output
    assert job.codes[0] not in (0, None)
