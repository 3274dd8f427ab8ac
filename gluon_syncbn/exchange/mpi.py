"""Carries messages over MPI (mpi4py).

The label at the beginning of a message names its receiver. The order of calls does not matter, because a waiting thread
files messages for other threads. Nothing here blocks: every wait is a loop with a time limit.
"""

from __future__ import annotations

import os
import struct
import sys
import threading
import time
from typing import Any, Dict, List, Optional, Sequence, Tuple

import mxnet as mx
import numpy as np

from .. import _native
from ..system.distribution import WHERE, command
from .transport import Combine, Label, arrays_of, bytes_of
from .waiting import Wait, WaitingTransport

_KINDS = (
    *("failure", "end", "agreement", "broadcast", "broadcast of", "gradient", "gradient of", "statistics"),
    "exchange of",
)
_KIND = {kind: number for number, kind in enumerate(_KINDS)}
_TYPES = tuple(np.dtype(name) for name in ("uint8", "float16", "float32", "float64", "int32", "int64", "int8"))
_TYPE = {dtype: number for number, dtype in enumerate(_TYPES)}
_HEADER = struct.Struct("=8q")  # kind, key, node, call, phase, part, type, 0
# Up to this number of ranks, each sends its part to all. More ranks send as many messages as the logarithm of the
# number.
_FEW = 4
_SPIN, _DOZE = 0.0005, 0.1  # seconds of waiting until polls are 50 us, then 1 ms apart
_ENDED = "has ended"
_SLICE = 5e-5  # seconds of polling between two checks of all other conditions

_Key = Tuple[int, ...]  # sender, kind, key, node, call, phase, part


