"""One rank of a job without a launcher, in memory that its processes share: ends of it that ``mpiexec`` would hide.

``segment_worker.py RANK RANKS TIMEOUT FAULT PLACE``. Rank 0 prints the place of the memory; the others take it.
"""

import json
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import gluon_syncbn  # isort: skip  # noqa: F401  (before mxnet: it finds what MXNet needs)
import mxnet as mx
import numpy as np

from gluon_syncbn import _native
from gluon_syncbn.exchange.base import LayerInfo, PythonExchange
from gluon_syncbn.training.session import session

STEPS, FAULT_AT = 20, 10
LENGTHS = [1, 7, 300, _native.MOST_VALUES, _native.MOST_VALUES + 1, 3 * _native.MOST_VALUES]


class Transport(PythonExchange):
    """It knows the layers and carries nothing."""

    spans_processes = True

    def add(self, layer, ticket, rows):
        raise NotImplementedError


def vector(rank, step, length):
    return np.random.RandomState([rank, step, length]).randn(length)


def main():
    rank, ranks, timeout, fault, place = sys.argv[1:]
    rank, ranks, timeout = int(rank), int(ranks), float(timeout)
    if rank == 0:
        segment = _native.Segment.create(ranks)
        place = {"process": os.getpid(), "number": segment.number(), "token": segment.token().hex()}
        print(json.dumps(place), flush=True)
    else:
        place = json.loads(place)
        segment = _native.Segment.open(ranks, rank, place["process"], place["number"], bytes.fromhex(place["token"]))
    transport = Transport()
    handle = segment.exchange(transport.handle)
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
                    _native.shared_memory_failed(handle, "the disk is full")
                    return
                elif fault == "ends":
                    _native.shared_memory_ended(handle)
                    return
                elif fault == "skips a step":
                    step += 1
            order = np.random.RandomState([rank, step]).permutation(len(LENGTHS))
            with ThreadPoolExecutor(len(LENGTHS)) as pool:  # in an order of its own in each process
                list(pool.map(exchange, [step] * len(LENGTHS), map(int, order)))
    except mx.MXNetError as error:
        print(f"FAILED after {time.monotonic() - began:.1f} s: {error}", flush=True)
        os._exit(3)
    _native.shared_memory_ended(handle)
    print("OK", flush=True)


main()
