"""GPUs of several processes: what they compute, and what it costs."""

import os

import mxnet as mx
import pytest
from mpi_job import Job
from places import SUPPORT

pytest.importorskip("mpi4py", reason="processes need mpi4py")
if "CUDA_EMULATOR" not in os.environ or not mx.context.num_gpus():
    pytest.skip("needs `make test-gpu-emulated`: counts and failures are the emulator's", allow_module_level=True)


SCENARIOS = "every_mode+gradients+rows_and_gradients+recomputed+beside_a_cpu+a_batch_that_is_not_finite"


def test_two_processes():
    job = Job(2, SCENARIOS, worker=SUPPORT / "gpu_worker.py", limit=200)
    assert job.succeeded(2), job.output
