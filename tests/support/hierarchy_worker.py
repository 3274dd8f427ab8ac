"""Ranks of jobs without a launcher, on machines that are pretended: ends of it that ``mpiexec`` would hide.

``hierarchy_worker.py FOLDER JOBS``: a list in JSON of [machines, fault, faulty rank, time limit], two at a time. The
machines name that of each rank, as in ``aab``.
"""

import functools
import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import light  # isort: skip  # noqa: F401
import gluon_syncbn  # isort: skip
import mxnet as mx
import numpy as np
from allreduce import allreduce, sent
from forks import fork_ranks

from gluon_syncbn.exchange import bridge
from gluon_syncbn.exchange import store as store_module
from gluon_syncbn.exchange.store import ProcessStore

STEPS, FAULT_AT = 12, 6
MOST = 74240  # numbers, as in csrc/exchange/segment.h
LENGTHS = [1, 7, 300, 4097, 20_000, MOST]
NUMBERS = np.random.RandomState(0).randn(MOST + 6000)


bridge._GRACE = 1.0  # seconds; nothing else is told that late


def introduced(folder, rank, size):
    """By a file of the folder."""

    def spread(told):
        path, hidden = folder / "introduction", folder / ".introduction"
        if rank == 0:
            hidden.write_bytes(told.tobytes())
            hidden.rename(path)
        while not path.exists():
            time.sleep(0.01)
        return np.frombuffer(path.read_bytes(), np.uint8)

    return bridge.BridgedTransport(rank, size, "127.0.0.1", spread)


def vector(rank, step, length):
    return NUMBERS[1000 * LENGTHS.index(length) + 16 * rank + step :][:length]


def total(machines, step, length):
    """The sum of the sums of the machines, each in the order of the ranks."""
    sums = {}
    for rank, machine in enumerate(machines):
        own = vector(rank, step, length)
        sums[machine] = sums[machine] + own if machine in sums else own
    first, *others = sums.values()
    if len(others) == 4:  # neighbours combine until their number is a power of two
        first, *others = first + others[0] + others[1], others[2] + others[3]
    return sum(others, first)


def main():
    running = {}  # job by process
    for number, (machines, fault, faulty, timeout) in enumerate(json.loads(sys.argv[2])):
        while len(set(running.values())) > 1:
            running.pop(os.wait()[0], None)
        folder = Path(sys.argv[1], str(number))
        folder.mkdir()
        job = {"folder": folder, "machines": machines, "fault": fault, "faulty": faulty, "timeout": timeout}
        for rank, process in enumerate(fork_ranks(len(machines), folder, functools.partial(work, **job))):
            if rank != faulty:  # it may be stopped
                running[process] = number
    while running:
        running.pop(os.wait()[0], None)


def work(rank, folder, machines, fault, faulty, timeout):
    store_module._machine = lambda: machines[rank]
    store = ProcessStore("relay", introduced(folder, rank, len(machines)))
    store.meet_in_memory()
    assert store.why_not_in_memory is None, store.why_not_in_memory

    def exchange(step, i):
        limit = timeout if step >= FAULT_AT else 60.0  # the first one waits for the others to start
        got = allreduce(store.handle, (i, -1, step, 0, f"layer{i}", limit), vector(rank, step, LENGTHS[i]))
        np.testing.assert_array_equal(got, total(machines, step, LENGTHS[i]))

    before, began = sent(store.handle), time.monotonic()
    try:
        for step in range(STEPS):
            began = time.monotonic()
            if step == FAULT_AT:
                gluon_syncbn.configure(timeout=timeout)
                if rank == faulty and fault in ("SIGKILL", "SIGSTOP"):
                    os.kill(os.getpid(), getattr(signal, fault))
                if rank == faulty and fault == "fails":
                    store.fail("the disk is full")
                if rank == faulty and fault in ("fails", "ends"):
                    store.close()
                    return
                if rank == faulty and fault == "skips a step":
                    step += 1
            order = np.random.RandomState([rank, step]).permutation(len(LENGTHS))
            with ThreadPoolExecutor(len(LENGTHS)) as pool:  # in an order of its own in each process
                list(pool.map(exchange, [step] * len(LENGTHS), map(int, order)))
    except mx.MXNetError as error:
        print(f"FAILED after {time.monotonic() - began:.1f} s: {error}", flush=True)
        store.fail(str(error))  # as a step does that fails
        store.close()
        os._exit(3)
    count = sent(store.handle) - before
    local = store.local_rank, store.local_size
    print(json.dumps({"sent": count, "machines": store.machines, "local": local}), flush=True)
    store.close()


main()
