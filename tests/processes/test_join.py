"""Processes that have different numbers of batches, in one job over MPI."""

import mxnet as mx
import pytest
from mpi_job import Job
from places import SUPPORT

from gluon_syncbn.training import join

REFUSED = "samples_of_all+clips_alone+updates_alone+gathers_while_joined"


@pytest.mark.parametrize(
    "processes, scenarios",
    [
        (2, f"joins+joins_masked+joins_without_an_output+raises_while_joined+{REFUSED}"),
        (3, "joins+joins_masked_in_groups"),
    ],
    ids=["two", "three"],
)
def test_uneven_numbers_of_batches_equal_one_process(processes, scenarios):
    job = Job(processes, scenarios, worker=SUPPORT / "gradients_worker.py", limit=200)
    assert job.succeeded(processes), job.output


@pytest.mark.parametrize("shape, samples", [((5, 2), 10), ((4, 2, 3, 8, 8), 8)])
def test_words_and_images_of_videos_are_samples(shape, samples):
    """As many as all processes would have without the second dimension."""
    assert not join._are_of_all(samples, [(mx.nd.ones(shape),)], 2)
