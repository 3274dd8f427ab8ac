"""Converts between the two kinds of arrays and symbols: ``mx.nd`` or ``mx.sym``, and ``mx.np``.

Operators of one kind refuse arrays of the other. A converted array shares its memory and its record for autograd.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx
from mxnet.util import is_np_array


def classic(value: Any) -> Any:
    """Returns the value as one of ``mx.nd`` or ``mx.sym``."""
    return value.as_nd_ndarray()


def like(value: Any, given: Any) -> Any:
    """Returns the value as the kind of ``given``."""
    return value.as_np_ndarray() if isinstance(given, (mx.np.ndarray, mx.sym.np._Symbol)) else classic(value)


def variable(name: str) -> mx.sym.Symbol:
    """Returns a variable of the kind that Gluon's layers expect now."""
    var = mx.sym.var(name)
    return var.as_np_ndarray() if is_np_array() else var
