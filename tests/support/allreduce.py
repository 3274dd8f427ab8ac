"""Combines rows, one of each process, by an exchange of the core."""

import numpy as np

from gluon_syncbn import _native


def allreduce(exchange, id, row, merges=False):
    """Their sum, or the moments of all values. `id`: layer, node, call, phase, name and time limit."""
    out = np.empty_like(row)
    _native.allreduce(exchange, merges, *id, row.size, row.ctypes.data, out.ctypes.data)
    return out
