"""Several processes on this machine, started by ``mpiexec``: what they compute, and what they learn of each other."""

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from environments import ended
from mpi_job import Job, failure_of
from places import SUPPORT

JOBS = {
    2: (
        "updates_bn_stats+recomputed+prepares_otherwise+configures_after_the_trainer+"
        "calls_stay_in_the_engine+trained_alone_before+modules_of_other_channels+a_batch_that_is_not_finite+"
        "broadcasts_parameters+gathers_other_rows"
    ),
    3: "equals_the_specification+gathers+gradients_in_any_order+shuffled_keys+fails_beside_two",
}
WAYS_TO_LEAVE = ["raises", "exits", "left_the_scope"]


@pytest.mark.parametrize("processes", JOBS)
def test_processes(processes):
    """With 1 and 2 devices in turn, and names of layers that differ."""
    job = Job(processes, JOBS[processes], limit=250)
    assert job.succeeded(processes), job.output


@pytest.fixture(scope="module")
def failed():
    """Jobs of two processes that end early, two at a time: most of each is starting Python and waiting."""
    jobs = [*(f"saves_its_work {way}" for way in WAYS_TO_LEAVE), "interrupted", "fails_after_another_has_ended"]
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2)) as pool:
        return dict(zip(jobs, pool.map(lambda arguments: Job(2, *arguments.split()), jobs)))


@pytest.mark.parametrize("way", WAYS_TO_LEAVE)
def test_a_process_that_leaves(way, failed):
    """Rank 0 gets an error that names layer, rank and step, at once, and saves its work. Both say why the job ends."""
    job = failed[f"saves_its_work {way}"]
    seconds, error = failure_of(0, job.output)
    assert seconds < 20
    if way == "left_the_scope":
        why = "rank 1 of 2 has failed: OSError left the recorded step (the disk is full)"
    else:
        why = "rank 1 of 2 has ended"
        assert (
            "in the forward of call 3 of SyncBatchNorm 'layer0'). The output of rank 1, or the log of its machine, "
            "says why. Give every process the same number of steps, or train within gluon_syncbn.join"
        ) in error
    assert why in error
    for rank in range(2):
        (told,) = re.findall(f"^rank {rank} of 2 ends, and its job with it .*$", job.output, re.MULTILINE)
        assert why in told
    assert "OK 0" not in job.output
    assert job.code not in (0, None)


def test_a_process_that_has_ended_when_another_one_fails(failed):
    """1 of 2,149 jobs hung where a rank left while another one was in MPI_Finalize."""
    job = failed["fails_after_another_has_ended"]
    assert "LEFT 0" in job.output and "LEFT 1" in job.output, job.output
    assert job.code != 0


def test_interrupt_while_another_process_is_late(failed):
    job = failed["interrupted"]
    seconds, error = failure_of(0, job.output)
    assert seconds < 20  # the time limit is 60 s
    assert "asked to end" in error or "KeyboardInterrupt" in error
    assert job.code != 0


def test_an_mpi_without_threads():
    """Nothing else takes its place."""
    program = (
        "import mpi4py; mpi4py.rc.thread_level = 'funneled'; import light, gluon_syncbn; gluon_syncbn.kvstore('mpi')"
    )
    done = ended([sys.executable, "-c", program], SUPPORT)
    assert "this job has it without MPI_THREAD_MULTIPLE" in done.stderr, done.stderr


def test_without_horovod(monkeypatch):
    import gluon_syncbn

    monkeypatch.setitem(sys.modules, "horovod", None)
    with pytest.raises(ImportError, match="kvstore 'horovod' needs Horovod"):
        gluon_syncbn.SyncBatchNorm(kvstore="horovod")
