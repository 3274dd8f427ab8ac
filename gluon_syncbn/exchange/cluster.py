"""Carries messages over MXNet's own cluster: the scheduler and the parameter servers of ``dist_sync``.

A parameter server adds up and knows no messages. So the workers meet in rounds. In each round every rank writes into a
row of its own and zeros elsewhere; the sum shows all rows to all:

rank 0: [messages, 0       ] ─┐             ┌─► [messages, messages]
                              ├─ server: + ─┤                             float32 holds whole numbers below 2**24
rank 1: [0,        messages] ─┘             └─► [messages, messages]

A rank that waits for somebody takes part in every round, with whatever it has to send. So the ranks may make their
calls in any order. All ranks see the same rounds. The servers add large gradients directly.
"""

from __future__ import annotations

import itertools
import os
import socket
import struct
import threading
import time
from collections import Counter, deque
from concurrent import futures
from contextlib import contextmanager
from typing import Deque, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np

from .. import _native
from ..system.environment import read
from ..system.logs import log
from .carrier import REGISTER, Carrier, Layout
from .transport import Label
from .waiting import Wait, WaitingTransport

_VARIABLES = ("DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER")
_HEADER = struct.Struct("=16s8s5q")  # kind, type, key, node, call, phase, bytes
_NOTE = struct.Struct("=qq")  # beats, state
_RUNNING, _ENDED, _FAILED, _LOST = range(4)
_WILL = "process {}; was it killed?"
_SMALL = 1 << 14  # bytes; larger gradients are added by the servers
_DIGITS = 3  # bytes in a float32: sums with zeros are exact, for every value
_MOST = 2**24 - 1  # of float32
_POLL = 0.05  # seconds between checks of other reasons to end
_BEAT = 0.5  # seconds between two notes
_SELDOM = 4  # notes between two looks at the scheduler
_CONNECT = 1.0  # seconds for a connection to the scheduler
_ANSWER = 3.0  # seconds in which a server has to answer, and a rank has to write a note
_HEARD = 1.5  # seconds in which the others read a note
_PAUSE = 0.002  # seconds at most between two rounds in which nobody sends anything
_RECENT = 64  # rounds
_LAST = -1  # bytes that a rank sends in a round after which it begins no other

_Identity = Tuple[str, int, int, int, int]  # of a message: kind, key, node, call, phase


