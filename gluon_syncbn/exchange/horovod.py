"""Exchanges statistics over Horovod, beside ``horovod.mxnet.DistributedTrainer``, which adds the gradients.

Horovod pairs operations by their names, in any order. It has no time limit, and does not say which rank is missing.
"""

from __future__ import annotations

import atexit
import functools
import threading

import mxnet as mx
import numpy as np

from ..system.distribution import HOROVOD
from .base import leave, made
from .job import Call, JobExchange

_UNKNOWN = "Horovod does not say which rank is missing: one may hang, or have left out a call"
_LEAVE = 1.0  # seconds in which the others hear of a failure
_made = functools.partial(made, "gluon_syncbn-horovod")


class HorovodExchange(JobExchange):
    """Exchanges in Horovod's global process set, by operations whose names begin with ``gluon_syncbn:``.

    Initialises Horovod if the script has not. A process that ends after a failure shuts it down,
    which the other ranks hear of.
    """

    def __init__(self) -> None:
        try:
            import horovod.mxnet as hvd
        except ImportError as error:
            raise ImportError(
                f"kvstore 'horovod' needs Horovod 0.28.1, compiled with MXNet and gloo ({error}): {HOROVOD}"
            ) from None
        if not hvd.is_initialized():
            if threading.current_thread() is not threading.main_thread():
                raise mx.MXNetError(
                    "Horovod has to be initialised on the main thread: name kvstore 'horovod' there first"
                )
            hvd.init()
        self._hvd = hvd
        atexit.unregister(hvd.shutdown)  # which would run during a step; `close` runs after it
        super().__init__("horovod", hvd.rank(), hvd.size())

    def rows_of(self, call: Call, row: np.ndarray, timeout: float) -> np.ndarray:
        def gather() -> np.ndarray:
            words = mx.nd.array(row.view(np.uint8)[np.newaxis], dtype="uint8")
            everyone = self._hvd.allgather(words, name=f"gluon_syncbn:{':'.join(map(str, call))}").asnumpy()
            return everyone.view(np.float64)

        gathered = _made(gather, timeout)
        if not gathered.done():
            _made(self._hvd.shutdown, 0)  # ends the operation, for which `mx.nd.waitall` would wait
            raise mx.MXNetError(f"not every rank has come within {timeout:g} s. {_UNKNOWN}")
        return gathered.result()

    def close(self) -> None:
        limit = _LEAVE if self.failure else None  # it waits for the others, which may hang
        if not _made(self._hvd.shutdown, limit).done() or self.failure:
            leave()


@functools.lru_cache(maxsize=None)
def exchange() -> HorovodExchange:
    return HorovodExchange()
