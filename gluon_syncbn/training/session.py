"""What belongs to the process: its defaults, its layers, the exchanges that reach other processes, the open scopes."""

from __future__ import annotations

import threading
import weakref
from typing import Any, Dict, List, Optional, Tuple

from .. import _native
from ..exchange import named
from ..exchange.base import Exchange, LayerInfo, Memory
from ..exchange.store import ProcessStore, way_of_gpus
from ..system import arguments

_UNCHANGED: Any = object()
_MEMORY = Memory()


class Session:
    """The one of this process is `session`. Time limits and the seed are the native core's, which waits and draws."""

    def __init__(self) -> None:
        #: For layers that name no KVStore; None is shared memory.
        self.exchange: Optional[Exchange] = None
        # In the order of their first initialisation, which is that of the net, and for good: whether a layer that is no
        # longer used has been collected yet is nothing that processes could agree on, and its last sum may be on its
        # way.
        self._layers: Dict[int, Tuple[LayerInfo, Optional[Exchange]]] = {}
        self._stores: Dict[str, ProcessStore] = {}  # by transport
        # By the KVStore that they add with: one for each, so that one lock guards it.
        self._exchanges: weakref.WeakValueDictionary[int, Exchange] = weakref.WeakValueDictionary()
        # Those that reach other processes, which have to hear of a failure and of the end.
        self._between_processes: weakref.WeakSet[Exchange] = weakref.WeakSet()
        self._lock = threading.Lock()  # guards the number of open scopes
        self._open_scopes = 0
        self.beginning = threading.RLock()  # held by a thread that enters its first scope, or forgets a failed step
        self._of_thread = threading.local()
        self.training_threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()  # threads that have opened a scope
        self.raised = ""  # the last failure that went through a scope as an exception
        self.ending = False  # exit handlers have begun

    # ---- exchanges -----------------------------------------------------------------------------------------

    def process_store(self, name: str, gpus: Any = _UNCHANGED) -> ProcessStore:
        """The one over this transport, made at its first use, where ``gpus`` holds for good."""
        if gpus is not _UNCHANGED:
            gpus = way_of_gpus(gpus)
        if name not in self._stores:
            given = None if gpus is _UNCHANGED else gpus
            self._stores[name] = ProcessStore(name, named.transport(name), given)
            self._between_processes.add(self._stores[name])
            self._stores[name].meet_in_memory()
        store = self._stores[name]
        if gpus is not _UNCHANGED and gpus != store.gpus:
            raise ValueError(f"gpus: {gpus!r} was given, but kvstore {name!r} has been made with {store.gpus!r}")
        return store

    def exchange_of(self, kvstore: Any) -> Optional[Exchange]:
        """What adds for the argument ``kvstore``; ValueError where nothing can."""
        exchange, key = named.exchange(kvstore)
        if exchange is not None and exchange.spans_processes:
            self._between_processes.add(exchange)
        return exchange if exchange is None or key is None else self._exchanges.setdefault(key, exchange)

    def set_exchange(self, exchange: Optional[Exchange]) -> None:
        self.exchange = exchange
        _native.default_exchange((exchange or _MEMORY).handle)

    def layer_of(self, exchange: Exchange, ticket: _native.Ticket) -> LayerInfo:
        """For the core: the layer of a ticket, which the exchange knows from now on."""
        layer, _ = self._layers[ticket.layer]
        if not exchange.knows(layer):
            exchange.learn(self._layers_of(exchange))
        return layer

    def _layers_of(self, exchange: Exchange) -> List[LayerInfo]:
        return [
            layer
            for layer, own in self._layers.values()
            if (own or self.exchange) is exchange and layer.mode != "local"  # which exchanges nothing
        ]

    def reaches_other_processes(self, exchange: Optional[Exchange]) -> bool:
        """Whether a layer that names this one does."""
        return (exchange or self.exchange or _MEMORY).spans_processes

    def tell_others(self, reason: str) -> None:
        """The other processes, of a step that has failed here."""
        for exchange in list(self._between_processes):
            exchange.fail(reason)

    def close(self) -> None:
        """The process ends."""
        for exchange in list(self._between_processes):
            exchange.close()

    # ---- layers --------------------------------------------------------------------------------------------

    def register(self, layer: LayerInfo, exchange: Optional[Exchange]) -> None:
        """A layer has its parameters, or has them elsewhere; ``exchange`` is its own."""
        self._layers[layer.id] = (layer, exchange)

    # ---- scopes --------------------------------------------------------------------------------------------

    def enter_scope(self) -> bool:
        """Whether it is the first one in the process."""
        with self._lock:
            first = self._open_scopes == 0
            self._open_scopes += 1
            if not hasattr(self._of_thread, "depth"):
                self.training_threads.add(threading.current_thread())
        self._of_thread.depth = self.depth() + 1
        return first

    def leave_scope(self) -> bool:
        """Whether it was the last one in its thread."""
        with self._lock:
            self._open_scopes -= 1
        self._of_thread.depth -= 1
        return self._of_thread.depth == 0

    def depth(self) -> int:
        """Scopes that this thread has open."""
        return getattr(self._of_thread, "depth", 0)

    def alone_in_a_step(self) -> bool:
        """Whether this thread is in a step and no other is."""
        with self._lock:
            return 0 < self._open_scopes == self.depth()

    def alone_trains(self) -> bool:
        """Whether this thread is in a step, and no other one will ever be: it is the main one, and none of the others
        that have opened a scope is left.
        """
        this = threading.current_thread()
        with self._lock:
            others = [thread for thread in self.training_threads if thread is not this and thread.is_alive()]
        return self.depth() > 0 and this is threading.main_thread() and not others

    # ---- forks ---------------------------------------------------------------------------------------------

    def forked(self) -> None:
        """Here is the child, with the one thread that forked."""
        self._lock, self._open_scopes = threading.Lock(), self.depth()
        self.beginning = threading.RLock()
        for exchange in list(self._between_processes):
            exchange.forked()


