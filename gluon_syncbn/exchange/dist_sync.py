"""Exchanges statistics between the workers of MXNet's own cluster, by the KVStore that adds their gradients.

A server adds what the workers push under a key, and answers when all have pushed. A layer has a key for its forwards,
and one for its backwards. Each worker has a place in the array, so the sum has the rows of all, with their calls.

    worker 0: [ call row |    0     ] ──┐
                                        ├─ + ──► [ call row | call row ], to both
    worker 1: [    0     | call row ] ──┘
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import threading
import weakref
from collections import defaultdict
from typing import Any, Callable, DefaultDict, Dict, Iterator, List, Tuple

import mxnet as mx
import numpy as np

from .. import _native
from ..system import arguments, locks
from ..system.environment import read
from ..system.logs import log
from .base import FIRST_KEY, leave, made
from .job import WORDS, Call, JobExchange, name_of

#: The types of MXNet's stores that add over workers.
TYPES = ("dist_sync", "dist_device_sync", "dist_sync_device")
_VARIABLES = ("DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER")
_HEAD = 4  # words: the call
_LATE = "not every worker has come"
_UNKNOWN = "MXNet's store does not say which worker is missing: one may have ended, hang, or have left out a call"
_made_by_all = functools.partial(made, "gluon_syncbn-store")


def _key(layer: int, phase: int) -> int:
    return FIRST_KEY + 2 * (layer + 1) + (phase > 0)


class DistSyncExchange(JobExchange):
    """Exchanges by the one KVStore ``'dist_sync'`` of this process, which the Trainer has, too."""

    def __init__(self, kvstore: mx.kv.KVStore) -> None:
        super().__init__(kvstore.type, kvstore.rank, kvstore.num_workers)
        self.kvstore = kvstore
        self.of_trainer = {"kvstore": kvstore, "update_on_kvstore": False}
        self._shapes: Dict[int, Tuple[int, int]] = {}  # of the array of each key
        self._trainer: Any = None  # a weak reference
        self._calls: Any  # held during calls of the store, whose maps have no lock
        self._rounds: DefaultDict[int, Any]  # of each key: a second push would count as another worker's
        locks.give(self, _calls=threading.Lock, _rounds=lambda: defaultdict(threading.Lock))
        self._begin_key(_key(-1, 0), WORDS)

    def rows_of(self, call: Call, row: np.ndarray, timeout: float) -> np.ndarray:
        key = _key(call[0], call[3])
        words = np.zeros(self._shapes[key])
        words[self.rank, :_HEAD].view(np.int64)[:] = call
        words[self.rank, _HEAD : _HEAD + row.size] = row
        # Servers leave float32 alone as it is (docs/mxnet_faults.md): a word is four whole numbers.
        array = mx.nd.array(words.ravel().view(np.uint16), dtype="float32")
        with self._rounds[key]:
            if self.failure:
                raise mx.MXNetError(self.failure)
            with self._calls:
                self.kvstore.pushpull(key, array)
            _native.await_array([array], timeout, _LATE, _UNKNOWN)
        everyone = array.asnumpy().astype(np.uint16).view(np.float64).reshape(words.shape)
        if everyone[self.rank].tobytes() != words[self.rank].tobytes():
            advice = "Give the Trainer update_on_kvstore=False."
            raise mx.MXNetError(f"the servers have an optimizer, which has run on the statistics. {advice}")
        for rank, theirs in enumerate(everyone[:, :_HEAD].copy().view(np.int64).tolist()):
            if theirs != list(call):
                raise mx.MXNetError(
                    f"rank {rank} has come with {name_of(theirs)}, rank {self.rank} with {name_of(call)}. Over "
                    f"{self.name!r}, all workers make the calls of a layer in one order; kvstore='mpi' takes any"
                )
        return everyone[:, _HEAD : _HEAD + row.size]

    def begin_layer(self, number: int, channels: int) -> None:
        for phase in (0, 1):
            self._begin_key(_key(number, phase), 1 + 2 * channels)

    def _begin_key(self, key: int, words: int) -> None:
        self._shapes[key] = self.num_workers, _HEAD + words
        zeros = mx.nd.zeros(self.num_workers * (_HEAD + words) * 4)

        def begin() -> None:
            self.kvstore.broadcast(key, zeros, out=zeros.copy())
            self.kvstore.pushpull(key, zeros)  # the first sum of a key changes the maps, too

        with self._calls:
            self._await(begin, f"the keys of the KVStore {self.name!r}")

    def _await(self, call: Callable[[], Any], what: str) -> None:
        begun = _made_by_all(call)
        if not begun.done():
            self.give_up(f"{what}: {_LATE} within {_native.timeout_of():g} s. {_UNKNOWN}")
        begun.result()

    def begin_trainer(self, trainer: Any) -> None:
        """Before its first step. MXNet would wait without a limit in what this calls."""
        if self._trainer is not None and self._trainer() is not trainer:
            expected = "'mpi' where there are several Trainers: parameters of another one have the same keys"
            arguments.refuse("kvstore", self.name, expected)
        self._trainer = weakref.ref(trainer)
        for gradient in _gradients(trainer):  # so no exchange is under way
            gradient.wait_to_read()
        self._await(trainer._init_params, "the beginning of the Trainer")

    @contextlib.contextmanager
    def summing(self, trainer: Any) -> Iterator[None]:
        """Within the block, a Trainer adds gradients. MXNet would wait without a limit. StepError: a worker is late."""
        gradients = _gradients(trainer)
        computed = list(map(mx.nd.shape_array, gradients))
        with self._calls:
            yield
        for one in computed:
            one.wait_to_read()
        try:
            for gradient in gradients:
                _native.await_array([gradient], _native.timeout_of(), _LATE, _UNKNOWN)
        except mx.MXNetError as error:
            self.give_up(self.failure or f"the sums of the gradients: {error}")

    def close(self) -> None:
        """MXNet's store waits for all workers, and ends the servers. Without one of them, the launcher ends these."""
        if self.failure:
            leave()
        handle, self.kvstore.handle = self.kvstore.handle, None  # to free none does nothing
        if not _made_by_all(lambda: mx.base.check_call(mx.base._LIB.MXKVStoreFree(handle))).done():
            log.error("rank %d of %d has come to its end. There, %s in time", self.rank, self.num_workers, _LATE)
            leave()


