"""Adds large arrays of gradients over Horovod, beside a job's other uses of Horovod. All else goes by a relay.

Horovod has no time limit, and does not say which rank is missing: the core does, and leaves a sum behind.
"""

from __future__ import annotations

import atexit
import functools
import os
import socket
import threading
import time
from concurrent import futures
from typing import Optional

import mxnet as mx
import numpy as np

from .. import _native
from ..system.distribution import HOROVOD
from ..system.environment import read
from .base import leave, result_of
from .bridge import BYTES, BridgedTransport, readers_of

_ANSWER = 1.0  # seconds in which it is known which rank has ended, and why
_LEAVE = 1.0  # seconds that a process has to end if it fails at the end
_result_of = functools.partial(result_of, "gluon_syncbn-horovod")


class HorovodTransport(BridgedTransport):
    """Connects the processes of Horovod's global process set. Names of operations begin with ``gluon_syncbn:``.

    Initialises Horovod if the script has not. A process that ends after a failure has exit code 1.
    """

    adds_from = 1 << 14

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
                    "Horovod has to be initialised on the main thread: create kvstore 'horovod' there first"
                )
            hvd.init()
        self._hvd, self._ending, self._pid = hvd, False, os.getpid()

        def spread(told: np.ndarray) -> np.ndarray:
            everyone = hvd.allgather(mx.nd.array(told, dtype="uint8"), name="gluon_syncbn:introduction")
            return everyone.asnumpy()[:BYTES]

        towards = read("HOROVOD_GLOO_RENDEZVOUS_ADDR") or socket.gethostname()  # the launcher, where gloo meets
        atexit.register(leave)  # in case that Horovod still waits then
        connected = _result_of(functools.partial(super().__init__, hvd.rank(), hvd.size(), towards, spread))
        if not futures.wait([connected], _native.timeout_of()).done:
            raise mx.MXNetError("kvstore 'horovod': not every process has created one. Create it in all, at the start.")
        connected.result()
        atexit.unregister(leave)
        # Horovod's own handler would shut it down during a step; `close` runs after the step.
        atexit.unregister(hvd.shutdown)
        atexit.register(self._at_exit)

    def _following(self) -> Optional[bytes]:
        message = super()._following()
        if message is None and self.has_failed():
            _result_of(self._hvd.shutdown)  # which waits for the other processes, and they may be frozen
            if self._ending:
                time.sleep(_LEAVE)
                leave()
        if not message or readers_of(message) != [self.size]:
            return message
        _result_of(functools.partial(self._add, message))
        return b""

    def _add(self, message: bytes) -> None:
        """Adds an array of the core in place: see ``Machines`` in csrc/exchange/machines.h.

        Each rank adds up its own part of the array and sends the sum to all. Horovod's allreduce is up to 1.5 times as
        fast, but its order of additions depends on the other operations under way.
        """
        number, size, count, address = np.frombuffer(message, np.int64)[-4:].tolist()
        array, name = _native.array_at(address, count, size), f"gluon_syncbn:{number}:"
        given = functools.partial(mx.nd.array, ctx=mx.cpu(), dtype=array.dtype)
        try:
            splits = [part.size for part in np.array_split(array, self.size)]
            parts = self._hvd.alltoall(given(array), splits, name=name + "parts")[0].asnumpy()
            total = functools.reduce(np.add, parts.reshape(self.size, -1))
            array[:] = self._hvd.allgather(given(total), name=name + "sums").asnumpy()
            self._take(message)
        except Exception as error:
            if self._hvd.is_initialized():
                time.sleep(_ANSWER)  # if another rank has ended Horovod, the core tells its fate first
            line = (str(error).strip() or repr(error)).splitlines()[-1]
            who = [*self._losses(but=("",)), "Horovod could not add gradients"][0]
            reason = f"{who}: {line} (rank {self.rank} was in sum {number} of gradients)"
            _native.processes_failed(self.handle, reason)

    def close(self) -> None:
        # Ends operations of the others, who have been told that this rank ends.
        ended = [] if self.has_failed() else [_result_of(self._hvd.shutdown)]
        super().close()
        if self.has_failed() or futures.wait(ended, _native.timeout_of()).not_done:
            leave()

    def _at_exit(self) -> None:
        # This runs before other handlers wait for operations in Horovod.
        if os.getpid() == self._pid:
            self._ending = True
            if self.has_failed():
                self.close()
