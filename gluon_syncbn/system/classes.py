"""Derives a class that has the name of another one, for objects whose class changes."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Callable


def _derive(own: Any, *bases: Any) -> Any:
    """Returns a class with the name of ``own``, which is one of its bases and its ``_own_class``."""
    named = {"__doc__": own.__doc__, "__module__": own.__module__, "_own_class": own}
    if (own.__reduce_ex__, own.__reduce__) == (object.__reduce_ex__, object.__reduce__):  # else it is the program's
        named["__reduce_ex__"] = _reduced
    return type(own.__name__, bases, named)


derived: Callable[..., Any] = lru_cache(maxsize=None)(_derive)


def _reduced(one: Any, protocol: Any) -> Any:
    """For ``pickle``, which would find another class under that name."""
    _, _, *state = list(object.__reduce_ex__(one, protocol))
    return (_made, (one._own_class, *type(one).__bases__), *state)


def _made(*classes: Any) -> Any:
    return object.__new__(derived(*classes))
