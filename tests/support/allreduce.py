"""Combines rows, one of each process, by an exchange of the core."""

from ctypes import c_bool, c_char_p, c_double, c_int64, c_size_t, c_void_p

import libraries
import numpy as np
from places import SUPPORT

from gluon_syncbn._native import MXNetError

_library = libraries.build("exchange", [SUPPORT / "exchange_driver.cc"], ["-O2", "-fvisibility=hidden"])
_library.allreduce.restype = c_char_p
_library.allreduce.argtypes = [c_void_p, c_bool, *[c_int64] * 4, c_char_p, c_double, c_size_t, c_void_p, c_void_p]
_library.sent.restype, _library.sent.argtypes = c_int64, [c_void_p]


def combine(exchange, merges, layer, node, call, phase, name, timeout, length, row, out):
    """Writes the result of ``length`` float64 at one address to another. MXNetError: there is none."""
    problem = _library.allreduce(exchange, merges, layer, node, call, phase, name, timeout, length, row, out)
    if problem is not None:
        raise MXNetError(problem.decode())


def allreduce(exchange, id, row, merges=False):
    """Their sum, or the moments of all values. `id`: layer, node, call, phase, name and time limit."""
    *numbers, name, timeout = id
    out = np.empty_like(row)
    combine(exchange, merges, *numbers, name.encode(), timeout, row.size, row.ctypes.data, out.ctypes.data)
    return out


def sent(exchange):
    """The number of messages of this process to the others."""
    return _library.sent(exchange)
