"""Runs a worker of MXNet's KVStore ``dist_sync`` in a process of its own, for the process that trains.

A request to a parameter server cannot be taken back, and MXNet's engine waits for it at every ``waitall`` and at the
end. So the training process leaves these requests to a child, which it can end at any time:

training process          socket pair            child                    parameter server
  ask(...) ─────────────► number, operation ───► kv.pushpull ───────────► adds up what all workers push
  future   ◄───────────── number, array     ◄─── array arrives ◄───────── answers when all have pushed

A server keeps an array for each key. It answers a push when as many pushes have come as there are workers. It does not
look at who pushed. A worker that pushes so often by itself therefore writes an array alone: its register.

All arrays are float32. A server of MXNet 1.9.1 never initialises its field ``multi_precision_``. Where the memory
happens not to be zero, it rounds float64 and float16 to float32 (src/kvstore/kvstore_dist_server.h of MXNet;
docs/mxnet_faults.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import pickle
import signal
import struct
import subprocess
import sys
import threading
import time
from concurrent import futures
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Tuple

import mxnet as mx
import numpy as np

from ..system import environment

_HEADER = struct.Struct("=qqq8s8s")  # number, key, size, operation, type
# The child needs no GPU. What the training process has set up for its own work would only cost time there.
_PROGRAM = """
import os, sys
os.environ.update(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1")
sys.path[:] = {paths!r}
from gluon_syncbn.exchange.carrier import serve
serve()
"""
_EVERYBODY = 1 + 2 + 4  # ps-lite's groups: scheduler, servers, workers
_WORDS = 1.0  # seconds for the last words
_LOOK = 0.5  # seconds between two looks at whether the parent is there
REGISTER = 600  # numbers of a register
_LEVELS = 320, 4096, 32768  # numbers that each rank may send in a round; the next level is larger
_LARGE = 1 << 20  # numbers of all ranks in the largest round


class Layout(NamedTuple):
    """The keys that every job has."""

    workers: int
    servers: int

    def register(self, rank: int) -> int:
        """The key of a worker's register; all of them are on server 0."""
        return rank * self.servers

    def probe(self, server: int) -> int:
        """A key on this server, which nobody writes."""
        first = self.workers * self.servers
        return next(key for key in range(first, first + self.servers) if key * 9973 % self.servers == server)

    def round(self, level: int) -> int:
        return (self.workers + 1) * self.servers + level

    def capacities(self) -> Tuple[int, ...]:
        """How many numbers each rank may send in a round, by level."""
        return *_LEVELS, max(_LEVELS[-1], _LARGE // self.workers)

    def sum(self, number: int) -> int:
        return self.round(len(self.capacities()) + number)

    def sizes(self) -> Dict[int, int]:
        """The sizes of the arrays that exist from the beginning."""
        sizes = {self.register(rank): REGISTER for rank in range(self.workers)}
        sizes.update({self.probe(server): 1 for server in range(self.servers)})
        sizes.update({self.round(i): self.workers * (2 + n) for i, n in enumerate(self.capacities())})
        return sizes


class Carrier:
    """The child, as the training process sees it."""

    def __init__(self) -> None:
        self._connection, theirs = Pipe()
        number = theirs.fileno()
        program = _PROGRAM.format(paths=[str(Path(__file__).parents[2]), *sys.path])
        self._child = subprocess.Popen(
            [sys.executable, "-c", program, str(number), str(os.getpid())],
            pass_fds=[number],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        self._sending = threading.Lock()
        self._numbers = itertools.count(1)
        self._asked: Dict[int, futures.Future[np.ndarray]] = {}
        self.ready: futures.Future[np.ndarray] = futures.Future()  # rank, workers, servers
        self._asked[0] = self.ready
        threading.Thread(target=self._receive, name="gluon_syncbn-carrier", daemon=True).start()

    def ask(self, operation: str, key: int = 0, array: Optional[np.ndarray] = None) -> futures.Future[np.ndarray]:
        """Asks the child for one of its operations. The future may never be done."""
        array = np.zeros(0) if array is None else array
        future: futures.Future[np.ndarray] = futures.Future()
        with self._sending:
            number = next(self._numbers)
            self._asked[number] = future
            header = _HEADER.pack(number, key, array.size, operation.encode(), array.dtype.str.encode())
            try:
                self._connection.send_bytes(header)
                if array.size:
                    self._connection.send_bytes(array.data.cast("B"))
            except OSError:
                self._lost()
        return future

    def end(self, seconds: float) -> None:
        """Waits for the end of the child, and ends it by force after that time."""
        try:
            self._child.wait(seconds)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _receive(self) -> None:
        try:
            while True:
                number, _, size, _, dtype = _HEADER.unpack(self._connection.recv_bytes())
                array = np.empty(size, dtype.rstrip(b"\0").decode())
                if size:
                    self._connection.recv_bytes_into(array.data.cast("B"))
                self._asked.pop(number).set_result(array)
        except (OSError, EOFError):
            self._lost()

    def _lost(self) -> None:
        text = f"the process {self._child.pid}, which carries the messages of this process, has ended."
        for number in list(self._asked):
            future = self._asked.pop(number, None)
            if future is not None:
                with contextlib.suppress(futures.InvalidStateError):
                    future.set_exception(mx.MXNetError(text))


class _Leave:
    """Ends a server that unpickles it: MXNet's servers unpickle what they are sent as an optimizer."""

    def __reduce__(self) -> Any:
        return os._exit, (1,)


class _Child:
    """What the child does. Only one thread calls MXNet's store; others wait for arrays and answer."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._sending = threading.Lock()
        self._waiters = futures.ThreadPoolExecutor(64)
        self._last: Optional[Tuple[int, np.ndarray]] = None
        self._dying = threading.Lock()
        self._store = mx.kv.create("dist_sync")
        self._layout = Layout(self._store.num_workers, int(environment.read("DMLC_NUM_SERVER")))
        self._sizes = self._layout.sizes()
        self._store.init(list(self._sizes), [mx.nd.zeros(size) for size in self._sizes.values()])
        self._answer(0, np.array([self._store.rank, *self._layout], np.int64))

    def serve(self) -> None:
        while True:
            number, key, size, operation, dtype = _HEADER.unpack(self._connection.recv_bytes())
            array = np.empty(size, dtype.rstrip(b"\0").decode())
            if size:
                self._connection.recv_bytes_into(array.data.cast("B"))
            getattr(self, "_" + operation.rstrip(b"\0").decode())(number, key, array)

    def _total(self, number: int, key: int, array: np.ndarray) -> None:
        """Adds up what all workers push."""
        values = mx.nd.array(array, dtype=array.dtype)
        self._store.pushpull(key, values)
        self._later(number, values)

    def _write(self, number: int, key: int, array: np.ndarray) -> None:
        """Writes our register, or a key that no worker has used so far."""
        new = key not in self._sizes
        values = [mx.nd.zeros(array.size, dtype=array.dtype) for _ in range(0 if new else self._layout.workers - 1)]
        for value in [mx.nd.array(array, dtype=array.dtype), *values]:
            self._store.push(key, value)
        self._read(number, key, array)  # MXNet's store reads a key after it has pushed it

    def _read(self, number: int, key: int, array: np.ndarray) -> None:
        out = mx.nd.empty(array.size, dtype=array.dtype)
        self._store.pull(key, out=out)
        self._later(number, out)

    def _abort(self, number: int, key: int, array: np.ndarray) -> None:
        """Ends the servers, which do not answer, and the scheduler."""
        command = pickle.dumps(_Leave(), 0).decode()
        self._waiters.submit(self._store._send_command_to_servers, 0, command)
        # The scheduler ends when all have come to a barrier. It counts requests, and does not look at who sent them.
        with contextlib.suppress(AttributeError):
            get, barrier = mx.base._LIB._ZN2ps10Postoffice3GetEv, mx.base._LIB._ZN2ps10Postoffice7BarrierEii
            get.restype = ctypes.c_void_p
            barrier.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int]
            for _ in range(self._layout.workers + self._layout.servers):
                threading.Thread(target=barrier, args=(get(), 0, _EVERYBODY), daemon=True).start()
        time.sleep(0.2)  # ps-lite sends in the background
        self._answer(number, array)

    def _will(self, number: int, key: int, array: np.ndarray) -> None:
        """Keeps what our register is to hold if the parent ends without a word."""
        self._last = key, array
        self._answer(number, array[:0])

    def die(self) -> None:
        """Writes the will, from any thread; the first call ends the process."""
        try:
            if self._last and self._dying.acquire(blocking=False):
                self._write(0, *self._last)
                time.sleep(_WORDS)
        finally:  # without a store, too
            os._exit(1)

    def _end(self, number: int, key: int, array: np.ndarray) -> None:
        del self._store  # ends the servers and the scheduler, once all workers have come here
        os._exit(0)

    def _later(self, number: int, values: mx.nd.NDArray) -> None:
        self._waiters.submit(lambda: self._answer(number, values.asnumpy()))

    def _answer(self, number: int, array: np.ndarray) -> None:
        with self._sending:
            self._connection.send_bytes(_HEADER.pack(number, 0, array.size, b"", array.dtype.str.encode()))
            if array.size:
                self._connection.send_bytes(array.data.cast("B"))


def serve() -> None:
    """The child's program. It ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    threading.Thread(target=_wait_for_the_end_of, args=(int(sys.argv[2]),), daemon=True).start()
    _children.append(_Child(Connection(int(sys.argv[1]))))
    with contextlib.suppress(EOFError, OSError):
        _children[0].serve()
    _children[0].die()


def _wait_for_the_end_of(parent: int) -> None:
    # The connection does not show it where a fork of the parent is left.
    while os.getppid() == parent:
        time.sleep(_LOOK)
    for child in _children:
        child.die()
    os._exit(1)


_children: List[_Child] = []
