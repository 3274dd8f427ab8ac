"""GPUs of several processes: what they compute, and what it costs."""

import os

import mxnet as mx
import pytest
from mpi_job import Job
from places import SUPPORT

pytest.importorskip("mpi4py", reason="processes need mpi4py")
if "CUDA_EMULATOR" not in os.environ or not mx.context.num_gpus():
    pytest.skip("needs `make test-gpu-emulated`: counts and failures are the emulator's", allow_module_level=True)


TOGETHER = ["every_mode", "gradients", "rows_and_gradients", "short_batches", "recomputed", "beside_a_cpu"]


@pytest.fixture(scope="module")
def together():
    """One job of two processes that does all of this."""
    return Job(2, "+".join(TOGETHER), worker=SUPPORT / "gpu_worker.py", limit=200)


@pytest.mark.parametrize("scenario", TOGETHER)
def test_two_processes(scenario, together):
    assert all(f"DONE {rank} {scenario}" in together.output for rank in range(2)), together.output


def test_two_processes_end_well(together):
    assert together.succeeded(2), together.output


def test_a_batch_that_is_not_finite():
    """Left out by all; then the end of the process whose batch it is."""
    done = Job(2, "a_batch_that_is_not_finite", environment={"GLUON_SYNCBN_TEST_DEVICE": "gpu"})
    assert done.code not in (0, None)
    assert "the batch is not finite: the mean of channel 1 is nan" in done.failure_of(1)[1]
