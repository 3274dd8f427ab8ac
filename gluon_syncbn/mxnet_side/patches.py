"""Puts functions in the places of MXNet's functions and classes, for good. Each one says why."""

from __future__ import annotations

import functools
from typing import Any, Callable, Dict, Tuple

#: What runs in the place of a function, by its owner and name.
_changes: Dict[Tuple[Any, str], Callable] = {}


def replace(around: Callable, owner: Any, name: str) -> None:
    """Puts a function in the place of one of a module or a class; once is enough.

    A call becomes ``around(original, *arguments)``. A class, which is a subclass, takes the place itself.
    """
    if (owner, name) in _changes:
        return
    _changes[owner, name] = around
    original = getattr(owner, name)

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    setattr(owner, name, around if isinstance(around, type) else functools.wraps(original)(wrapper))


def install(*wrapped: Dict[Tuple[Any, str], Any]) -> None:
    """Changes MXNet for all programs. `replace` changes what only some need, at its first use."""
    for (owner, name), around in (one for each in wrapped for one in each.items()):
        replace(around, owner, name)
