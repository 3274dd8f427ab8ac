"""Whatever a process leaves out, repeats, or does in another order: no process waits much longer than the time limit,
and each has what is right, or an error that says in which exchange it was.

The table of exchanges.py, with the first and the last rank of two and three processes.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from exchanges import assert_sound, cases
from mpi_job import Job
from places import SUPPORT

RANKS = [2, 3]


def jobs(parts):
    """Their ends, by their numbers of ranks. A failure leaves a process usable, with another store, so a job has many
    cases. Most of it is waiting.
    """
    worker = SUPPORT / "exchanges_worker.py"
    with ThreadPoolExecutor(len(parts)) as pool:
        run = lambda ranks: Job(ranks, *parts[ranks], worker=worker, limit=60 + 10 * len(parts[ranks]))  # noqa: E731
        return parts, dict(zip(parts, pool.map(run, parts)))


@pytest.fixture(scope="module")
def some():
    """Every fault of every exchange, with two or three ranks."""
    every = cases([1], "later")
    return jobs({ranks: every[i :: len(RANKS)] for i, ranks in enumerate(RANKS)})


@pytest.fixture(scope="module")
def everything():
    return jobs({ranks: cases([0, ranks - 1], "now", "later") for ranks in RANKS})


def check(made, ranks):
    parts, ended = made
    assert_sound(ended[ranks].output, ranks, parts[ranks])
    # After a failure, mpiexec ends the others with the first that leaves, and tells how one of them has ended.
    assert ended[ranks].code in (1, 9), ended[ranks].output


@pytest.mark.parametrize("ranks", RANKS)
def test_some(some, ranks):
    check(some, ranks)


def test_the_step_of_another_trainer(some):
    """Here the errors say where the other rank is."""
    told = [line for done in some[1].values() for line in done.output.splitlines() if '"step/twice/' in line]
    assert len(told) >= 2
    assert any("Meanwhile rank " in line and "_weight', step " in line for line in told), told


@pytest.mark.slow
@pytest.mark.parametrize("ranks", RANKS)
def test_everything(everything, ranks):
    check(everything, ranks)
