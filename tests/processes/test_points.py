"""A thread or a process is hit at one point: the others have an error in time, and the next step is right.

The sources name the points: `SYNCBN_POINT` in the core, which only tests/support/points.py compiles in.
"""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import points
import pytest
from environments import shell
from mpi_job import Job
from places import PACKAGE, SUPPORT

WORKER = SUPPORT / "points_worker.py"
HANGS = 300  # seconds, of a whole process; nothing here takes long
#: Where a replica that is hit in the forward keeps the others from a total.
BEFORE_THE_TOTAL = {"before_join", "before_contribution", "before_reduce", "after_reduce"}
#: Whether a call is handed to a worker is a matter of time.
NOT_ALWAYS = {"before_worker"}
BY_KVSTORE = {"before_exchange", "after_exchange"}
OF_STATISTICS = {"before_post", "after_post", "after_collect"}  # between processes
OF_GRADIENTS = {"before_copy_in", "before_add_part", "before_copy_out"}  # between processes
#: Where all have the sum: the others may end well before they learn of anything.
WITH_THE_SUM = "before_copy_out"
NOT_WITHIN = BY_KVSTORE | OF_STATISTICS | OF_GRADIENTS
WITHIN = [point for point in points.NATIVE if point not in NOT_WITHIN]


def test_the_points_of_the_sources():
    assert set(points.NATIVE) >= BEFORE_THE_TOTAL | NOT_ALWAYS | BY_KVSTORE | OF_STATISTICS | OF_GRADIENTS


def test_the_core_that_is_shipped_has_none():
    core = (PACKAGE / "_core.so").read_bytes()
    assert b"reach_point" not in core
    assert not [point for point in points.NATIVE + points.GPU if point.encode() in core]
    marked = (points.package() / "gluon_syncbn" / "_core.so").read_bytes()
    assert all(point.encode() in marked for point in points.NATIVE), "this test looks for the wrong thing"


@pytest.fixture(scope="module")
def environment():
    return shell(points.package(), SUPPORT, OMP_NUM_THREADS=1)


# ---- several replicas in one process ---------------------------------------------------------------------------


