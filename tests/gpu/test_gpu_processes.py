"""GPUs of several processes: what they compute, what it costs, and what they learn of each other's failures."""

import os
import re
from concurrent.futures import ThreadPoolExecutor

import mxnet as mx
import pytest
from mpi_job import Job
from places import SUPPORT

import gluon_syncbn

pytest.importorskip("mpi4py", reason="processes need mpi4py")
if "CUDA_EMULATOR" not in os.environ or not mx.context.num_gpus():
    pytest.skip("needs `make test-gpu-emulated`: counts and failures are the emulator's", allow_module_level=True)

ON_GPUS = {"GLUON_SYNCBN_TEST_DEVICE": "gpu"}


def job(*arguments, worker=SUPPORT / "gpu_worker.py", **settings):
    return Job(2, *arguments, worker=worker, **settings)


def assert_succeeded(done):
    assert done.succeeded(2), done.output


def test_named_groups():
    """Some stay within a process, and ask nobody. Sums of gradients over NCCL come in another order in each process."""
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
        "frozen": ("fault", "frozen", 3),
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


def test_gradients_between_machines():
    assert_succeeded(job("gradients", environment={"MPI_WORKER_MACHINES": "0,1"}))


@pytest.mark.parametrize(
    "more, machine, reason",
    [(["asked"], "", "rank 1: gpus='host'"), ([], "one", "several processes use the same GPU")],
)
def test_gradients_over_the_host(more, machine, reason):
    environment = {"CUDA_EMULATOR_MACHINE": machine} if machine else {}
    done = job("gradients_over_the_host", *more, environment=environment)
    assert_succeeded(done)
    assert f"the gradients of GPUs go through host memory: {reason}" in done.output


def test_a_gpu_that_does_not_come_to_a_sum():
    done = job("gradients_fail")
    for rank in range(2):
        seconds, text = done.failure_of(rank)
        assert re.search(
            r"rank \d of 2 waits for rank \d \(over NCCL.* in the gradient of 'array0' and 4 more.* after 5 s", text
        ), text
        assert seconds < 25


def test_a_way_that_is_none():
    with pytest.raises(ValueError, match=r"gpus: 'nccl' was given, expected 'host' or None"):
        gluon_syncbn.kvstore("mpi", gpus="nccl")
