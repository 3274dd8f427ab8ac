"""Processes of one machine that meet in memory. No launcher ends them all, so that one may go in any way."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import mxnet as mx
import pytest
from environments import shell
from mpi_job import Job
from places import SUPPORT

from gluon_syncbn import _native

WORKER = SUPPORT / "segment_worker.py"


class Workers:
    """Processes of segment_worker.py, the last of which has the fault."""

    def __init__(self, folder, ranks, fault="none", timeout=60.0):
        self.folder = folder
        command = [sys.executable, WORKER, folder, ranks, timeout, fault]
        self._job = subprocess.Popen(
            [str(part) for part in command],
            stdout=subprocess.PIPE,
            text=True,
            env=shell(SUPPORT),
            start_new_session=True,
        )
        self._watchdog = threading.Timer(120, self.end)
        self._watchdog.start()
        self.processes = json.loads(self._job.stdout.readline())

    def end(self):
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(self._job.pid, signal.SIGKILL)

    def place(self):
        """Where the memory is."""
        while not (self.folder / "place").exists():
            assert self._job.poll() is None
            time.sleep(0.01)
        return json.loads((self.folder / "place").read_text())

    def outputs(self, ranks):
        self._job.wait()
        return [(self.folder / f"output.{rank}").read_text() for rank in ranks]

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._watchdog.cancel()
        self.end()
        self._job.wait()
        self._job.stdout.close()


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_any_order_and_any_length(tmp_path, ranks):
    with Workers(tmp_path, ranks) as workers:
        outputs = workers.outputs(range(ranks))
        assert [output.splitlines()[-1] for output in outputs] == ["OK"] * ranks, outputs


# What the others then learn of the last rank, and the limit of their wait.
FAULTS = {
    "SIGKILL": ("rank 2 of 3 has ended without a word (process {process}; was it killed?)", 60),
    "SIGSTOP": ("of 3 waits for rank 2 in the forward of call 11 of SyncBatchNorm 'layer", 3),
    "fails": ("rank 2 of 3 has failed: the disk is full", 60),
    "ends": ("rank 2 of 3 has ended (rank", 60),
    "skips a step": ("one of them has skipped or repeated a step", 60),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_process_that_goes(tmp_path, fault):
    """All others have an error. Whoever finds the cause tells the others, so that one may hear of it from another."""
    text, timeout = FAULTS[fault]
    with Workers(tmp_path, 3, fault, timeout) as workers:
        outputs = workers.outputs((0, 1))
        text = text.format(process=workers.processes[2])
        for output in outputs:
            found = re.search(r"FAILED after ([0-9.]+) s: (.*)", output)
            assert found, output
            assert float(found[1]) < 30
            assert "layer" in found[2]
        assert any(text in output for output in outputs), outputs


def test_nothing_is_left_of_processes_that_are_killed(tmp_path):
    """The memory has no name: it goes with the last process."""
    before = in_shared_memory()
    with Workers(tmp_path, 2, "SIGSTOP") as workers:
        place = workers.place()
        file = Path(f"/proc/{place['process']}/fd/{place['number']}")
        assert file.readlink().name.startswith("memfd:")
        assert file.stat().st_mode & 0o777 == 0o600
        assert file.stat().st_nlink == 0
        for process in workers.processes:
            os.kill(process, signal.SIGKILL)
    assert in_shared_memory() <= before


def in_shared_memory():
    """Files there, but for those of MPICH, which another job of this machine may make meanwhile."""
    return {name for name in os.listdir("/dev/shm") if not name.startswith("mpich")}


def test_another_file_is_not_taken_for_the_memory(tmp_path):
    segment = _native.Segment.create(2)
    with pytest.raises(mx.MXNetError, match="is of another process"):
        _native.Segment.open(2, 1, os.getpid(), segment.number(), b"0" * 16)
    with open(tmp_path / "other", "wb") as other:
        with pytest.raises(mx.MXNetError, match="is another file"):
            _native.Segment.open(2, 1, os.getpid(), other.fileno(), segment.token())
        number = other.fileno()
    with pytest.raises(mx.MXNetError, match=f"/proc/{os.getpid()}/fd/{number}: No such file"):
        _native.Segment.open(2, 1, os.getpid(), number, segment.token())
    segment.free()


def test_what_goes_by_which_way():
    """Statistics meet in memory, or go by the transport where memory is switched off."""
    job = Job(2, "ways_of_statistics")
    assert job.succeeded(2), job.output
    job = Job(2, "ways_of_statistics", environment={"GLUON_SYNCBN_SHARED_MEMORY": "off"})
    assert job.succeeded(2), job.output


def test_groups_ask_their_members_only():
    job = Job(4, "groups_in_memory")
    assert job.succeeded(4), job.output


def test_a_call_stays_in_the_thread_of_the_engine():
    job = Job(2, "calls_stay_in_the_engine")
    assert job.succeeded(2), job.output
