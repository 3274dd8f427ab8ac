"""Several processes on this machine, started by ``mpiexec``: what they compute, and what they learn of each other."""

import os
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from environments import ended
from mpi_job import Job
from places import SUPPORT

TOGETHER = [
    "equals_the_specification",
    "same_bits_on_repetition",
    "refuses_what_it_cannot_send",
    "averages_running_stats",
    "updates_bn_stats",
    "recomputed",
    "gathers",
    "gradients_in_any_order",
    "shuffled_keys",
    "initialised_at_different_speeds",
    "prepares_otherwise",
    "configures_after_the_trainer",
    "calls_stay_in_the_engine",
    "trained_alone_before",
]
WAYS_TO_LEAVE = ["raises", "exits", "left_the_scope"]
# These end in an error, with which the store ends and the processes go on.
FAILING = [
    "another_net",
    "modules_of_other_channels",
    "a_batch_that_is_not_finite",
    "broadcasts_parameters",
    "gathers_other_rows",
]


@pytest.fixture(scope="module")
def together():
    """One job of two processes that does all of this."""
    return Job(2, "+".join([*TOGETHER, *(f"!{scenario}" for scenario in FAILING)]), limit=250)


@pytest.fixture(scope="module")
def failed():
    """Jobs of two processes that end early, two at a time: most of each is starting Python and waiting."""
    jobs = [*(f"saves_its_work {way}" for way in WAYS_TO_LEAVE), "interrupted", "fails_after_another_has_ended"]
    with ThreadPoolExecutor(max(2, (os.cpu_count() or 2) // 2)) as pool:
        return dict(zip(jobs, pool.map(lambda arguments: Job(2, *arguments.split()), jobs)))


@pytest.mark.parametrize("scenario", TOGETHER)
def test_two_processes(scenario, together):
    assert all(f"DONE {rank} {scenario}" in together.output for rank in range(2)), together.output


def test_two_processes_end_well(together):
    assert together.succeeded(2), together.output


ROWS = "gathers+gradients_in_any_order+shuffled_keys"
NUMBERS = "equals_the_specification+same_bits_on_repetition"


@pytest.mark.parametrize(
    "processes, scenarios",
    [
        (3, f"{NUMBERS}+{ROWS}+!fails_beside_two"),
        (5, f"same_bits_on_repetition+{ROWS}+!one_does_not_come"),
    ],
)
def test_more_processes(processes, scenarios):
    """All modes, types and ways of running, 1 and 2 devices in turn, names that differ; the same bits on all ranks."""
    job = Job(processes, scenarios, limit=250)
    assert job.succeeded(processes), job.output
    for rank in range(processes):
        if "one_does_not_come" in scenarios and rank != processes % 2:
            _, error = job.failure_of(rank, "one_does_not_come")
            assert re.search(f"waits for rank {processes % 2}[ ,].*in the forward of call 2", error), error
    if processes == 3:
        seconds, error = job.failure_of(0, "fails_beside_two")
        assert "rank 2 of 3 has failed: the disk is full (rank 0 was in the forward of call 2 of SyncBatchNorm" in error
        assert seconds < 30  # the time limit is 60 s


@pytest.mark.parametrize("scenario, name", [("another_net", "first"), ("modules_of_other_channels", "bn")])
def test_another_net(scenario, name, together):
    for rank in range(2):
        _, error = together.failure_of(rank, scenario)
        assert f"the processes disagree about the net: layer 1 is SyncBatchNorm '{name}' (" in error
        assert f"'{name}' (5 channels" in error and f"'{name}' (6 channels" in error


def test_a_batch_that_is_not_finite(together):
    for rank in range(2):
        _, error = together.failure_of(rank, "a_batch_that_is_not_finite")
        assert "'front' on cpu(1): the batch is not finite" in error


def test_the_same_parameters(together):
    """Each rank's in turn, and in the end another net on each."""
    for rank in range(2):
        _, error = together.failure_of(rank, "broadcasts_parameters")
        told = [f"'net_weight' of shape ({4 + k}, 3) and type float32 on rank {k}" for k in (rank, 1 - rank)]
        assert f"the processes disagree about the parameters: number 1 is {told[0]} and {told[1]}" in error


def test_rows_of_another_shape(together):
    for rank in range(2):
        _, error = together.failure_of(rank, "gathers_other_rows")
        assert f"gather 'features': rank {rank} came with rows of shape ({3 + rank},) and type float32" in error


@pytest.mark.parametrize("way", WAYS_TO_LEAVE)
def test_a_process_that_leaves(way, failed):
    """Rank 0 gets an error that names layer, rank and step, at once, and saves its work. Both say why the job ends."""
    job = failed[f"saves_its_work {way}"]
    seconds, error = job.failure_of(0)
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
    seconds, error = job.failure_of(0)
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
