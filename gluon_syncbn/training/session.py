"""Holds the state of the process: its defaults, its exchanges, and what `install` has asked for."""

from __future__ import annotations

import os
import threading
import typing
from collections import Counter, defaultdict
from typing import Any, DefaultDict, Dict, List, Literal, Optional, Sequence, Tuple

from mxnet.base import MXNetError
from mxnet.context import Context

from .. import _native
from ..exchange import named
from ..exchange.agreement import numbered
from ..exchange.base import Exchange
from ..exchange.store import ProcessStore
from ..system import arguments, locks
from ..system.identity import OfEach

_UNCHANGED: Any = type("_Unchanged", (), {"__repr__": lambda _: "unchanged"})()
NONFINITE = ("propagate", "skip", "error")  # the order is that of `Nonfinite` in csrc/meeting/meeting.h


class OfTrainer:
    """What is known of a Trainer besides."""

    def __init__(self) -> None:
        self.has_begun = False
        self.joined: Any = None  # the block of `join` that it is in
        self.compared: Optional[Dict[int, Any]] = None  # states, by the processes. To load others makes another dict
        # The divisor then: the object, because a new one may be as large. None: the next sum compares weights first.
        self.summed_for: Optional[float] = None

    def begin_part(self, name: str) -> None:
        """Begins a part of a step. MXNetError: within `join`, it is outside of one."""
        if self.joined is not None and not self.joined.in_step:
            raise MXNetError(
                f"trainer.{name} was called within gluon_syncbn.join, where a process without a batch calls "
                "trainer.step alone, and would not do what comes between the parts of a step. Do it in the step of a "
                "subclass of gluon.Trainer."
            )

    def in_order(self, trainer: Any) -> List[Any]:
        """Returns the parameters that the Trainer has now, in an order that is the same in all processes. Gluon's
        counters may begin elsewhere in another one, where the Trainer puts ``dense10_weight`` before ``dense9_weight``.
        """
        return sorted(trainer._params, key=lambda one: numbered(one.name))


class Session:
    """The state of this process. What `set` changes, the native core has, too."""

    def __init__(self) -> None:
        #: The exchange of layers that name no KVStore; None is the core's own, over this process's contexts.
        self.exchange: Optional[Exchange] = None
        self._in_core = Exchange(_native.memory_exchange(0))
        self.timeout, self.nonfinite, self.seed = 300.0, NONFINITE[0], 0
        #: Contexts that alone take part, none means all; and the marks that `only_on` took from their arrays, by `id`.
        self.devices: Dict[Context, Dict[int, bool]] = {}
        self.chosen = False  # `configure` has set it
        self.stores = named.stores
        self._issuing: DefaultDict[Tuple[int, int], threading.Lock]  # by context
        self.tracing: Any  # held by a thread that records the graph of a net
        locks.give(self, tracing=threading.RLock, _issuing=lambda: defaultdict(threading.Lock))
        #: How many layers have trained, by the most contexts on which they met; none for several processes.
        self.ran: typing.Counter[Tuple[Context, ...]] = Counter()
        self.trainers = OfEach(OfTrainer)  # of Gluon
        #: The blocks that have recorded a graph. A block does not know those around it, whose graphs have its layers.
        self.graphs: OfEach[None] = OfEach(lambda: None)
        #: What runs before MXNet records a block, and behind the construction of a Trainer; and the operators of MXNet
        #: whose nodes in a `Module` are also synchronised.
        self.hooks: Dict[str, List[Any]] = {"recording": [], "constructing": [], "operators": []}
        self._done: Dict[str, int] = {}  # the process that has asked `first`

    def set(self, **changes: Any) -> None:
        """Sets defaults of layers."""
        vars(self).update(changes)
        handle = (self.exchange or self._in_core).handle
        _native.configure(self.timeout, NONFINITE.index(self.nonfinite), list(map(str, self.devices)), handle)
        if "seed" in changes:
            _native.seed(self.seed)

    def tell_others(self, reason: str) -> None:
        """Tells the other processes that a step has failed here."""
        for store in self.stores:
            store.fail(reason)

    def issuing(self, context: Context) -> threading.Lock:
        """Returns the lock of a thread that issues operators of a layer on this context.

        They write the same running statistics as those of another thread. MXNet appends an operator to the queue of
        each array that it writes, one after the other (`ThreadedEngine::Push` in src/engine/threaded_engine.cc). If
        two threads do so at once, each operator may be the first in one queue, and then wait for the other for ever.
        """
        return self._issuing[context.device_typeid, context.device_id]

    def trained(self) -> List[Any]:
        """Returns the parameters of all Trainers that have gradients."""
        parameters = {id(one): one for trainer in self.trainers.objects() for one in trainer._params}
        return [one for one in parameters.values() if one._grad is not None]

    def notes(self, met: Tuple[Context, ...], before: Optional[Tuple[Context, ...]]) -> Tuple[Context, ...]:
        """Notes where a layer has trained, in place of what was noted before. Returns what is noted."""
        if before is None or len(met) > len(before):
            self.ran.update([met])
            self.ran.subtract([] if before is None else [before])
            return met
        return before

    def first(self, what: str) -> bool:
        """Whether nobody has asked for this in this process, which is another one after a fork."""
        before, self._done[what] = self._done.get(what), os.getpid()
        return before != self._done[what]

    def also(self, **more: Sequence[Any]) -> None:
        """Adds to the hooks."""
        for kind, hooks in more.items():
            self.hooks[kind] += hooks

    def no_longer(self, *less: Any) -> None:
        """Undoes `also`."""
        for hooks in self.hooks.values():
            hooks[:] = [one for one in hooks if one not in less]


