"""Groups that are named by ranks, between processes: what they compute, and whom they ask."""

import pytest
from mpi_job import Job
from places import SUPPORT

pytestmark = pytest.mark.timeout(600)  # one job does most of this


@pytest.mark.parametrize(
    "processes, arguments, settings",
    [
        (4, ["layers_in_any_order+members_do_not_wait_for_others"], {}),
        (2, ["layers_in_any_order+fewer_devices+other_devices"], {}),
        # MXNet may put the copies of two layers into one operation, which would wait for both.
        (4, ["layers_in_any_order"], {"GLUON_SYNCBN_OPERATOR": "custom"}),
        pytest.param(4, ["layers_in_any_order", 1000], {}, marks=[pytest.mark.slow, pytest.mark.timeout(1500)]),
    ],
    ids=["of processes", "of contexts", "through Custom", "for long"],
)
def test_four_replicas(processes, arguments, settings):
    environment = {"MPI_WORKER_CONTEXTS": str(4 // processes), **settings}
    limit = 1200 if arguments[1:] else 300
    job = Job(processes, *arguments, worker=SUPPORT / "groups_worker.py", environment=environment, limit=limit)
    assert job.succeeded(processes), job.output
