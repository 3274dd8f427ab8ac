"""Checks arguments: an error names the argument, its value and the expectation.

Each check returns a plain Python value. ``nn.BatchNorm`` also takes NumPy's scalars, but JSON and ctypes do not. Unlike
in Python, a boolean is not a number here.
"""

from __future__ import annotations

import ast
import numbers
import sys
from typing import Any, List, NoReturn, Sequence

import mxnet as mx
import numpy as np

_BOOLEANS = (bool, np.bool_)

#: More devices than any job has, virtual ones included. Their products do not overflow in the native core.
MOST_DEVICES = 65535
#: The largest number of items of one kind that a message names.
NAMED = 5


def described(value: Any) -> str:
    """Describes a value for an error: arrays are summarised, not printed."""
    if isinstance(value, (list, tuple)) and any(isinstance(item, (mx.nd.NDArray, np.ndarray)) for item in value):
        return f"{type(value).__name__} of {len(value)}"
    if isinstance(value, mx.nd.NDArray):
        kind = "mx.np.ndarray" if isinstance(value, mx.np.ndarray) else type(value).__name__
        dtype = np.dtype(value.dtype)
        name = dtype.names[0] if dtype.names else dtype  # bfloat16 is a structure of one field
        return f"{kind} of shape {value.shape} and type {name} on {value.ctx}"
    if isinstance(value, np.ndarray):
        return f"numpy.ndarray of shape {value.shape}"
    return repr(value)


def refuse(name: str, value: Any, expected: str) -> NoReturn:
    raise ValueError(f"{name}: {described(value)} was given, expected {expected}")


def is_a(kind: type, value: Any) -> bool:
    return isinstance(value, kind) and not isinstance(value, _BOOLEANS)


def whole(name: str, value: Any, low: int, high: int, expected: str = "") -> int:
    if not is_a(numbers.Integral, value) or not low <= value <= high:
        refuse(name, value, expected or f"a whole number from {low} to {high}")
    return int(value)


def number(name: str, value: Any, low: float, high: float, expected: str) -> float:
    if isinstance(value, np.floating):  # NumPy 2 would round `high` to the value's type before it compares
        value = float(value)
    if not is_a(numbers.Real, value) or not low <= value <= high:
        refuse(name, value, expected)
    return float(value)


def flag(name: str, value: Any) -> bool:
    if not isinstance(value, _BOOLEANS):
        refuse(name, value, "True or False")
    return bool(value)


def one_of(name: str, value: Any, choices: Sequence[str]) -> Any:
    if not isinstance(value, str) or value not in choices:
        refuse(name, value, f"one of {tuple(choices)}")
    return value


def devices(name: str, value: Any) -> int:
    """A number of devices, or of things that are counted like devices."""
    return whole(name, value, 1, MOST_DEVICES)


def block(name: str, value: Any) -> mx.gluon.Block:
    if not isinstance(value, mx.gluon.Block):
        refuse(name, value, "a gluon.Block")
    return value


def contexts(name: str, value: Any, expected: str = "a list of mx.Context objects") -> List[mx.Context]:
    """A list of at least one context. A context by itself is such a list."""
    found = [value] if isinstance(value, mx.Context) else value
    listed = isinstance(found, (list, tuple)) and len(found) > 0
    if not listed or not all(isinstance(context, mx.Context) for context in found):
        refuse(name, value, expected)
    return list(found)


def seconds(name: str, value: Any) -> float:
    """A time limit of at most some thirty years, because an endless wait is not allowed."""
    return number(name, value, sys.float_info.min, 1e9, "a number of seconds above 0, at most 1e9")


def seed(name: str, value: Any) -> int:
    return whole(name, value, 0, 2**64 - 1, "a whole number from 0 to 2**64 - 1")


def some(texts: Sequence[str], separator: str) -> str:
    """Joins the first texts, and says how many more there are."""
    return separator.join(texts[:NAMED]) + (f"{separator}and {len(texts) - NAMED} more" if len(texts) > NAMED else "")


def value_of(text: Any) -> Any:
    """Returns the number, truth value or None that MXNet reads in a text, ``true`` as ``True``. Other text stays."""
    if not isinstance(text, str):
        return text
    try:
        return ast.literal_eval(text.strip().capitalize())
    except (ValueError, SyntaxError):
        return text
