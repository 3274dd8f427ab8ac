"""Several processes on this machine, started by ``mpiexec``: what they compute, and what they learn of each other."""

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from environments import ended
from mpi_job import Job
from places import SUPPORT

#: Jobs of this many processes, with 1 and 2 devices in turn.
JOBS = {
    2: (
        "updates_bn_stats+recomputed+prepares_otherwise+shares_the_store+"
        "calls_stay_in_the_engine+trained_alone_before+modules_of_other_channels+a_batch_that_is_not_finite+"
        "broadcasts_parameters+gathers_other_rows"
    ),
    3: (
        "equals_the_specification+gathers+gradients_in_any_order+shuffled_keys+joins+joins_masked_in_groups+"
        "fails_beside_two"
    ),
}
#: Jobs of four replicas, whose groups are named by their ranks.
GROUPS = {
    "of processes": (4, ["layers_in_any_order+members_do_not_wait_for_others"], {}),
    "of contexts": (2, ["layers_in_any_order+fewer_devices+other_devices"], {}),
    # MXNet may put the copies of two layers into one operation, which would wait for both.
    "through Custom": (4, ["layers_in_any_order"], {"GLUON_SYNCBN_OPERATOR": "custom"}),
    "for long": (4, ["layers_in_any_order", 1000], {}),
}
SLOW = [pytest.mark.slow, pytest.mark.timeout(1500)]
ENDS_FIRST = [rf"^rank {rank} of 2 ends, and its job with it .*rank 1 of 2 has ended" for rank in (0, 1)]
FAILS = [rf"^rank {rank} of 2 ends, and its job with it .*OSError left the recorded step" for rank in (0, 1)]
#: Jobs of two processes that end early, and what they say, once. Rank 0 saves its work.
ENDS = {
    "saves_its_work exits": ["SAVED", *ENDS_FIRST],
    "saves_its_work left_the_scope": ["SAVED", *FAILS],
    "interrupted": ["INTERRUPTED"],
    # 1 of 2,149 jobs hung where a rank left while another one was in MPI_Finalize.
    "fails_after_another_has_ended": ["LEFT 0", "LEFT 1"],
}


@pytest.mark.parametrize("processes", JOBS)
def test_processes(processes):
    """Names of layers differ."""
    job = Job(processes, JOBS[processes], worker=SUPPORT / "gradients_worker.py", limit=250)
    assert job.succeeded(processes), job.output
    assert "Processes: <kvstore 'mpi': rank 1 of 2>" in job.output or processes == 3


@pytest.mark.parametrize("name", [pytest.param(one, marks=SLOW if one == "for long" else []) for one in GROUPS])
def test_four_replicas(name):
    processes, arguments, settings = GROUPS[name]
    environment = {"MPI_WORKER_CONTEXTS": str(4 // processes), **settings}
    limit = 1200 if arguments[1:] else 250
    job = Job(processes, *arguments, worker=SUPPORT / "groups_worker.py", environment=environment, limit=limit)
    assert job.succeeded(processes), job.output


@pytest.fixture(scope="module")
def ended_jobs():
    """Two at a time: most of each is starting Python and waiting."""
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2)) as pool:
        return dict(zip(ENDS, pool.map(lambda arguments: Job(2, *arguments.split()), ENDS)))


@pytest.mark.parametrize("arguments", ENDS)
def test_a_job_that_ends_early(arguments, ended_jobs):
    job = ended_jobs[arguments]
    for text in ENDS[arguments]:
        assert len(re.findall(text, job.output, re.MULTILINE)) == 1, job.output
    assert "OK 0" not in job.output
    assert job.code not in (0, None)


def test_an_mpi_without_threads():
    """Nothing else takes its place."""
    program = (
        "import mpi4py; mpi4py.rc.thread_level = 'funneled'; import light, gluon_syncbn; gluon_syncbn.kvstore('mpi')"
    )
    done = ended([sys.executable, "-c", program], SUPPORT)
    assert "this job has it without MPI_THREAD_MULTIPLE" in done.stderr, done.stderr


def test_an_mpi_that_another_thread_has_initialised():
    """Horovod's would end it at exit, before the last step has ended."""
    program = (
        "import threading; thread = threading.Thread(target=lambda: __import__('mpi4py.MPI')); thread.start()\n"
        "thread.join(); import light, gluon_syncbn; gluon_syncbn.kvstore('mpi')"
    )
    done = ended([sys.executable, "-c", program], SUPPORT)
    assert "create the store before hvd.init()" in done.stderr, done.stderr
