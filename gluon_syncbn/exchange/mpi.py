"""The transport over MPI (mpi4py).

Messages of one communicator find their receivers by the label at their beginning, not by the order of the calls: a
thread that waits files what comes for others. Nothing here blocks: every wait is a loop with a time limit.
"""

from __future__ import annotations

import functools
import os
import struct
import sys
import threading
import time
from typing import Any, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np

from .. import _native
from ..distribution import WHERE, command
from .store import Combine, Decision, Label, arrays_of, bytes_of
from .waiting import Wait, WaitingTransport

_KINDS = (
    *("failure", "end", "agreement", "broadcast", "broadcast of", "gradient", "gradient of", "statistics"),
    *("exchange of", "turn"),
)
_KIND = {kind: number for number, kind in enumerate(_KINDS)}
_TYPES = tuple(np.dtype(name) for name in ("uint8", "float16", "float32", "float64", "int32", "int64", "int8"))
_TYPE = {dtype: number for number, dtype in enumerate(_TYPES)}
_HEADER = struct.Struct("=8q")  # kind, key, node, call, phase, part, type, 0
_SMALL = 1 << 18  # bytes; larger sums are made in parts, one by each rank
_FEW = 8  # ranks that send everybody their part; more add up along a tree, in twice its depth messages each
_SPIN, _DOZE = 0.0005, 0.1  # seconds of waiting until polls are 50 us, 1 ms apart
_ENDED = "has ended"
_SLICE = 5e-5  # seconds of polling between two looks at everything else

_Key = Tuple[int, ...]  # sender, kind, key, node, call, phase, part


