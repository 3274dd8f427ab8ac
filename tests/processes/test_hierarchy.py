"""Processes of one machine, which meet in memory, and of several pretended ones, whose leaders exchange."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys

import pytest
from environments import shell
from mpi_job import assert_no_strange_error
from places import SUPPORT

WORKER = SUPPORT / "hierarchy_worker.py"
EXCHANGES = 12 * 6  # steps, layers
MACHINES = ["aaa", "aabb", "aab", "abba", "abcca", "abcdeee"]  # of each rank
# What somebody learns of the rank that goes, and the limit of their wait.
FAULTS = {
    "SIGKILL": ("rank {rank} of {size} has ended without a word (process", 60),
    "SIGSTOP": ("of {size} waits for rank {rank}", 3),
    "fails": ("rank {rank} of {size} has failed: the disk is full", 60),
    "ends": ("rank {rank} of {size} has ended (rank", 60),
    "skips a step": ("one of them has skipped or repeated a step", 60),
}
# The rank and the others of its machine are not the first.
FAULTY = {"leader": ("aabbb", 2), "member": ("aabbb", 3), "alone": ("aaa", 2)}
HEALTHY = [(machines, "none", -1, 60) for machines in MACHINES]
JOBS = HEALTHY + [(on, fault, rank, FAULTS[fault][1]) for on, rank in FAULTY.values() for fault in FAULTS]


@pytest.fixture(scope="module")
def outputs(tmp_path_factory):
    """Those of all ranks but the faulty one, by job."""
    folder = tmp_path_factory.mktemp("ranks")
    command = [sys.executable, str(WORKER), str(folder), json.dumps(JOBS)]
    job = subprocess.Popen(command, env=shell(SUPPORT), start_new_session=True)
    try:
        assert job.wait(250) == 0
    finally:
        with contextlib.suppress(ProcessLookupError):  # all have ended
            os.killpg(job.pid, signal.SIGKILL)
        job.wait()
    for path in folder.rglob("output.*"):
        assert_no_strange_error(path.read_text())
    return {
        job: [(folder / str(i) / f"output.{rank}").read_text() for rank in range(len(job[0])) if rank != job[2]]
        for i, job in enumerate(JOBS)
    }


@pytest.mark.parametrize("machines", MACHINES)
def test_only_leaders_talk(outputs, machines):
    """Sums of any length, in an order of its own in each process; the worker compares them with the exact bits."""
    ranks = [[rank for rank, on in enumerate(machines) if on == name] for name in dict.fromkeys(machines)]
    # Of five leaders, each sends only to some.
    messages = iter({1: [0], 2: [1, 1], 3: [2, 2, 2], 5: [1, 3, 2, 2, 2]}[len(ranks)])
    for rank, output in enumerate(outputs[machines, "none", -1, 60]):
        assert output.startswith("{"), output
        found = json.loads(output)
        (own,) = [group for group in ranks if rank in group]
        assert found["machines"] == ranks
        assert found["local"] == [own.index(rank), len(own)]
        assert found["sent"] == (EXCHANGES * next(messages) if rank == own[0] else 0)


@pytest.mark.parametrize("which", FAULTY)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_process_that_goes(outputs, fault, which):
    """All others have an error that says which."""
    (machines, rank), (text, timeout) = FAULTY[which], FAULTS[fault]
    heard = outputs[machines, fault, rank, timeout]
    for output in heard:
        found = re.search(r"FAILED after ([0-9.]+) s: (.*)", output)
        assert found, output
        assert float(found[1]) < 30
    said = text.format(rank=rank, size=len(machines))
    # In memory alone, whoever finds the cause tells the others, so that one may hear of it from another.
    assert (any if which == "alone" else all)(said in output for output in heard), heard
    assert which != "alone" or all("layer" in output for output in heard), heard
