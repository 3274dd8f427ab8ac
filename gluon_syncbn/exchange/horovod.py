"""Carries messages over Horovod, beside a job's other uses of Horovod.

Horovod matches messages by name, in any order and from any thread: the label makes the name. Horovod lacks a time
limit, and does not say which rank is missing:

caller                  worker thread           1. the caller waits for the worker, no longer than its limit
  message ────────────► hvd.allgather(name)     2. an operation that waits inside MXNet cannot be taken back: after
  wait    ◄──────────── result                     its limit the caller leaves the worker behind
  limit: note, hvd.shutdown()                   3. which releases whoever else waits; they look for notes
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import http.client
import json
import os
import queue
import sys
import threading
import time
from concurrent import futures
from typing import Any, Callable, Dict, List, NamedTuple, NoReturn, Optional, Sequence

import mxnet as mx
import numpy as np

from ..system.environment import read
from .transport import Label
from .waiting import Wait, WaitingTransport

_HEADER = np.dtype([(name, np.int64) for name in ("key", "node", "call", "phase", "bytes")])  # of a message
_SMALL = 1 << 18  # bytes; larger sums are made in parts, one by each rank
_POLL = 0.05  # seconds between checks of other reasons to end
_ANSWER = 0.7  # seconds within which the others say where they were
_LEAVE = 1.0  # seconds that a process has to end if it fails at the end


class HorovodTransport(WaitingTransport):
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
        self._inquiry = threading.Lock()  # one thread looks for the cause
        self._workers = _Workers()
        self._turns: Dict[str, threading.Lock] = {}  # of names that calls share
        self._notes = _Notes(self.rank, self.size)
        self._pid = os.getpid()
        # Horovod's own handler would shut it down during a step; `close` runs after the step.
        atexit.unregister(hvd.shutdown)
        atexit.register(self._at_exit)

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
        total = functools.reduce(np.add, everyone.reshape(self.size, -1))
        return self._run(label, total, functools.partial(self._hvd.allgather, name=_name(label, label.call, "sums")))

    def poll(self, label: Label) -> None:
        self.check_unbroken(label)
        for rank, note in sorted(self._notes.read(lambda notes: True).items()):
            if note.failure:
                self.give_up(label, f"rank {rank} of {self.size} {note} (rank {self.rank} was in {label})")

    def tell(self, label: Optional[Label], reason: str) -> None:
        self._notes.write(_Note(where=str(label or ""), failure=reason))
        self._end_horovod()

    def close(self) -> None:
        if self._closed:
            return
        if self._broken:
            _leave()
        self._closed = True
        self._notes.write(_Note(ended=True))
        self._hvd.shutdown()

    def _run(self, label: Label, array: np.ndarray, operation: Callable) -> np.ndarray:
        """Returns the result of ``operation``, or raises an error in time."""
        if not self._hvd.is_initialized():
            self.give_up(label, f"Horovod was shut down in this process before {label}.")
        wait = Wait(self, label)
        others = [rank for rank in range(self.size) if rank != self.rank]
        result = self._workers.start(lambda: operation(mx.nd.array(array, ctx=mx.cpu(), dtype=array.dtype)).asnumpy())
        with self.told_if_left(label):
            while True:
                try:
                    return result.result(_POLL)
                except futures.TimeoutError:
                    wait.poll(others)
                except mx.MXNetError as error:
                    self.give_up(label, "", functools.partial(self._cause, label, str(error)))

    # ---- errors --------------------------------------------------------------------------------------------

    def give_up(self, label: Label, reason: str, find_out: Optional[Callable[[], str]] = None) -> NoReturn:
        with self._inquiry:
            if not self._broken:
                # First release the others: the notes that they then leave say which exchange they were in. If the
                # reason is empty, another process has failed, and the notes show which.
                self.tell(label, reason)
                found = find_out() if find_out else reason
                with self._state:
                    self._broken = self._broken or found
                if not reason:
                    self._notes.write(_Note(where=str(label), failure=found))  # for later readers
        raise mx.MXNetError(self._broken)

    def late(self, label: Label, missing: Sequence[int], wait: Wait) -> str:
        notes = self._notes.read(lambda notes: len(notes) == self.size - 1)
        absent = [rank for rank in missing if rank not in notes or notes[rank].where != str(label)]
        if not absent:
            return wait.text(missing) + " All are in it: their arrays differ in size, or they cannot reach each other."
        meanwhile = [f"rank {rank} {notes[rank]}" for rank in absent if rank in notes]
        return wait.text(absent) + (f" Meanwhile {'; '.join(meanwhile)}." if meanwhile else "")

    def _cause(self, label: Label, words: str) -> str:
        """Returns the reason why Horovod has ended an operation."""
        line = next((line.strip() for line in reversed(words.splitlines()) if line.strip()), "")
        if "Mismatched" in words:
            return f"in {label}, Horovod says: {line} All processes must build the same net and cast it alike."
        notes = self._notes.read(lambda notes: any(note.failure or note.ended for note in notes.values()))
        where = f"(rank {self.rank} was in {label})"
        for rank, note in sorted(notes.items(), key=lambda item: item[1].ended):  # a failure says more
            if note.failure or note.ended:
                return f"rank {rank} of {self.size} {note} {where}"
        silent = [str(rank) for rank in range(self.size) if rank != self.rank and rank not in notes]
        who = f"rank {' or '.join(silent)} of {self.size}" if silent else "another process"
        return f"{who} has ended without a word: it was killed, or cannot be reached {where}. Horovod says: {line}"

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
                _leave()


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

    def start(self, call: Callable[[], np.ndarray]) -> futures.Future[np.ndarray]:
        result: futures.Future[np.ndarray] = futures.Future()
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


class _Note(NamedTuple):
    """The last state of a rank."""

    where: str = ""  # the exchange that it was in when Horovod ended
    failure: str = ""
    ended: bool = False

    def __str__(self) -> str:
        if self.ended:
            return "has ended"
        where = f"was in {self.where}"
        return where if not self.failure else f"has failed: {self.failure}" + f" ({where})" * bool(self.where)


class _Notes:
    """Notes that the ranks leave for each other, in the store of the launcher where gloo's processes have met.

    The launcher outlives the processes. Horovod over MPI has no such store, and ranks know nothing of each other.
    """

    def __init__(self, rank: int, size: int) -> None:
        self._rank = rank
        self._others = [other for other in range(size) if other != rank]
        self._host = read("HOROVOD_GLOO_RENDEZVOUS_ADDR")
        self._port = read("HOROVOD_GLOO_RENDEZVOUS_PORT")

    def write(self, note: _Note) -> None:
        self._ask("PUT", self._rank, json.dumps(note))

    def read(self, enough: Callable[[Dict[int, _Note]], bool]) -> Dict[int, _Note]:
        """Reads the notes of the others, within `_ANSWER` seconds."""
        deadline = time.monotonic() + _ANSWER
        notes: Dict[int, _Note] = {}
        while True:
            for rank in self._others:
                answer = self._ask("GET", rank)
                if answer is not None:
                    notes[rank] = _Note(*json.loads(answer))
            if enough(notes) or not self._host or time.monotonic() > deadline:
                return notes
            time.sleep(0.02)

    def _ask(self, method: str, rank: int, body: Optional[str] = None) -> Optional[bytes]:
        if not self._host or not self._others:
            return None
        connection = http.client.HTTPConnection(self._host, int(self._port), timeout=0.5)
        try:
            connection.request(method, f"/gluon_syncbn/{rank}", body)
            answer = connection.getresponse()
            content = answer.read()
            return content if answer.status == 200 else None
        except (OSError, http.client.HTTPException):  # the launcher has ended
            return None
        finally:
            connection.close()
