"""Connects the processes of a job, where their launcher does not. A relay in rank 0 passes messages on.

rank 1 ─ Link ── messages ──┐                        ┌─ Link ─ rank 0
                            ├─ Relay, in rank 0 ─────┤
rank 2 ─ Link ── messages ──┘                        └─ ...

The native core writes and reads the messages (csrc/exchange/python.h). The relay sees their readers, and which
connection has ended. Nothing is unpickled. Each connection begins with a proof that both ends have the job's key.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import queue
import socket
import struct
import threading
import time
from functools import partial
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge
from typing import Any, Callable, List, Optional, Sequence

import mxnet as mx
import numpy as np

from .. import _native
from ..system.logs import log
from .base import Transport

BYTES = 256  # of an introduction
_POLL = 0.05  # seconds between checks of other reasons to end
_PULSE = 1.0  # seconds without a message after which an end shows that it is alive
_SILENCE = 10.0  # seconds without a sign of life, after those that a wait may take
_GRACE = 5.0  # seconds that a rank stays after a failure, until the others have come to their end
_DIED, _FAILED = 1, 2  # of Head::Kind in csrc/exchange/inbox.h
# What a connection to a stranger raises.
_STRANGE = OSError, EOFError, ValueError, AssertionError, AuthenticationError


class Link:
    """One end of a connection to a process that has the job's key.

    ``proofs`` are given to the other end and taken from it, in waits that have the time limit.
    """

    def __init__(self, end: socket.socket, key: bytes, *proofs: Callable[[Connection, bytes], None]) -> None:
        end.setblocking(True)
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)  # small messages leave at once
        limit = struct.pack("ll", math.ceil(_native.timeout_of()), 0)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self.connection = Connection(end.detach())
        for proof in proofs:
            proof(self.connection, key)

    def start(
        self, following: Callable[[], Optional[bytes]], take: Callable[[bytes], None], loss: Callable[[bool], bytes]
    ) -> None:
        """Starts threads that send and receive, so that nobody else waits for the other end.

        ``following`` returns what is next: empty if nothing comes for a moment, None at the end. ``take`` gets what
        comes, and at last the ``loss`` of the other end, which is silent, or else has closed the connection.
        """
        self._following, self._take, self._loss = following, take, loss
        self._socket = socket.socket(fileno=os.dup(self.connection.fileno()))
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, 0))  # `poll` has a limit
        self.sender = threading.Thread(target=self._send, name="gluon_syncbn-link", daemon=True)
        self.receiver = threading.Thread(target=self._receive, name="gluon_syncbn-link", daemon=True)
        self.sender.start()
        self.receiver.start()

    def close(self) -> None:
        self.connection.close()
        self._socket.close()

    def _send(self) -> None:
        with contextlib.suppress(OSError):  # the other thread hears of it, too
            for message in iter(self._following, None):
                self.connection.send_bytes(message)
            self._socket.shutdown(socket.SHUT_WR)

    def _receive(self) -> None:
        silent = False
        with contextlib.suppress(OSError, EOFError):
            while self.connection.poll(_native.timeout_of() + _SILENCE):
                message = self.connection.recv_bytes()
                if message:
                    self._take(message)
            silent = True
        self._take(self._loss(silent))


def readers_of(message: bytes) -> List[int]:
    return np.frombuffer(message, np.int64, int.from_bytes(message[:8], "little"), 8).tolist()


def _loss(size: int, rank: int, process: int, silent: bool) -> bytes:
    """Returns the message to all ranks that one is lost, unless it has said that it ends."""
    text = f"nothing was heard of it for {_native.timeout_of() + _SILENCE:.0f} s".encode() * silent
    numbers = [size, *range(size), *[0] * 5, _FAILED if silent else _DIED, rank, len(text), process]
    return np.array(numbers, np.int64).tobytes() + text + bytes(-len(text) % 8)


def relay(towards: str, size: int, links: List[Link]) -> List[Any]:
    """Passes messages on between ranks, until all have come to their end. Puts their links into a list.

    Returns the introduction: host and port, the job's key, and this process.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((towards, 9))  # sends nothing, and finds the interface that leads there
        host = probe.getsockname()[0]
    key = os.urandom(16)
    server = socket.create_server((host, 0), backlog=size)
    address = server.getsockname()
    outboxes: List[queue.SimpleQueue[Optional[bytes]]] = [queue.SimpleQueue() for _ in range(size)]

    def following(rank: int) -> Optional[bytes]:
        try:
            return outboxes[rank].get(timeout=_PULSE)
        except queue.Empty:
            return b""

    def take(message: bytes) -> None:
        for rank in readers_of(message):
            outboxes[rank].put(message)

    def greet(end: socket.socket, caller: Any) -> None:
        try:
            link = Link(end, key, deliver_challenge, answer_challenge)
            rank, process = json.loads(link.connection.recv_bytes(64))
        except _STRANGE as error:
            log.info("%s:%d connected to the relay of gluon_syncbn and is none of its job: %r", *caller[:2], error)
            return
        link.start(partial(following, rank), take, partial(_loss, size, rank, process))
        links.append(link)

    def run() -> None:
        server.settimeout(_POLL)
        while len(links) < size:  # a caller that says nothing, such as a scanner of ports, has a thread of its own
            with contextlib.suppress(OSError):
                threading.Thread(target=greet, args=server.accept(), name="gluon_syncbn-relay", daemon=True).start()
        server.close()
        for link in links:
            link.receiver.join()
        for outbox in outboxes:
            outbox.put(None)

    threading.Thread(target=run, name="gluon_syncbn-relay", daemon=True).start()
    return [*address, key.hex(), os.getpid()]


