"""Whatever a process leaves out, repeats, or does in another order: no process waits much longer than the time limit,
and each has what is right, or an error that says in which exchange it was.

The table of exchanges.py, with the first and the last rank of two and three processes.
"""

from concurrent.futures import ThreadPoolExecutor

import pytest
from exchanges import assert_sound, cases
from mpi_job import Job
from places import SUPPORT

# By shared memory, by MPI, and by messages as those of Horovod and 'dist_sync'.
WAYS = ["memory", "mpi", "relay"]
SOME = [("memory", 3), ("mpi", 2), ("relay", 2)]


def job(way, ranks, asked):
    """A failure leaves a process usable, with another store. So a job has many cases."""
    environment = {"GLUON_SYNCBN_SHARED_MEMORY": "on" if way == "memory" else "off"}
    worker = SUPPORT / "exchanges_worker.py"
    return Job(ranks, way, *asked, worker=worker, environment=environment, limit=60 + 10 * len(asked))


def jobs(parts):
    """Their ends, by what was asked of each. Most of a job is waiting."""
    with ThreadPoolExecutor(len(parts)) as pool:
        return dict(zip(parts, pool.map(lambda part: job(*part[:2], parts[part]), parts)))


@pytest.fixture(scope="module")
def some():
    """Every fault of every exchange, by one of the ways each."""
    parts = {part: [] for part in SOME}
    for number, case in enumerate(cases([1], "later")):
        parts[SOME[(number + number // len(SOME)) % len(SOME)]].append(case)
    return parts, jobs(parts)


@pytest.fixture(scope="module")
def everything():
    parts = {(way, ranks): cases([0, ranks - 1], "now", "later") for way in WAYS for ranks in (2, 3)}
    return parts, jobs(parts)


def check(made, part):
    parts, ended = made
    assert_sound(ended[part].output, part[1], parts[part])
    assert ended[part].code == 0, ended[part].output


@pytest.mark.parametrize("part", SOME)
def test_some(some, part):
    check(some, part)


def test_the_step_of_another_trainer(some):
    """Here the error says more than where the process is."""
    text = (
        "rank 1 of 2 waits in the gradient of 'first_weight', round 3, because the others have gone on to the gradient "
        "of 'second_weight', which this rank has not computed after 1 s. Every process must step the same trainers in "
        "the same order: a step was left out, or another one came before it."
    )
    told = [line for done in some[1].values() for line in done.output.splitlines() if '"step/twice/' in line]
    assert len(told) == 2
    assert all(text in line for line in told), told


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("way", WAYS)
def test_everything(everything, way, ranks):
    check(everything, (way, ranks))
