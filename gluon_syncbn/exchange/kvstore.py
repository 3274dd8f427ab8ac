"""Exchange through MXNet's KVStore: its own reduction over the contexts of one process."""

from __future__ import annotations

import itertools
import threading
import weakref
from typing import Any, Dict, List, Tuple

import mxnet as mx
import numpy as np

from .. import _native, arguments
from .._native import Ticket, Total
from .base import Exchange, Member
from .store import ProcessStore, Transport

#: KVStore types that add within one process.
TYPES = ("local", "device", "nccl")

# gluon.Trainer numbers its parameters from 0 in the same store; no net has this many.
_keys = itertools.count(1 << 24)
# One for each store, so that one lock guards it; that of NCCL is at 0.
_exchanges: weakref.WeakValueDictionary[int, Exchange] = weakref.WeakValueDictionary()


_process_stores: Dict[str, ProcessStore] = {}


def kvstore(name: str) -> ProcessStore:
    """A KVStore over all processes of the job, for ``gluon.Trainer(kvstore=...)``, ``SyncBatchNorm(kvstore=...)`` and
    ``configure(kvstore=...)``.

    ::

        kv = gluon_syncbn.kvstore("mpi")  # in every process, started by mpiexec
        gluon_syncbn.configure(kvstore=kv)
        trainer = gluon.Trainer(net.collect_params(), "sgd", kvstore=kv)
        trainer.step(samples_of_all_processes)

    The processes must build and initialise the same net; Gluon's names need not be the same. A process that ends,
    hangs or fails ends the step of all with an `MXNetError` that names the layer and the rank, and the job with it.

    Parameters
    ----------
    name : str
        ``'mpi'``: mpi4py over the MPI that it was installed with. ``'horovod'``: Horovod, started by ``horovodrun``;
        ``horovod.mxnet.DistributedTrainer`` may add the gradients meanwhile.

    Returns
    -------
    ProcessStore
        The same object at every call. ``rank`` and ``num_workers`` say which process this is.

    Raises
    ------
    ValueError
        Where there is no such transport.
    ImportError
        Where what it needs is not installed.
    """
    if not isinstance(name, str) or name not in ("mpi", "horovod"):
        arguments.refuse("name", name, "'mpi' or 'horovod'." + _refusal(str(name)))
    if name not in _process_stores:
        _process_stores[name] = ProcessStore(name, _transport(name))
    return _process_stores[name]


def _transport(name: str) -> Transport:
    if name == "mpi":
        from .mpi import MPITransport

        return MPITransport()
    from .horovod import HorovodTransport

    return HorovodTransport()


def create(kvstore: Any) -> Exchange | None:
    """An exchange from ``None`` (shared memory), a KVStore type name or a KVStore object.

    Raises
    ------
    ValueError
        Where the argument is no KVStore, or one that cannot add statistics. The text says why.
    """
    if kvstore is None:
        return None
    if isinstance(kvstore, str):
        if kvstore not in TYPES:
            arguments.refuse(
                "kvstore", kvstore, f"one of {TYPES}, a KVStore object or None (shared memory)." + _refusal(kvstore)
            )
        try:
            store = mx.kv.create(kvstore)
        except mx.MXNetError as error:
            reason = str(error).splitlines()[-1]
            raise ValueError(
                f"kvstore: {kvstore!r} was given, but this build of MXNet cannot create it: {reason}"
            ) from None
        if kvstore == "nccl":
            return _exchanges.setdefault(0, NCCLExchange())
        kvstore = store
    if isinstance(kvstore, ProcessStore):
        return kvstore
    if not isinstance(kvstore, (mx.kv.KVStore, mx.kvstore.KVStoreBase)):
        arguments.refuse("kvstore", kvstore, f"one of {TYPES}, a KVStore object or None (shared memory)")
    if kvstore.type not in TYPES or kvstore.type == "nccl":
        raise ValueError(
            f"kvstore: an object of type {kvstore.type!r} was given, expected one of {TYPES}." + _refusal(kvstore.type)
        )
    return _exchanges.setdefault(id(kvstore), KVStoreExchange(kvstore))


def _refusal(name: str) -> str:
    if name.startswith("dist"):
        return " Parameter servers run the optimizer on what is pushed to them, so they cannot add statistics."
    if name == "horovod":
        return (
            " MXNet 1.9.1 has no store of that name and silently creates a local one; gluon_syncbn.kvstore('horovod') "
            "makes one."
        )
    if name == "nccl":
        return (
            " A store of NCCL serves only the keys that it had at its first sum, so a Trainer cannot share it; the "
            "name 'nccl' makes one for all layers."
        )
    return ""


