"""Sums through MXNet's KVStores ``'device'`` and ``'local'``: their own reduction over the contexts of one process."""

from __future__ import annotations

import itertools
import threading
from typing import Dict, Tuple

import mxnet as mx
import numpy as np

from .._native import Ticket, Total
from .base import Exchange, LayerInfo

# gluon.Trainer numbers its parameters from 0 in the same store; no net has this many.
_keys = itertools.count(1 << 24)


class DeviceExchange(Exchange):
    """Adds with ``kvstore.pushpull``, on the contexts that the replicas live on.

    A store that runs an optimizer on what it receives is refused when it is first used.
    """

    def __init__(self, kvstore: mx.kvstore.KVStoreBase) -> None:
        self.kvstore = kvstore
        # A store makes the buffers of a key for the contexts of its first sum (CommCPU and CommDevice::Reduce resize
        # `copy_buf` once) and writes past their end where a later sum has more.
        self._keys: Dict[Tuple[int, Tuple[mx.Context, ...]], int] = {}  # (length, contexts) -> key
        self._lock = threading.Lock()  # leaders of different layers come at once, the store serves one

    def add(self, layer: LayerInfo, ticket: Ticket, rows: np.ndarray) -> Total:
        if getattr(self.kvstore, "_updater", None) is not None:
            raise ValueError(
                "this KVStore has an optimizer set, which would run on the statistics. Give the Trainer "
                "update_on_kvstore=False, or give SyncBatchNorm a store of its own."
            )
        length, contexts = rows.shape[1], tuple(layer.contexts[: len(rows)])
        with self._lock:
            values = [mx.nd.array(row, ctx=ctx, dtype="float64") for row, ctx in zip(rows, contexts)]
            key = self._keys.get((length, contexts))
            if key is None:
                key = self._keys[length, contexts] = next(_keys)
                zeros = mx.nd.zeros(length, ctx=contexts[0], dtype="float64")
                self.kvstore.broadcast(key, zeros, out=[value.copy() for value in values])
            out = [mx.nd.empty(length, ctx=ctx, dtype="float64") for ctx in contexts]
            self.kvstore.pushpull(key, values, out=out)
            return Total(out[0].asnumpy(), 0, ticket.layer)
