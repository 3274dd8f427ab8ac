"""Defines the interface that carries arrays between processes, and the labels of messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import List, NamedTuple, Optional, Sequence, Union

import mxnet as mx
import numpy as np

from .. import _native

_KINDS = ("agreement", "broadcast", "exchange", "gradient")


class Label(NamedTuple):
    """Names an exchange. The first four fields identify its messages, and are the same in every process."""

    kind: str  # one of these
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
    waits for messages (csrc/exchange/processes.cc). It sends them over MPI, or gives them to the transport
    (`next_message`), which brings them to the core of their readers (`deliver`).
    """

    #: What the core needs to send over MPI itself.
    mpi: Optional[_native.Mpi] = None
    #: Bytes from which the transport itself adds arrays of gradients, of all ranks only; None: it adds none.
    adds_from: Optional[int] = None
    #: The core's exchange over this transport alone, which `open` gives.
    handle: _native.Handle

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._closed = False

    # ---- what a transport brings ---------------------------------------------------------------------------

    def open(self, handle: _native.Handle) -> None:
        """Takes the core's exchange, whose messages it carries."""
        self.handle = handle

    @abstractmethod
    def close(self) -> None:
        """Closes the transport at the end of the process, which the core has told the others."""

    def forked(self) -> None:
        """Closes in the child of a fork what belongs to its parent."""
        self._closed = True

    def split(self, leaders: Sequence[int]) -> None:  # noqa: B027
        """Prepares exchanges of these ranks, one for each machine. All ranks call it at once."""

    # ---- for everybody -------------------------------------------------------------------------------------

    def allgather(
        self,
        label: Label,
        part: Union[np.ndarray, List[np.ndarray]],
        *,
        equal: bool,
        ranks: Optional[Sequence[int]] = None,
    ) -> List[np.ndarray]:
        """Returns the parts of all ranks, in their order. Each part is a vector. In a list, each rank gets its own.

        ``equal``: parts of another size or type than ours are an error. ``ranks``: only these ranks take part.
        """
        ranks = range(self.size) if ranks is None else ranks
        own = part if isinstance(part, list) else [part]
        messages = [one.dtype.str.encode().ljust(8) + np.ascontiguousarray(one).tobytes() for one in own]
        try:
            identity = _KINDS.index(label.kind), label.key, label.call, label.phase
            got = _native.bytes_of(self.handle, ranks, identity, label.what, messages)
        except mx.MXNetError as error:
            self.fail(str(error))
            raise
        parts = [m[8:].copy().view(bytes(m[:8]).decode().strip()) for m in got]
        for rank, theirs in zip(ranks, parts if equal else ()):
            self.check_alike(label, rank, theirs.size, theirs.dtype, own[self.rank % len(own)])
        return parts

    def fail(self, reason: str) -> None:
        """Tells the other ranks of a failure. Nothing is carried any more."""
        _native.processes_failed(self.handle, reason)

    def has_failed(self) -> bool:
        return _native.fate_of(self.handle, self.rank) not in ("", "has ended")

    def check_alike(self, label: Label, rank: int, size: int, dtype: np.dtype, ours: np.ndarray) -> None:
        """Checks that an array from a rank has our array's size and type."""
        if (size, dtype) != (ours.size, ours.dtype):
            reason = (
                f"in {label}, rank {rank} sent {size} values of {dtype} where rank {self.rank} has "
                f"{ours.size} of {ours.dtype}. All processes must build the same net and cast it alike."
            )
            self.fail(reason)
            raise mx.MXNetError(reason)
