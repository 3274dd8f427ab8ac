"""The ranks of a job without a launcher, in memory that they share: ends of it that ``mpiexec`` would hide.

``segment_worker.py FOLDER RANKS TIMEOUT FAULT`` prints the process ids. Rank 0 leaves the place of the memory in the
folder; the others take it.
"""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import light  # isort: skip  # noqa: F401
import mxnet as mx
import numpy as np
from forks import fork_ranks

from gluon_syncbn import _native
from gluon_syncbn.exchange.base import Exchange, LayerInfo
from gluon_syncbn.training.session import session

STEPS, FAULT_AT = 20, 10
LENGTHS = [1, 7, 300, _native.MOST_VALUES, _native.MOST_VALUES + 1, 3 * _native.MOST_VALUES]


class Transport(Exchange):
    """It knows the layers and carries nothing."""

    spans_processes = True

    def agreed(self, layer, here):
        return _native.Agreed(layer.id)


def vector(rank, step, length):
    return np.random.RandomState([rank, step, length]).randn(length)


def main():
    folder, ranks, timeout, fault = sys.argv[1:]
    processes = fork_ranks(
        int(ranks), Path(folder), lambda rank: work(rank, int(ranks), Path(folder), float(timeout), fault)
    )
    print(json.dumps(processes), flush=True)
    for process in processes if fault != "SIGSTOP" else processes[:-1]:
        os.waitpid(process, 0)


def work(rank, ranks, folder, timeout, fault):
    place = folder / "place"
    if rank == 0:
        segment = _native.Segment.create(ranks)
        told = {"process": os.getpid(), "number": segment.number(), "token": segment.token().hex()}
        (folder / "unfinished").write_text(json.dumps(told))
        (folder / "unfinished").rename(place)
    else:
        while not place.exists():
            time.sleep(0.001)
        told = json.loads(place.read_text())
        segment = _native.Segment.open(ranks, rank, told["process"], told["number"], bytes.fromhex(told["token"]))
    transport = Transport()
    processes = _native.processes(_native.python_exchange(transport), rank, ranks, None)
    handle = segment.exchange(processes, range(ranks), [0])
    layers = []
    for i in range(len(LENGTHS)):
        layers.append(_native.layer_create(f"layer{i}", 0, 1, 0))
        session.register(LayerInfo(layers[i], f"layer{i}", [mx.cpu(0)], 1, 3, "sync", 1, None), transport)

    def exchange(step, i):
        limit = timeout if step >= FAULT_AT else 60.0  # the first one waits for the others to start
        ticket = _native.Ticket(layers[i], -1, step, 0, f"layer{i}".encode(), limit)
        total = _native.allreduce(handle, ticket, vector(rank, step, LENGTHS[i]))
        want = vector(0, step, LENGTHS[i])
        for other in range(1, ranks):
            want = want + vector(other, step, LENGTHS[i])
        np.testing.assert_array_equal(total, want)  # in the order of the ranks: the same bits everywhere

    began = time.monotonic()
    try:
        for step in range(STEPS):
            began = time.monotonic()
            if step == FAULT_AT and rank == ranks - 1:
                if fault in ("SIGKILL", "SIGSTOP"):
                    os.kill(os.getpid(), getattr(signal, fault))
                elif fault == "fails":
                    _native.processes_failed(handle, "the disk is full")
                    return
                elif fault == "ends":
                    _native.processes_ended(handle)
                    return
                elif fault == "skips a step":
                    step += 1
            order = np.random.RandomState([rank, step]).permutation(len(LENGTHS))
            with ThreadPoolExecutor(len(LENGTHS)) as pool:  # in an order of its own in each process
                list(pool.map(exchange, [step] * len(LENGTHS), map(int, order)))
    except mx.MXNetError as error:
        print(f"FAILED after {time.monotonic() - began:.1f} s: {error}", flush=True)
        os._exit(3)
    _native.processes_ended(handle)
    print("OK", flush=True)


main()
