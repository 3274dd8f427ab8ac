"""Provides MXNet's operators without automatic mixed precision.

``mxnet.contrib.amp.init`` replaces the functions of ``mx.nd`` and ``mx.sym``. Its lists give ``Custom`` float32 inputs
only, because ``Custom`` may be any operator. `SyncBatchNorm` takes float16 as it is, as ``nn.BatchNorm`` does, and
casts would double the memory of its input and output. The functions here are made as MXNet makes its own. So they do
not depend on whether ``amp.init`` ran before or after the import of this package.
"""

from __future__ import annotations

import ctypes
from typing import Any, Callable, NamedTuple

import mxnet as mx
from mxnet.base import _LIB, OpHandle, c_str, check_call
from mxnet.ndarray.register import _make_ndarray_function
from mxnet.symbol.register import _make_symbol_function


class Operators(NamedTuple):
    """Stands in for ``mx.nd`` or ``mx.sym``."""

    Cast: Callable[..., Any]
    Custom: Callable[..., Any]
    SwapAxis: Callable[..., Any]


def without_amp(F: Any) -> Operators:
    return _ND if F is mx.nd else _SYM


def _make(make: Callable[[Any, str, str], Callable[..., Any]]) -> Operators:
    functions = []
    for name in Operators._fields:
        handle = OpHandle()
        check_call(_LIB.NNGetOpHandle(c_str(name), ctypes.byref(handle)))
        functions.append(make(handle, name, name))
    return Operators(*functions)


_ND = _make(_make_ndarray_function)
_SYM = _make(_make_symbol_function)
