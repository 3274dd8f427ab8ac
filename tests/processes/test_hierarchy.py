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
from mpi_job import Job, assert_no_strange_error
from places import SUPPORT

WORKER = SUPPORT / "hierarchy_worker.py"
EXCHANGES = 12 * 6  # steps, layers
MACHINES = ["aaa", "aabb", "aab", "abba", "abcca"]  # of each rank
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
    for rank, output in enumerate(outputs[machines, "none", -1, 60]):
        assert output.startswith("{"), output
        found = json.loads(output)
        assert found["machines"] == ranks
        leads = len(ranks) > 1 and [rank] in [group[:1] for group in ranks]
        assert found["sent"] == (EXCHANGES * (len(ranks) - 1) if leads else 0)


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


@pytest.mark.parametrize("machines", ["0,0,1,1", "0,1,0"])
def test_layers_over_two_machines(machines):
    """All modes, types and ways of running, against the specification; the same bits on all ranks, in any order."""
    ranks = len(machines.split(","))
    scenarios = "equals_the_specification+same_bits_on_repetition+levels" + "+random_order" * (ranks == 4)
    job = Job(ranks, scenarios, 30, limit=250, environment={"MPI_WORKER_MACHINES": machines})
    assert job.succeeded(ranks), job.output


def test_many_machines():
    """More leaders than send to each other directly, of which the number is no power of two."""
    job = Job(6, "levels", limit=250, environment={"MPI_WORKER_MACHINES": "0,1,2,3,4,4"})
    assert job.succeeded(6), job.output


def test_a_rank_that_fails_ends_an_exchange_of_others():
    job = Job(3, "fails_beside_two", limit=100, environment={"GLUON_SYNCBN_SHARED_MEMORY": "off"})
    seconds, error = job.failure_of(0)
    assert "rank 2 of 3 has failed: the disk is full (rank 0 was in the forward of call 2 of SyncBatchNorm" in error
    assert seconds < 30  # the time limit is 60 s
