"""The relay and its links, between threads of this process, each of which is a rank."""

import contextlib
import os
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client

import mxnet as mx
import numpy as np
import pytest
from gluon_syncbn.exchange.bridge import BridgedTransport
from thread_transport import everywhere

import gluon_syncbn
from gluon_syncbn import _native
from gluon_syncbn.exchange import bridge
from gluon_syncbn.exchange.store import ProcessStore


class Worker(ProcessStore):
    def __init__(self, rank, size, told):
        def spread(own):
            if rank == 0:
                told.set_result(own)
            return told.result()

        super().__init__("bridge", BridgedTransport(rank, size, "127.0.0.1", spread))

    def cut(self):
        """As the kernel does when the process is killed."""
        self._transport._link._socket.shutdown(socket.SHUT_RDWR)

    def comes_to_its_end(self):
        _native.processes_ended(self.handle)


MADE = []  # a store lasts as long as its process, and so do its connections


def workers(size):
    told = Future()  # by rank 0
    with ThreadPoolExecutor(size) as pool:
        MADE.extend(pool.map(lambda rank: Worker(rank, size, told), range(size)))
    return MADE[-size:]


def test_messages_in_any_order():
    def work(worker):
        rng = np.random.RandomState(worker.rank)
        with ThreadPoolExecutor(20) as pool:

            def exchange(call):
                time.sleep(0.01 * rng.rand())
                part = np.full(call + worker.rank, 10 * call + worker.rank)
                for rank, got in enumerate(worker.allgather(call, part, equal=False)):
                    np.testing.assert_array_equal(got, np.full(call + rank, 10 * call + rank))

            list(pool.map(exchange, rng.permutation(20).tolist()))

    assert everywhere(workers(3), work) == [None] * 3


def test_to_each_its_own():
    def work(worker):
        return worker.exchange("parts", [np.full(to, 10 * worker.rank + to) for to in range(3)], equal=True)

    for to, parts in enumerate(everywhere(workers(3), work)):
        assert [part.tolist() for part in parts] == [[10 * rank + to] * to for rank in range(3)]


def test_a_stranger_is_refused(monkeypatch):
    introduction = bridge.relay("127.0.0.1", 1, [])
    address = tuple(introduction[:2])
    monkeypatch.setattr(bridge, "relay", lambda *_: introduction)
    with pytest.raises(AuthenticationError):
        Client(address, authkey=b"another")
    silent, half, longer = (socket.create_connection(address) for _ in range(3))
    half.sendall(b"\x00\x00\x00\x20#CHALL")
    longer.sendall(b"\x00\x00\x00\x04work" * 9)
    gluon_syncbn.configure(timeout=60)
    (worker,) = workers(1)  # while the three are there
    with pytest.raises(ConnectionRefusedError):  # when all have come, nobody listens
        for _ in range(100):
            with contextlib.suppress(ConnectionResetError):  # the listener closes at this moment
                socket.create_connection(address).close()
            time.sleep(0.05)
    assert worker.allgather(7, np.ones(2))[0].tolist() == [1, 1]
    for stranger in (silent, half, longer):
        stranger.close()


@pytest.mark.parametrize("gone", [0, 2])
@pytest.mark.parametrize("how", ["cut", "ends", "fails"])
def test_a_rank_that_is_gone(gone, how):
    """The others hear of it at once, and why."""
    everyone = workers(3)
    ways = {"cut": Worker.cut, "ends": Worker.comes_to_its_end, "fails": lambda worker: worker.fail("the disk is full")}
    text = f"rank {gone} of 3 has "
    text += {
        "cut": f"ended without a word (process {os.getpid()}; was it killed?)",
        "ends": "ended",
        "fails": "failed: the disk is full",
    }[how]

    def work(worker):
        if worker.rank == gone:
            time.sleep(0.2)
            return ways[how](worker)
        return worker.allgather(7, np.ones(2))

    for rank, error in enumerate(everywhere(everyone, work)):
        if rank != gone:
            assert text in str(error) and f"(rank {rank} was in exchange 7, round 1)" in str(error), error
            with pytest.raises(mx.MXNetError, match="nothing is exchanged any more"):
                everyone[rank].allgather(8, np.ones(2))


def test_a_rank_that_is_silent(monkeypatch):
    """Its connection is there, but nothing comes, not even when it has nothing to say."""
    own, over = BridgedTransport._following, threading.Event()
    silent = lambda self: own(self) if self.rank == 0 else over.wait(60) and None  # noqa: E731
    monkeypatch.setattr(BridgedTransport, "_following", silent)
    monkeypatch.setattr(bridge, "_SILENCE", 2.0)
    gluon_syncbn.configure(timeout=1)
    everyone = workers(2)
    until = time.monotonic() + 20
    while not _native.fate_of(everyone[0].handle, 1) and time.monotonic() < until:
        time.sleep(0.05)
    assert _native.fate_of(everyone[0].handle, 1) == "has failed: nothing was heard of it for 3 s"
    over.set()
    everywhere(everyone, Worker.comes_to_its_end)  # another test's step would take their threads for callers


def test_the_end_of_all(caplog):
    """Who comes first waits for the others, and hears if one of them does not come."""
    gluon_syncbn.configure(timeout=5)

    def end(worker):
        time.sleep(0.3 * worker.rank)
        worker.comes_to_its_end()
        return worker._transport.close() or worker._transport._losses()

    assert everywhere(workers(3), end) == [[]] * 3
    everyone = workers(3)
    everyone[2].cut()
    assert [len(losses) for losses in everywhere(everyone[:2], end)] == [1, 1]
    assert "ends without the others: rank 2 of 3 has ended without a word" in caplog.text