class BridgedTransport(Transport):
    """Sends the core's messages by the relay, which rank 0 makes. Each wait to connect has the time limit.

    ``towards`` names a host that all ranks reach. ``spread`` gets bytes in every rank, and returns those of rank 0.
    """

    def __init__(self, rank: int, size: int, towards: str, spread: Callable[[np.ndarray], np.ndarray]) -> None:
        super().__init__(rank, size)
        self._relayed: List[Link] = []  # the relay's ends
        told = json.dumps(relay(towards, size, self._relayed) if rank == 0 else None).encode().ljust(BYTES)
        heard = spread(np.frombuffer(told, np.uint8)).astype(np.uint8).tobytes()
        host, port, key, self._process = json.loads(heard)  # of rank 0
        try:
            end = socket.create_connection((host, port), _native.timeout_of())
            self._link = Link(end, bytes.fromhex(key), answer_challenge, deliver_challenge)
            self._link.connection.send_bytes(json.dumps([rank, os.getpid()]).encode())
        except _STRANGE as error:
            raise mx.MXNetError(
                f"no connection to rank 0, at {host}:{port} ({error!r}). Every process has to reach any port there."
            ) from error

    def open(self, handle: int) -> None:
        super().open(handle)
        self._link.start(self._following, self._take, partial(_loss, self.size, 0, self._process))

    def _following(self) -> Optional[bytes]:
        return _native.next_message(self.handle, _PULSE)

    def _take(self, message: bytes) -> None:
        _native.deliver(self.handle, len(message), message)

    def forked(self) -> None:
        # While a child has the connections of its parent, nobody hears that the parent was killed.
        for link in (self._link, *self._relayed):
            link.close()

    def close(self) -> None:
        """Waits until all ranks have come to their end. Some may run much longer."""
        until = math.inf
        while self._link.receiver.is_alive() and time.monotonic() < until:
            self._link.receiver.join(_POLL)
            until = min(until, time.monotonic() + _GRACE if self._losses() else until)
        for link in [] if self._link.receiver.is_alive() else self._relayed:
            link.sender.join(_PULSE)  # the others hear that all have come to their end
        losses = self._losses()
        if losses and not self.has_failed():
            log.error("rank %d of %d ends without the others: %s.", self.rank, self.size, losses[0])

    def _losses(self, but: Sequence[str] = ("", "has ended")) -> List[str]:
        fates = enumerate(_native.fate_of(self.handle, rank) for rank in range(self.size))
        return [f"rank {rank} of {self.size} {fate}" for rank, fate in fates if fate not in but]
