"""The two kinds of arrays and symbols: those of ``mx.nd`` and ``mx.sym``, and those of ``mx.np``.

Operators of one kind refuse arrays of the other. Both share memory and what is recorded of it.
"""

from __future__ import annotations

from typing import Any

import mxnet as mx
from mxnet.util import is_np_array


def classic(value: Any) -> Any:
    """As one of ``mx.nd`` or ``mx.sym``."""
    return value.as_nd_ndarray()


def like(value: Any, given: Any) -> Any:
    """Of the kind of ``given``."""
    return value.as_np_ndarray() if is_np(given) else classic(value)


def is_np(value: Any) -> bool:
    return isinstance(value, (mx.np.ndarray, mx.sym.np._Symbol))


def variable(name: str) -> mx.sym.Symbol:
    """Of the kind that Gluon's layers expect now."""
    var = mx.sym.var(name)
    return var.as_np_ndarray() if is_np_array() else var
