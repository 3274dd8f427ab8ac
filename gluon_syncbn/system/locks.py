"""Locks that the child of a fork finds open: a thread that the child does not have may have held one."""

from __future__ import annotations

import weakref
from typing import Any, Callable, List, Tuple

_all: List[Tuple[Any, str, Callable[[], Any]]] = []


def give(owner: Any, **made: Callable[[], Any]) -> None:
    """Gives an object attributes that are made like this, and again in the child of a fork.

    The thread that forks leaves a lock that it holds as it has entered it.
    """
    for name, make in made.items():
        setattr(owner, name, make())
        _all.append((weakref.ref(owner), name, make))


def forked() -> None:
    """Called in the child of a fork."""
    for reference, name, make in _all:
        owner = reference()
        if owner is not None:
            setattr(owner, name, make())
