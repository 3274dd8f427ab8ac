"""Groups that are named by ranks, between processes: what they compute, and whom they ask."""

import pytest
from mpi_job import Job
from places import SUPPORT

WORKER = SUPPORT / "groups_worker.py"
BY_TRANSPORT = {"GLUON_SYNCBN_SHARED_MEMORY": "off"}
NUMBERS = "equals_the_specification+empty_shards+layers_in_any_order"


@pytest.mark.parametrize("way", [{}, BY_TRANSPORT], ids=["memory", "transport"])
@pytest.mark.parametrize(
    ("processes", "contexts", "more"), [(4, 1, "members_do_not_wait_for_others"), (2, 2, "fewer_devices")]
)
def test_named_groups(processes, contexts, more, way):
    """Against the specification; the same bits for all members; any order of layers with other groups."""
    scenarios = f"{NUMBERS}+{more}" + "+messages_to_members_only" * bool(way)
    environment = {"GROUPS_WORKER_CONTEXTS": str(contexts), **way}
    job = Job(processes, scenarios, worker=WORKER, environment=environment)
    assert job.succeeded(processes), job.output


def test_named_groups_of_two_machines():
    job = Job(4, NUMBERS, worker=WORKER, environment={"MPI_WORKER_MACHINES": "a,b,a,b"})
    assert job.succeeded(4), job.output


def test_through_custom():
    """MXNet may put the copies of two layers into one operation, which would wait for both."""
    job = Job(4, "layers_in_any_order", worker=WORKER, environment={"GLUON_SYNCBN_OPERATOR": "custom"})
    assert job.succeeded(4), job.output


@pytest.mark.parametrize("way", [{}, BY_TRANSPORT], ids=["memory", "transport"])
@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("raises", "rank 2 of 4 has failed: OSError left the recorded step (disk full)"),
        ("stays away", "rank 0 of 4 waits for rank 2 in the forward of call 2 of SyncBatchNorm"),
    ],
)
def test_a_member_that_fails(fault, text, way):
    """The other member gets an error that names it. In memory, processes without a member go on."""
    job = Job(4, "a_member_fails", fault, worker=WORKER, environment=way)
    seconds, error = job.failure_of(0)
    assert text in error
    assert seconds < 30
    if not way:
        assert [job.failure_of(rank)[1] for rank in (1, 3)] == ["nothing", "nothing"]