session = Session()


def configure(
    *, kvstore: Any = _UNCHANGED, timeout: Any = _UNCHANGED, seed: Any = _UNCHANGED, nonfinite: Any = _UNCHANGED
) -> None:
    """Sets defaults for all layers that do not say otherwise, those that exist already included.

    Some models call ``norm_layer`` without ``norm_kwargs``; this reaches their layers too. A sum that is on its way
    when the KVStore changes is made by one or the other.

    Parameters
    ----------
    kvstore : str, KVStore or None
        What adds the statistics over contexts. ``None``, where a process starts: shared memory; GPUs gather them with
        NCCL, or over the host where this build of MXNet has none. ``'nccl'``: NCCL, or an error. ``'host'``: shared
        memory, for GPUs too. ``'device'``, ``'local'`` or a KVStore object: MXNet's reduction; of GPUs, which have a
        replica each, it adds the arrays where they are.
    timeout : float
        Seconds that a replica waits for the others, 300 to start with. Then the step fails with an `MXNetError`
        that names the layer, who arrived and who is missing.
    seed : int
        Of the permutations of mode ``'shuffle'``, from 0 to 2**64 - 1; 0 to start with. Each layer draws a new one for
        each call, and setting a seed starts over: a run that sets seed + epoch at the start of each epoch is the same
        whether it was interrupted or not.
    nonfinite : str
        Of a batch whose mean or variance is not finite, on any device that shares the statistic. ``'propagate'``, where
        a process starts: what plain BatchNorm does, and the running statistics are lost. ``'skip'``: they leave the
        batch out, on all devices that it would have reached, and one warning names layer, replica and what was found;
        outputs and gradients are as before, so that the step has to be left out too. ``'error'``: the step ends in an
        `MXNetError` with that text, and nothing is updated. It shows in the sums that are made anyway.

    Raises
    ------
    ValueError
        Where an argument is out of range. Nothing is changed then.
    """
    if seed is not _UNCHANGED:
        seed = arguments.seed("seed", seed)
    if timeout is not _UNCHANGED:
        timeout = arguments.seconds("timeout", timeout)
    if nonfinite is not _UNCHANGED:
        nonfinite = arguments.one_of("nonfinite", nonfinite, _native.NONFINITE)
    exchange = session.exchange if kvstore is _UNCHANGED else session.exchange_of(kvstore)
    if timeout is not _UNCHANGED:
        _native.default_timeout(timeout)
    if seed is not _UNCHANGED:
        _native.seed(seed)
    if nonfinite is not _UNCHANGED:
        _native.nonfinite(nonfinite)
    if kvstore is not _UNCHANGED:
        session.set_exchange(exchange)


def kvstore(name: str, *, gpus: Any = _UNCHANGED) -> ProcessStore:
    """A KVStore over all processes of the job, for ``gluon.Trainer(kvstore=...)``, ``SyncBatchNorm(kvstore=...)`` and
    ``configure(kvstore=...)``.

    ::

        # mpiexec -n 2 python train.py
        import gluon_syncbn
        from mxnet import gluon

        kv = gluon_syncbn.kvstore("mpi")  # in every process
        gluon_syncbn.configure(kvstore=kv)
        net = gluon_syncbn.SyncBatchNorm()
        net.initialize()
        trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=kv)
        # and in each step: trainer.step(number of the samples of all processes)

    The processes must build and initialise the same net; Gluon's names need not be the same. A process that ends,
    hangs or fails ends the step of all with an `MXNetError` that names the layer and the rank, and the job with it.

    Parameters
    ----------
    name : str
        ``'mpi'``: mpi4py over the MPI that it was installed with. ``'horovod'``: Horovod, started by ``horovodrun``;
        ``horovod.mxnet.DistributedTrainer`` may add the gradients meanwhile.
    gpus : str or None
        How GPUs hand each other the statistics, the same in every process; it holds from the first call. ``None``, the
        default: they stay on the devices, on NCCL's communicators over all processes; over the host, with a warning,
        where NCCL cannot be had: a build of MXNet without it, a GPU that several replicas share, contexts that are no
        GPUs. ``'nccl'``: NCCL, or an error. ``'host'``: over the host.

    Returns
    -------
    ProcessStore
        The same object at every call. ``rank`` and ``num_workers`` say which process this is.

    Raises
    ------
    ValueError
        Where there is no such transport, or ``gpus`` is not one of those, or another one than at the first call.
    ImportError
        Where what it needs is not installed.
    """
    return session.process_store(named.transport_name(name), gpus)


_native.set_layers(session.layer_of)
