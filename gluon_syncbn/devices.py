"""Which contexts take part, and CPU contexts that can."""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import Iterator, List, Optional, Sequence

import mxnet as mx
from mxnet.context import Context

from . import _native
from .steps import drain


@contextmanager
def devices(contexts: Sequence[Context]) -> Iterator[None]:
    """Lets only these contexts take part, for example for a short last batch.

    ::

        with gluon_syncbn.devices(contexts[:3]):
            with autograd.record(): ...          # a step on three of the contexts

    Waits for all work on entering and leaving, so that no step is half in and half out. Holds for the whole process.

    Parameters
    ----------
    contexts : list of Context
        At least one, each once.

    Raises
    ------
    ValueError
        Where the list is empty, repeats a context or holds something else.
    """
    if isinstance(contexts, Context):
        contexts = [contexts]
    names = [str(context) for context in contexts] if isinstance(contexts, (list, tuple)) else []
    if not names or len(set(names)) < len(names) or not all(isinstance(c, Context) for c in contexts):
        raise ValueError(f"contexts: {contexts!r} was given, expected a list of different mx.Context objects")
    global _active
    if _active:
        raise ValueError("contexts: devices(...) is active already; leave that block first")
    mx.nd.waitall()
    _active = True
    _native.reset()
    _native.devices(names)
    try:
        yield
        mx.nd.waitall()
    except BaseException as error:
        _native.fail(f"{type(error).__name__} left gluon_syncbn.devices(...): {error}")
        drain()
        raise
    finally:
        _native.devices([])
        _native.reset()
        _active = False


_active = False


def cpu_devices(n: int, temp_copies: Optional[int] = None) -> List[Context]:
    """``n`` CPU contexts whose operators can wait for each other. Call it before the first MXNet operator runs.

    MXNet's operators on all CPU contexts share one pool of temporary space and take from it in the order in which they
    were issued. With its default of 4 copies, a later operator of the first replica stands before the second replica's
    first one while the first replica waits for the second: a deadlock. This sets ``MXNET_CPU_TEMP_COPY``, and
    ``MXNET_CPU_PARALLEL_RAND_COPY`` for Dropout, so that there are more copies than such operators in a step. Values
    that are larger already stay.

    Parameters
    ----------
    n : int
        Number of contexts.
    temp_copies : int, optional
        Copies of temporary space, by default 1024 for each context and at least 4096. Each keeps the largest space it
        ever served, so a big net on a small machine may want fewer: about four times the number of operators in one
        step over all contexts.

    Returns
    -------
    list of Context
        ``[cpu(0), ..., cpu(n - 1)]``

    Raises
    ------
    ValueError
        Where an argument is not a positive whole number.
    """
    for name, value in (("n", n), ("temp_copies", temp_copies)):
        if value is None and name == "temp_copies":
            continue
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: {value!r} was given, expected a whole number above 0")
    at_least("MXNET_CPU_TEMP_COPY", temp_copies or max(4096, 1024 * n))
    at_least("MXNET_CPU_PARALLEL_RAND_COPY", 16 * n)
    return [mx.cpu(i) for i in range(n)]


def at_least(variable: str, value: int) -> None:
    # MXNet reads these when it first needs temporary space, which is after import and before the first operator.
    current = os.environ.get(variable, "")
    if not current.isdigit() or int(current) < value:
        os.environ[variable] = str(value)
