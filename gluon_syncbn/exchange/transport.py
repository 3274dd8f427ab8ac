"""Defines the interface that carries arrays between processes, and the labels of messages."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Callable, List, NamedTuple, Optional, Sequence

import numpy as np


class Label(NamedTuple):
    """Names an exchange. The first five fields identify its messages, and are the same in every process."""

    kind: str
    key: int = 0
    node: int = -1
    call: int = 0
    phase: int = 0
    what: str = ""  # for messages
    layer: int = 0  # in this process, for its time limit
    longer: float = 0.0  # seconds beyond that limit

    def __str__(self) -> str:
        return self.what


#: Combines two arrays.
Combine = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Transport(ABC):
    """Carries arrays between processes.

    Every call has a time limit and ends in an `MXNetError` that names the label and the missing ranks. After that, no
    call succeeds. Several threads call at once, and other processes may call in another order.
    """

    rank: int
    size: int
    #: Whether some ranks can exchange something without the others.
    partial = True

    @abstractmethod
    def allgather(
        self, label: Label, part: np.ndarray, *, equal: bool, ranks: Optional[Sequence[int]] = None
    ) -> List[np.ndarray]:
        """Returns the parts of all ranks, in their order. Each part is a vector.

        ``equal``: parts of another size or type than ours are an error. ``ranks``: only these ranks take part; this
        rank is one of them, and each of them makes the same call.
        """

    @abstractmethod
    def allreduce(
        self, label: Label, array: np.ndarray, combine: Combine = np.add, *, ranks: Optional[Sequence[int]] = None
    ) -> np.ndarray:
        """Combines the arrays of all ranks, two at a time, in the order of the ranks; bitwise equal everywhere.

        ``np.add`` may get parts of an array, any other function gets all of it. ``ranks``: as above.
        """

    @abstractmethod
    def broadcast(self, label: Label, array: np.ndarray) -> np.ndarray:
        """Returns the array of rank 0."""

    def poll(self, label: Label) -> None:  # noqa: B027
        """Raises an error if another rank is known to have failed. Does not wait."""

    @abstractmethod
    def fail(self, reason: str) -> None:
        """Tells the other ranks of a failure, and carries nothing any more."""

    @abstractmethod
    def close(self) -> None:
        """Closes the transport at the end of the process."""


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
