"""Connects the processes of a job, where their launcher does not. A relay in rank 0 passes messages on.

rank 1 ─ Link ── frames ──┐                        ┌─ Link ─ rank 0
                          ├─ Relay, in rank 0 ─────┤                  a frame: a line of JSON, then bytes
rank 2 ─ Link ── frames ──┘                        └─ ...

The relay passes frames on in their order, adds arrays, and sees which connection has ended. Nothing is unpickled. Each
connection begins with a proof that both ends have the job's random key.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import queue
import socket
import threading
import time
import weakref
from concurrent import futures
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Callable, Dict, Iterable, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np

from .. import _native
from ..system.logs import log
from .transport import Label, Transport

BYTES = 256  # of an introduction
_POLL = 0.05  # seconds between checks of other reasons to end
_ANSWER = 1.0  # seconds in which a rank answers that can be reached
_GRACE = 5.0  # seconds that a rank stays after a failure, until the others have come to their end
_PRESENT, _FAILED, _ENDED = 1, 2, 3  # of Mailbox::State in csrc/exchange/mailbox.h
# What a connection to a stranger raises.
_STRANGE = OSError, EOFError, ValueError, AssertionError, AuthenticationError


class Row(NamedTuple):
    """What the relay knows of a rank."""

    process: int = 0
    answers: int = 0  # how often it has spoken of itself
    failure: str = ""
    ended: bool = False  # it has come to its end
    lost: bool = False  # its connection has ended before all came to their end

    def fate(self) -> str:
        """Returns why nothing more comes from this rank; empty if something may."""
        if self.failure or self.ended:
            return f"has failed: {self.failure.rstrip('.')}" if self.failure else "has ended"
        return f"has ended without a word (process {self.process}; was it killed?)" if self.lost else ""


def frame(*head: Any, body: bytes = b"") -> bytes:
    line = json.dumps(head).encode()
    return line + b" " * (-(len(line) + 1) % 16) + b"\n" + body  # numbers are aligned, for their sum


class Link:
    """One end of a connection. Threads of its own send and receive, so that nobody else waits for the other end."""

    def __init__(self, connection: Connection, take: Callable[..., None], lost: Callable[[], None]) -> None:
        with socket.socket(fileno=os.dup(connection.fileno())) as connected:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small messages leave at once
        self._connection, self._take, self._lost = connection, take, lost
        self._outbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.send, self.close = self._outbox.put, connection.close
        for work in (self._send, self._receive):
            threading.Thread(target=work, name="gluon_syncbn-link", daemon=True).start()

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # the other thread hears of it, too
            while True:
                content = self._outbox.get()
                if isinstance(content, threading.Event):
                    content.set()
                else:
                    self._connection.send_bytes(content)

    def flush(self) -> None:
        """Waits until all has been sent, or for a moment."""
        sent = threading.Event()
        self._outbox.put(sent)
        sent.wait(_ANSWER)

    def _receive(self) -> None:
        with contextlib.suppress(OSError, EOFError):
            while True:
                content = self._connection.recv_bytes()
                end = content.index(b"\n") + 1
                self._take(content, end, *json.loads(content[:end]))
        self._lost()


class Relay:
    """Passes messages on between ranks, adds their arrays, and tells all ranks of each other."""

    def __init__(self, towards: str, size: int) -> None:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((towards, 9))  # sends nothing, and finds the interface that leads there
            host = probe.getsockname()[0]
        key = os.urandom(16)
        self._listener = Listener((host, 0), backlog=size, authkey=key)
        self.introduction = [*self._listener.address, key.hex()]
        self._lock = threading.Lock()  # guards all that follows
        self._rows = [Row()] * size
        self.links: Dict[int, Link] = {}
        self._parts: Dict[Tuple, Dict[int, np.ndarray]] = {}
        threading.Thread(target=self._accept, name="gluon_syncbn-relay", daemon=True).start()

    def close(self) -> None:
        for link in self.links.values():
            link.close()

    def _accept(self) -> None:
        while len(self.links) < len(self._rows):
            with contextlib.suppress(*_STRANGE):
                connection = self._listener.accept()
                rank, process = json.loads(connection.recv_bytes(64))
                with self._lock:
                    self._rows[rank] = Row(process)
                    self.links[rank] = Link(connection, self._take, functools.partial(self._lose, rank))
        self._listener.close()
        with self._lock:
            self._tell()

    def _take(self, content: bytes, start: int, kind: str, sender: int, *rest: Any) -> None:
        with self._lock:
            if kind == "message":
                self._send(content, rest[2])
            elif kind == "part":
                self._add(tuple(rest[0]), rest[1], sender, np.frombuffer(content, rest[2], offset=start))
            elif kind == "who":
                self._send(content, self.links)
            else:
                self._rows[sender] = Row(self._rows[sender].process, self._rows[sender].answers + 1, *rest)
                self._tell()

    def _add(self, identity: Tuple, ranks: Sequence[int], sender: int, part: np.ndarray) -> None:
        parts = self._parts.setdefault(identity, {})
        parts[sender] = part
        if len(parts) == len(ranks):
            total = functools.reduce(np.add, [parts[rank] for rank in ranks])
            del self._parts[identity]
            self._send(frame("sum", 0, identity, body=total.tobytes()), ranks)

    def _lose(self, rank: int) -> None:
        with self._lock:
            if not all(row.ended for row in self._rows):
                self._rows[rank] = self._rows[rank]._replace(lost=True)
                self._tell()

    def _tell(self) -> None:
        if len(self.links) == len(self._rows):
            self._send(frame("rows", 0, self._rows), self.links)

    def _send(self, content: bytes, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self.links[rank].send(content)


def introduce(
    rank: int, size: int, towards: str, spread: Callable[[np.ndarray], np.ndarray]
) -> Tuple[Connection, Optional[Relay]]:
    """Makes the relay in rank 0, and connects this rank to it. Has no time limit.

    ``spread`` gets bytes in every rank, and returns those of rank 0. ``towards`` names a host that all ranks reach.
    """
    relay = Relay(towards, size) if rank == 0 else None
    told = json.dumps(relay.introduction if relay else None).encode().ljust(BYTES)
    return connect(json.loads(spread(np.frombuffer(told, np.uint8)).astype(np.uint8).tobytes()), rank), relay


def connect(introduction: Sequence[Any], rank: int) -> Connection:
    host, port, key = introduction
    try:
        connection = Client((host, port), authkey=bytes.fromhex(key))
        connection.send_bytes(json.dumps([rank, os.getpid()]).encode())
        return connection
    except _STRANGE as error:
        raise mx.MXNetError(f"no connection to the relay in rank 0, at {host}:{port}: {error}") from error


class BridgedTransport(Transport):
    """Sends by the relay, which knows what has become of the other ranks. A transport calls `bridge` first."""

    def bridge(self, connection: Connection, relay: Optional[Relay], limit: float) -> bool:
        """Waits until all ranks are connected, and returns whether they are. The relay is in rank 0."""
        self._changed = threading.Condition()  # guards all that follows
        self._sums: Dict[Tuple, futures.Future[np.ndarray]] = {}  # that the relay makes, by label
        self._rows: List[Row] = []
        self._failure, self._ended = "", False  # of this rank, behind all that it has sent
        self._opened = threading.Event()
        self._relay, self._link = relay, Link(connection, self._take, self._lose)
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._rows), limit)

    def open(self, handle: _native.Handle) -> None:
        super().open(handle)
        self._opened.set()

    def forked(self) -> None:
        # While a child has the connections of its parent, nobody hears that the parent was killed.
        self._link.close()
        if self._relay:
            self._relay.close()

    def send(self, message: bytes) -> None:
        self._link.send(message)

    def leave(self, failure: str) -> None:
        self._failure, self._ended = failure, not failure
        self.say()

    def say(self) -> None:
        """Tells the others what has become of this rank."""
        self._link.send(frame("row", self.rank, self._failure or self._broken, self._ended))

    def _take(self, content: bytes, start: int, kind: str, sender: int, *rest: Any) -> None:
        if kind == "message":
            self._opened.wait()
            label, length, _ = rest
            _native.deliver(self.handle, sender, label, length, content[start:], (len(content) - start) // 8)
        elif kind == "sum":
            self._sums.pop(tuple(rest[0])).set_result(np.frombuffer(content, np.uint8, offset=start))
        elif kind == "who":
            self.say()
        else:
            self._hear([Row(*row) for row in rest[0]])

    def _lose(self) -> None:
        if self._rows and not all(row.ended for row in self._rows):
            self._hear([self._rows[0]._replace(lost=True), *self._rows[1:]])

    def _hear(self, rows: List[Row]) -> None:
        with self._changed:
            self._rows = rows
            self._changed.notify_all()
        self._opened.wait()
        for rank, row in enumerate(rows):
            if rank != self.rank and row.fate():
                state = _FAILED if row.failure else _ENDED if row.ended else _PRESENT
                _native.report(self.handle, rank, state, row.failure, row.process if row.lost and not row.ended else 0)

    def added(self, label: Label, part: np.ndarray, ranks: Sequence[int]) -> futures.Future[np.ndarray]:
        """Has the relay add the parts of these ranks, in their order. The result comes as bytes."""
        identity = tuple(label[:4])
        self._sums[identity] = futures.Future()
        self._link.send(frame("part", self.rank, identity, list(map(int, ranks)), part.dtype.str, body=part.tobytes()))
        return self._sums[identity]

    def wait_for(self, label: Label, result: futures.Future[Any], ranks: Sequence[int]) -> None:
        """Waits for what a thread brings that may never end, or raises an error in time. ``ranks`` take part in it."""
        missing = [rank for rank in ranks if rank != self.rank]
        rank, others = f"rank {self.rank} of {self.size}", ", ".join(map(str, missing))
        wait = _native.wait_begin(str(label), rank, others, _native.timeout_of())
        end = weakref.finalize(self, _native.wait_end, wait)
        try:
            while not futures.wait([result], _POLL).done:
                own = self._broken or self._failure
                for fate in [own] if own else self.fates(missing)[:1]:
                    raise mx.MXNetError(f"{fate} (rank {self.rank} was in {label})")
                _native.wait_look(wait)
        except BaseException as error:
            self.fail(str(error) if isinstance(error, mx.MXNetError) else f"{type(error).__name__} left {label}.")
            raise
        finally:
            end()

    def fates(self, missing: Sequence[int] = ()) -> List[str]:
        found = [
            (bool(row.failure or row.ended), f"rank {rank} of {self.size} {row.fate()}")  # the cause comes first
            for rank, row in enumerate(self._rows)
            if rank != self.rank and (row.failure or row.lost or (row.ended and rank in missing))
        ]
        return [fate for _, fate in sorted(found)]

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            _native.processes_ended(self.handle)
            self.all_end()

    def _is_over(self) -> bool:
        return self._rows[0].lost or all(row.ended or row.lost for row in self._rows)

    def all_end(self) -> bool:
        """Waits until all ranks have come to their end, and returns whether they have. Some may run much longer."""
        since, before, limit = time.monotonic(), -1, _native.timeout_of()
        if self._failure or self._broken:  # else the core says it
            self._ended = True
            self.say()
        with self._changed:
            while not self._changed.wait_for(self._is_over, _ANSWER):
                failed = bool(self._broken or self.fates())
                heard = sum(row.answers for row in self._rows if not row.ended)
                if heard != before and not failed:
                    since, before = time.monotonic(), heard
                if time.monotonic() - since > (_GRACE if failed else limit):
                    break
                self._link.send(frame("who", self.rank))
            together = all(row.ended and not row.lost for row in self._rows)
        if self._relay:  # the others hear by it that all have come to their end
            for link in list(self._relay.links.values()):
                link.flush()
        if not together and not self._broken:
            why = next(iter(self.fates()), f"nothing was heard of them for {limit:.0f} s")
            log.error("rank %d of %d ends without the others: %s.", self.rank, self.size, why)
        return together
