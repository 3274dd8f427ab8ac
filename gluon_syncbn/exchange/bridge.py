"""Tells the processes of a job what their launcher does not: who is missing, and why. A relay in rank 0 knows it.

rank 1 ─ Link ── frames ──┐                        ┌─ Link ─ rank 0
                          ├─ Relay, in rank 0 ─────┤                  a frame: a line of JSON, then bytes
rank 2 ─ Link ── frames ──┘                        └─ ...

The relay passes frames on in their order, and sees which connection has ended. Nothing is unpickled. Each connection
begins with a proof that both ends have the job's random key.
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
from collections import Counter
from contextlib import contextmanager
from multiprocessing import AuthenticationError
from multiprocessing.connection import Client, Connection, Listener
from typing import Any, Callable, Dict, Iterable, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np

from .. import _native
from ..system.logs import log
from .transport import Label
from .waiting import Wait, WaitingTransport

BYTES = 256  # of an introduction
ADDED = -1  # in the place of a sender: the relay, which has added
_ANSWER = 1.0  # seconds in which a rank answers that can be reached
_GRACE = 5.0  # seconds that a rank stays after a failure, until the others have come to their end
# What a connection to a stranger raises.
_STRANGE = OSError, EOFError, ValueError, AssertionError, AuthenticationError


class Row(NamedTuple):
    """What the relay knows of a rank."""

    process: int = 0
    answers: int = 0  # how often it has spoken of itself
    where: Sequence[str] = ()  # it waits
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
        self._outbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.send, self.close = self._outbox.put, connection.close
        for work in (self._send, self._receive):
            threading.Thread(target=work, name="gluon_syncbn-link", daemon=True).start()

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # the other thread hears of it, too
            while True:
                self._connection.send_bytes(self._outbox.get())

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
        self._links: Dict[int, Link] = {}
        self._parts: Dict[Tuple, Dict[int, np.ndarray]] = {}
        threading.Thread(target=self._accept, name="gluon_syncbn-relay", daemon=True).start()

    def close(self) -> None:
        for link in self._links.values():
            link.close()

    def _accept(self) -> None:
        while len(self._links) < len(self._rows):
            with contextlib.suppress(*_STRANGE):
                connection = self._listener.accept()
                rank, process = json.loads(connection.recv_bytes(64))
                with self._lock:
                    self._rows[rank] = Row(process)
                    self._links[rank] = Link(connection, self._take, functools.partial(self._lose, rank))
        self._listener.close()
        with self._lock:
            self._tell()

    def _take(self, content: bytes, start: int, kind: str, sender: int, *rest: Any) -> None:
        with self._lock:
            if kind == "message":
                self._send(content, set(rest[1]) - {sender})
            elif kind == "part":
                self._add(tuple(rest[0]), rest[1], sender, np.frombuffer(content, rest[2], offset=start))
            elif kind == "who":
                self._send(content, self._links)
            else:
                self._rows[sender] = Row(self._rows[sender].process, self._rows[sender].answers + 1, *rest)
                self._tell()

    def _add(self, identity: Tuple, ranks: Sequence[int], sender: int, part: np.ndarray) -> None:
        parts = self._parts.setdefault(identity, {})
        parts[sender] = part
        if len(parts) == len(ranks):
            total = functools.reduce(np.add, [parts[rank] for rank in ranks])
            del self._parts[identity]
            self._send(frame("message", ADDED, identity, body=total.tobytes()), ranks)

    def _lose(self, rank: int) -> None:
        with self._lock:
            if not all(row.ended for row in self._rows):
                self._rows[rank] = self._rows[rank]._replace(lost=True)
                self._tell()

    def _tell(self) -> None:
        if len(self._links) == len(self._rows):
            self._send(frame("rows", 0, self._rows), self._links)

    def _send(self, content: bytes, ranks: Iterable[int]) -> None:
        for rank in ranks:
            self._links[rank].send(content)


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


class BridgedTransport(WaitingTransport):
    """Learns from the relay what has become of the other ranks. A transport calls `bridge` at its beginning."""

    def bridge(self, connection: Connection, relay: Optional[Relay], limit: float) -> bool:
        """Waits until all ranks are connected, and returns whether they are. The relay is in rank 0."""
        self._changed = threading.Condition()  # guards all that follows
        self._inbox: Dict[Tuple, Dict[int, np.ndarray]] = {}  # messages, by label and sender
        self._places: Counter = Counter()  # the labels of waits
        self._rows: List[Row] = []
        self._relay, self._link = relay, Link(connection, self._take, self._lose)
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._rows), limit)

    def forked(self) -> None:
        # While a child has the connections of its parent, nobody hears that the parent was killed.
        self._link.close()
        if self._relay:
            self._relay.close()

    def _take(self, content: bytes, start: int, kind: str, sender: int, *rest: Any) -> None:
        with self._changed:
            if kind == "message":
                self._inbox.setdefault(tuple(rest[0]), {})[sender] = np.frombuffer(content, np.uint8, offset=start)
            elif kind == "who":
                self.say()
            else:
                self._rows = [Row(*row) for row in rest[0]]
            self._changed.notify_all()

    def _lose(self) -> None:
        with self._changed:
            if self._rows and not all(row.ended for row in self._rows):
                self._rows[0] = self._rows[0]._replace(lost=True)
                self._changed.notify_all()

    def tell(self, reason: str) -> None:
        self.say()

    def say(self) -> None:
        """Tells the others what has become of this rank."""
        self._link.send(frame("row", self.rank, list(self._places), self._broken, self._closed))

    @contextmanager
    def waits(self, label: Label) -> Iterator[None]:
        """Lets the others know where this rank waits, while it does."""
        self._places[str(label)] += 1
        try:
            with self.told_if_left(label):
                yield
        finally:
            self._places -= Counter([str(label)])

    def poll(self, label: Label) -> None:
        """Raises an error if another rank has failed."""
        self.check_unbroken(label)
        self.check_fates(label)

    def check_fates(self, label: Label, missing: Sequence[int] = ()) -> None:
        """Raises an error if another rank has failed, or if one of the missing ones has ended."""
        for fate in self.fates(missing)[:1]:
            self.give_up(label, f"{fate} (rank {self.rank} was in {label})")

    def fates(self, missing: Sequence[int] = ()) -> List[str]:
        found = [
            (bool(row.failure or row.ended), f"rank {rank} of {self.size} {row.fate()}")  # the cause comes first
            for rank, row in enumerate(self._rows)
            if rank != self.rank and (row.failure or row.lost or (row.ended and rank in missing))
        ]
        return [fate for _, fate in sorted(found)]

    def late(self, label: Label, missing: Sequence[int], wait: Wait) -> str:
        found = {}
        with self._changed:
            before = self._rows
            self._link.send(frame("who", self.rank))
            self._changed.wait_for(lambda: not self._silent(before), _ANSWER)
            silent = self._silent(before)
            for rank in [0] if self.rank in silent else missing:  # without the relay, nobody is heard
                row = self._rows[rank]
                if row.fate() or rank in silent:
                    found[rank] = row.fate() or "does not answer: it hangs, or cannot be reached"
                elif str(label) not in row.where:
                    found[rank] = f"is in {'; '.join(row.where)}" if row.where else "waits for nobody"
        facts = [f"rank {rank} {fact}" for rank, fact in found.items()]
        facts = facts or ["all of them are in it: their arrays differ, or do not arrive"]
        return f"{wait.text(list(found) or missing)} Meanwhile {'; '.join(facts)}."

    def _silent(self, before: Sequence[Row]) -> List[int]:
        rows = enumerate(zip(before, self._rows))
        return [rank for rank, (old, new) in rows if old.answers == new.answers and not new.fate()]

    def _is_over(self) -> bool:
        return self._rows[0].lost or all(row.ended or row.lost for row in self._rows)

    def all_end(self) -> bool:
        """Waits until all ranks have come to their end, and returns whether they have. Some may run much longer."""
        since, before, limit = time.monotonic(), -1, _native.timeout_of()
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
        if not together and not self._broken:
            why = next(iter(self.fates()), f"nothing was heard of them for {limit:.0f} s")
            log.error("rank %d of %d ends without the others: %s.", self.rank, self.size, why)
        return together
