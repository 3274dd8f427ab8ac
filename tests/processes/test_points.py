"""A thread or a process is hit at one point: the others have an error in time, and the next step is right.

The sources name the points: `SYNCBN_POINT` in the core, which only tests/support/points.py compiles in.
"""

import sys
from concurrent.futures import ThreadPoolExecutor

import points
import pytest
from environments import ended, shell
from mpi_job import Job
from places import PACKAGE, SUPPORT

pytestmark = pytest.mark.timeout(600)
WORKER = SUPPORT / "points_worker.py"
#: Where all have the sum: the others may end well before they learn of anything.
WITH_THE_SUM = "before_copy_out"
SOME = {
    "raise": ["before_post", "after_post", "after_collect", "before_add_part"],
    "stop": ["before_post", "before_join", "after_collect", "before_copy_in"],
    "kill": ["after_contribution"],
}


def test_the_core_that_is_shipped_has_none():
    core = (PACKAGE / "_core.so").read_bytes()
    assert not [point for point in points.PARTS if point.encode() in core]
    marked = (points.package() / "gluon_syncbn" / "_core.so").read_bytes()
    assert all(point.encode() in marked for point in points.PARTS), "this test looks for the wrong thing"


@pytest.fixture(scope="module")
def environment():
    return {"PYTHONPATH": shell(points.package(), SUPPORT)["PYTHONPATH"]}


def test_replicas_that_are_hit(environment):
    """The tests of the worker, with the other core, which Python finds in the folder where it starts."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", WORKER]
    done = ended(command, cwd=points.package(), timeout=280, OMP_NUM_THREADS=1, **environment)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("everywhere", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("action", SOME)
def test_a_process_that_is_hit(action, everywhere, environment):
    """Rank 1, while rank 0 goes on. What they find is sound, or the worker says so."""
    asked = SOME[action]
    if everywhere:
        asked = [point for point in points.WITHIN + points.BETWEEN if point != "before_worker"]
    if action == "stop":  # of two that have the sum, the other ends well, and MPI_Finalize waits for this one for ever
        asked = [point for point in asked if point != WITH_THE_SUM]

    def job(*some):
        return Job(2, "is_hit", action, 4 if everywhere else 2, *some, worker=WORKER, environment=environment)

    if action == "raise":  # with which the processes go on, with another store
        done = job(*asked)
        assert done.succeeded(2), done.output
        return
    with ThreadPoolExecutor(2) as pool:
        for point, done in zip(asked, pool.map(job, asked)):
            assert done.code != 0, done.output
            if action == "stop":
                assert f"SOUND 0 {point}" in done.output and "SOUND 1" not in done.output, done.output
            else:  # MPICH's mpiexec ends the others at once
                assert "OK 1" not in done.output
                assert "OK 0" not in done.output or point == WITH_THE_SUM