session = Session()


def configure(
    *,
    kvstore: Any = _UNCHANGED,
    timeout: float = _UNCHANGED,
    seed: int = _UNCHANGED,
    nonfinite: Literal["propagate", "skip", "error"] = _UNCHANGED,
) -> Dict[str, Any]:
    """Sets defaults for all layers that do not override them, existing layers included, and returns all of them.

    They reach models that call ``norm_layer`` without ``norm_kwargs``, too. A call that has begun keeps its KVStore.
    Without arguments, nothing changes.

    ::

        import gluon_syncbn

        gluon_syncbn.configure(timeout=60, nonfinite="skip")
        print(gluon_syncbn.configure()["timeout"])  # 60.0

    Parameters
    ----------
    kvstore : str, KVStore or None
        The exchange that adds the statistics over contexts. ``None``, the default: shared memory. GPUs gather the
        statistics with NCCL, or through host memory if this build of MXNet has no NCCL. ``'nccl'``: NCCL, or an error.
        ``'host'``: shared memory, for GPUs too. ``'device'``, ``'local'`` or such a KVStore object: MXNet's reduction.
        A store of `gluon_syncbn.kvstore`, or its name: over all processes of the job. Every ``gluon.Trainer`` without
        ``kvstore=`` then adds its gradients there, also one of a net without such a layer. ``kvstore=None`` makes a
        Trainer of one process, ``kvstore='device'`` one of several devices of it. ``'dist_sync'``, or such a KVStore
        object: over the workers of MXNet's parameter servers, for the mode ``'sync'`` without groups. The one Trainer
        has the same store, and ``update_on_kvstore=False``.
    timeout : float
        Seconds that a replica waits for the others, initially 300. Then the step fails with a `StepError`
        that names the layer, who arrived and who is missing.
    seed : int
        The seed of the permutations of mode ``'shuffle'``, from 0 to 2**64 - 1, initially 0. Each layer draws a new
        permutation for each call, and setting a seed starts over. A run that sets seed + epoch at the start of each
        epoch gives the same results after an interruption.
    nonfinite : str
        The treatment of a batch whose mean or variance is not finite, on any device that shares the statistic.
        ``'propagate'``, the default: the running statistics become NaN or Inf too, as in plain BatchNorm. ``'skip'``:
        the running statistics leave the batch out on all devices that share the statistic. One warning names layer,
        replica and value. Outputs and gradients are unchanged, so skip the optimizer's update yourself. ``'error'``:
        the step ends in a `StepError` with that text, and nothing is updated. The check uses sums that exist anyway.

    Returns
    -------
    dict
        Each argument's value now, the KVStore's as its name.

    Raises
    ------
    ValueError
        If an argument is out of range. Then nothing is changed.
    """
    changes: Dict[str, Any] = {}  # none before all arguments are checked
    if seed is not _UNCHANGED:
        changes["seed"] = arguments.seed("seed", seed)
    if timeout is not _UNCHANGED:
        changes["timeout"] = arguments.seconds("timeout", timeout)
    if nonfinite is not _UNCHANGED:
        changes["nonfinite"] = arguments.one_of("nonfinite", nonfinite, NONFINITE)
    if kvstore is not _UNCHANGED:
        changes.update(exchange=named.exchange(kvstore), chosen=True)
    if changes:
        session.set(**changes)
    name = session.exchange and session.exchange.name
    return {"kvstore": name, "timeout": session.timeout, "seed": session.seed, "nonfinite": session.nonfinite}


def kvstore(name: Literal["mpi"] = "mpi") -> ProcessStore:
    """Returns a KVStore over all processes of the job, for `configure`, ``gluon.Trainer`` and ``SyncBatchNorm``, which
    take its name, too.

    The processes must build and initialise the same net; Gluon's names may differ. If a process ends, hangs or fails,
    the step of all processes ends in a `StepError` that names the layer and the rank. The job ends too.

    ::

        # mpiexec -n 2 python train.py
        import gluon_syncbn

        kv = gluon_syncbn.kvstore("mpi")
        print(f"rank {kv.rank} of {kv.num_workers}")

    Parameters
    ----------
    name : str
        ``'mpi'``: mpi4py with the MPI that it was installed with. In a job of MXNet's parameter servers,
        layers take ``mx.kv.create('dist_sync')``, and need no such store.

    Returns
    -------
    ProcessStore
        The same object at every call. ``rank`` and ``num_workers`` identify this process, ``local_rank`` and
        ``local_size`` do so on its machine, by its host name. Its ``allgather`` gives every process an array of each.

    Raises
    ------
    ValueError
        If ``name`` is something else.
    ImportError
        If mpi4py is not installed.
    MXNetError
        If not all processes of the job arrive within ``timeout``.
    """
    return named.store(name)
