"""Adds large arrays over Horovod, beside a job's other uses of Horovod. All else goes by the relay in rank 0.

Horovod lacks a time limit, and does not say which rank is missing: the bridge does.

caller                  worker thread           1. the caller waits for the worker, no longer than its limit
  array ──────────────► hvd.alltoall(name)      2. an operation that waits inside MXNet cannot be taken back: after
  wait  ◄────────────── result                     its limit the caller leaves the worker behind
  limit: hvd.shutdown()                         3. which releases whoever else waits
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import os
import queue
import socket
import sys
import threading
from concurrent import futures
from typing import Any, Callable, NoReturn, Sequence

import mxnet as mx
import numpy as np

from .. import _native
from ..system.environment import read
from .bridge import BYTES, BridgedTransport, introduce
from .transport import Label

_SMALL = 1 << 14  # bytes; Horovod adds larger arrays, in parts, one by each rank
_ANSWER = 1.0  # seconds in which it is known which rank has ended
_LEAVE = 1.0  # seconds that a process has to end if it fails at the end


class HorovodTransport(BridgedTransport):
    """Adds arrays over Horovod's global process set, under names that begin with ``gluon_syncbn:``.

    Initialises Horovod if the script has not. A process that ends after a failure has exit code 1.
    """

    adds_some = False  # it would need a process set for them

    def __init__(self) -> None:
        try:
            import horovod.mxnet as hvd
        except ImportError as error:
            raise ImportError(
                f"kvstore 'horovod' needs Horovod 0.28.1, built with MXNet and gloo ({error}): docs/distributed.md "
                "has the command"
            ) from None
        if not hvd.is_initialized():
            if threading.current_thread() is not threading.main_thread():
                raise mx.MXNetError(
                    "Horovod has to be initialised on the main thread: create kvstore 'horovod' there first"
                )
            hvd.init()
        super().__init__(hvd.rank(), hvd.size())
        self._hvd = hvd
        self._ending = False
        self._workers = _Workers()
        self._introduce()
        self._pid = os.getpid()
        # Horovod's own handler would shut it down during a step; `close` runs after the step.
        atexit.unregister(hvd.shutdown)
        atexit.register(self._at_exit)

    def _introduce(self) -> None:
        def spread(told: np.ndarray) -> np.ndarray:
            everyone = self._hvd.allgather(mx.nd.array(told, dtype="uint8"), name="gluon_syncbn:introduction")
            return everyone.asnumpy()[:BYTES]

        towards = read("HOROVOD_GLOO_RENDEZVOUS_ADDR") or socket.gethostname()  # the launcher, where gloo meets
        atexit.register(_leave)  # in case that the worker still waits then
        introduced = self._workers.start(lambda: introduce(self.rank, self.size, towards, spread))
        limit = _native.timeout_of()
        if futures.wait([introduced], limit).done:
            connection, relay = introduced.result()
            if self.bridge(connection, relay, limit):
                atexit.unregister(_leave)
                return
        raise mx.MXNetError("kvstore 'horovod': not every process has created one. Create it in all, at the start.")

    # ---- Transport -----------------------------------------------------------------------------------------

    def sum(self, label: Label, array: np.ndarray, ranks: Sequence[int]) -> np.ndarray:
        if self.size == 1 or array.nbytes <= _SMALL:
            return super().sum(label, array, ranks)
        # Each rank adds up its own part of the array and sends the sum to all. Horovod's allreduce is up to 1.5 times
        # as fast, but its order of additions depends on the other operations under way.
        parts = np.array_split(array, self.size)
        splits = [part.size for part in parts]
        everyone = self._run(label, array, lambda x: self._hvd.alltoall(x, splits, name=_name(label, "parts"))[0])
        if everyone.size != self.size * parts[self.rank].size:
            all_alike = "All processes must build the same net and cast it alike."
            self.give_up(f"in {label}, the ranks have arrays of other sizes. {all_alike}")
        total = functools.reduce(np.add, everyone.reshape(self.size, -1))
        return self._run(label, total, functools.partial(self._hvd.allgather, name=_name(label, "sums")))

    def leave(self, failure: str) -> None:
        super().leave(failure)
        if failure:
            self._end_horovod()

    def all_end(self) -> bool:
        if not self._broken:
            self._hvd.shutdown()  # ends operations of the others, who have been told that this rank ends
        together = super().all_end()
        if self._broken:
            _leave()
        return together

    def _run(self, label: Label, array: np.ndarray, operation: Callable) -> np.ndarray:
        """Returns the result of ``operation``, or raises an error in time."""
        if not self._hvd.is_initialized():
            self.give_up(f"Horovod was shut down in this process before {label}.")
        result = self._workers.start(lambda: operation(mx.nd.array(array, ctx=mx.cpu(), dtype=array.dtype)).asnumpy())
        self.wait_for(label, result, range(self.size))
        try:
            return result.result()
        except mx.MXNetError as error:
            self.give_up(self._cause(label, str(error)))

    # ---- errors --------------------------------------------------------------------------------------------

    def _cause(self, label: Label, words: str) -> str:
        """Returns the reason why Horovod has ended an operation."""
        line = next((line.strip() for line in reversed(words.splitlines()) if line.strip()), "")
        if "Mismatched" in words:
            return f"in {label}, Horovod says: {line} All processes must build the same net and cast it alike."
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self.fates(range(self.size)), _ANSWER)
            fates = self.fates(range(self.size)) or [f"{self._broken or 'another process has ended Horovod'}: {line}"]
        return f"{fates[0]} (rank {self.rank} was in {label})"

    def _end_horovod(self) -> None:
        # Horovod's shutdown waits for the other processes, which may be frozen.
        threading.Thread(target=self._hvd.shutdown, name="gluon_syncbn-shutdown", daemon=True).start()
        if self._ending:
            timer = threading.Timer(_LEAVE, _leave)
            timer.daemon = True
            timer.start()

    def _at_exit(self) -> None:
        # This runs before other handlers wait for operations in Horovod.
        if os.getpid() == self._pid:
            self._ending = True
            if self._broken:
                self.close()


def _leave() -> NoReturn:
    """Ends the process: after a failure, the normal exit would wait for operations that never complete."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or its reader has gone
            stream.flush()
    os._exit(1)


def _name(label: Label, purpose: str) -> str:
    return ":".join(map(str, ("gluon_syncbn", *label[:4], purpose)))


class _Workers:
    """Threads for calls that may never return. At exit, Python would wait for the threads of an executor."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue = queue.SimpleQueue()
        self._idle = threading.Semaphore(0)

    def start(self, call: Callable[[], Any]) -> futures.Future[Any]:
        result: futures.Future[Any] = futures.Future()
        if not self._idle.acquire(blocking=False):
            threading.Thread(target=self._serve, name="gluon_syncbn-horovod", daemon=True).start()
        self._calls.put((result, call))
        return result

    def _serve(self) -> None:
        while True:
            result, call = self._calls.get()
            try:
                result.set_result(call())
            except BaseException as error:  # the thread that waits raises it
                result.set_exception(error)
            self._idle.release()
