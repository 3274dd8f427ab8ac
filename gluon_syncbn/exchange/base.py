"""Defines what every exchange has."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import threading
from typing import Any, Dict, NoReturn, Tuple

import mxnet as mx
import numpy as np

from .. import _native
from ..system import locks

#: gluon.Trainer numbers its parameters from 0 in the same store; no net has this many parameters.
FIRST_KEY = 1 << 24

_NO_ANSWER = "Its sum waits for an operator of MXNet's that does not end. kvstore='host' adds without MXNet."


class Exchange:
    """Combines the statistics of the replicas. An exception in it becomes the failure of the step, with its text."""

    spans_processes = False
    #: The settings of a ``gluon.Trainer`` that adds its gradients by the same means, if these are a store's.
    of_trainer: Any = None

    def __init__(self, handle: int, name: str = "") -> None:
        self.handle = handle  # of the core's, which lasts as long as the process
        self.name = name  # that `configure` takes

    def check(self, settings: Any) -> None:
        """ValueError: it does not carry what a layer with these settings needs."""

    def __deepcopy__(self, memo: Any) -> Exchange:
        return self  # a copy of a layer exchanges as the layer does

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be pickled, nor can a layer or a Trainer with kvstore=, nor a net of these, because a "
            "KVStore belongs to its process: save net.save_parameters(file) and trainer.save_states(file), and give "
            "the layers of the process that loads them a KVStore there"
        )


class DeviceExchange(Exchange):
    """Adds with ``pushpull`` of MXNet's KVStores ``'device'`` and ``'local'``, on the contexts of one process.

    A store that runs an optimizer on the values that it receives is refused at its first use.
    """

    def __init__(self, kvstore: mx.kvstore.KVStoreBase) -> None:
        self.kvstore = kvstore
        super().__init__(_native.python_exchange(self), kvstore.type)
        # A store makes the buffers of a key for the contexts of its first sum. CommCPU and CommDevice::Reduce resize
        # `copy_buf` once, and write past its end if a later sum has more contexts.
        self._keys: Dict[Tuple[int, Tuple[mx.Context, ...]], int] = {}  # (length, contexts) -> key
        self._lock: Any  # layers call at once, and the store serves one
        locks.give(self, _lock=threading.Lock)

    def add(self, places: str, rows: np.ndarray, timeout: float, _call: Any) -> np.ndarray:
        """For the core, which asks Python here alone, because the user named a KVStore of MXNet's: returns the rows,
        float64, of shape (contexts, length). A store can only add, so each has a place of its own in the sum.
        ``places``: the contexts, as in "cpu(0), cpu(1)". MXNetError: it takes more than ``timeout`` seconds.
        """
        length = rows.size
        contexts = tuple(mx.Context(kind, int(number)) for kind, number in re.findall(r"(\w+)\((\d+)\)", places))
        apart = np.zeros((len(rows), *rows.shape))
        apart[range(len(rows)), range(len(rows))] = rows
        values = [mx.nd.array(row.ravel(), ctx=context, dtype="float64") for row, context in zip(apart, contexts)]
        out = [mx.nd.empty(length, ctx=context, dtype="float64") for context in contexts]
        if getattr(self.kvstore, "_updater", None) is not None:
            raise ValueError(
                "this KVStore has an optimizer set, which would run on the statistics. Give the Trainer "
                "update_on_kvstore=False, or give SyncBatchNorm a store of its own."
            )
        with self._lock:  # not during the sum: in MXNet's engine, the next user of a key waits
            key = self._keys.get((length, contexts))
            if key is None:
                key = FIRST_KEY + len(self._keys)
                self.kvstore.broadcast(key, mx.nd.zeros(length, mx.cpu(), "float64"), out=out)
                self._keys[length, contexts] = key
            self.kvstore.pushpull(key, values, out=out)
        _native.await_array(out[:1], timeout, "the KVStore has not answered", _NO_ANSWER)
        return out[0].asnumpy().reshape(rows.shape)


def leave() -> NoReturn:
    """Ends the process: after a failure, the normal exit would wait for operations that never complete."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or its reader has gone
            stream.flush()
    os._exit(1)
