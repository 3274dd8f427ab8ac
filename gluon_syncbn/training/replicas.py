"""Describes the replicas of a layer."""

from __future__ import annotations

import threading
import warnings
import weakref
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any, Callable, ClassVar, Dict, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.context import Context
from mxnet.gluon import Parameter

from .. import _native
from ..exchange import named
from ..exchange.agreement import ProcessExchange
from ..exchange.dist_sync import DistSyncExchange
from ..exchange.store import ProcessStore
from ..settings import MODES, Settings
from ..system import arguments, cuda, kinds
from ..system.identity import OfEach, alive
from ..system.logs import log
from .session import session

#: How a layer was called in training: not yet, by itself, in a graph.
NEVER, EAGER, IN_GRAPH = "", "eager", "graph"

_ROOM = 256  # errors, before somebody calls `mx.nd.waitall`
_ONE_EACH = (
    "A context has one replica, with one batch: give it the samples of several. virtual_devices has the statistics of "
    "several devices on one, and several processes may share a GPU"
)


@contextmanager
def setting(change: Callable[[Any], Any], value: Any) -> Iterator[None]:
    """Within the block, a setting has another value. ``change`` sets it, and returns the value before."""
    before = change(value)
    try:
        yield
    finally:
        change(before)


@contextmanager
def executing(context: Context, layers: Any = (), nodes: Any = (), running: Sequence[Any] = ()) -> Iterator[None]:
    """Within the block, this thread makes or executes a graph whose operators MXNet keeps, with training calls of these
    layers' nodes. ``running``: pairs of running statistics, parameters or arrays, that the calls update. Who reads or
    writes these before the block or after it does so before the calls or after them.
    """
    arrays = [one.data(context) if isinstance(one, Parameter) else one for one in running]
    _native.begin_graph(str(context), layers, nodes, arrays)
    try:
        yield
    finally:
        _native.end_graph(arrays)


#: Of a running mean, the replicas of its layers. A copy of it has none before its layers are there.
_layers: OfEach[weakref.WeakValueDictionary[int, Replicas]] = OfEach(weakref.WeakValueDictionary)
#: Those that nodes name in a symbol of the program's. It may outlive the layer, so they live as long as the mean.
_in_symbols: OfEach[Dict[int, Replicas]] = OfEach(dict)


def followers_of(parameters: Iterable[Any]) -> List[Replicas]:
    """Returns the replicas of the layers that some of these parameters belong to, each once."""
    known = [_layers.get(parameter) for parameter in parameters]
    return list(dict.fromkeys(one for each in known if each for one in alive(each.valuerefs())))


def follow(mean: Parameter, replicas: Replicas) -> None:
    _layers(mean)[replicas.id] = replicas


def unfollow(mean: Parameter, replicas: Replicas) -> None:
    _layers(mean).pop(replicas.id, None)
    _in_symbols(mean).pop(replicas.id, None)


class _OfThread(threading.local):
    records: Optional[List[Replicas]] = None  # those in a graph that a block is recording, which keeps them itself
    issues = False  # the operators of a replica


_of_thread = _OfThread()


def records(value: Optional[List[Replicas]]) -> Optional[List[Replicas]]:
    """For `setting`."""
    before, _of_thread.records = _of_thread.records, value
    return before


def traced(parameter: Parameter, replicas: Replicas) -> None:
    """A layer puts a node into a symbol."""
    if _of_thread.records is None:
        _in_symbols(parameter)[replicas.id] = replicas
    else:
        _of_thread.records.append(replicas)


def stores_of(parameters: Iterable[Any]) -> List[Any]:
    """Returns the exchanges of several processes that are the default, or that the layers of these parameters name."""
    used = [session.exchange, *(replicas.exchange for replicas in followers_of(parameters))]
    return list(dict.fromkeys(one for one in used if one is not None and one.spans_processes))


def store_of(kvstore: Any, parameters: Iterable[Any] = ()) -> Optional[ProcessStore]:
    """Returns the store that reaches the other processes, for an argument ``kvstore``; None if it reaches none. By
    default that of `stores_of`, or the only one of this process, which no Trainer may have yet.
    """
    exchange: Any = named.exchange(kvstore)
    if kvstore is None:
        stores = stores_of(parameters) or ([] if session.chosen else session.stores)
        if len(stores) > 1:
            arguments.refuse("kvstore", kvstore, f"one of the {len(stores)} KVStores of the layers")
        exchange = stores[0] if stores else None
    if isinstance(exchange, DistSyncExchange):
        arguments.refuse(
            "kvstore", exchange.name, "'mpi', which carries more than statistics, or 'host' for one process"
        )
    return exchange if isinstance(exchange, ProcessStore) else None


