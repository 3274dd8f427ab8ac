"""Converts between the two kinds of arrays and symbols: ``mx.nd`` or ``mx.sym``, and ``mx.np``. Tells floating-point
arrays from others.

Operators of one kind refuse arrays of the other. A converted array shares its memory and its record for autograd.
"""

from __future__ import annotations

from typing import Any, Callable, List, Sequence

import mxnet as mx
import numpy as np
from mxnet.ndarray.sparse import BaseSparseNDArray
from mxnet.util import is_np_array

#: MXNet's type, whose NumPy arrays are structures with one field.
BFLOAT16 = np.dtype([("bfloat16", np.uint16)])


def classic(value: Any) -> Any:
    """Returns the value as one of ``mx.nd`` or ``mx.sym``."""
    return value.as_nd_ndarray()


def dense(value: Any) -> Any:
    """Returns a sparse array as a dense one, as MXNet does for operators that take no sparse one. Custom ones fail."""
    return value.tostype("default") if isinstance(value, BaseSparseNDArray) else value


def like(value: Any, given: Any) -> Any:
    """Returns the value as the kind of ``given``."""
    return value.as_np_ndarray() if isinstance(given, (mx.np.ndarray, mx.sym.np._Symbol)) else classic(value)


def variable(name: str) -> mx.sym.Symbol:
    """Returns a variable of the kind that Gluon's layers expect now."""
    var = mx.sym.var(name)
    return var.as_np_ndarray() if is_np_array() else var


def is_bfloat16(dtype: Any) -> bool:
    """Whether ``dtype`` is bfloat16, as a type or as a name."""
    return dtype == "bfloat16" if isinstance(dtype, str) else dtype == BFLOAT16


def is_float(array: mx.nd.NDArray) -> bool:
    return np.dtype(array.dtype).kind == "f" or is_bfloat16(array.dtype)


def values(array: mx.nd.NDArray) -> np.ndarray:
    """Returns the values as NumPy can compute with them, bfloat16 as float32."""
    found = array.asnumpy()
    return (found.view(np.uint16).astype(np.uint32) << 16).view(np.float32) if is_bfloat16(found.dtype) else found


def arrays_of(value: Any) -> List[Any]:
    """Returns the arrays and symbols in a value, also within lists, tuples and dictionaries."""
    found: List[Any] = []
    map_arrays(found.append, value)
    return found


def map_arrays(change: Callable[[Any], Any], value: Any) -> Any:
    """Returns the value with each array changed."""
    if isinstance(value, (mx.nd.NDArray, mx.sym.Symbol)):
        return change(value)
    if isinstance(value, (list, tuple)):
        entries: Sequence[Any] = [map_arrays(change, entry) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if isinstance(value, dict):
        return {key: map_arrays(change, entry) for key, entry in value.items()}
    return value
