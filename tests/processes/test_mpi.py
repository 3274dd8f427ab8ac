"""Several processes on this machine, started by ``mpiexec``: what they compute, and what they learn of each other."""

import re

import pytest
from mpi_job import Job

import gluon_syncbn


@pytest.mark.parametrize("processes", [2, 3])
def test_processes_equal_the_specification(processes):
    """All modes, types and ways of running, 1 and 2 devices in turn, names that differ."""
    job = Job(processes, "equals_the_specification", limit=120)
    assert job.succeeded(processes), job.output


@pytest.mark.parametrize(
    "scenario",
    [
        "same_bits_on_repetition",
        "one_store_for_gradients_and_statistics",
        "pushpull_and_broadcast",
        "running_stats_of_all_processes",
        "recomputed",
        "decisions",
    ],
)
def test_two_processes(scenario):
    job = Job(2, scenario)
    assert job.succeeded(2), job.output


@pytest.mark.parametrize("processes", [3, 4, 5])
def test_many_processes_add_along_a_tree(processes):
    job = Job(processes, "along_a_tree")
    assert job.succeeded(processes), job.output


def test_layers_in_any_order():
    job = Job(4, "random_order", 30)
    assert job.succeeded(4), job.output


@pytest.mark.slow
def test_layers_in_any_order_for_long():
    job = Job(4, "random_order", 1000, limit=1200)
    assert job.succeeded(4), job.output


def test_another_net():
    job = Job(2, "another_net")
    assert job.code != 0
    assert "the processes disagree about the net: layer 1 is SyncBatchNorm 'first' (5 channels" in job.output
    assert "'first' (6 channels" in job.output


def test_a_batch_that_is_not_finite():
    job = Job(2, "a_batch_that_is_not_finite")
    assert job.code not in (0, None)
    for rank in range(2):
        assert re.search(rf"FAILED rank {rank} .*'front' on cpu\(1\): the batch is not finite", job.output), job.output


def test_the_same_parameters():
    """Each rank's in turn, and in the end another net on each."""
    job = Job(2, "broadcasts_parameters")
    assert job.code not in (0, None)
    for rank in range(2):
        _, error = job.failure_of(rank)
        told = [f"'net_weight' of shape ({4 + k}, 3) and type float32 on rank {k}" for k in (rank, 1 - rank)]
        assert f"the processes disagree about the parameters: number 1 is {told[0]} and {told[1]}" in error


@pytest.mark.parametrize(
    ("fault", "text", "limit"),
    [
        ("frozen", "in the forward of call 2 of SyncBatchNorm 'layer0'", 3),
        ("exits", "rank 1 of 2 has ended (rank 0 was in the forward of call 2 of SyncBatchNorm 'layer0')", 60),
        ("raises", "rank 1 of 2 has failed: OSError left the recorded step (disk full)", 60),
        ("one batch more", "rank 1 of 2 has ended (rank 0 was in the forward of call 3", 60),
        ("skips a layer", "in the forward of call 2 of SyncBatchNorm 'layer0'", 3),
        ("another layer", "in the forward of call 2 of SyncBatchNorm 'layer0'", 3),
        ("repeats a step", "in the forward of call 2 of SyncBatchNorm 'layer1'", 3),
        ("another shape", "in gradient 0, round 2", 60),
    ],
)
def test_a_process_that_does_something_else(fault, text, limit):
    """Rank 0 gets an error that names layer, rank and step, at once or after the time limit of 3 s, and mpiexec's exit
    code is not 0."""
    job = Job(2, "fault", fault, limit)
    seconds, error = job.failure_of(0)
    assert text in error
    assert seconds < 20
    assert "OK 0" not in job.output
    assert job.code not in (0, None)


def test_a_process_that_is_killed():
    """MPICH's mpiexec ends the others at once, with -disable-auto-cleanup too: no process is left to be told."""
    job = Job(2, "fault", "killed", 300)
    assert job.code != 0
    assert "ENDED" not in job.output


def test_interrupt_while_another_process_is_late():
    job = Job(2, "interrupted")
    seconds, error = job.failure_of(0)
    assert seconds < 20  # the time limit is 60 s
    assert "asked to end" in error or "KeyboardInterrupt" in error
    assert job.code != 0


def test_a_transport_that_does_not_exist():
    with pytest.raises(ValueError, match=re.escape("name: 'dist_sync' was given, expected 'mpi'")):
        gluon_syncbn.kvstore("dist_sync")
