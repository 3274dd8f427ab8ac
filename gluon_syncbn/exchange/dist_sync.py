"""Exchanges statistics between the workers of MXNet's own cluster, by the KVStore that adds their gradients.

A server adds what the workers push under a key, and answers when all have pushed: a *round*. Each worker has a place in
the array, so the sum has the rows of all. A layer has a key.

    worker 0: [ row |  0  ] ──┐
                              ├─ + ──► [ row | row ], to both
    worker 1: [  0  | row ] ──┘

Calls of a layer may come in another order in another worker. So a row begins with its call, and a worker goes on with
empty rows until those of its call have come from all. A worker that fails or ends says so in a row of every key.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import math
import threading
import time
import weakref
from concurrent import futures
from typing import Any, Callable, Dict, Iterator, List, Tuple

import mxnet as mx
import numpy as np

from .. import _native
from ..system import arguments, locks
from ..system.environment import read
from ..system.logs import log
from .base import leave, result_of
from .job import WORDS, Call, JobExchange

#: The types of MXNet's stores that add over workers.
TYPES = ("dist_sync", "dist_device_sync", "dist_sync_device")
_VARIABLES = ("DMLC_ROLE", "DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER")
_EMPTY, _ROW, _FAILED, _ENDED = range(4)
_FATES = {_FAILED: "has failed, and its error says why", _ENDED: "has ended"}
_HEAD = 5  # words: one of these, and the call
_KEYS = 1 << 24  # gluon.Trainer numbers its parameters from 0 in the same store; no net has this many
_GRACE = 10.0  # seconds that a worker stays after a failure, until the others have come to their end
_SENT = 1.0  # seconds in which what it tells them is on its way
_QUIET = 10.0  # seconds after which it says what it waits for
_ENDS = 30.0  # seconds in which servers and scheduler end
_MOST_WAITS = 10  # after so many errors MXNet fails at every wait
NO_OPTIMIZER = "Give the Trainer update_on_kvstore=False."
_UNKNOWN = "MXNet's store does not say which worker is missing: one may have ended, hang, or have left out a call"


class _Rounds:
    """The rounds of a key. ``calls``: held during calls of the store, whose maps have no lock."""

    def __init__(self, store: Any, calls: Any, key: int, words: int) -> None:
        self._store, self._calls, self._key = store, calls, key
        self._shape = store.num_workers, _HEAD + words
        self._waiting: List[Tuple[Call, np.ndarray]] = []  # rows of this worker
        self._came: Dict[Call, Dict[int, np.ndarray]] = {}
        self._lock: Any  # held during a round, because a second push would count as another worker's
        locks.give(self, _lock=threading.Lock)
        self._is_open = True  # to a push
        self._is_over = False  # all workers know that one has failed or ended

    def begin(self) -> None:
        """Makes the key. All workers do so at once. Waits for them without a limit."""
        zeros = mx.nd.zeros(self._shape[0] * self._shape[1] * 4)
        with self._calls:
            self._store.broadcast(self._key, zeros, out=zeros.copy())

    def rows_of(self, call: Call, row: np.ndarray, timeout: float) -> np.ndarray:
        """Returns the rows of all workers for this call. MXNetError: one has not come, has failed or has ended."""
        until = time.monotonic() + timeout
        self._waiting.append((call, row))
        while True:
            with self._lock:
                came = self._came.setdefault(call, {})
                missing = [str(rank) for rank in range(self._shape[0]) if rank not in came]
                if not missing:
                    del self._came[call]
                    return np.stack([theirs[: row.size] for _, theirs in sorted(came.items())])
                if time.monotonic() > until:
                    raise mx.MXNetError(f"rank {', '.join(missing)} has come to other calls of this layer, not to this")
                round = self._push(_ROW, *self._waiting.pop(0)) if self._waiting else self._push(_EMPTY)
                for rank, kind in enumerate(self._take(timeout, *round)):
                    if kind in _FATES:
                        self._is_over = True
                        raise mx.MXNetError(f"rank {rank} of {self._shape[0]} {_FATES[kind]}")

    def _push(self, kind: int, call: Call = (), row: Any = ()) -> Tuple[mx.nd.NDArray, np.ndarray]:
        if not self._is_open:
            raise mx.MXNetError("an earlier exchange of this layer has failed")
        self._is_open = False  # until the answer is there
        words = np.zeros(self._shape)
        own = words[self._store.rank]
        own[:_HEAD].view(np.int64)[: 1 + len(call)] = kind, *call
        own[_HEAD : _HEAD + len(row)] = row
        # Servers leave float32 alone as it is (docs/mxnet_faults.md): a word is four whole numbers.
        array = mx.nd.array(words.ravel().view(np.uint16), dtype="float32")
        with self._calls:
            self._store.pushpull(self._key, array)
        return array, own

    def _take(self, timeout: float, array: mx.nd.NDArray, own: np.ndarray) -> List[int]:
        """Awaits the end of a round, and returns what each worker has come with."""
        _native.await_array([array], timeout, "not every worker has come", _UNKNOWN)
        words = array.asnumpy().astype(np.uint16).view(np.float64).reshape(self._shape)
        if words[self._store.rank].tobytes() != own.tobytes():
            raise mx.MXNetError(f"the servers have an optimizer, which has run on the statistics. {NO_OPTIMIZER}")
        self._is_open = True
        heads = words[:, :_HEAD].copy().view(np.int64).tolist()
        for rank, (kind, *call) in enumerate(heads):
            if kind == _ROW:
                self._came.setdefault(tuple(call), {})[rank] = words[rank, _HEAD:]
        return [kind for kind, *_ in heads]

    def tell(self, kind: int, again: bool) -> Callable[[float], List[int]]:
        """Tells the others what becomes of this worker, unless they know, maybe ``again``, or are about to end a round.
        Returns what awaits the same of all, within a limit.
        """
        if (self._is_over and not again) or not self._is_open or not self._lock.acquire(blocking=False):  # for good
            return lambda _: []
        round = self._push(kind)

        def awaited(timeout: float) -> List[int]:
            nonlocal round
            while True:
                kinds = self._take(timeout, *round)
                if set(kinds) <= set(_FATES):
                    return kinds
                round = self._push(kind)

        return awaited


class DistSyncExchange(JobExchange):
    """Exchanges by the one KVStore ``'dist_sync'`` of this process, which the Trainer has, too."""

    def __init__(self, kvstore: mx.kv.KVStore) -> None:
        super().__init__(kvstore.type, kvstore.rank, kvstore.num_workers)
        self.kvstore = kvstore
        self._calls: Any
        locks.give(self, _calls=threading.Lock)
        self._rounds: Dict[int, _Rounds] = {}  # by the number of a layer; -1 has the agreements
        self._trainer: Any = None  # a weak reference
        self._told: Callable[[float], List[int]] = lambda _: []
        self._begin_layer(-1, WORDS)
        self.of_trainer = {"kvstore": kvstore, "update_on_kvstore": False}

    def _rows(self, call: Call, row: np.ndarray, timeout: float) -> np.ndarray:
        return self._rounds[call[0]].rows_of(call, row, timeout)

    def _begin_layer(self, number: int, words: int) -> None:
        rounds = _Rounds(self.kvstore, self._calls, _KEYS + 1 + number, words)
        self._in_time(rounds.begin, f"the keys of the KVStore {self.name!r}")
        self._rounds[number] = rounds

    def _in_time(self, call: Callable[[], Any], what: str) -> None:
        """Makes a call that waits for all workers. StepError: they have not come within the limit."""
        limit = _native.timeout_of()
        done = result_of("gluon_syncbn-store", call)
        if not futures.wait([done], limit).done:
            self.give_up(f"{what}: not every worker has come within {limit:g} s. {_UNKNOWN}")
        done.result()

    def begin_trainer(self, trainer: Any) -> None:
        """Before its first step. MXNet would wait without a limit in what this calls."""
        if self._trainer is not None and self._trainer() is not trainer:
            expected = "'mpi' where there are several Trainers: parameters of another one have the same keys"
            arguments.refuse("kvstore", self.name, expected)
        self._trainer = weakref.ref(trainer)
        # The store's maps have no lock, so no exchange may be under way.
        for gradient in [one for p in trainer._params if p.grad_req != "null" for one in p.list_grad()]:
            gradient.wait_to_read()
        self._in_time(trainer._init_params, "the beginning of the Trainer")

    @contextlib.contextmanager
    def summing(self, trainer: Any) -> Iterator[None]:
        """Within the block, a Trainer adds gradients. MXNet would wait without a limit. StepError: a worker is late."""
        gradients = {p.name: p.list_grad()[0] for p in trainer._params if p.grad_req != "null"}
        computed = [mx.nd.shape_array(gradient) for gradient in gradients.values()]
        yield
        for (name, gradient), before in zip(gradients.items(), computed):
            before.wait_to_read()
            try:
                _native.await_array([gradient], _native.timeout_of(), "not every worker has come", _UNKNOWN)
            except mx.MXNetError as error:
                self.give_up(self.failure or f"the sum of the gradient of '{name}': {error}")

    def _tell_failure(self) -> None:
        self._tell(_FAILED)

    def _part(self) -> None:
        all_come = False  # nobody was killed, or hangs
        with contextlib.suppress(mx.MXNetError):
            all_come = bool(self._told(_GRACE))
        if all_come:
            self._end_servers()
        else:
            time.sleep(_SENT)

    def _tell(self, kind: int) -> None:
        told = {number: rounds.tell(kind, again=number < 0) for number, rounds in self._rounds.items()}
        self._told = told.get(-1, self._told)

    def close(self) -> None:
        """Waits until all workers have come to their end, as MXNet's store does. Some may run much longer."""
        self._tell(_ENDED)
        awaited = result_of("gluon_syncbn-store", functools.partial(self._told, math.inf))
        if not futures.wait([awaited], _QUIET).done:
            log.warning(
                "rank %d of %d has come to its end, and waits for the other workers", self.rank, self.num_workers
            )
        failed = _FAILED in awaited.result()
        self._end_servers()
        if failed:
            log.error("rank %d of %d ends with a worker that has failed", self.rank, self.num_workers)
            leave()

    def _end_servers(self) -> None:
        """Frees MXNet's store, which ends the servers, too."""

        def free() -> None:
            for _ in range(_MOST_WAITS):
                with contextlib.suppress(mx.MXNetError):
                    mx.nd.waitall()
                    break
            handle, self.kvstore.handle = self.kvstore.handle, None  # to free none does nothing
            mx.base.check_call(mx.base._LIB.MXKVStoreFree(handle))

        if not futures.wait([result_of("gluon_syncbn-store", free)], min(_ENDS, _native.timeout_of())).done:
            log.error("rank %d of %d: MXNet's servers and scheduler have not ended.", self.rank, self.num_workers)
            leave()

    def forked(self) -> None:
        """Has a child end with its status before C++ destructors run: one of ps-lite's would end it by SIGABRT."""
        self.kvstore.handle = None
        mx.base._LIB.on_exit(mx.base._LIB._exit, None)  # functions of glibc


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
            f"kvstore {name!r}: {', '.join(missing)} is not set in the environment. MXNet's launch.py "
            "sets it for all processes. By hand: DMLC_ROLE is scheduler, server or worker; DMLC_PS_ROOT_URI and "
            "DMLC_PS_ROOT_PORT are the address where the scheduler listens; DMLC_NUM_WORKER and DMLC_NUM_SERVER "
            "are the numbers of workers and servers. A scheduler or server runs `python -c 'import mxnet'`."
        )
    limit, made = _native.timeout_of(), result_of("gluon_syncbn-store", functools.partial(mx.kv.create, name))
    if not futures.wait([made], limit).done:
        atexit.register(leave)  # ps-lite would end the process by SIGABRT
        uri, port, workers, servers = map(read, _VARIABLES[1:])
        raise mx.MXNetError(
            f"kvstore {name!r}: not connected within {limit:g} s. Either the scheduler is not at {uri}:{port} "
            f"(DMLC_PS_ROOT_URI, DMLC_PS_ROOT_PORT), or not all of {workers} workers (DMLC_NUM_WORKER) and {servers} "
            "servers (DMLC_NUM_SERVER) have come, or this process has made such a store before: give that one."
        )
    return made.result()
