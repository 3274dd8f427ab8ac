"""Locks that the child of a fork finds open: a thread that the child does not have may have held one."""

from __future__ import annotations

import os
import weakref
from typing import Any, Callable


def give(owner: Any, **made: Callable[[], Any]) -> None:
    """Gives an object attributes that are made like this, and again in the child of a fork, where the thread that forks
    leaves a lock that it holds as it has entered it.
    """
    reference = weakref.ref(owner)

    def make() -> None:
        for name, new in made.items() if reference() is not None else ():
            setattr(reference(), name, new())

    make()
    os.register_at_fork(after_in_child=make)