class Worker:
    """A process whose steps are hit, one after the other."""

    def __init__(self, replicas, environment):
        self.replicas, self._counts = replicas, {}
        command = [sys.executable, str(WORKER), str(replicas)]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, env=environment, text=True, **pipes)

    def case(self, point, action, times=1, seconds=0.0, limit=60.0):
        case = {"point": point, "action": action, "times": times, "seconds": seconds, "limit": limit}
        self._process.stdin.write(json.dumps(case) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        assert line, "the process has ended"
        return json.loads(line)

    def in_backward(self, point):
        """At which time the point is reached first in the backward; 1 where it is only reached in the forward."""
        if point not in self._counts:
            self._counts[point] = self.case(point, "none")["reached"]
        return self._counts[point] // 2 + 1 if self._counts[point] > self.replicas or "reduce" in point else 1

    def end(self):
        self._process.kill()
        self._process.communicate()


@pytest.fixture(scope="module")
def workers(environment):
    made = {}

    def worker(replicas):
        if replicas not in made:
            made[replicas] = Worker(replicas, environment)
        return made[replicas]

    yield worker
    for one in made.values():
        one.end()


def assert_sound(result, action, point, told=True):
    assert result["next"] is True
    assert "wrong" not in result["statistics"]
    if result["errors"]:
        assert result["seconds"] < HANGS / 10
        assert result["parameters kept"]
    else:
        assert result["right"]
        assert set(result["statistics"]) == {"new"}
    if point in NOT_ALWAYS and not result["reached"]:
        return
    assert result["reached"]
    if told:
        assert result["errors"], f"nobody was told of: {action} {point}"


@pytest.mark.parametrize("replicas", [2, 3])
@pytest.mark.parametrize("point", WITHIN)
def test_a_replica_that_is_hit(workers, replicas, point):
    """It raises, in the forward and in the backward, when the others have come as far as they can; it is late; of two,
    it hangs for longer than the time limit, while the other one waits for it, or does not.
    """
    worker = workers(replicas)
    result = worker.case(point, "raise", seconds=0.05)
    assert_sound(result, "raise", point)
    if point in BEFORE_THE_TOTAL:
        assert set(result["statistics"]) == {"old"}
    backward = worker.in_backward(point)
    if backward > 1 and point not in NOT_ALWAYS:
        result = worker.case(point, "raise", backward, seconds=0.05)
        assert_sound(result, "raise", point)
        # Its own. Another replica on a busy machine may still be in its forward, which fails then.
        assert "new" in result["statistics"]
    result = worker.case(point, "delay", seconds=0.1)
    assert_sound(result, "delay", point, told=False)
    assert not result["errors"]
    if replicas == 2:
        result = worker.case(point, "delay", seconds=2.0, limit=0.4)
        waited_for = point in ("before_join", "before_contribution")  # elsewhere there is a grace beside the limit
        assert_sound(result, "hang", point, told=waited_for)
        if waited_for:
            assert any("missing cpu(" in error and "after 0.4 s" in error for error in result["errors"])
            assert set(result["statistics"]) == {"old"}


# ---- two processes -----------------------------------------------------------------------------------------------


def job(environment, *cases, limit=60):
    """Of (point, action), one after the other."""
    cases = [{"point": p, "action": action, "times": 1, "seconds": 0.0, "limit": limit} for p, action in cases]
    own = {"PYTHONPATH": environment["PYTHONPATH"]}
    return Job(2, "mpi", json.dumps(cases), worker=WORKER, environment=own)


def told(done, rank, *case):
    """What this process has told; None where it did not come to that."""
    start = f"TOLD {rank} {' '.join(case)} "
    lines = [line for line in done.output.splitlines() if line.startswith(start)]
    return json.loads(lines[0][len(start) :]) if lines else None


def assert_survived(done, point, action):
    """Rank 0, where rank 1 was hit."""
    if action == "kill":  # MPICH's mpiexec ends the others at once
        assert done.code != 0
        assert "OK 1" not in done.output
        assert "OK 0" not in done.output or point == WITH_THE_SUM
        return
    survivor, hit = (told(done, rank, point, action) for rank in range(2))
    assert survivor is not None, done.output
    assert survivor["statistics"] in (["old"], ["new"])
    if action == "raise":
        assert hit is not None and hit["reached"], f"{point} was not reached: {done.output}"
        assert hit["errors"] and hit["parameters kept"], done.output
    if survivor["errors"]:
        assert survivor["seconds"] < HANGS / 10
        assert survivor["parameters kept"]
        assert (done.code == 0) is (action == "raise")  # with which the processes go on, with another store
    if action == "stop":
        assert hit is None


REPRESENTATIVE = [
    ("before_post", "raise"),
    ("before_post", "stop"),
    ("after_post", "raise"),
    ("after_contribution", "kill"),
    ("before_join", "stop"),
    ("after_collect", "raise"),
    ("after_collect", "stop"),
    ("before_copy_in", "stop"),
    ("before_add_part", "raise"),
]


@pytest.fixture(scope="module")
def some(environment):
    raising = [case for case in REPRESENTATIVE if case[1] == "raise"]
    alone = [case for case in REPRESENTATIVE if case not in raising]
    with ThreadPoolExecutor(2) as pool:
        together, *jobs = pool.map(
            lambda cases: job(environment, *cases, limit=2), [raising, *([one] for one in alone)]
        )
    return {**dict.fromkeys(raising, together), **dict(zip(alone, jobs))}


@pytest.mark.parametrize(("point", "action"), REPRESENTATIVE)
def test_a_process_that_is_hit(some, point, action):
    done = some[point, action]
    assert_survived(done, point, action)
    survivor = told(done, 0, point, action)
    if survivor is not None:
        assert any("rank 1" in error for error in survivor["errors"]) or point.startswith("after_")
        early = point in ("before_post", "before_join")
        assert survivor["statistics"] == ["old"] or not early, done.output


def test_messages_under_way_when_a_seed_is_set(environment):
    """The next call has another label, and is not taken for this one."""
    done = Job(2, "seeds", worker=WORKER, environment={"PYTHONPATH": environment["PYTHONPATH"]})
    assert done.succeeded(2), done.output


@pytest.mark.slow
@pytest.mark.parametrize("action", ["raise", "stop", "kill"])
def test_a_process_that_is_hit_anywhere(environment, action):
    healthy = job(environment, ("none", "none"))
    assert healthy.succeeded(2), healthy.output
    everything = [point for point in points.NATIVE if point not in NOT_ALWAYS | BY_KVSTORE]
    if action == "stop":  # of two that have the sum, the other ends well, and MPI_Finalize waits for this one for ever
        everything.remove(WITH_THE_SUM)
    with ThreadPoolExecutor(2) as pool:
        done = pool.map(lambda point: job(environment, (point, action), limit=4), everything)
        for point, each in zip(everything, done):
            assert_survived(each, point, action)
