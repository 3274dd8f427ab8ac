"""Provides MXNet's own operators, whatever has replaced them since: automatic mixed precision, or a user.

``mxnet.contrib.amp.init`` replaces the functions of ``mx.nd`` and ``mx.sym``. Its lists give ``Custom`` float32 inputs
only, because ``Custom`` may be any operator. `SyncBatchNorm` takes float16 as it is, as ``nn.BatchNorm`` does, and
casts would double the memory of its input and output. The functions here are made as MXNet makes its own. So they do
not depend on whether ``amp.init`` ran before or after the import of this package.

A script may also put this package's symbol into the place of ``mx.sym.BatchNorm``, which must not call itself then.
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

    BatchNorm: Callable[..., Any]
    Cast: Callable[..., Any]
    Custom: Callable[..., Any]
    SwapAxis: Callable[..., Any]


class _Symbols:
    """Stands in for the whole of ``mx.sym``, where a layer of MXNet's looks up its operator."""

    def __getattr__(self, name: str) -> Any:
        return getattr(mx.sym, name)

    @property
    def BatchNorm(self) -> Callable[..., Any]:
        return _SYM.BatchNorm


SYMBOLS = _Symbols()


def own(F: Any) -> Operators:
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
