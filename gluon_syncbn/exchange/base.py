"""What every exchange does: put packed float64 vectors together."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import NamedTuple, Optional, Sequence

import numpy as np
from mxnet.context import Context

from .. import _native
from .._native import Agreed, Ticket, Total, Turn


class LayerInfo(NamedTuple):
    """What an exchange knows of a layer."""

    id: int
    name: str
    contexts: Sequence[Context]
    replicas: int
    channels: int
    mode: str
    virtual_devices: int
    group_size: Optional[int]


def merge_moments(total: np.ndarray, part: np.ndarray) -> np.ndarray:
    """``[count, mean[C], m2[C]]`` of the values of both, m2 being the sum of squared deviations from the mean. Source:
    Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979."""
    n, m = total[0], part[0]
    if m == 0 or n == 0:
        return total if m == 0 else part
    (mean, m2), (other_mean, other_m2) = total[1:].reshape(2, -1), part[1:].reshape(2, -1)
    with _any_value():
        delta = other_mean - mean
        m2 = m2 + other_m2 + delta * delta * (n * m / (n + m))
        return np.concatenate([[n + m], mean + delta * (m / (n + m)), m2])


def _any_value() -> np.errstate:
    """A batch that is not finite is no reason for a warning here: it comes out as it went in."""
    return np.errstate(over="ignore", invalid="ignore")


class Exchange:
    """Brings the statistics of the replicas together."""

    #: Whether replicas of other processes take part.
    spans_processes = False
    #: The same, for the core.
    handle: _native.Handle

    def knows(self, layer: LayerInfo) -> bool:
        """Whether it can serve this one; if not, it has to `learn` of it first."""
        return True

    def learn(self, layers: Sequence[LayerInfo]) -> None:
        """All that it serves, in the order in which they were initialised."""

    def fail(self, reason: str) -> None:
        """The step has failed here; nothing may be exchanged with what is left of it."""

    def close(self) -> None:
        """The process ends."""

    def forked(self) -> None:
        """Here is the child of a fork, which is no member of its parent's job."""


class Memory(Exchange):
    """The core's own, for the contexts of this process; GPUs by ``'nccl'``, over the ``'host'``, or as it may be."""

    def __init__(self, gpus: str = "") -> None:
        self.handle = _native.memory_exchange(gpus)


class PythonExchange(Exchange, ABC):
    """One that is written in Python. It puts packed float64 vectors together, over the contexts of this process and
    whatever it reaches.

    One thread calls per layer, call and phase; several layers, and several calls of one layer, come at once. What an
    exchange raises becomes the failure of the step, with its text. With `spans_processes` it is called however few
    contexts there are here, and also to gather.
    """

    @functools.cached_property
    def handle(self) -> _native.Handle:  # type: ignore[override]
        return _native.python_exchange(self, self.spans_processes)

    def merge(self, layer: LayerInfo, ticket: Ticket, rows: np.ndarray) -> Total:
        """Returns the moments of all values, in the forward.

        Parameters
        ----------
        layer : LayerInfo
            The layer; row i comes from its i-th context.
        ticket : Ticket
            Of this handing-in.
        rows : numpy.ndarray, float64, (contexts, 1 + 2C)
            ``[count, mean[C], m2[C]]``, as `merge_moments` has them.
        """
        # What can only be added are sums. Those of squares lose the digits that an offset of the data takes, so they
        # are taken about a mean that all rows are near to.
        counts, (means, m2s) = rows[:, :1], np.split(rows[:, 1:], 2, axis=1)
        origin = means[np.argmax(counts[:, 0])]
        with _any_value():
            apart = np.where(counts > 0, means - origin, 0)
            sums = np.concatenate([counts, counts * apart, m2s + counts * apart**2], axis=1)
        total = self.add(layer, ticket, sums)
        count, (apart, squares) = total.values[0], np.split(total.values[1:], 2)
        if count == 0:
            return total
        with _any_value():
            apart = apart / count
            squares = squares - count * apart**2
            squares[squares < 0] = 0  # rounding; a NaN stays
            return total._replace(values=np.concatenate([[count], origin + apart, squares]))

    @abstractmethod
    def add(self, layer: LayerInfo, ticket: Ticket, rows: np.ndarray) -> Total:
        """Returns the sum over all rows, float64, of shape (contexts, length): in a backward
        ``[sum dy[C], sum dy*xhat[C]]``. The arguments are those of `merge`."""

    def gather(self, layer: LayerInfo, ticket: Ticket, rows: np.ndarray) -> Total:
        """Returns the one row of each process side by side, in the order of their ranks."""
        return Total(rows[0], 0, ticket.layer)

    def gpus_of_all_processes(self, layer: LayerInfo) -> int:
        """How many replicas, in all processes, exchange their statistics on GPUs; 0 where they do so over the host."""
        return 0

    def turn(self, layer: LayerInfo, ticket: Ticket, devices: Sequence[int], counts: np.ndarray) -> Turn:
        """Returns whose turn it is when, for GPUs of several processes. Waits until all processes are ready.

        Parameters
        ----------
        layer : LayerInfo
            The layer.
        ticket : Ticket
            Of this handing-in.
        devices : sequence of int, (replicas,)
            The GPUs of the replicas of this process.
        counts : numpy.ndarray, float64, (replicas, slots)
            The samples of their slots.
        """
        return alone(ticket.layer, counts)

    def agreed(self, layer: LayerInfo) -> Agreed:
        """What the processes have agreed on about the layer."""
        return Agreed(layer.id, False)

    def check(self, layer: LayerInfo, ticket: Ticket) -> None:
        """GPUs take long over what has been agreed on: raises where another process has failed."""


def alone(key: int, counts: np.ndarray) -> Turn:
    """The turn of a collective that stays within this process."""
    return Turn(0, -1, 0, len(counts), 0, b"", counts.ravel(), key)
