"""A thread or a process is hit at one point: the others have an error in time, and the next step is right.

The sources name the points: `SYNCBN_POINT` in the core, which only tests/support/points.py compiles in.
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

import points
import pytest
from environments import ended, shell
from mpi_job import Job
from places import PACKAGE, SUPPORT

WORKER = SUPPORT / "points_worker.py"
#: Where all have the sum: the others may end well before they learn of anything.
WITH_THE_SUM = "before_copy_out"


def test_the_core_that_is_shipped_has_none():
    core = (PACKAGE / "_core.so").read_bytes()
    assert b"reach_point" not in core
    assert not [point for point in points.NATIVE + points.GPU if point.encode() in core]
    marked = (points.package() / "gluon_syncbn" / "_core.so").read_bytes()
    assert all(point.encode() in marked for point in points.NATIVE), "this test looks for the wrong thing"


@pytest.fixture(scope="module")
def environment():
    return {"PYTHONPATH": shell(points.package(), SUPPORT)["PYTHONPATH"]}


def test_replicas_that_are_hit(environment):
    """The tests of the worker, with the other core, which Python finds in the folder where it starts."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", WORKER]
    done = ended(command, cwd=points.package(), timeout=280, OMP_NUM_THREADS=1, **environment)
    assert done.returncode == 0, done.stdout


# ---- two processes -----------------------------------------------------------------------------------------------


def job(environment, *cases, limit=60, names=False):
    """Of (point, action), one after the other."""
    cases = json.dumps([(*case, limit, names) for case in cases])
    return Job(2, "is_hit", cases, worker=WORKER, environment=environment)


def assert_survived(done, point, action):
    """Rank 0, where rank 1 was hit. What they find is sound, or the worker says so."""
    if action == "raise":  # with which the processes go on, with another store
        assert done.succeeded(2), done.output
    elif action == "stop":
        assert f"SOUND 0 {point}" in done.output and "SOUND 1" not in done.output, done.output
        assert done.code != 0
    else:  # MPICH's mpiexec ends the others at once
        assert done.code != 0 and "OK 1" not in done.output
        assert "OK 0" not in done.output or point == WITH_THE_SUM


STOPS = ["before_post", "before_join", "after_collect", "before_copy_in"]
RAISES = ["before_post", "after_post", "after_collect", "before_add_part"]


def test_a_process_that_is_hit(environment):
    jobs = [[(point, "raise") for point in RAISES], *([(point, "stop")] for point in STOPS)]
    jobs.append([("after_contribution", "kill")])
    with ThreadPoolExecutor(2) as pool:
        done = list(pool.map(lambda cases: job(environment, *cases, limit=2, names=True), jobs))
    for each, cases in zip(done, jobs):
        assert_survived(each, *cases[0])


def test_messages_under_way_when_a_seed_is_set(environment):
    """The next call has another label, and is not taken for this one."""
    done = Job(2, "has_a_seed_for_each_call", worker=WORKER, environment=environment)
    assert done.succeeded(2), done.output


@pytest.mark.slow
@pytest.mark.parametrize("action", ["raise", "stop", "kill"])
def test_a_process_that_is_hit_anywhere(environment, action):
    healthy = job(environment, ("none", "none"))
    assert healthy.succeeded(2), healthy.output
    everything = [point for point in points.NATIVE if point not in points.NOT_ALWAYS | points.BY_KVSTORE]
    if action == "stop":  # of two that have the sum, the other ends well, and MPI_Finalize waits for this one for ever
        everything.remove(WITH_THE_SUM)
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda point: job(environment, (point, action), limit=4), everything)
        for point, each in zip(everything, done):
            assert_survived(each, point, action)
