"""Sums with NCCL, through KVStores of MXNet's."""

from __future__ import annotations

import threading
from typing import Dict, List, Tuple

import mxnet as mx
import numpy as np

from .. import _native
from .._native import Ticket, Total
from .base import Exchange, LayerInfo


class NCCLExchange(Exchange):
    """Adds on the GPUs with NCCL, through KVStores of its own.

    A store of MXNet makes its buffers when it first adds (``KVStoreNCCL::InitMergeBuffer``), for the keys that it has
    by then, and serves one set of GPUs. So there is one for each set, whose keys are there from the start: one for
    each power of two up to `_MOST` values, of which a vector takes the next, in parts where it is longer.
    """

    _LEAST, _MOST = 1 << 6, 1 << 17

    def __init__(self) -> None:
        self._stores: Dict[Tuple[mx.Context, ...], mx.kvstore.KVStoreBase] = {}
        # All collectives are posted under this lock, in one order on all GPUs: NCCL hangs where two GPUs differ.
        self._lock = threading.Lock()

    def add(self, layer: LayerInfo, ticket: Ticket, rows: np.ndarray) -> Total:
        contexts = tuple(layer.contexts)
        if any(context.device_type != "gpu" for context in contexts):
            raise ValueError(f"kvstore 'nccl' adds on GPUs, but the layer is on {', '.join(map(str, contexts))}")
        with self._lock:
            if contexts not in self._stores:
                self._stores[contexts] = self._store(contexts)
            outs = [
                self._sum(self._stores[contexts], contexts, rows[:, first : first + self._MOST])
                for first in range(0, rows.shape[1], self._MOST)
            ]
            try:
                return Total(_read(outs, _native.timeout_of(ticket.layer))[: rows.shape[1]], 0, ticket.layer)
            except TimeoutError:
                del self._stores[contexts]  # what is posted there never ends
                raise

    def _store(self, contexts: Tuple[mx.Context, ...]) -> mx.kvstore.KVStoreBase:
        store, size = mx.kv.create("nccl"), self._LEAST
        while size <= self._MOST:
            store.init(size, mx.nd.array(np.zeros(size), ctx=contexts[0], dtype="float64"))
            size *= 2
        return store

    def _sum(self, store: mx.kvstore.KVStoreBase, contexts: Tuple[mx.Context, ...], rows: np.ndarray) -> mx.nd.NDArray:
        size = self._LEAST
        while size < rows.shape[1]:
            size *= 2
        # Every GPU takes part in each collective; of those that a step leaves out, see `devices`, there is no row.
        padded = np.zeros((len(contexts), size))
        padded[: len(rows), : rows.shape[1]] = rows
        values = [mx.nd.array(row, ctx=context, dtype="float64") for row, context in zip(padded, contexts)]
        out = [mx.nd.empty(size, ctx=context, dtype="float64") for context in contexts]
        store.pushpull(size, values, out=out)
        return out[0]


def _read(arrays: List[mx.nd.NDArray], timeout: float) -> np.ndarray:
    """The values of all arrays one after the other. A collective that hangs cannot be interrupted, only left alone."""
    values: List[np.ndarray] = []
    problems: List[BaseException] = []

    def read() -> None:
        try:
            values.extend(array.asnumpy() for array in arrays)
        except mx.MXNetError as error:
            problems.append(error)

    reader = threading.Thread(target=read, name="gluon_syncbn-nccl", daemon=True)
    reader.start()
    reader.join(timeout)
    if reader.is_alive():
        raise TimeoutError(
            f"NCCL has not finished for {timeout:g} s. Either a GPU is not there any more (nvidia-smi), or another "
            "user of NCCL in this process waits for the same GPUs; NCCL_DEBUG=INFO shows what it does."
        )
    if problems:
        raise problems[0]
    return np.concatenate(values)
