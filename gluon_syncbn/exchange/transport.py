"""Defines the interface that carries arrays between processes, and the labels of messages."""

from __future__ import annotations

import functools
import json
import threading
from abc import ABC, abstractmethod
from typing import List, NamedTuple, NoReturn, Optional, Sequence

import mxnet as mx
import numpy as np

from .. import _native

_KINDS = ("agreement", "broadcast", "broadcast of", "exchange", "exchange of", "gradient", "gradient of")


class Label(NamedTuple):
    """Names an exchange. The first four fields identify its messages, and are the same in every process."""

    kind: str  # one of these; sums that a relay makes have others
    key: int = 0
    call: int = 0
    phase: int = 0
    what: str = ""  # for messages

    def __str__(self) -> str:
        return self.what


class Transport(ABC):
    """Carries arrays between processes.

    Every exchange has a time limit and ends in an `MXNetError` that names the label and the missing ranks. After that,
    none succeeds. Several threads exchange at once, and other processes may do so in another order. The native core
    waits for messages (csrc/exchange/processes.cc). It sends them over MPI, or else by `send`.
    """

    #: Whether some ranks can add gradients without the others.
    adds_some = True
    #: What the core needs to send over MPI itself.
    mpi: Optional[_native.Mpi] = None
    #: The core's exchange over this transport alone, which `open` gives.
    handle: _native.Handle

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._broken = ""  # why nothing is carried any more
        self._closed = False
        self._state = threading.Lock()  # guards _broken

    # ---- what a transport brings ---------------------------------------------------------------------------

    def open(self, handle: _native.Handle) -> None:
        """Takes the core's exchange, to which messages of others go by `deliver` of the core."""
        self.handle = handle
        if self.mpi is None:
            threading.Thread(target=self._carry, name="gluon_syncbn-carrier", daemon=True).start()

    def _carry(self) -> None:
        while True:
            message = _native.next_message(self.handle, 1.0)
            if message.startswith(b'["left"'):  # the last one
                line, _, reason = message.partition(b"\n")
                self.leave(reason.decode(errors="replace") if json.loads(line)[2] else "")
                return
            if message:
                self.send(message)

    def send(self, message: bytes) -> None:
        """Sends a message of the core, which has the form of `next_message`, and does not wait."""
        raise NotImplementedError

    def leave(self, failure: str) -> None:
        """Tells the others that this rank has failed, or has ended. They call `report` of the core."""
        raise NotImplementedError

    @abstractmethod
    def close(self) -> None:
        """Closes the transport at the end of the process."""

    def forked(self) -> None:  # noqa: B027
        """Closes in the child of a fork what belongs to its parent."""

    def split(self, leaders: Sequence[int]) -> None:  # noqa: B027
        """Prepares exchanges of these ranks, one for each machine. All ranks call it at once."""

    def sum(self, label: Label, array: np.ndarray, ranks: Sequence[int]) -> np.ndarray:
        """Adds the vectors of these ranks in their order; bitwise equal everywhere."""
        return functools.reduce(np.add, self.allgather(label, array, equal=True, ranks=ranks))

    # ---- for everybody -------------------------------------------------------------------------------------

    def allgather(
        self, label: Label, part: np.ndarray, *, equal: bool, ranks: Optional[Sequence[int]] = None
    ) -> List[np.ndarray]:
        """Returns the parts of all ranks, in their order. Each part is a vector.

        ``equal``: parts of another size or type than ours are an error. ``ranks``: only these ranks take part.
        """
        self.check_open()
        ranks = range(self.size) if ranks is None else ranks
        message = part.dtype.str.encode().ljust(8) + np.ascontiguousarray(part).tobytes()
        try:
            identity = _KINDS.index(label.kind), label.key, label.call, label.phase
            got = _native.bytes_of(self.handle, ranks, identity, label.what, message)
        except mx.MXNetError as error:
            self.fail(str(error))
            raise
        parts = [m[8:].copy().view(bytes(m[:8]).decode().strip()) for m in got]
        for rank, theirs in zip(ranks, parts if equal else ()):
            self.check_alike(label, rank, theirs.size, theirs.dtype, part)
        return parts

    def fail(self, reason: str) -> None:
        """Tells the other ranks of a failure, and carries nothing any more."""
        with self._state:
            if self._broken or self._closed:
                return
            self._broken = reason
        _native.processes_failed(self.handle, reason)

    def check_open(self) -> None:
        """Raises an error if the transport is broken or closed, before anything is sent."""
        if self._broken:
            raise mx.MXNetError(
                f"nothing is exchanged any more. Start the job again. The first error was: {self._broken}"
            )

    def check_alike(self, label: Label, rank: int, size: int, dtype: np.dtype, ours: np.ndarray) -> None:
        """Checks that an array from a rank has our array's size and type."""
        if (size, dtype) != (ours.size, ours.dtype):
            self.give_up(
                f"in {label}, rank {rank} sent {size} values of {dtype} where rank {self.rank} has "
                f"{ours.size} of {ours.dtype}. All processes must build the same net and cast it alike."
            )

    def give_up(self, reason: str) -> NoReturn:
        """Ends all exchanges, and raises an error with the reason."""
        self.fail(reason)
        raise mx.MXNetError(reason)


def bytes_of(*arrays: np.ndarray) -> np.ndarray:
    """Packs arrays as bytes, each after its size."""
    parts = []
    for array in arrays:
        flat = np.ascontiguousarray(array).ravel().view(np.uint8)
        parts += [np.array([flat.size], np.int64).view(np.uint8), flat]
    return np.concatenate(parts)


def arrays_of(data: np.ndarray) -> List[np.ndarray]:
    """Unpacks the bytes of the arrays that `bytes_of` was given."""
    arrays = []
    while data.size:
        end = 8 + int(data[:8].copy().view(np.int64)[0])
        arrays.append(data[8:end].copy())
        data = data[end:]
    return arrays
