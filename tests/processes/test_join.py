"""Processes that have different numbers of batches, in one job over MPI."""

import mxnet as mx
import pytest
from mpi_job import Job
from places import SUPPORT

from gluon_syncbn.training import join

WORKER = SUPPORT / "join_worker.py"


REFUSED = {
    "+!samples_of_all": "was given, expected the samples of this process within gluon_syncbn.join, not of all",
    "+!clips_alone": "trainer.allreduce_grads was called within gluon_syncbn.join, where a process without a batch",
    "+!updates_alone": "trainer.update was called within gluon_syncbn.join",
}


@pytest.mark.parametrize(
    "processes, scenarios",
    [
        (
            2,
            "equal_one_process+masks_equal_one_process+leave_out_an_output+!gathers+!errors_end_all" + "".join(REFUSED),
        ),
        (3, "equal_one_process+masks_in_groups_equal_one_process"),
    ],
)
def test_uneven_numbers_of_batches_equal_one_process(processes, scenarios):
    """Of two: an error in one process ends all, and a gather is one."""
    job = Job(processes, scenarios, worker=WORKER, limit=200)
    assert job.succeeded(processes), job.output
    if processes == 2:
        assert "disk full" in job.failure_of(1, "errors_end_all")[1]
        assert "rank 1 left gluon_syncbn.join with OSError: disk full" in job.failure_of(0, "errors_end_all")[1]
        for rank in range(2):
            for scenario, text in REFUSED.items():
                assert text in job.failure_of(rank, scenario[2:])[1]
            text = job.failure_of(rank, "gathers")[1]
            assert (
                "gather does not work within gluon_syncbn.join, because a process without a batch has no rows" in text
            )


@pytest.mark.parametrize("shape, samples", [((5, 2), 10), ((4, 2, 3, 8, 8), 8)])
def test_words_and_images_of_videos_are_samples(shape, samples):
    """As many as all processes would have without the second dimension."""
    assert not join._are_of_all(samples, [(mx.nd.ones(shape),)], 2)
