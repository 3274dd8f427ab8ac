"""Combines rows, one of each process, by an exchange of the core, and finds who has the members of groups."""

from ctypes import byref, c_bool, c_char_p, c_double, c_int, c_int64, c_size_t, c_void_p

import libraries
import numpy as np
from places import SOURCES, SUPPORT

from gluon_syncbn._native import MXNetError

_SOURCE = [SUPPORT / "exchange_driver.cc", SOURCES / "pooling" / "pooling.cc"]
_library = libraries.build("exchange", _SOURCE, ["-O2", "-fvisibility=hidden"])
_library.allreduce.restype = c_char_p
_library.allreduce.argtypes = [c_void_p, c_bool, *[c_int64] * 4, c_char_p, c_double, c_size_t, *[c_void_p] * 3]
_library.sent.restype, _library.sent.argtypes = c_int64, [c_void_p]


def combine(exchange, merges, layer, node, call, phase, name, timeout, length, row, out):
    """Writes the result of ``length`` float64 at one address to another. Returns the seconds that it took. MXNetError:
    there is none."""
    given = exchange, merges, layer, node, call, phase, name, timeout, length, row, out
    taken = c_double()
    problem = _library.allreduce(*given, byref(taken))
    if problem is not None:
        raise MXNetError(problem.decode())
    return taken.value


def allreduce(exchange, id, row, merges=False):
    """Their sum, or the moments of all values. `id`: layer, node, call, phase, name and time limit."""
    *numbers, name, timeout = id
    out = np.empty_like(row)
    combine(exchange, merges, *numbers, name.encode(), timeout, row.size, row.ctypes.data, out.ctypes.data)
    return out


def reach(pooling, replicas, rank):
    """Of one process, where each has so many replicas: the ranks that share groups with it, these groups' members among
    the replicas of those ranks, the group of each, and the first of its own."""
    groups, out = pooling.group_of_each(), (c_int64 * (5 + 3 * sum(replicas)))()
    of_each, of_ranks = (c_int * len(groups))(*groups), (c_size_t * len(replicas))(*replicas)
    given = c_int64(pooling.group_size or 0), c_size_t(len(groups)), of_each
    _library.reach(*given, c_size_t(len(replicas)), of_ranks, c_size_t(rank), out)
    lists, values = [], iter(out)
    for _ in range(4):
        lists.append(np.array([next(values) for _ in range(next(values))], int))
    return (*lists[:3], int(lists[3][0]))


def sent(exchange):
    """The number of messages of this process to the others."""
    return _library.sent(exchange)
