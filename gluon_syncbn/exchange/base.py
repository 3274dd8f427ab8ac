"""Defines what every exchange does: combine packed float64 vectors."""

from __future__ import annotations

import functools
from abc import ABC, abstractmethod
from typing import NamedTuple, Optional, Sequence

import numpy as np
from mxnet.context import Context

from .. import _native
from .._native import Agreed, Ticket, Total
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

    def in_groups(self) -> bool:
        return self.group_size is not None or self.groups is not None


def merge_moments(total: np.ndarray, part: np.ndarray) -> np.ndarray:
    """Returns ``[count, mean[C], m2[C]]`` of the values of both; m2 is the sum of squared deviations from the mean.

    Source: Chan, Golub, LeVeque, "Updating formulae and a pairwise algorithm for computing sample variances", 1979.
    """
    n, m = total[0], part[0]
    if m == 0 or n == 0:
        return total if m == 0 else part
    (mean, m2), (other_mean, other_m2) = total[1:].reshape(2, -1), part[1:].reshape(2, -1)
    with _any_value():
        delta = other_mean - mean
        m2 = m2 + other_m2 + delta * delta * (n * m / (n + m))
        return np.concatenate([[n + m], mean + delta * (m / (n + m)), m2])


def _any_value() -> np.errstate:
    """Suppresses NumPy's warnings: a batch that is not finite passes through unchanged."""
    return np.errstate(over="ignore", invalid="ignore")


class Exchange:
    """Combines the statistics of the replicas."""

    #: Whether replicas of other processes take part.
    spans_processes = False
    #: The same, for the core.
    handle: _native.Handle

    def knows(self, layer: LayerInfo) -> bool:
        """Whether the exchange can serve this layer; if not, `learn` has to come first."""
        return True

    def learn(self, layers: Sequence[LayerInfo], more: bool = False) -> None:
        """Takes layers that it serves, in the order in which they were initialised. ``more``: others may follow."""

    def fail(self, reason: str) -> None:
        """Notes that the step has failed here; nothing may be exchanged with the rest of it."""

    def close(self) -> None:
        """Closes the exchange at the end of the process."""

    def forked(self) -> None:
        """Resets the exchange in the child of a fork, which is not a member of its parent's job."""


class Memory(Exchange):
    """The core's own exchange, over this process's contexts. ``gpus`` is ``'nccl'``, ``'host'`` or either if empty."""

    def __init__(self, gpus: str = "") -> None:
        self.handle = _native.memory_exchange(gpus)


class PythonExchange(Exchange, ABC):
    """An exchange in Python. It combines packed float64 vectors, over this process's contexts and others that it
    reaches.

    One thread calls per layer, call and phase. Several layers, and several calls of one layer, call at once. An
    exception of an exchange becomes the failure of the step, with its text. With `spans_processes` the core calls it
    even for a single context, and also to gather.
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
            The ticket of this contribution.
        rows : numpy.ndarray, float64, (contexts, 1 + 2C)
            ``[count, mean[C], m2[C]]``, as in `merge_moments`.
        """
        # Some exchanges can only add. Sums of squares about 0 lose the digits that an offset of the data takes. So the
        # squares are taken about a mean that is near all rows.
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

    def agreed(self, layer: LayerInfo) -> Agreed:
        """Returns the agreement of the processes about the layer."""
        return Agreed(layer.id)