def _gradients(trainer: Any) -> List[mx.nd.NDArray]:
    return [one for p in trainer._params if p.grad_req != "null" for one in p.list_grad()]


_made: List[DistSyncExchange] = []


def exchange(kvstore: Any) -> DistSyncExchange:
    """Returns the exchange by a KVStore, or by the one of this process, which is made if there is none."""
    if not _made:
        _made.append(DistSyncExchange(_create(kvstore) if isinstance(kvstore, str) else kvstore))
    if kvstore not in (_made[0].name, _made[0].kvstore):
        arguments.refuse("kvstore", kvstore, f"{_made[0].kvstore!r}, because a process has one store of this kind")
    return _made[0]


def _create(name: str) -> mx.kv.KVStore:
    missing = [variable for variable in _VARIABLES if not read(variable)]
    if missing:
        raise mx.MXNetError(
            f"kvstore {name!r}: {', '.join(missing)} is not set in the environment: MXNet's launch.py "
            "sets it in all processes"
        )
    store = _made_by_all(functools.partial(mx.kv.create, name))
    if not store.done():
        atexit.register(leave)  # ps-lite would end the process by SIGABRT
        uri, port, workers, servers = map(read, _VARIABLES[1:])
        raise mx.MXNetError(
            f"kvstore {name!r}: not connected within {_native.timeout_of():g} s. Either the scheduler is not at "
            f"{uri}:{port} (DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT), or not all of {workers} workers (DMLC_NUM_WORKER) "
            f"and {servers} servers (DMLC_NUM_SERVER) have come, or this process has made such a store: give that one."
        )
    return store.result()
