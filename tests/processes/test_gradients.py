"""Gradients of several processes against one process with all samples, on one machine and on pretended ones."""

import pytest
from mpi_job import Job
from places import SUPPORT

WORKER = SUPPORT / "gradients_worker.py"
SCENARIOS = [
    "accumulates",
    "clips",
    "scales_the_loss",
    "leaves_out_what_is_stale",
    "trains_two_nets",
    "trains_in_threads",
    "adds_in_the_order_of_the_ranks",
]
# What the processes learn: of rank 1, and of the arrays.
FAULTS = {
    "freezes": ("the processes disagree about their arrays", "1_bias' (300000 values of float32) on rank"),
    "ends": ("rank 1 of 2 has ended (rank 0 was in the gradient of 'dense1_weight'", "round 2"),
    "is_late": ("rank 0 of 2 waits for rank 1", "in the gradient of 'dense1_weight'"),
}


# Ranks 0 and 1 are on a machine, or each rank is on one.
@pytest.mark.parametrize("machines", ["0,0", "0,0,1", "0,1"])
def test_steps(machines):
    ranks = len(machines.split(","))
    scenarios = "+".join(SCENARIOS)
    job = Job(ranks, scenarios, worker=WORKER, limit=250, environment={"MPI_WORKER_MACHINES": machines})
    for scenario in SCENARIOS:
        assert all(f"DONE {rank} {scenario}" in job.output for rank in range(ranks)), job.output
    assert job.succeeded(ranks), job.output


@pytest.mark.parametrize("fault", FAULTS)
def test_a_step_that_fails(fault):
    """It changes no parameter, which the worker checks."""
    job = Job(2, fault, worker=WORKER)
    assert job.code not in (0, None)
    seconds, error = job.failure_of(0)
    assert seconds < 30
    for text in FAULTS[fault]:
        assert text in error


def test_another_net_on_another_machine():
    job = Job(2, "freezes", worker=WORKER, environment={"MPI_WORKER_MACHINES": "0,1"})
    _, error = job.failure_of(1)
    assert "1_weight' (1200000 values of float32) on rank 1 and another one on rank 0" in error
    assert "the processes disagree about their arrays" in job.failure_of(0)[1]
