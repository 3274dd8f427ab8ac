"""Groups that are named by ranks, between processes: what they compute, and whom they ask."""

import pytest
from mpi_job import Job
from places import SUPPORT

WORKER = SUPPORT / "groups_worker.py"
pytestmark = pytest.mark.timeout(600)  # one job does most of this
NUMBERS = "groups_equal_the_specification+empty_shards+layers_in_any_order"
# What the other member learns.
FAULTS = {
    "raises": "rank 2 of 4 has failed: OSError left the recorded step (disk full)",
    "stays_away": "rank 0 of 4 waits for rank 2 in the forward of call 2 of SyncBatchNorm",
}


def run(processes, *scenarios, **settings):
    """With four replicas."""
    environment = {"MPI_WORKER_CONTEXTS": str(4 // processes), **settings}
    job = Job(processes, "+".join(scenarios), worker=WORKER, environment=environment, limit=300)
    assert job.succeeded(processes), job.output
    return job


def test_named_groups():
    """Against the specification; the same bits for all members; any order of layers with other groups."""
    both = [NUMBERS, "messages_to_members_only", "members_do_not_wait_for_others", *(f"!{fault}" for fault in FAULTS)]
    job = run(4, *both)
    for fault, text in FAULTS.items():
        seconds, error = job.failure_of(0, fault)
        assert text in error
        assert seconds < 30


def test_named_groups_of_contexts():
    run(2, NUMBERS, "messages_to_members_only", "fewer_devices", "other_devices")


def test_through_custom():
    """MXNet may put the copies of two layers into one operation, which would wait for both."""
    run(4, "layers_in_any_order", GLUON_SYNCBN_OPERATOR="custom")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_layers_in_any_order_for_long():
    job = Job(4, "layers_in_any_order", 1000, worker=WORKER, environment={"MPI_WORKER_CONTEXTS": "1"}, limit=1200)
    assert job.succeeded(4), job.output
