"""What carries arrays between processes, and what a message between them is about."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Callable, List, NamedTuple, Optional, Sequence

import numpy as np


class Label(NamedTuple):
    """What a message is about, the same in every process."""

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


#: Makes one array of two.
Combine = Callable[[np.ndarray, np.ndarray], np.ndarray]


class Transport(ABC):
    """Carries arrays between processes. Every call has a time limit and ends in an `MXNetError` that names the label
    and the ranks that are missing; after that, nothing is carried any more. Calls come from several threads at once,
    and other processes may make them in another order."""

    rank: int
    size: int
    #: Whether some ranks can exchange something without the others.
    partial = True

    @abstractmethod
    def allgather(
        self, label: Label, part: np.ndarray, *, equal: bool, ranks: Optional[Sequence[int]] = None
    ) -> List[np.ndarray]:
        """The parts of all ranks, in their order. ``equal``: of another size or type than ours is an error. ``ranks``:
        only of these, of which this is one; each of them asks for this one, too."""

    @abstractmethod
    def allreduce(
        self, label: Label, array: np.ndarray, combine: Combine = np.add, *, ranks: Optional[Sequence[int]] = None
    ) -> np.ndarray:
        """What ``combine`` makes of the arrays of all ranks, two at a time, in the order of the ranks; the same bits
        everywhere. ``np.add`` may see parts of an array, anything else sees all of it. ``ranks``: as above."""

    @abstractmethod
    def broadcast(self, label: Label, array: np.ndarray) -> np.ndarray:
        """The array of rank 0."""

    def look(self, label: Label) -> None:  # noqa: B027
        """Raises where it is known that another rank has failed. Does not wait."""

    @abstractmethod
    def fail(self, reason: str) -> None:
        """Tells the others, and carries nothing any more."""

    @abstractmethod
    def close(self) -> None:
        """The process ends."""


def bytes_of(*arrays: np.ndarray) -> np.ndarray:
    """Arrays as bytes, each behind its size."""
    parts = []
    for array in arrays:
        flat = np.ascontiguousarray(array).ravel().view(np.uint8)
        parts += [np.array([flat.size], np.int64).view(np.uint8), flat]
    return np.concatenate(parts)


def arrays_of(data: np.ndarray) -> List[np.ndarray]:
    """The bytes of the arrays that `bytes_of` was given."""
    arrays = []
    while data.size:
        end = 8 + int(data[:8].copy().view(np.int64)[0])
        arrays.append(data[8:end].copy())
        data = data[end:]
    return arrays
