"""Whatever a process leaves out, repeats, or does in another order: no process waits much longer than the time limit,
and each has what is right, or an error that says in which exchange it was.

The table of exchanges.py, with the first and the last rank of two and three processes.
"""

import contextlib
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from exchanges import assert_sound, cases, drawn
from mpi_job import BIN, Job, Programs
from places import SUPPORT

RANKS = [2, 3]


def check(folder, parts):
    """Of each number of ranks. A failure leaves a process usable, with another store, so a job has many cases. Most of
    it is waiting. Returns the outputs.
    """

    def run(ranks):
        path = folder / f"{ranks}.json"
        path.write_text(json.dumps(parts[ranks]))
        return Job(ranks, path, worker=SUPPORT / "exchanges_worker.py", limit=60 + 10 * len(parts[ranks]))

    with ThreadPoolExecutor(len(parts)) as pool:
        for ranks, done in dict(zip(parts, pool.map(run, parts))).items():
            assert_sound(done.output, ranks, parts[ranks])
            # After a failure, mpiexec ends the others with the first that leaves, and tells how one of them has ended.
            assert done.code in (1, 9), done.output
            yield done.output


def test_some(tmp_path):
    """Every fault of every exchange, with two or three ranks. Where it is a Trainer's, errors say where others are."""
    every = cases([1], "later")
    output = "".join(check(tmp_path, {ranks: every[i :: len(RANKS)] for i, ranks in enumerate(RANKS)}))
    told = [line for line in output.splitlines() if line.startswith("TOLD") and '"step+' in line and "twice" in line]
    assert len(told) >= 2
    assert any("Meanwhile rank " in line and "_weight', step " in line for line in told), told


@pytest.mark.slow
def test_everything(tmp_path):
    list(check(tmp_path, {ranks: cases([0, ranks - 1], "now", "later") for ranks in RANKS}))


def left(folder):
    """The processes of a job that have not ended."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended since, or is another user's
            if f"MPI_WORKER_REPORTS={folder}".encode() in path.read_bytes():
                yield int(path.parent.name)


@pytest.mark.parametrize("ranks", RANKS)
def test_random(ranks):
    """`make soak` has other seeds. Of the longer cases, the last one has a signal, and no process stays behind it."""
    first = 16 * int(os.environ.get("GLUON_SYNCBN_TEST_SEED", 0)) + 8 * (ranks - RANKS[0])
    asked = [drawn(seed, ranks, seed == first + 7) for seed in range(first, first + 8)]
    with Programs() as programs:
        path = programs.folder / ".cases"
        path.write_text(json.dumps(asked))
        command = [BIN / "mpiexec", "-n", ranks, sys.executable, "-W", "ignore", SUPPORT / "exchanges_worker.py", path]
        job = [programs.start("job", command, {})]
        if asked[-1]["fault"] == "SIGSTOP" and programs.wait(job, 250) == [None]:
            for pid in left(programs.folder):  # it stopped behind its last call, and as in MPI_Finalize all wait for it
                if " (python) T " in Path(f"/proc/{pid}/stat").read_text():
                    os.kill(pid, signal.SIGKILL)
        (code,) = programs.wait(job, 250)
        time.sleep(1)
        stayed = list(left(programs.folder))
        for pid in stayed:
            os.kill(pid, signal.SIGKILL)
        output = programs.output()
    assert code is not None and not stayed, output
    assert_sound(output, ranks, asked)
