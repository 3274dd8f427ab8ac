"""Keeps something of each object of a program's while it lives."""

from __future__ import annotations

import functools
import weakref
from typing import Any, Callable, Dict, Generic, Iterable, List, Optional, Tuple, TypeVar

T = TypeVar("T")


def alive(references: Iterable[weakref.ref]) -> List[Any]:
    """Returns the objects that live, such as those of a dictionary's ``valuerefs()``. Its ``values()``, and the list of
    a ``WeakSet``, end in a RuntimeError if another thread adds one meanwhile.
    """
    return [one for one in (reference() for reference in references) if one is not None]


class OfEach(Generic[T]):
    """What is kept of each object. Objects count as themselves: their class may define ``==`` without a hash,
    as a dataclass does.
    """

    def __init__(self, make: Callable[[], T]) -> None:
        self._make = make
        self._kept: Dict[int, Tuple[weakref.ref, T]] = {}  # by `id`, which is another object's only after the call back

    def __call__(self, one: Any) -> T:
        """Returns what is kept of an object; makes it first."""
        kept = self._kept.get(id(one))
        if kept is None:
            gone = weakref.ref(one, functools.partial(_forget, self._kept, id(one)))
            kept = self._kept.setdefault(id(one), (gone, self._make()))
        return kept[1]

    def get(self, one: Any) -> Optional[T]:
        kept = self._kept.get(id(one))
        return kept and kept[1]

    def objects(self) -> List[Any]:
        """Returns those of which something is kept."""
        return alive([gone for gone, _ in list(self._kept.values())])


def _forget(kept: Dict[int, Any], key: int, gone: weakref.ref) -> None:
    if kept.get(key, (None,))[0] is gone:
        del kept[key]
