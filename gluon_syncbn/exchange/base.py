"""Defines what every exchange and every transport has, and what an exchange knows of a layer."""

from __future__ import annotations

from typing import NamedTuple, Optional, Sequence

from mxnet.context import Context

from .. import _native
from .groups import Groups


class LayerInfo(NamedTuple):
    """The properties of a layer that an exchange needs."""

    id: int
    name: str
    contexts: Sequence[Context]
    replicas: int
    channels: int
    mode: str
    virtual_devices: int
    group_size: Optional[int]
    groups: Optional[Groups] = None


class Exchange:
    """Combines the statistics of the replicas. An exception in it becomes the failure of the step, with its text."""

    def __init__(self, handle: _native.Handle) -> None:
        self.handle = handle


class Transport:
    """Knows the processes of a job, and carries their messages.

    The native core writes, reads and awaits messages (csrc/exchange/processes.cc). It sends them over MPI, or gives
    them to the transport (`next_message`), which brings them to the core of their readers (`deliver`).
    """

    #: What the core needs to send over MPI itself.
    mpi: Optional[_native.Mpi] = None
    #: Bytes from which the transport itself adds arrays of gradients, of all ranks only; None: it adds none.
    adds_from: Optional[int] = None
    #: The core's exchange over this transport alone, which `open` gives.
    handle: _native.Handle

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size

    def open(self, handle: _native.Handle) -> None:
        """Takes the core's exchange, whose messages it carries."""
        self.handle = handle

    def close(self) -> None:
        """Closes the transport at the end of the process, which the core has told the others."""

    def forked(self) -> None:
        """Closes in the child of a fork what belongs to its parent."""

    def split(self, leaders: Sequence[int]) -> None:
        """Prepares exchanges of these ranks, one for each machine. All ranks call it at once."""

    def has_failed(self) -> bool:
        return _native.fate_of(self.handle, self.rank) not in ("", "has ended")
