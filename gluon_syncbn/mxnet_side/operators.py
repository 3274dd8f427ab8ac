"""Provides MXNet's own operators, whatever has replaced them since: automatic mixed precision, or a user.

``mxnet.contrib.amp.init`` replaces the functions of ``mx.nd`` and ``mx.sym``. Its lists give ``Custom`` float32 inputs
only, because ``Custom`` may be any operator. `SyncBatchNorm` takes float16 as it is, as ``nn.BatchNorm`` does, and
casts would double the memory of its input and output. The functions here are made as MXNet makes its own. So they do
not depend on whether ``amp.init`` ran before or after the import of this package.

A script may also put this package's symbol into the place of ``mx.sym.BatchNorm``, which must not call itself then.
"""

from __future__ import annotations

import ctypes
from typing import Any, Callable

import mxnet as mx
from mxnet.base import _LIB, OpHandle, c_str, check_call
from mxnet.ndarray.register import _make_ndarray_function
from mxnet.symbol.register import _make_symbol_function


class Operators:
    """Stands in for ``mx.nd`` or ``mx.sym``. Whatever else is asked for is as it is there now."""

    def __init__(self, module: Any, make: Callable[[Any, str, str], Callable[..., Any]]) -> None:
        self._module = module
        for name in ("BatchNorm", "Cast", "Custom", "SwapAxis"):
            handle = OpHandle()
            check_call(_LIB.NNGetOpHandle(c_str(name), ctypes.byref(handle)))
            setattr(self, name, make(handle, name, name))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


SYMBOLS = Operators(mx.sym, _make_symbol_function)
_ARRAYS = Operators(mx.nd, _make_ndarray_function)


def own(F: Any) -> Operators:
    return _ARRAYS if F is mx.nd else SYMBOLS
