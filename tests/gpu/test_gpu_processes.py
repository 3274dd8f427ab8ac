"""GPUs of several processes: what they compute, what it costs, and what they learn of each other's failures."""

import os
import re

import mxnet as mx
import pytest
from mpi_job import Job
from places import SUPPORT

import gluon_syncbn

pytest.importorskip("mpi4py", reason="processes need mpi4py")
if "CUDA_EMULATOR" not in os.environ or not mx.context.num_gpus():
    pytest.skip("needs `make test-gpu-emulated`: counts and failures are the emulator's", allow_module_level=True)

WORKER = SUPPORT / "gpu_worker.py"


def job(processes, *arguments, **settings):
    return Job(processes, *arguments, worker=WORKER, **settings)


def assert_succeeded(done, processes):
    assert done.succeeded(processes), done.output
    assert "over the host" not in done.output, done.output


# Four processes find what two find; `make test-gpu-emulated ARGS="-m slow"`.
PROCESSES = [pytest.param(2, marks=pytest.mark.slow), 4]


@pytest.mark.parametrize("processes", PROCESSES)
def test_every_mode_and_what_it_costs(processes):
    """2 launches, no copy, 1 wait, 1 collective and 1 message between the hosts, forward and backward."""
    assert_succeeded(job(processes, "every_mode", limit=200), processes)


@pytest.mark.parametrize("scenario", ["other_types", "short_batches", "recomputed_on_gpus"])
def test_two_processes(scenario):
    assert_succeeded(job(2, scenario), 2)


@pytest.mark.parametrize("processes", PROCESSES)
def test_branches_in_another_order_in_each_process(processes):
    """Collectives that two processes post in another order hang, or mix two layers."""
    assert_succeeded(job(processes, "branches", 6, limit=150), processes)


@pytest.mark.slow
def test_along_a_tree(monkeypatch):
    """What many processes do: from more than so many on, the counts come along a tree."""
    monkeypatch.setenv("MPI_WORKER_FEW", "1")
    assert_succeeded(job(5, "branches", 2, limit=150), 5)


def test_over_the_host_on_request(monkeypatch):
    monkeypatch.setenv("GPU_WORKER_GPUS", '"host"')
    assert_succeeded(job(2, "every_mode", limit=200), 2)


@pytest.mark.parametrize(
    "how, text",
    [
        ("same", r"gpu\(0\) of rank 0 and gpu\(0\) of rank 1 are the same GPU"),
        pytest.param("cpu", r"rank 0: it is on cpu\(0\) there", marks=pytest.mark.slow),
    ],
)
def test_over_the_host_where_nccl_cannot_be_had(monkeypatch, how, text):
    """The numbers are right, one warning says why, and whoever asked for NCCL gets an error."""
    if how == "same":
        monkeypatch.setenv("CUDA_EMULATOR_MACHINE", "this one")
    done = job(2, "over_the_host", how)
    assert done.succeeded(2), done.output
    warning = "the statistics of the GPUs of several processes go over the host: " + text
    assert len(re.findall(warning, done.output)) == 2, done.output  # one in each process
    monkeypatch.setenv("GPU_WORKER_GPUS", '"nccl"')
    done = job(2, "over_the_host", how)
    assert done.code not in (0, None)
    assert re.search(
        r"ValueError: gpus: 'nccl' was given, but the statistics of '\w+' cannot go by NCCL: " + text, done.output
    )


def test_a_batch_that_is_not_finite(monkeypatch):
    """Left out by all; then the end of the process whose batch it is."""
    monkeypatch.setenv("GLUON_SYNCBN_TEST_DEVICE", "gpu")
    done = Job(2, "a_batch_that_is_not_finite")
    assert done.code not in (0, None)
    assert "the batch is not finite: the mean of channel 1 is nan" in done.failure_of(1)[1]


def test_a_process_that_raises():
    done = job(2, "fails", "raises")
    assert "disk full" in done.failure_of(1)[1]
    seconds, text = done.failure_of(0)
    assert "rank 1 of 2 has failed: OSError left the recorded step (disk full)" in text
    assert seconds < 20


def test_a_process_that_does_not_come():
    done = job(2, "fails", "does not come")
    seconds, text = done.failure_of(0)
    assert re.search(r"rank 0 of 2 waits for rank 1 in the forward of call 2 of SyncBatchNorm '.*' after 3 s", text), (
        text
    )
    assert 2.5 < seconds < 20


def test_a_gpu_that_hangs():
    """In another process: rank 0, which could wait for longer, hears of it while its own GPU waits."""
    done = job(2, "fails", "its GPU hangs")
    assert re.search(r"on gpu\(\d\): the GPU has not finished for 3 s", done.failure_of(1)[1]), done.output
    seconds, text = done.failure_of(0)
    assert "rank 1 of 2 has failed: " in text and "the GPU has not finished for 3 s" in text
    assert seconds < 20


def test_a_process_that_is_killed_in_a_collective():
    """mpiexec ends the others."""
    done = job(2, "fails", "killed in a collective", limit=60)
    assert done.code not in (0, None)
    assert "ENDED" not in done.output


def test_how_they_go_is_settled_once():
    with pytest.raises(ValueError, match=r"gpus: 'gloo' was given, expected 'nccl', 'host' or None"):
        gluon_syncbn.kvstore("mpi", gpus="gloo")
    kv = gluon_syncbn.kvstore("mpi")
    assert gluon_syncbn.kvstore("mpi", gpus=None) is kv and kv.gpus is None
    with pytest.raises(ValueError, match="gpus: 'host' was given, but kvstore 'mpi' has been made with None"):
        gluon_syncbn.kvstore("mpi", gpus="host")
