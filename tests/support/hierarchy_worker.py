"""The ranks of a job without a launcher, on machines that are pretended: ends of it that ``mpiexec`` would hide.

``hierarchy_worker.py FOLDER MACHINES FAULT FAULTY TIMEOUT``. MACHINES names that of each rank, as in ``a,a,b``.
"""

import json
import os
import signal
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import light  # isort: skip  # noqa: F401
import gluon_syncbn  # isort: skip
import mxnet as mx
import numpy as np
from allreduce import allreduce
from forks import fork_ranks

from gluon_syncbn import _native
from gluon_syncbn.exchange import store as store_module
from gluon_syncbn.exchange.base import LayerInfo
from gluon_syncbn.exchange.store import ProcessStore
from gluon_syncbn.exchange.waiting import Wait, WaitingTransport
from gluon_syncbn.training.session import session

STEPS, FAULT_AT = 12, 6
PIECE = 4608  # numbers, as in csrc/exchange/segment.h
LENGTHS = [1, 7, 300, PIECE, PIECE + 1, 3 * PIECE]


class Files(WaitingTransport):
    """Over files of a folder, which outlive the processes."""

    def __init__(self, folder, rank, size):
        super().__init__(rank, size)
        self._folder, self.sent = folder, Counter()

    def _leave(self, name, content):
        hidden = self._folder / f".{name}"
        hidden.write_bytes(content)
        hidden.rename(self._folder / name)

    def carry(self, label, message, ranks):
        wait = Wait(self, label)
        name = "_".join(map(str, label[:5])).replace(" ", "-")
        self._leave(f"{name}.{self.rank}", message.tobytes())
        self.sent[label.kind] += 1
        while True:
            paths = {rank: self._folder / f"{name}.{rank}" for rank in ranks}
            missing = [rank for rank, path in paths.items() if not path.exists()]
            if not missing:
                return [np.frombuffer(path.read_bytes(), np.uint8) for path in paths.values()]
            for failed in self._folder.glob("failure.*"):
                self.give_up(label, f"rank {failed.suffix[1:]} of {self.size} has failed: {failed.read_text()}")
            wait.poll(missing)
            time.sleep(0.001)

    def tell(self, reason):
        self._leave(f"failure.{self.rank}", reason.encode())

    def close(self):
        self._closed = True


def vector(rank, step, length):
    return np.random.RandomState([rank, step, length]).randn(length)


def total(machines, step, length):
    """The sum of the sums of the machines, each in the order of the ranks."""
    sums = {}
    for rank, machine in enumerate(machines):
        own = vector(rank, step, length)
        sums[machine] = sums[machine] + own if machine in sums else own
    return sum(list(sums.values())[1:], next(iter(sums.values())))


def main():
    folder, machines, fault, faulty, timeout = sys.argv[1:]
    folder, machines, faulty = Path(folder), machines.split(","), int(faulty)
    ranks = fork_ranks(len(machines), folder, lambda rank: work(rank, folder, machines, fault, faulty, float(timeout)))
    for rank, process in enumerate(ranks):
        if rank != faulty:
            os.waitpid(process, 0)


def work(rank, folder, machines, fault, faulty, timeout):
    store_module._machine = lambda: machines[rank]
    transport = Files(folder, rank, len(machines))
    store = ProcessStore("files", transport)
    store.meet_in_memory()
    assert store.why_not_in_memory is None, store.why_not_in_memory
    layers = []
    for i in range(len(LENGTHS)):
        layers.append(_native.layer_create(f"layer{i}", 0, 1, 0, []))
        session.register(LayerInfo(layers[i], f"layer{i}", [mx.cpu(0)], 1, 3, "sync", 1, None), store)

    def exchange(step, i):
        limit = timeout if step >= FAULT_AT else 60.0  # the first one waits for the others to start
        ticket = _native.Ticket(layers[i], -1, step, 0, f"layer{i}".encode(), limit)
        got = allreduce(store.handle, ticket, vector(rank, step, LENGTHS[i]))
        np.testing.assert_array_equal(got, total(machines, step, LENGTHS[i]))

    began = time.monotonic()
    try:
        for step in range(STEPS):
            began = time.monotonic()
            if step == FAULT_AT:
                gluon_syncbn.configure(timeout=timeout)
                if rank == faulty and fault in ("SIGKILL", "SIGSTOP"):
                    os.kill(os.getpid(), getattr(signal, fault))
                if rank == faulty and fault == "fails":
                    store.fail("the disk is full")
                    return
                if rank == faulty and fault == "ends":
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
        os._exit(3)
    print(json.dumps({"sent": transport.sent["statistics"], "machines": store.machines}), flush=True)
    store.close()


main()