def for_replica(call: Callable, block: Any, *args: Any) -> Any:
    """For layers on several CPU contexts: the outermost block that is called in training issues the operators of a
    replica. These draw from random states of their own (csrc/native/resources.cc).
    """
    if _of_thread.issues or not autograd.is_training():
        return call(block, *args)
    contexts = (x.ctx for x in kinds.arrays_of(args) if isinstance(x, mx.nd.NDArray))
    context = next((one for one in contexts if one.device_type == "cpu"), None)
    if context is None:
        return call(block, *args)
    _of_thread.issues = True
    try:
        with setting(_native.issue_on, context.device_id):
            return call(block, *args)
    finally:
        _of_thread.issues = False


def _make_room_for_errors() -> None:
    """Lets MXNet's list of errors grow before it has one.

    MXNet keeps the errors of operators in a list that has no lock (`AddToGlobalExceptions` in
    src/engine/threaded_engine.h). Each operator behind an error looks through the list. If several replicas fail,
    the list may get an error of another thread meanwhile. If it has to move for that, the process ends.
    """
    arrays = [mx.nd.empty(1, ctx=mx.cpu()) for _ in range(_ROOM)]
    _native.fail_arrays(arrays)
    for array in arrays:
        with suppress(mx.MXNetError):  # who reads an error removes it, and its place stays
            array.wait_to_read()


class EagerCall:
    """What an eager call of a layer computes. The core knows it by its number, as long as this object lives."""

    def __init__(self, layer: Replicas, settings: Settings) -> None:
        attributes = {**layer.to_node(settings), "node": "-1"}
        number = _native.call_create(list(attributes), list(attributes.values()))
        self.number = str(number)
        weakref.finalize(self, _native.call_drop, number).atexit = False


