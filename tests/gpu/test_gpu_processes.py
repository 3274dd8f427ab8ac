"""GPUs of several processes: what they compute, what it costs, and what they learn of each other's failures."""

import os
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import pytest
from mpi_job import Job
from places import SUPPORT

pytest.importorskip("mpi4py", reason="processes need mpi4py")
if "CUDA_EMULATOR" not in os.environ or not mx.context.num_gpus():
    pytest.skip("needs `make test-gpu-emulated`: counts and failures are the emulator's", allow_module_level=True)

ON_GPUS = {"GLUON_SYNCBN_TEST_DEVICE": "gpu"}


def job(*arguments, worker=SUPPORT / "gpu_worker.py", **settings):
    return Job(2, *arguments, worker=worker, **settings)


def assert_succeeded(done):
    assert done.succeeded(2), done.output


def test_named_groups():
    """Some stay within a process, and ask nobody."""
    environment = {**ON_GPUS, "MPI_WORKER_CONTEXTS": "2"}
    scenarios = "groups_equal_the_specification+layers_in_any_order"
    assert_succeeded(job(scenarios, worker=SUPPORT / "groups_worker.py", environment=environment, limit=200))


TOGETHER = ["every_mode", "gradients", "rows_and_gradients", "short_batches", "recomputed", "beside_a_cpu"]


@pytest.fixture(scope="module")
def together():
    """One job of two processes that does all of this."""
    return job("+".join(TOGETHER), limit=200)


@pytest.mark.parametrize("scenario", TOGETHER)
def test_two_processes(scenario, together):
    assert all(f"DONE {rank} {scenario}" in together.output for rank in range(2)), together.output


def test_two_processes_end_well(together):
    assert_succeeded(together)


@pytest.fixture(scope="module")
def failed():
    """Jobs of two processes that end early, two at a time: most of each is starting Python and waiting."""
    jobs = {
        "not finite": ("a_batch_that_is_not_finite",),
        "frozen": ("freezes",),
    }
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2)) as pool:
        return dict(zip(jobs, pool.map(lambda one: Job(2, *one, environment=ON_GPUS), jobs.values())))


def test_a_batch_that_is_not_finite(failed):
    """Left out by all; then the end of the process whose batch it is."""
    done = failed["not finite"]
    assert done.code not in (0, None)
    assert "the batch is not finite: the mean of channel 1 is nan" in done.failure_of(1)[1]


def test_a_process_that_does_not_come(failed):
    """One that raises, or is killed, is the same on CPUs."""
    seconds, error = failed["frozen"].failure_of(0)
    assert "rank 0 of 2 waits for rank 1 in the forward of call 2 of SyncBatchNorm 'layer0' after 3 s" in error
    assert seconds < 20
