"""Carries messages over Horovod, beside a job's other uses of Horovod.

Horovod matches messages by name, in any order and from any thread: the label makes the name. Horovod lacks a time
limit, and does not say which rank is missing: the bridge does.

caller                  worker thread           1. the caller waits for the worker, no longer than its limit
  message ────────────► hvd.allgather(name)     2. an operation that waits inside MXNet cannot be taken back: after
  wait    ◄──────────── result                     its limit the caller leaves the worker behind
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
from typing import Any, Callable, Dict, List, NoReturn, Sequence

import mxnet as mx
import numpy as np

from .. import _native
from ..system.environment import read
from .bridge import BYTES, BridgedTransport, introduce
from .transport import Label
from .waiting import Wait

_HEADER = np.dtype([(name, np.int64) for name in ("key", "node", "call", "phase", "bytes")])  # of a message
_SMALL = 1 << 18  # bytes; larger sums are made in parts, one by each rank
_POLL = 0.05  # seconds between checks of other reasons to end
_ANSWER = 1.0  # seconds in which it is known which rank has ended
_LEAVE = 1.0  # seconds that a process has to end if it fails at the end


class HorovodTransport(BridgedTransport):
    """Carries arrays over Horovod's global process set, under names that begin with ``gluon_syncbn:``.

    Initialises Horovod if the script has not. A process that ends after a failure has exit code 1.
    """

    partial = False  # it would need a process set for each group

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
        self._turns: Dict[str, threading.Lock] = {}  # of names that calls share
        self._others = [rank for rank in range(self.size) if rank != self.rank]
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

    def carry(self, label: Label, message: np.ndarray, ranks: Sequence[int]) -> List[np.ndarray]:
        # Horovod agrees on a known name in one turn instead of three, and knows 1024. So successive calls alternate
        # between two names, each used by one call at a time. If another process has another order, the headers show it
        # to all processes. Then each of these calls is repeated under a name of its own.
        name, own = _name(label, label.call % 2, "shared"), tuple(label[1:5])
        turn = self._turns.setdefault(name, threading.Lock())

        def gather(x: mx.nd.NDArray) -> mx.nd.NDArray:
            with turn:
                return self._hvd.allgather(x, name=name)

        packed = np.concatenate([np.array((*own, message.size), _HEADER).reshape(1).view(np.uint8), message])
        got = _unpack(self._run(label, packed, gather))
        if any(header["call"] != label.call for header, _ in got):
            gather = functools.partial(self._hvd.allgather, name=_name(label, label.call))
            got = _unpack(self._run(label, packed, gather))
        for rank, (header, _) in enumerate(got):
            if header.item()[:4] != own:
                self.give_up(label, f"in {label}, rank {rank} sent {header.item()[:4]} where {own} was expected.")
        return [got[rank][1] for rank in ranks]

    def sum(self, label: Label, array: np.ndarray, ranks: Sequence[int]) -> np.ndarray:
        if self.size == 1 or array.nbytes <= _SMALL:
            return super().sum(label, array, ranks)
        # Each rank adds up its own part of the array and sends the sum to all. Horovod's allreduce is up to 1.5 times
        # as fast, but its order of additions depends on the other operations under way.
        parts = np.array_split(array, self.size)
        everyone = self._run(
            label, array, lambda x: self._hvd.alltoall(x, [p.size for p in parts], name=_name(label, label.call))[0]
        )
        if everyone.size != self.size * parts[self.rank].size:
            all_alike = "All processes must build the same net and cast it alike."
            self.give_up(label, f"in {label}, the ranks have arrays of other sizes. {all_alike}")
        total = functools.reduce(np.add, everyone.reshape(self.size, -1))
        return self._run(label, total, functools.partial(self._hvd.allgather, name=_name(label, label.call, "sums")))

    def tell(self, reason: str) -> None:
        self.say()
        self._end_horovod()

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if not self._broken:
            self.say()  # first, because the shutdown ends operations of the others
            self._hvd.shutdown()
        self.all_end()
        if self._broken:
            _leave()

    def _run(self, label: Label, array: np.ndarray, operation: Callable) -> np.ndarray:
        """Returns the result of ``operation``, or raises an error in time."""
        if not self._hvd.is_initialized():
            self.give_up(label, f"Horovod was shut down in this process before {label}.")
        wait = Wait(self, label)
        result = self._workers.start(lambda: operation(mx.nd.array(array, ctx=mx.cpu(), dtype=array.dtype)).asnumpy())
        with self.waits(label):
            while True:
                try:
                    return result.result(_POLL)
                except futures.TimeoutError:
                    self.check_fates(label)
                    wait.poll(self._others)
                except mx.MXNetError as error:
                    self.give_up(label, self._cause(label, str(error)))

    # ---- errors --------------------------------------------------------------------------------------------

    def _cause(self, label: Label, words: str) -> str:
        """Returns the reason why Horovod has ended an operation."""
        line = next((line.strip() for line in reversed(words.splitlines()) if line.strip()), "")
        if "Mismatched" in words:
            return f"in {label}, Horovod says: {line} All processes must build the same net and cast it alike."
        with self._changed:
            self._changed.wait_for(lambda: self._broken or self.fates(self._others), _ANSWER)
            fates = self.fates(self._others) or [f"{self._broken or 'another process has ended Horovod'}: {line}"]
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


def _name(label: Label, call: int, purpose: str = "") -> str:
    return ":".join(map(str, ("gluon_syncbn", label.kind, label.key, label.node, label.phase, call, purpose)))


def _unpack(messages: np.ndarray) -> List[Any]:
    """Returns the headers and contents of concatenated messages."""
    found, at = [], 0
    while at < messages.size:
        header = messages[at : at + _HEADER.itemsize].copy().view(_HEADER)[0]
        at += _HEADER.itemsize + header["bytes"]
        found.append((header, messages[at - header["bytes"] : at]))
    return found


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