class Replicas:
    """The replicas of one layer, as the native core sees them: one on each context of its parameters."""

    #: Those of this process that still exist.
    by_id: ClassVar[weakref.WeakValueDictionary[int, Replicas]] = weakref.WeakValueDictionary()

    def __init__(self, name: str, kwargs: Dict[str, Any], settings: Settings) -> None:
        self.name, self.exchange = name, settings.exchange
        if self.exchange is not None:
            self.exchange.check(settings)
        self._kwargs = kwargs  # of ``nn.BatchNorm``, which anybody may change
        self.on_cpus = True  # some contexts may be
        self._now: Tuple[Settings, Dict[Tuple[bool, bool], EagerCall]]
        self.settings = settings
        self.channels = 0
        self.contexts: List[Context] = []
        self.order = 0  # in which layers got contexts first, which is that of the net; 0: it has none yet
        self.running: OfEach[None] = OfEach(lambda: None)  # the parameters of the running statistics
        self.ran = NEVER  # how the last training call on these contexts came
        self._noted: Optional[Tuple[Context, ...]] = None  # what the session counts of it
        self.taken_in = ""  # names the operators that the layer absorbed in the graph that was recorded last
        numbers = MODES.index(settings.mode), settings.virtual_devices, settings.group_size or 0
        handle = None if self.exchange is None else self.exchange.handle
        self.id: int = _native.layer_create(name, *numbers, settings.group_of_each(), settings.timeout or 0, handle)
        self.by_id[self.id] = self
        self.store: Any = ...  # that its last training call met by; None is the core's own
        self.key = self.id  # in that store, the same in all processes
        # At exit a daemon thread may still use it.
        weakref.finalize(self, _native.layer_drop, self.id).atexit = False

    @classmethod
    def all(cls) -> List[Replicas]:
        return alive(cls.by_id.valuerefs())

    @classmethod
    def placed(cls) -> List[Replicas]:
        """Returns those with contexts, in the order in which they got them."""
        return sorted((one for one in cls.all() if one.order), key=lambda one: one.order)

    @classmethod
    def of_node(cls, attributes: Mapping[str, str]) -> Optional[Replicas]:
        """Returns those of a node's layer, if it is in this process."""
        process, number = attributes["layer"].split(":")
        return cls.by_id.get(int(number)) if f"{process}:" == _native.PROCESS else None

    def to_node(self, settings: Settings) -> Dict[str, str]:
        """Returns the attributes of a node. The graph numbers its nodes when it is built."""
        place = {"layer": f"{_native.PROCESS}{self.id}", "node": "0", "on_cpus": str(int(self.on_cpus))}
        return {**place, **settings.to_node()}

    def now(self) -> Tuple[Settings, Dict[Tuple[bool, bool], EagerCall]]:
        """Returns the present settings, and the eager calls with these that the core knows."""
        if self._kwargs != self._of_kwargs:
            self.settings = replace(self._now[0], **self._kwargs)
        return self._now

    @property
    def settings(self) -> Settings:
        return self.now()[0]

    @settings.setter
    def settings(self, settings: Settings) -> None:
        kwargs = dict(self._kwargs)
        self._now = settings, {}  # calls of another thread go on with the pair that they have
        self._of_kwargs = kwargs

    def __reduce__(self) -> Any:
        return replace, (self.settings,)  # of which the copy of a layer makes its own

    def spread_running(self, trained: Sequence[Context]) -> None:
        """After steps on some contexts, gives the others their running statistics, if all share one statistic."""
        sources = [context for context in self.contexts if context in trained]
        if not sources or not self.settings.one_pool:
            return
        with autograd.pause():
            have_values = [one for one in self.running.objects() if one._data]  # those of a Module have none
            for parameter in have_values:
                for context in self.contexts:
                    if context not in trained:
                        parameter.data(sources[0]).copyto(parameter.data(context))

    def set_contexts(self, contexts: List[Context], channels: int) -> None:
        """Sets the contexts that hold the layer's parameters. If they cannot train, a training call raises the error:
        a net may get its parameters before its contexts, as from a file, or predict on others.
        """
        for context in contexts:
            if context.device_type == "gpu":
                cuda.check_architecture(context.device_id)
        if self.contexts != contexts:
            self.ran = NEVER
            if not self.settings.one_pool:
                self.store = ...  # whom a replica needs depends on how many each process has: they agree again
        self.contexts, self.channels = list(contexts), channels
        self.on_cpus = any(context.device_type != "gpu" for context in contexts)
        self.settings = self.settings  # calls depend on it
        if len(contexts) > 1:  # replicas need temporary space and random states of their own
            problem = _native.separate_resources()
            if problem:
                warnings.warn(
                    f"the devices of {self.name} share temporary space and random states ({problem}). Replicas may "
                    "wait for each other there until the time limit, unless MXNET_CPU_TEMP_COPY, "
                    "MXNET_GPU_TEMP_COPY and MXNET_CPU_PARALLEL_RAND_COPY are large",
                    stacklevel=2,
                )
        self.order = self.order or 1 + max(one.order for one in self.all())
        if len(contexts) > 1 and session.first("room for errors"):
            _make_room_for_errors()
        _native.layer_place(self.id, [str(context) for context in contexts])

    def problem_on(self, contexts: List[Context]) -> str:
        """Returns why the layer cannot train on these contexts; empty if it can."""
        places, expected = ", ".join(map(str, contexts)), self.settings.num_devices
        if len(set(contexts)) < len(contexts):
            return (
                f"ctx: the parameters of SyncBatchNorm '{self.name}' are on {places}, expected each context once. "
                f"{_ONE_EACH}"
            )
        if expected is not None and expected != len(contexts):
            more = f" contrib's layer would wait for ever for the missing ones. {_ONE_EACH}"
            return (
                f"num_devices: {expected} was given, expected None or {len(contexts)}, because the parameters of "
                f"SyncBatchNorm '{self.name}' are on {places}.{more if expected > len(contexts) else ''}"
            )
        return "" if self.reaches_other_processes() else self.settings.problem(len(contexts))

    def check(self) -> None:
        """ValueError if the layer cannot train on its contexts, if they are known."""
        problem = self.problem_on(self.contexts) if self.contexts else ""
        if problem:
            raise ValueError(problem)

    def runs(self, how: str) -> None:
        """Notes that the layer is about to be called in training. Before its first call, the processes agree on it.

        They do so in the user's thread, whose line an error has. A layer that never trains takes no part.
        """
        store: Any = self.exchange or session.exchange
        if self.ran == how and self.store is store:
            return
        trains = not self.settings.use_global_stats
        if trains:
            self.check()
        meets = bool(self.contexts) and self.settings.mode != "local" and trains
        between = store is not None and store.spans_processes
        # A Trainer brings its KVStore to the layers, or says whom they meet. A loop may have none.
        others = [] if store or session.chosen or session.trainers.objects() else session.stores
        if meets and any(one.num_workers > 1 for one in others) and session.first("a loop without a Trainer"):
            log.warning("the layers meet within this process alone; configure(kvstore=kv) lets them use %r", others[0])
        self._noted = session.notes(tuple(self.contexts) if meets and not between else (), self._noted)
        self.ran = how
        while between and meets and self.store is not store:
            more = any(not one.contexts and one.settings.mode != "local" for one in self.all())
            counted = [one for one in self.placed() if one.settings.mode != "local"]
            store.agree(self, [one for one in counted if (one.exchange or session.exchange) is store], more)
        if meets:
            self.store = store

    def agrees(self, store: ProcessExchange, key: int, replicas: List[int]) -> None:
        """Takes the agreement of the processes, of which each has so many replicas."""
        _native.layer_agree(self.id, store.handle, key, store.rank, replicas)
        self.store, self.key = store, key

    def meets(self) -> bool:
        """Whether the layer has several replicas."""
        return self.reaches_other_processes() or len(self.contexts) > 1

    def reaches_other_processes(self) -> bool:
        exchange = self.exchange or session.exchange
        return exchange is not None and exchange.spans_processes