class ClusterTransport(WaitingTransport):
    """Carries arrays over the parameter servers that the variables ``DMLC_*`` name.

    Every worker has to create one. The servers and the scheduler need no more than ``import mxnet``.
    """

    partial = False  # a round is for all ranks

    def __init__(self) -> None:
        missing = [name for name in _VARIABLES if not read(name)]
        if missing:
            raise mx.MXNetError(
                f"kvstore 'dist_sync': {', '.join(missing)} is not set in the environment. MXNet's launch.py "
                "sets it for all processes; docs/distributed.md shows how to do it by hand."
            )
        self._scheduler = (read("DMLC_PS_ROOT_URI"), int(read("DMLC_PS_ROOT_PORT")))
        self._carrier = Carrier()
        rank, workers, servers = self._meet()
        super().__init__(rank, workers)
        self._others = [other for other in range(workers) if other != rank]
        self._layout = Layout(workers, servers)
        self._changed = threading.Condition()  # guards all that follows
        self._inbox: Dict[_Identity, Dict[int, np.ndarray]] = {}
        self._outbox: Deque[memoryview] = deque()
        self._places: Counter = Counter()  # the labels of waits
        self._waiting = 0  # how many of them are for rounds
        self._sums: Dict[Tuple[str, int, int], int] = {}  # numbers of gradients, by kind, key and size
        self._numbers = itertools.count()
        self._asked = 0.0  # when somebody last waited
        self._fates: Dict[int, Tuple[float, _Note]] = {}  # of the ranks that have ended or failed, and since when
        self._stage, self._words, self._ended = _RUNNING, "", 0.0  # of our note, and when it became another state
        self._told = threading.Event()  # the note is to be written at once
        self._written = threading.Event()
        self._quiet = threading.Event()  # no more notes
        self._closing = False  # this rank has come to its end
        self._over = threading.Event()  # all ranks have: no more rounds
        self._carrier.ask("will", self._layout.register(rank), _note(0, _LOST, _WILL.format(os.getpid())))
        for work in (self._exchange, self._take_notes):
            threading.Thread(target=work, name="gluon_syncbn-cluster", daemon=True).start()

    def _meet(self) -> Tuple[int, int, int]:
        limit = _native.timeout_of()
        deadline = time.monotonic() + limit
        try:
            while time.monotonic() < deadline:
                try:
                    rank, workers, servers = self._carrier.ready.result(_POLL).tolist()
                    return rank, workers, servers
                except futures.TimeoutError:
                    pass
            problem = self._scheduler_problem() or (
                f"the scheduler at {self._scheduler[0]}:{self._scheduler[1]} is there, but not all of "
                f"{read('DMLC_NUM_WORKER')} workers and {read('DMLC_NUM_SERVER')} servers have come. Each worker "
                "creates one such KVStore, and no store by mx.kv.create('dist_sync')"
            )
            raise mx.MXNetError(f"kvstore 'dist_sync': not connected within {limit:.0f} s: {problem}.")
        except BaseException:
            self._carrier.end(0)
            raise

    # ---- Transport -----------------------------------------------------------------------------------------

    def carry(self, label: Label, message: np.ndarray, ranks: Sequence[int]) -> List[np.ndarray]:
        identity = (label.kind, *label[1:5])
        header = _HEADER.pack(label.kind.encode(), b"|u1", *label[1:5], message.nbytes)
        with self._waits(label):
            with self._changed:
                self._outbox.append(memoryview(header + message.tobytes()))
                self._waiting += 1
                self._changed.notify_all()
            try:
                got = self._collect(label, identity)
            finally:
                with self._changed:
                    self._waiting -= 1
        return [got[rank] for rank in ranks]

    def sum(self, label: Label, array: np.ndarray, ranks: Sequence[int]) -> np.ndarray:
        if array.nbytes <= _SMALL or array.dtype != np.float32 or self.size == 1:
            return super().sum(label, array, ranks)
        self.check_open()
        identity = label.kind, label.key, array.size
        if identity not in self._sums:
            self._sums[identity] = self._new_sum(label, array)
        return self._ask(label, "total", self._layout.sum(self._sums[identity]), array)

    def _new_sum(self, label: Label, like: np.ndarray) -> int:
        """Returns the number of a new key, which is there when all ranks know it. Rank 0 makes it."""
        label = label._replace(kind="new " + label.kind)
        for rank, size in enumerate(self.allgather(label, np.array([like.size]), equal=True)):
            self.check_alike(label, rank, int(size[0]), like.dtype, like)
        number = next(self._numbers)
        if self.rank == 0:
            self._ask(label, "write", self._layout.sum(number), np.zeros_like(like))
        return int(self.allgather(label._replace(phase=1), np.array([number]), equal=True)[0][0])

    def poll(self, label: Label) -> None:
        self._asked = time.monotonic()
        self.check_unbroken(label)
        self._check_fates(label, ())

    def tell(self, label: Optional[Label], reason: str) -> None:
        self._say(_FAILED, reason)
        with self._changed:
            self._changed.notify_all()

    def close(self) -> None:
        if self._closed:
            return
        if self._broken:
            self._closed = True
            time.sleep(max(0, self._ended + _HEARD - time.monotonic()))
            self._abort()
            return
        self._say(_ENDED, "")
        self._closed = True
        over = self._wait_for_the_end()
        self._quiet.set()
        if not over:
            self._abort()
            return
        self._carrier.ask("end")
        self._carrier.end(_native.timeout_of())

    def _abort(self) -> None:
        """Ends servers and scheduler, which would wait for ever, and the carrier."""
        futures.wait([self._carrier.ask("abort")], 1.0)
        self._carrier.end(0)

    def _wait_for_the_end(self) -> bool:
        """Waits until all ranks have come to their end, in a last round. Returns whether they have.

        A round that only some ranks have begun would keep the store from ending.
        """
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        since = time.monotonic()
        beats: Dict[int, int] = {}  # of the ranks that run, as they last changed
        while not self._over.wait(_BEAT):
            if self._broken:
                log.error("%s", self._broken)
                return False
            notes = self._notes()
            running = {rank: note.beats for rank, note in notes.items() if note.state == _RUNNING}
            problems = [f"rank {rank} {note.fate()}" for rank, note in notes.items() if note.state in (_FAILED, _LOST)]
            problems += [self._scheduler_problem(), *([] if notes else self._silent_servers())]
            if running != beats:
                beats, since = running, time.monotonic()
            elif time.monotonic() - since > _native.timeout_of():
                problems.append(f"nothing was heard of the others for {_native.timeout_of():.0f} s")
            if any(problems):
                log.error(
                    "rank %d of %d ends without the others: %s.", self.rank, self.size, next(filter(None, problems))
                )
                return False
        return True

    # ---- waits ---------------------------------------------------------------------------------------------

    @contextmanager
    def _waits(self, label: Label) -> Iterator[None]:
        """Shows the others where this rank waits, while it does."""
        self._places[str(label)] += 1
        try:
            with self.told_if_left(label):
                yield
        finally:
            self._places[str(label)] -= 1
            if not self._places[str(label)]:
                del self._places[str(label)]

    def _collect(self, label: Label, identity: _Identity) -> Dict[int, np.ndarray]:
        """Returns this message of all ranks, once they have arrived."""
        wait = Wait(self, label)
        while True:
            with self._changed:
                got = self._inbox.setdefault(identity, {})
                if len(got) < self.size:
                    self._changed.wait(_POLL)
                if len(got) == self.size:
                    return self._inbox.pop(identity)
                missing = [rank for rank in self._others if rank not in got]
            self._look(label, wait, missing)

    def _ask(self, label: Label, operation: str, key: int, array: np.ndarray) -> np.ndarray:
        """Has the servers do something with an array, and returns the result in time."""
        wait = Wait(self, label)
        with self._waits(label):
            result = self._carrier.ask(operation, key, array)
            while True:
                try:
                    return result.result(_POLL)
                except futures.TimeoutError:
                    self._look(label, wait, self._others)
                except mx.MXNetError as error:
                    self.give_up(label, str(error))

    def _look(self, label: Label, wait: Wait, missing: Sequence[int]) -> None:
        self._asked = time.monotonic()
        wait.poll(missing)
        self._check_fates(label, missing)

    def _check_fates(self, label: Label, missing: Sequence[int]) -> None:
        for rank, (since, note) in sorted(self._fates.items()):
            # Once a rank has ended, its last messages arrive before its note is so old.
            if note.state != _ENDED or (rank in missing and time.monotonic() - since > 1):
                self.give_up(label, f"rank {rank} of {self.size} {note.fate()} (rank {self.rank} was in {label})")

    # ---- rounds --------------------------------------------------------------------------------------------

    def _exchange(self) -> None:
        """Takes part in rounds while this process waits for others."""
        streams = [_Stream() for _ in range(self.size)]
        level, pause = 0, 0.0
        recent: Deque[int] = deque([0], _RECENT)  # levels that rounds could have used
        capacities = self._layout.capacities()
        while not self._broken:
            with self._changed:
                closing = self._closing
                if not self._waiting and not closing:
                    self._changed.wait(_POLL)
                    continue
                if pause and not self._outbox:
                    self._changed.wait(pause)
                content = self._take(capacities[level] * _DIGITS)
                left = sum(map(len, self._outbox))
            row = np.zeros((self.size, 2 + capacities[level]), np.float32)
            numbers = _numbers(content)
            row[self.rank, :2] = len(content) or (_LAST if closing else 0), min(left, _MOST)
            row[self.rank, 2 : 2 + numbers.size] = numbers
            try:
                rows = self._carrier.ask("total", self._layout.round(level), row.ravel()).result()
            except mx.MXNetError as error:
                self.fail(str(error))
                return
            rows = rows.reshape(row.shape)
            if (rows[:, 0] == _LAST).all():  # the same in all ranks, which see the same rows
                self._over.set()
                return
            arrived = [
                (rank, message)
                for rank, (size, _, *_) in enumerate(rows[:, :2].astype(np.int64).tolist())
                for message in streams[rank].feed(_bytes(rows[rank, 2:], max(size, 0)))
            ]
            with self._changed:
                for rank, (identity, array) in arrived:
                    self._inbox.setdefault(identity, {})[rank] = array
                if arrived:
                    self._changed.notify_all()
            pause = 0.0 if rows[:, 0].any() else min(_PAUSE, 2 * pause or 1e-4)
            # The same in all ranks, which see the same rows.
            most = -(-int((rows[:, 1] if rows[:, 1].any() else rows[:, 0]).max()) // _DIGITS)
            wanted = sum(most > capacity for capacity in capacities[:-1])
            recent.append(min(wanted, 1))
            level = max(wanted if rows[:, 1].any() else 0, *recent)

    def _take(self, capacity: int) -> bytes:
        """Removes that many bytes from the outbox. The caller holds the lock."""
        taken = []
        while self._outbox and capacity:
            message = self._outbox.popleft()
            taken.append(message[:capacity])
            if len(message) > capacity:
                self._outbox.appendleft(message[capacity:])
            capacity -= len(taken[-1])
        return b"".join(taken)

    # ---- notes ---------------------------------------------------------------------------------------------

    def _say(self, state: int, words: str) -> None:
        """Writes a note for the others, if that is possible at once."""
        self._ended = time.monotonic()
        if self._stage == _RUNNING:
            self._stage, self._words = state, words
        self._written.clear()
        self._told.set()
        self._written.wait(_ANSWER)

    def _take_notes(self) -> None:
        """Writes our note again and again, and reads those of the others while this process waits for them."""
        refused = 0
        for beats in range(1, 2**62):
            last = self._stage != _RUNNING
            words = self._words if last else "; ".join(map(str, list(self._places)))
            note = _note(beats, self._stage, words)
            try:
                self._carrier.ask("write", self._layout.register(self.rank), note).result()
                if last:
                    self._written.set()
                if self._quiet.is_set():
                    return
                if time.monotonic() - self._asked < 2:
                    for rank, theirs in self._notes(None).items():
                        if theirs.state != _RUNNING and rank not in self._fates:
                            self._fates[rank] = time.monotonic(), theirs
                if beats % _SELDOM == 0:
                    refused = refused + 1 if self._scheduler_problem() else 0
            except mx.MXNetError:  # the carrier has ended; whoever waits for it says so
                return
            if refused > 1 and not self._closed:
                self.fail(f"{self._scheduler_problem()}.")
            self._told.wait(_BEAT * max(1, self.size / 16))
            self._told.clear()

    def _notes(self, seconds: Optional[float] = _ANSWER) -> Dict[int, _Note]:
        """Reads the notes of the other ranks, as far as they come in this time."""
        asked = {
            rank: self._carrier.ask("read", self._layout.register(rank), np.zeros(REGISTER, np.float32))
            for rank in self._others
        }
        futures.wait(asked.values(), seconds)
        notes = {}
        for rank, future in asked.items():
            if future.done() and not future.exception():
                note = _bytes(future.result(), REGISTER * _DIGITS)
                words = note[_NOTE.size :].rstrip(b"\0").decode(errors="replace")
                beats, state = _NOTE.unpack_from(note)
                notes[rank] = _Note(beats, state, words)
        return notes

    # ---- errors --------------------------------------------------------------------------------------------

    def late(self, label: Label, missing: Sequence[int], wait: Wait) -> str:
        problems = [self._scheduler_problem(), *self._silent_servers()]
        before = self._notes()
        time.sleep(_ANSWER if before else 0)
        after = self._notes() if before else {}
        places, absent = [], []
        for rank, note in after.items():
            if note.state in (_FAILED, _LOST):
                problems.append(f"rank {rank} of {self.size} {note.fate()}")
            elif note.state == _RUNNING and rank in before and before[rank].beats == note.beats:
                problems.append(f"rank {rank} of {self.size} has ended without a word, or hangs")
            elif str(label) not in note.words:
                places.append(f"rank {rank} " + (f"is in {note.words}" if note.words else "waits for nobody"))
            else:
                continue
            absent.append(rank)
        problems = [problem for problem in problems if problem]
        text = wait.text([rank for rank in missing if rank in absent] or missing)
        if problems:
            return f"{text} {'; '.join(problems).rstrip('.')}."
        text += " All servers and processes are there."
        return text + (f" Meanwhile {'; '.join(places)}." if places else "")

    def _silent_servers(self) -> List[str]:
        servers = range(self._layout.servers)
        asked = [self._carrier.ask("read", self._layout.probe(server), np.zeros(1, np.float32)) for server in servers]
        futures.wait(asked, _ANSWER)
        return [
            f"server {server} of {len(servers)} does not answer"
            for server, future in enumerate(asked)
            if not future.done()
        ]

    def _scheduler_problem(self) -> str:
        """Says that nobody listens at the scheduler's address; empty if somebody does, or if nobody knows."""
        try:
            socket.create_connection(self._scheduler, _CONNECT).close()
        except ConnectionRefusedError:
            return "the scheduler is gone: nobody listens at {}:{}".format(*self._scheduler)
        except OSError:
            pass
        return ""


class _Note(NamedTuple):
    """What a rank last said."""

    beats: int
    state: int
    words: str  # where it waits, or why it has failed

    def fate(self) -> str:
        if self.state == _LOST:
            return f"has ended without a word ({self.words})"
        return f"has failed: {self.words}" if self.state == _FAILED else "has ended"


class _Stream:
    """The bytes of a rank, from which messages are taken as they become complete."""

    def __init__(self) -> None:
        self._parts: List[bytes] = []
        self._size, self._wanted = 0, _HEADER.size

    def feed(self, content: bytes) -> Iterator[Tuple[_Identity, np.ndarray]]:
        self._parts.append(content)
        self._size += len(content)
        while self._size >= self._wanted:
            data = b"".join(self._parts)
            kind, dtype, key, node, call, phase, size = _HEADER.unpack_from(data)
            end = _HEADER.size + size
            if len(data) < end:
                self._parts, self._wanted = [data], end
                return
            array = np.frombuffer(data, np.uint8, size, _HEADER.size).copy()
            self._parts, self._size, self._wanted = [data[end:]], len(data) - end, _HEADER.size
            identity = (kind.rstrip(b"\0").decode(), key, node, call, phase)
            yield identity, array.view(dtype.rstrip(b"\0").decode())


def _note(beats: int, state: int, words: str) -> np.ndarray:
    note = _NOTE.pack(beats, state) + words.encode(errors="replace")
    return _numbers(note[: REGISTER * _DIGITS].ljust(REGISTER * _DIGITS, b"\0"))


def _numbers(content: bytes) -> np.ndarray:
    """Returns bytes as float32, `_DIGITS` in each: whole numbers that a sum with zeros leaves as they are."""
    count = -(-len(content) // _DIGITS)
    digits = np.zeros((count, 4), np.uint8)
    digits[:, :_DIGITS] = np.frombuffer(content.ljust(count * _DIGITS, b"\0"), np.uint8).reshape(-1, _DIGITS)
    return digits.view("<i4").ravel().astype(np.float32)


def _bytes(numbers: np.ndarray, size: int) -> bytes:
    """Returns the first ``size`` bytes of such numbers."""
    numbers = numbers[: -(-size // _DIGITS)]
    return numbers.astype("<i4").view(np.uint8).reshape(-1, 4)[:, :_DIGITS].tobytes()[:size]
