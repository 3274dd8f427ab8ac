"""What every exchange does: put packed float64 vectors together."""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from typing import Callable, List, NamedTuple, Sequence, Tuple

import numpy as np
from mxnet.context import Context

from .._native import Ticket, Total


class Member(NamedTuple):
    """What an exchange knows of a layer."""

    id: int
    name: str
    contexts: Sequence[Context]
    replicas: int
    channels: int
    pooling: Tuple  # (mode, virtual_devices, group_size)


class Exchange(ABC):
    """Puts the packed statistics of one layer together, over the contexts of this process and whatever it reaches.

    One thread calls per layer, call and phase; several layers, and several calls of one layer, come at once. What an
    exchange raises becomes the failure of the step, with its text.
    """

    #: Beyond this process: then it is called however few contexts there are here, and also to gather.
    processes = False

    @abstractmethod
    def add(self, member: Member, ticket: Ticket, rows: np.ndarray) -> Total:
        """Returns the sum over all rows.

        Parameters
        ----------
        member : Member
            The layer; row i comes from its i-th context.
        ticket : Ticket
            Of this handing-in.
        rows : numpy.ndarray, float64, (contexts, length)
            In the forward ``[count, sum[C], sum of squares[C]]``, in a backward ``[sum dy[C], sum dy*xhat[C]]``.
        """

    def fail(self, reason: str) -> None:  # noqa: B027  (nothing to do within a process)
        """The step has failed here; nothing may be exchanged with what is left of it."""

    def close(self) -> None:  # noqa: B027
        """The process ends."""

    def gather(self, member: Member, ticket: Ticket, values: np.ndarray) -> Total:
        """Returns the values of all processes side by side, in the order of their ranks."""
        return Total(values, 0, ticket.layer)


#: The layers that an exchange serves, in the order in which they were initialised: set by whoever knows them.
roster: Callable[[Exchange], List[Member]]

#: Exchanges that reach other processes, which have to hear of a failure and of the end.
beyond: weakref.WeakSet[Exchange] = weakref.WeakSet()