class MPITransport(WaitingTransport):
    """Arrays over ``MPI.COMM_WORLD``.

    Every process has to create one. Under ``mpiexec``, a process that ends after a failure ends the others too.
    """

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise ImportError(f"kvstore 'mpi' needs mpi4py ({error}): {command('mpi')}{WHERE}") from None
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise mx.MXNetError("this MPI serves one thread only; kvstore 'mpi' needs MPI_THREAD_SERIALIZED at least")
        super().__init__(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())
        self._MPI = MPI
        # Starting behind this rank, so that not everybody writes to rank 0 first.
        self._others = [(self.rank + i) % self.size for i in range(1, self.size)]
        self._gone: Dict[int, str] = {}
        self._inbox: Dict[_Key, np.ndarray] = {}
        self._outgoing: List[Tuple[Any, bytes]] = []
        self._incoming: List[Tuple[Any, np.ndarray, int]] = []
        self._mpi = threading.Lock()  # one MPI call at a time
        self._status = MPI.Status()
        self._lock = threading.RLock()  # guards the inbox
        self._changed = threading.Condition(self._lock)
        self._polling, self._sleepers = False, 0
        self._comm = self._duplicate()

    def _duplicate(self) -> Any:
        comm, request = self._MPI.COMM_WORLD.Idup()
        deadline = time.monotonic() + _native.timeout_of()
        while not request.Test():
            if time.monotonic() > deadline:
                raise mx.MXNetError("kvstore 'mpi': not every process has created one. Create it in all, at the start.")
            time.sleep(1e-4)
        return comm

    # ---- Transport -----------------------------------------------------------------------------------------

    def allgather(
        self, label: Label, part: np.ndarray, *, equal: bool, ranks: Optional[Sequence[int]] = None
    ) -> List[np.ndarray]:
        others = [rank for rank in self._others if ranks is None or rank in ranks]
        requests = self._send(others, label, 0, part)
        got = self._collect(others, label, 0, part, requests, equal=equal)
        got[self.rank] = part
        return [got[rank] for rank in sorted(got)]

    def allreduce(self, label: Label, array: np.ndarray, combine: Combine = np.add) -> np.ndarray:
        if array.nbytes > _SMALL and self.size > 1 and combine is np.add:
            array = np.ascontiguousarray(array)
            return self._sum_of_parts(label, array).reshape(array.shape)
        if self.size > _FEW:
            array = np.ascontiguousarray(array)
            return self._along_tree(label, array.ravel(), combine).reshape(array.shape)
        return super().allreduce(label, array, combine)

    def decide(self, label: Label, part: np.ndarray, decision: Decision) -> np.ndarray:
        # To rank 0 and back: where they are few, from each; else along the tree.
        parent, children = self._relatives()
        said = bytes_of(part)
        got = self._collect(children, label, 0, said, [], equal=False)
        said = np.concatenate([said, *[got[rank] for rank in sorted(got)]])
        if self.rank == 0:
            answer = decision(arrays_of(said))
        else:
            answer = self._collect([parent], label, 1, said, self._send([parent], label, 0, said), equal=False)[parent]
        self._collect([], label, 1, answer, self._send(children, label, 1, answer))
        return answer

    def _relatives(self) -> Tuple[int, List[int]]:
        """The parent of this rank and its children: from the nearest, whose ranks come next, to the farthest."""
        if self.size <= _FEW:
            return 0, list(range(1, self.size)) if self.rank == 0 else []
        distance, children = 1, []
        while distance < self.size and not self.rank & distance:
            if self.rank + distance < self.size:
                children.append(self.rank + distance)
            distance *= 2
        return self.rank - distance, children

    def _along_tree(self, label: Label, total: np.ndarray, combine: Combine) -> np.ndarray:
        distance = 1
        while distance < self.size and not self.rank & distance:  # towards rank 0
            if self.rank + distance < self.size:
                got = self._collect([self.rank + distance], label, 0, total, [])
                total = combine(total, got[self.rank + distance])
            distance *= 2
        if self.rank > 0:
            parent = self.rank - distance
            total = self._collect([parent], label, 1, total, self._send([parent], label, 0, total))[parent]
        children = [self.rank + d for d in _powers_below(distance) if self.rank + d < self.size]
        self._collect([], label, 1, total, self._send(children, label, 1, total))
        return total

    def _sum_of_parts(self, label: Label, array: np.ndarray) -> np.ndarray:
        # Each rank adds up its own part of the array and sends the sum to all.
        others, parts = self._others, np.array_split(array.ravel(), self.size)
        requests = [r for rank in others for r in self._send([rank], label, rank, parts[rank])]
        own = parts[self.rank]
        got = self._collect(others, label, self.rank, own, requests)
        got[self.rank] = own
        total = functools.reduce(np.add, [got[rank] for rank in range(self.size)])
        requests = self._send(others, label, self.size + self.rank, total)
        done = {self.rank: total}
        for rank in others:
            done.update(self._collect([rank], label, self.size + rank, parts[rank], requests))
        return np.concatenate([done[rank] for rank in range(self.size)])

    def broadcast(self, label: Label, array: np.ndarray) -> np.ndarray:
        array = np.ascontiguousarray(array)
        if self.rank == 0:
            self._collect([], label, 0, array, self._send(self._others, label, 0, array.ravel()))
            return array
        self._send([], label, 0, array)
        return self._collect([0], label, 0, array.ravel(), [])[0].reshape(array.shape)

    def look(self, label: Label) -> None:
        with self._lock:
            if not self._polling:
                self._file(self._progress())
            for rank, fate in self._gone.items():
                if fate != _ENDED:  # who has ended has had all that it has waited for
                    self.give_up(label, f"rank {rank} of {self.size} {fate} (rank {self.rank} was in {label})")
            self.check_unbroken(label)

    def tell(self, label: Optional[Label], reason: str) -> None:
        with self._lock:
            self._changed.notify_all()
        text = np.frombuffer(reason.encode(errors="replace")[:4000], np.uint8)
        self._post(self._others, Label("failure"), 0, text)

    def close(self) -> None:
        if self._closed or self._MPI.Is_finalized():
            return
        self._closed = True
        if self._broken and self.size > 1:
            # MPI_Finalize waits for processes that may be stuck or gone, and MPI_Abort runs destructors in MXNet that
            # end in a signal. Leaving without either makes mpiexec end all processes and return 1.
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(1)
        self._post(self._others, Label("end"), 0, np.zeros(0, np.uint8))
        deadline = time.monotonic() + 1
        while self._outgoing and time.monotonic() < deadline:
            self._progress()
            time.sleep(1e-4)

    # ---- messages ------------------------------------------------------------------------------------------

    def _send(self, ranks: Sequence[int], label: Label, part: int, array: np.ndarray) -> List[Any]:
        self.check_open()
        return self._post(ranks, label, part, array)

    def _post(self, ranks: Sequence[int], label: Label, part: int, array: np.ndarray) -> List[Any]:
        _, key, node, call, phase, *_ = label
        header = _HEADER.pack(_KIND[label.kind], key, node, call, phase, part, _TYPE[array.dtype], 0)
        message = header + array.tobytes()
        with self._mpi:
            requests = [self._comm.Isend([message, self._MPI.BYTE], rank) for rank in ranks]
            self._outgoing += [(request, message) for request in requests]  # MPI reads it later
        return requests

    def _collect(
        self,
        ranks: Sequence[int],
        label: Label,
        part: int,
        like: np.ndarray,
        requests: Sequence[Any],
        equal: bool = True,
    ) -> Dict[int, np.ndarray]:
        """What these ranks sent, once our own messages are out too."""
        identity = (_KIND[label.kind], *label[1:5], part)
        keys = [(rank, *identity) for rank in ranks]
        wait = Wait(self, label)
        with self._lock:
            while True:
                missing = [key[0] for key in keys if key not in self._inbox]
                if not missing and self._all_sent(requests):
                    got = {key[0]: self._inbox.pop(key) for key in keys}
                    if self._sleepers:
                        self._changed.notify_all()  # somebody else may have to poll now
                    break
                if self._broken or self._gone or self._inbox:
                    self._check(label, identity, missing)
                waited = wait.seconds()
                if waited > _SPIN:
                    wait.look(missing)
                self._poll(missing, waited)
        if equal:
            for rank, array in got.items():
                self.check_alike(label, rank, array.size, array.dtype, like)
        return got

    def _poll(self, missing: Sequence[int], waited: float) -> None:
        """Lets messages come; the caller holds the lock, which is free meanwhile. One thread polls for all."""
        if self._polling:
            self._sleepers += 1
            self._changed.wait(0.01)
            self._sleepers -= 1
            return
        self._polling = True
        self._lock.release()
        try:
            arrived = self._progress()
            if waited > _SPIN:
                if not arrived:
                    time.sleep(5e-5 if waited < _DOZE else 1e-3)
            else:
                until = time.monotonic() + (_SLICE if missing else 0)  # else our own messages are not out yet
                while not arrived:
                    os.sched_yield()  # to the process that is waited for, where there are more than cores
                    if time.monotonic() > until:
                        break
                    arrived = self._progress()
        finally:
            self._lock.acquire()
            self._polling = False
        self._file(arrived)

    def _all_sent(self, requests: Sequence[Any]) -> bool:
        with self._mpi:
            return not [request for request in requests if not request.Test()]

    def _progress(self) -> List[Tuple[int, np.ndarray]]:
        """Moves messages along; returns those that have come."""
        done = []
        with self._mpi:
            if self._outgoing:
                self._outgoing = [sent for sent in self._outgoing if not sent[0].Test()]
            while True:
                probed = self._comm.Improbe(status=self._status)
                if probed is None:
                    break
                message = np.empty(self._status.Get_count(self._MPI.BYTE), np.uint8)
                self._incoming.append((probed.Irecv([message, self._MPI.BYTE]), message, self._status.Get_source()))
            if self._incoming:
                waiting = []
                for receipt in self._incoming:
                    request, message, rank = receipt
                    if request.Test():
                        done.append((rank, message))
                    else:
                        waiting.append(receipt)
                self._incoming = waiting
        return done

    def _file(self, messages: Sequence[Tuple[int, np.ndarray]]) -> None:
        for rank, message in messages:
            header = _HEADER.unpack_from(message.data)
            array = message[_HEADER.size :].view(_TYPES[header[6]])
            kind = _KINDS[header[0]]
            if kind == "failure":
                self._gone[rank] = f"has failed: {bytes(array).decode(errors='replace')}"
            elif kind == "end":
                self._gone[rank] = _ENDED
            else:
                self._inbox[(rank, *header[:6])] = array
        if messages and self._sleepers:
            self._changed.notify_all()

    # ---- errors --------------------------------------------------------------------------------------------

    def _check(self, label: Label, identity: _Key, missing: Sequence[int]) -> None:
        self.check_unbroken(label)
        arriving = {rank for _, _, rank in self._incoming}
        for rank in missing:
            if rank in self._gone and rank not in arriving:
                gone = f"rank {rank} of {self.size} {self._gone[rank]} (rank {self.rank} was in {label})"
                self.give_up(label, gone)
            if label.phase == 0 and rank not in arriving:
                other = [key for key in self._inbox if key[0] == rank and key[1:4] == identity[:3] and key[5] == 0]
                if other and all(key[4] != label.call for key in other):
                    self.give_up(
                        label,
                        f"rank {self.rank} is in {label}, but rank {rank} is in number {other[0][4] + 1}: one of them "
                        "has skipped or repeated a step.",
                    )

    def meanwhile(self, missing: Sequence[int]) -> List[str]:
        return sorted(
            {
                f"rank {key[0]} is in {_KINDS[key[1]]} {key[2]}, call {key[4] + 1}"
                for key in self._inbox
                if key[0] in missing
            }
        )


def _powers_below(limit: int) -> List[int]:
    """The largest first, so that the deepest part of a tree hears first."""
    return [1 << i for i in reversed(range(limit.bit_length() - 1))]
