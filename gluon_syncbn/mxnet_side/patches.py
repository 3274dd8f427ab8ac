"""Puts functions in the places of MXNet's functions and classes. Each one says why."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, List, Tuple

#: By the owner and the name of a function: what runs in its place, and while it does, what the owner had.
_changes: Dict[Tuple[Any, str], List[Any]] = {}


def replace(around: Callable, owner: Any, name: str) -> None:
    """Puts a function in the place of one of a module or a class; once is enough. After `remove`, `install` does it.

    A call becomes ``around(original, *arguments)``. A class, which is a subclass, takes the place itself.
    """
    _changes.setdefault((owner, name), [around])
    if any(original for _, *original in _changes.values()):
        _put(owner, name)


def install(*wrapped: Dict[Tuple[Any, str], Any]) -> None:
    """Changes MXNet for all programs. `replace` changes what only some need, at its first use."""
    for place, around in [one for each in wrapped for one in each.items()]:
        _changes.setdefault(place, [around])
    for owner, name in list(_changes):
        _put(owner, name)


def _put(owner: Any, name: str) -> None:
    around, *before = change = _changes[owner, name]
    if before:
        return
    original = getattr(owner, name)
    change.append(vars(owner)[name])  # none of them is inherited

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, around if isinstance(around, type) else functools.wraps(original)(wrapper))


def remove() -> None:
    """Puts all originals back."""
    for (owner, name), (_, *before) in _changes.items():
        for original in before:
            setattr(owner, name, original)
        del _changes[owner, name][1:]
