"""Carries messages between the workers of MXNet's own cluster. MXNet's store introduces them, and a relay carries.

A request to a parameter server cannot be taken back, so a wait for one has no limit. Therefore a thread calls MXNet's
store: at the beginning, to tell all where the relay in rank 0 listens, and at the end, which ends the servers, too.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from concurrent import futures

import mxnet as mx
import numpy as np

from .. import _native
from ..system.environment import read
from ..system.logs import log
from .bridge import BridgedTransport

_VARIABLES = ("DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER")
_POLL = 0.05  # seconds between checks of other reasons to end
_ENDS = 30.0  # seconds in which servers and scheduler end


def _skip_destructors() -> None:
    """Has the process end with its status before C++ destructors run: ps-lite's ends it by SIGABRT.

    It does so while a thread waits in ps-lite, and in the child of a fork (class Postoffice of ps-lite).
    """
    mx.base._LIB.on_exit(mx.base._LIB._exit, None)  # functions of glibc


def _set_barrier(store: mx.kv.KVStore, barrier: bool) -> None:
    mx.base.check_call(mx.base._LIB.MXKVStoreSetBarrierBeforeExit(store.handle, int(barrier)))


class DistSyncTransport(BridgedTransport):
    """Carries arrays between the workers of the cluster that the variables ``DMLC_*`` name.

    Every worker has to create one. The servers and the scheduler need no more than ``import mxnet``.
    """

    def __init__(self) -> None:
        missing = [name for name in _VARIABLES if not read(name)]
        if missing:
            raise mx.MXNetError(
                f"kvstore 'dist_sync': {', '.join(missing)} is not set in the environment. MXNet's launch.py "
                "sets it for all processes. By hand: DMLC_ROLE is scheduler, server or worker; DMLC_PS_ROOT_URI and "
                "DMLC_PS_ROOT_PORT are the address where the scheduler listens; DMLC_NUM_WORKER and DMLC_NUM_SERVER "
                "are the numbers of workers and servers. A scheduler or server runs `python -c 'import mxnet'`."
            )
        limit, scheduler = _native.timeout_of(), (read("DMLC_PS_ROOT_URI"), int(read("DMLC_PS_ROOT_PORT")))
        deadline = time.monotonic() + limit
        late = f"kvstore 'dist_sync': not connected within {limit:.0f} s"
        while True:
            try:
                socket.create_connection(scheduler, 1).close()
                break
            except ConnectionRefusedError:
                if time.monotonic() > deadline:
                    where = "{}:{} (DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT)".format(*scheduler)
                    raise mx.MXNetError(
                        f"{late}: the scheduler is not there: nobody listens at {where}. Start it before the workers."
                    ) from None
                time.sleep(_POLL)
            except OSError:  # nobody knows whether it listens
                break
        self._connected: futures.Future[None] = futures.Future()
        self._together: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=scheduler[:1], name="gluon_syncbn-store", daemon=True)
        self._thread.start()
        try:
            if not futures.wait([self._connected], max(0, deadline - time.monotonic())).done:
                raise mx.MXNetError(
                    f"{late}: the scheduler at {scheduler[0]}:{scheduler[1]} is there, but not all of "
                    f"{read('DMLC_NUM_WORKER')} workers (DMLC_NUM_WORKER) and {read('DMLC_NUM_SERVER')} servers "
                    "(DMLC_NUM_SERVER) have come. Each worker creates one such KVStore, and no store by "
                    "mx.kv.create('dist_sync')."
                )
            self._connected.result()
        except BaseException:
            _skip_destructors()
            raise

    def _run(self, scheduler: str) -> None:
        """Has MXNet's store, in a thread that may wait for ever."""

        def spread(told: np.ndarray) -> np.ndarray:
            # Bytes as float32, the one type that servers leave as it is: docs/mxnet_faults.md.
            store.init(0, mx.nd.array(told, dtype="float32"))  # takes rank 0's
            heard = mx.nd.zeros(told.size)
            store.pull(0, out=heard)
            return heard.asnumpy()

        try:
            store = mx.kv.create("dist_sync")
            _set_barrier(store, False)  # until all have come to their end
            super().__init__(store.rank, store.num_workers, scheduler, spread)
        except BaseException as error:  # whose traceback would keep the store
            self._connected.set_exception(mx.MXNetError(str(error)))
        else:
            self._connected.set_result(None)
            _set_barrier(store, self._together.get())
        # Here the store ends. With a barrier, it ends the servers and the scheduler, too.

    def close(self) -> None:
        super().close()
        # A worker that has failed comes to the barrier, too, unless it was killed or hangs.
        gone = ("without a word", "nothing was heard")
        dead = any(text in loss for loss in self._losses() for text in gone)
        self._together.put(not (dead or self._link.receiver.is_alive()))
        self._thread.join(min(_ENDS, _native.timeout_of()))
        if self._thread.is_alive():
            log.error("rank %d of %d: MXNet's servers and scheduler have not ended.", self.rank, self.size)
            _skip_destructors()

    def forked(self) -> None:
        super().forked()
        _skip_destructors()
