"""Adds through MXNet's KVStores ``'device'`` and ``'local'``, over the contexts of one process."""

from __future__ import annotations

import itertools
import threading
from typing import Dict, Tuple

import mxnet as mx
import numpy as np

from .. import _native
from .base import Exchange, LayerInfo

# gluon.Trainer numbers its parameters from 0 in the same store; no net has this many parameters.
_keys = itertools.count(1 << 24)


class DeviceExchange(Exchange):
    """Adds with ``kvstore.pushpull``, on the replicas' contexts.

    A store that runs an optimizer on the values that it receives is refused at its first use.
    """

    def __init__(self, kvstore: mx.kvstore.KVStoreBase) -> None:
        self.kvstore = kvstore
        super().__init__(_native.kvstore_exchange(_native.python_exchange(self)))
        # A store makes the buffers of a key for the contexts of its first sum. CommCPU and CommDevice::Reduce resize
        # `copy_buf` once, and write past its end if a later sum has more contexts.
        self._keys: Dict[Tuple[int, Tuple[mx.Context, ...]], int] = {}  # (length, contexts) -> key
        self._lock = threading.Lock()  # leaders of different layers call at once, and the store serves one

    def add(self, layer: LayerInfo, rows: np.ndarray) -> np.ndarray:
        """For the core: returns the sum over all rows, float64, of shape (contexts, length)."""
        length, contexts = rows.shape[1], tuple(layer.contexts[: len(rows)])
        values = [mx.nd.array(row, ctx=context, dtype="float64") for row, context in zip(rows, contexts)]
        out = [mx.nd.empty(length, ctx=context, dtype="float64") for context in contexts]
        if getattr(self.kvstore, "_updater", None) is not None:
            raise ValueError(
                "this KVStore has an optimizer set, which would run on the statistics. Give the Trainer "
                "update_on_kvstore=False, or give SyncBatchNorm a store of its own."
            )
        with self._lock:  # not during the sum: in MXNet's engine, the next user of a key waits
            key = self._keys.get((length, contexts))
            if key is None:
                key = next(_keys)
                self.kvstore.broadcast(key, mx.nd.zeros(length, mx.cpu(), "float64"), out=out)
                self._keys[length, contexts] = key
            self.kvstore.pushpull(key, values, out=out)
        return out[0].asnumpy()