class MPITransport(WaitingTransport):
    """Carries arrays over ``MPI.COMM_WORLD``.

    Every process has to create one. Under ``mpiexec``, a process that ends after a failure ends the others too.
    """

    def __init__(self) -> None:
        try:
            from mpi4py import MPI
        except ImportError as error:
            raise ImportError(f"kvstore 'mpi' needs mpi4py ({error}): {command('mpi')}{WHERE}") from None
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise mx.MXNetError("this MPI supports one thread only; kvstore 'mpi' needs at least MPI_THREAD_SERIALIZED")
        super().__init__(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())
        self._MPI = MPI
        # The order starts after this rank, so that not all ranks write to rank 0 first.
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

    def native(self, ranks: Sequence[int]) -> Optional[Dict[str, Any]]:
        MPI = self._MPI
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:  # else the core and Python must not call at once
            return None
        # All ranks have answered a moment ago, so none waits long in this.
        self._leaders = MPI.COMM_WORLD.Split(0 if self.rank in ranks else MPI.UNDEFINED, self.rank)
        handles = {"float32": MPI.FLOAT, "float64": MPI.DOUBLE, "int64": MPI.INT64_T, "add": MPI.SUM}
        found = {name: MPI._handleof(handle) for name, handle in handles.items()}
        place = int(MPI.IN_PLACE) % 2**64
        return {"file": MPI.__file__, "communicator": MPI._handleof(self._leaders), "in_place": place, **found}

    # ---- Transport -----------------------------------------------------------------------------------------

    def allgather(
        self, label: Label, part: np.ndarray, *, equal: bool, ranks: Optional[Sequence[int]] = None
    ) -> List[np.ndarray]:
        if ranks is None and self.size > _FEW:
            return self._gather_by_doubling(label, part, equal)
        others = [rank for rank in self._others if ranks is None or rank in ranks]
        requests = self._send(others, label, 0, part)
        got = self._collect(others, label, 0, part, requests, equal=equal)
        got[self.rank] = part
        return [got[rank] for rank in sorted(got)]

    def allreduce(
        self, label: Label, array: np.ndarray, combine: Combine = np.add, *, ranks: Optional[Sequence[int]] = None
    ) -> np.ndarray:
        members = range(self.size) if ranks is None else sorted(ranks)
        array = np.ascontiguousarray(array)
        if len(members) > _FEW:
            return self._add_by_doubling(label, array.ravel(), combine, members).reshape(array.shape)
        return super().allreduce(label, array, combine, ranks=ranks)

    def _gather_by_doubling(self, label: Label, part: np.ndarray, equal: bool) -> List[np.ndarray]:
        # Each rank holds the parts of 1, 2, 4 ... ranks from itself on, and sends them to the rank as far behind it.
        # Source: Bruck, Ho, Kipnis, Upfal, Weathersby, "Efficient algorithms for all-to-all communications in multiport
        # message-passing systems", 1997.
        parts, step = [part], 0
        while len(parts) < self.size:
            distance = 1 << step
            behind, ahead = (self.rank - distance) % self.size, (self.rank + distance) % self.size
            sent = parts[: self.size - distance]
            message = bytes_of(*[array for one in sent for array in (np.array([_TYPE[one.dtype]]), one)])
            requests = self._send([behind], label, step, message)
            got = arrays_of(self._collect([ahead], label, step, message, requests, equal=False)[ahead])
            types = [_TYPES[int(code.view(np.int64)[0])] for code in got[::2]]
            parts += [array.view(dtype) for array, dtype in zip(got[1::2], types)]
            step += 1
        in_order = [parts[(rank - self.rank) % self.size] for rank in range(self.size)]
        if equal:
            for rank, array in enumerate(in_order):
                self.check_alike(label, rank, array.size, array.dtype, part)
        return in_order

    def _add_by_doubling(self, label: Label, total: np.ndarray, combine: Combine, members: Sequence[int]) -> np.ndarray:
        # Neighbours merge until their number is a power of two. Then each holds the total of 1, 2, 4 ... of them, and
        # swaps it with a rank that holds a total of as many. Both put the lower ranks first, for the same bits.
        size, own = len(members), members.index(self.rank)
        pairs = size - (1 << (size.bit_length() - 1))
        paired, lower = own < 2 * pairs, own % 2 == 0
        neighbour = members[own + (1 if lower else -1)] if paired else self.rank
        if paired and lower:
            self._collect([], label, 0, total, self._send([neighbour], label, 0, total))
            return self._collect([neighbour], label, 1, total, [])[neighbour]
        if paired:
            total = combine(self._collect([neighbour], label, 0, total, [])[neighbour], total)
        place = own // 2 if paired else own - pairs
        for step in range(2, size.bit_length() + 1):
            other = place ^ (1 << (step - 2))
            rank = members[2 * other + 1 if other < pairs else other + pairs]
            theirs = self._collect([rank], label, step, total, self._send([rank], label, step, total))[rank]
            total = combine(total, theirs) if place < other else combine(theirs, total)
        if paired:
            self._collect([], label, 1, total, self._send([neighbour], label, 1, total))
        return total

    def broadcast(self, label: Label, array: np.ndarray) -> np.ndarray:
        array = np.ascontiguousarray(array)
        if self.rank == 0:
            self._collect([], label, 0, array, self._send(self._others, label, 0, array.ravel()))
            return array
        self._send([], label, 0, array)
        return self._collect([0], label, 0, array.ravel(), [])[0].reshape(array.shape)

    def poll(self, label: Label) -> None:
        with self._lock:
            if not self._polling:
                self._file(self._progress())
            for rank, fate in self._gone.items():
                if fate != _ENDED:  # a rank that has ended has received all that it waited for
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
            # MPI_Finalize waits for processes that may be stuck or gone. MPI_Abort runs destructors in MXNet that end
            # in a signal. If the process leaves without either, mpiexec ends all processes and returns 1.
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
        """Returns what these ranks sent, once our own messages are out too."""
        identity = (_KIND[label.kind], *label[1:5], part)
        keys = [(rank, *identity) for rank in ranks]
        wait = Wait(self, label)
        with self._lock:
            while True:
                missing = [key[0] for key in keys if key not in self._inbox]
                if not missing and self._all_sent(requests):
                    got = {key[0]: self._inbox.pop(key) for key in keys}
                    if self._sleepers:
                        self._changed.notify_all()  # another thread may have to poll now
                    break
                if self._broken or self._gone or self._inbox:
                    self._check(label, identity, missing)
                waited = wait.seconds()
                if waited > _SPIN:
                    wait.poll(missing)
                self._poll(missing, waited)
        if equal:
            for rank, array in got.items():
                self.check_alike(label, rank, array.size, array.dtype, like)
        return got

    def _poll(self, missing: Sequence[int], waited: float) -> None:
        """Lets messages arrive. The caller holds the lock, which is released meanwhile. One thread polls for all."""
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
                    os.sched_yield()  # to the missing process, if there are more processes than cores
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
        for rank in self._gone:  # the missing rank may wait for this one
            if self._gone[rank] != _ENDED and rank not in arriving and not arriving.intersection(missing):
                gone = f"rank {rank} of {self.size} {self._gone[rank]} (rank {self.rank} was in {label})"
                self.give_up(label, gone)
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
