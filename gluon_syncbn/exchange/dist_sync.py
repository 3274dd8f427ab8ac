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
import itertools
import json
import os
import threading
import weakref
from collections import defaultdict
from concurrent import futures
from typing import Any, Callable, DefaultDict, Dict, Iterator, List, Tuple

import mxnet as mx
import numpy as np

from .. import _native
from ..system import arguments, locks
from ..system.environment import read
from ..system.logs import log
from .agreement import ProcessExchange
from .base import FIRST_KEY, leave

#: The types of MXNet's stores that add over workers.
TYPES = ("dist_sync", "dist_device_sync", "dist_sync_device")
_VARIABLES = ("DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER")
_HEAD = 4  # words: the call
_WORDS = 1024  # of a row of bytes
_LATE = "not every worker has come"
_UNKNOWN = "MXNet's store does not say which worker is missing: one may have ended, hang, or have left out a call"
Call = Tuple[int, ...]  # layer, as all processes number it; node, sequence and phase of its call


def _key(layer: int, phase: int) -> int:
    return FIRST_KEY + 2 * (layer + 1) + (phase > 0)


class DistSyncExchange(ProcessExchange):
    """Exchanges by the one KVStore ``'dist_sync'`` of this process, or makes it. The Trainer has it, too.

    It brings each process the rows of all, in the order of the ranks, in which the core combines them. It has no
    groups, and carries nothing else. The others miss a worker that fails, within their time limit.
    """

    def __init__(self, kvstore: Any) -> None:
        kvstore = _create(kvstore) if isinstance(kvstore, str) else kvstore
        super().__init__(_native.python_exchange(self, kvstore.num_workers), kvstore.type)
        self.rank, self.num_workers, self.kvstore = kvstore.rank, kvstore.num_workers, kvstore
        self.of_trainer = {"kvstore": kvstore, "update_on_kvstore": False}
        self._shapes: Dict[int, Tuple[int, int]] = {}  # of the array of each key
        self._trainer: Any = None  # a weak reference
        self._calls: Any  # held during calls of the store, whose maps have no lock
        self._rounds: DefaultDict[int, Any]  # of each key: a second push would count as another worker's
        locks.give(self, _calls=threading.Lock, _rounds=lambda: defaultdict(threading.Lock))
        self.failure = ""  # after which nothing is exchanged
        self._told, self._pid = itertools.count(), os.getpid()
        atexit.register(self._leave_if_failed)  # before the handlers that would wait for operators
        self._begin_key(_key(-1, 0), _WORDS)

    def __repr__(self) -> str:
        return f"<exchange {self.name!r} of statistics: rank {self.rank} of {self.num_workers}>"

    def check(self, settings: Any) -> None:
        """ValueError for a layer whose replicas share something else than one statistic of all."""
        mpi = f"with kvstore={self.name!r}; kvstore='mpi' has it, in a job that mpiexec starts"
        for name in ("group_size", "groups"):
            if getattr(settings, name) is not None:
                arguments.refuse(name, getattr(settings, name), f"None {mpi}")
        if settings.mode == "shuffle":
            arguments.refuse("mode", settings.mode, f"'sync' or 'local' {mpi}")

    def add(self, _contexts: str, rows: np.ndarray, timeout: float, call: Call) -> np.ndarray:
        """For the core: returns the rows of all workers for a call."""
        return self._gathered(_name_of(call), call, rows[0], timeout)

    def tell_all(self, what: str, ours: Any) -> List[Any]:
        text = json.dumps(ours).encode()
        call, timeout = (-1, 0, next(self._told), 0), _native.timeout_of()
        sizes = self._gathered(what, call, np.array([float(len(text))]), timeout)[:, 0].astype(int)
        texts = [b""] * self.num_workers
        for begin in range(0, max(sizes), 8 * _WORDS):
            words = np.frombuffer(text[begin : begin + 8 * _WORDS].ljust(8 * _WORDS), np.float64)
            rows = self._gathered(what, (-1, begin + 1, *call[2:]), words, timeout)
            texts = [told + row.tobytes() for told, row in zip(texts, rows)]
        return [json.loads(told[:size]) for told, size in zip(texts, sizes)]

    def _gathered(self, what: str, call: Call, row: np.ndarray, timeout: float) -> np.ndarray:
        try:
            return self._rows_of(call, row, timeout)
        except mx.MXNetError as error:
            self.give_up(self.failure or f"{what}: {error}")

    def _rows_of(self, call: Call, row: np.ndarray, timeout: float) -> np.ndarray:
        """Returns the rows of all ranks for this call, [ranks][words]. MXNetError: one has not come."""
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
                    f"rank {rank} has come with {_name_of(theirs)}, rank {self.rank} with {_name_of(call)}. Over "
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

    def fail(self, reason: str) -> None:
        self.failure = self.failure or reason

    def _leave_if_failed(self) -> None:
        if os.getpid() == self._pid and (self.failure or _native.failure()):
            leave()

    def close(self) -> None:
        """MXNet's store waits for all workers, and ends the servers. Without one of them, the launcher ends these."""
        if self.failure:
            leave()
        handle, self.kvstore.handle = self.kvstore.handle, None  # to free none does nothing
        if not _made_by_all(lambda: mx.base.check_call(mx.base._LIB.MXKVStoreFree(handle))).done():
            log.error("rank %d of %d has come to its end. There, %s in time", self.rank, self.num_workers, _LATE)
            leave()


def _name_of(call: Call) -> str:
    """Returns what errors call it: "the forward of call 3"."""
    return f"the {'backward' if call[3] else 'forward'} of call {call[2] + 1}"


def _made_by_all(call: Callable[[], Any]) -> futures.Future[Any]:
    """Makes a call of the store, which may never return, in a thread, and waits for it within the time limit. At exit,
    Python would wait for an executor's thread.
    """
    result: futures.Future[Any] = futures.Future()

    def work() -> None:
        try:
            result.set_result(call())
        except BaseException as error:  # the thread that waits raises it
            result.set_exception(error)

    threading.Thread(target=work, name="gluon_syncbn-store", daemon=True).start()
    futures.wait([result], _native.timeout_of())
    return result


def _gradients(trainer: Any) -> List[mx.nd.NDArray]:
    return [one for p in trainer._params if p.grad_req != "null" for one in p.list_grad()]


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