class KVStoreExchange(Exchange):
    """Adds with ``kvstore.pushpull``, on the contexts that the replicas live on.

    A store that runs an optimizer on what it receives is refused when it is first used.
    """

    def __init__(self, kvstore: mx.kvstore.KVStoreBase) -> None:
        self.kvstore = kvstore
        # A store makes the buffers of a key for the contexts of its first sum (CommCPU and CommDevice::Reduce resize
        # `copy_buf` once) and writes past their end where a later sum has more.
        self._keys: Dict[Tuple[int, Tuple[mx.Context, ...]], int] = {}  # (length, contexts) -> key
        self._lock = threading.Lock()  # leaders of different layers come at once, the store serves one

    def add(self, member: Member, ticket: Ticket, rows: np.ndarray) -> Total:
        if getattr(self.kvstore, "_updater", None) is not None:
            raise ValueError(
                "this KVStore has an optimizer set, which would run on the statistics. Give the Trainer "
                "update_on_kvstore=False, or give SyncBatchNorm a store of its own."
            )
        length, contexts = rows.shape[1], tuple(member.contexts[: len(rows)])
        with self._lock:
            values = [mx.nd.array(row, ctx=ctx, dtype="float64") for row, ctx in zip(rows, contexts)]
            key = self._keys.get((length, contexts))
            if key is None:
                key = self._keys[length, contexts] = next(_keys)
                zeros = mx.nd.zeros(length, ctx=contexts[0], dtype="float64")
                self.kvstore.broadcast(key, zeros, out=[value.copy() for value in values])
            out = [mx.nd.empty(length, ctx=ctx, dtype="float64") for ctx in contexts]
            self.kvstore.pushpull(key, values, out=out)
            return Total(out[0].asnumpy(), 0, ticket.layer)


class NCCLExchange(Exchange):
    """Adds on the GPUs with NCCL, through KVStores of its own.

    A store of MXNet makes its buffers when it first adds (``KVStoreNCCL::InitMergeBuffer``), for the keys that it has
    by then, and serves one set of GPUs. So there is one for each set, whose keys are there from the start: one for
    each power of two up to `_MOST` values, of which a vector takes the next, in parts where it is longer.
    """

    _LEAST, _MOST = 1 << 6, 1 << 17

    def __init__(self) -> None:
        self._stores: Dict[Tuple[mx.Context, ...], mx.kvstore.KVStoreBase] = {}
        # All collectives are posted under this lock, in one order on all GPUs: NCCL hangs where two GPUs differ.
        self._lock = threading.Lock()

    def add(self, member: Member, ticket: Ticket, rows: np.ndarray) -> Total:
        contexts = tuple(member.contexts)
        if any(context.device_type != "gpu" for context in contexts):
            raise ValueError(f"kvstore 'nccl' adds on GPUs, but the layer is on {', '.join(map(str, contexts))}")
        with self._lock:
            if contexts not in self._stores:
                self._stores[contexts] = self._store(contexts)
            outs = [
                self._sum(self._stores[contexts], contexts, rows[:, first : first + self._MOST])
                for first in range(0, rows.shape[1], self._MOST)
            ]
            try:
                return Total(_read(outs, _native.timeout_of(ticket.layer))[: rows.shape[1]], 0, ticket.layer)
            except TimeoutError:
                del self._stores[contexts]  # what is posted there never ends
                raise

    def _store(self, contexts: Tuple[mx.Context, ...]) -> mx.kvstore.KVStoreBase:
        store, size = mx.kv.create("nccl"), self._LEAST
        while size <= self._MOST:
            store.init(size, mx.nd.array(np.zeros(size), ctx=contexts[0], dtype="float64"))
            size *= 2
        return store

    def _sum(self, store: mx.kvstore.KVStoreBase, contexts: Tuple[mx.Context, ...], rows: np.ndarray) -> mx.nd.NDArray:
        size = self._LEAST
        while size < rows.shape[1]:
            size *= 2
        # Every GPU takes part in each collective; of those that a step leaves out, see `devices`, there is no row.
        padded = np.zeros((len(contexts), size))
        padded[: len(rows), : rows.shape[1]] = rows
        values = [mx.nd.array(row, ctx=context, dtype="float64") for row, context in zip(padded, contexts)]
        out = [mx.nd.empty(size, ctx=context, dtype="float64") for context in contexts]
        store.pushpull(size, values, out=out)
        return out[0]


def _read(arrays: List[mx.nd.NDArray], timeout: float) -> np.ndarray:
    """The values of all arrays one after the other. A collective that hangs cannot be interrupted, only left alone."""
    values: List[np.ndarray] = []
    problems: List[BaseException] = []

    def read() -> None:
        try:
            values.extend(array.asnumpy() for array in arrays)
        except mx.MXNetError as error:
            problems.append(error)

    reader = threading.Thread(target=read, name="gluon_syncbn-nccl", daemon=True)
    reader.start()
    reader.join(timeout)
    if reader.is_alive():
        raise TimeoutError(
            f"NCCL has not finished for {timeout:g} s. Either a GPU is not there any more (nvidia-smi), or another "
            "user of NCCL in this process waits for the same GPUs; NCCL_DEBUG=INFO shows what it does."
        )
    if problems:
        raise problems[0]
    return np.concatenate(values)
