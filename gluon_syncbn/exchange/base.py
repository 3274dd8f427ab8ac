"""What every exchange does: put packed float64 vectors together."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import List, Protocol

import numpy as np
from mxnet.context import Context

from .._native import Ticket, Total


class Member(Protocol):
    """What an exchange knows of a layer."""

    name: str
    contexts: List[Context]


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

    def gather(self, member: Member, ticket: Ticket, values: np.ndarray) -> Total:
        """Returns the values of all processes side by side, in the order of their ranks."""
        return Total(values, 0, ticket.layer)
