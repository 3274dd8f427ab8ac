"""Introduces the processes of Horovod to each other, beside a job's other uses of Horovod. Messages go by a relay.

Horovod's own sums have no time limit, and do not say which rank is missing.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import sys
import threading
from concurrent import futures
from typing import Callable, NoReturn

import mxnet as mx
import numpy as np

from .. import _native
from ..system.environment import read
from .bridge import BYTES, BridgedTransport, Introduced, introduce

_LEAVE = 1.0  # seconds that a process has to end if it fails at the end


class HorovodTransport(BridgedTransport):
    """Connects the processes of Horovod's global process set.

    Initialises Horovod if the script has not. A process that ends after a failure has exit code 1.
    """

    def __init__(self) -> None:
        try:
            import horovod.mxnet as hvd
        except ImportError as error:
            raise ImportError(
                f"kvstore 'horovod' needs Horovod 0.28.1, built with MXNet and gloo ({error}): docs/distributed.md "
                "has the command"
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
        atexit.register(_leave)  # in case that Horovod still waits then
        introduced = _result_of(lambda: introduce(hvd.rank(), hvd.size(), towards, spread))
        if not futures.wait([introduced], _native.timeout_of()).done:
            raise mx.MXNetError("kvstore 'horovod': not every process has created one. Create it in all, at the start.")
        super().__init__(hvd.rank(), hvd.size(), introduced.result())
        atexit.unregister(_leave)
        # Horovod's own handler would shut it down during a step; `close` runs after the step.
        atexit.unregister(hvd.shutdown)
        atexit.register(self._at_exit)

    def left(self) -> None:
        if not self.has_failed():
            return
        # Horovod's shutdown waits for the other processes, which may be frozen.
        threading.Thread(target=self._hvd.shutdown, name="gluon_syncbn-shutdown", daemon=True).start()
        if self._ending:
            timer = threading.Timer(_LEAVE, _leave)
            timer.daemon = True
            timer.start()

    def all_end(self) -> bool:
        if not self.has_failed():
            self._hvd.shutdown()  # ends operations of the others, who have been told that this rank ends
        together = super().all_end()
        if self.has_failed():
            _leave()
        return together

    def _at_exit(self) -> None:
        # This runs before other handlers wait for operations in Horovod.
        if os.getpid() == self._pid:
            self._ending = True
            if self.has_failed():
                self.close()


def _result_of(call: Callable[[], Introduced]) -> futures.Future[Introduced]:
    """Makes a call that may never return, in a thread. At exit, Python would wait for that of an executor."""
    result: futures.Future[Introduced] = futures.Future()

    def work() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # the thread that waits raises it
            result.set_exception(error)

    threading.Thread(target=work, name="gluon_syncbn-horovod", daemon=True).start()
    return result


def _leave() -> NoReturn:
    """Ends the process: after a failure, the normal exit would wait for operations that never complete."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):  # closed, or its reader has gone
            stream.flush()
    os._exit(1)
