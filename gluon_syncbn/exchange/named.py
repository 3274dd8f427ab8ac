"""Finds the exchange for a name or a KVStore."""

from __future__ import annotations

import functools
from typing import Any, List, Optional

import mxnet as mx

from .. import _native
from ..system import arguments
from . import dist_sync
from .base import DeviceExchange, Exchange
from .mpi import Job
from .store import ProcessStore

#: KVStore types that add within one process.
TYPES = ("local", "device")
#: The native core's own exchanges, for all contexts of a process, with their numbers (`Nccl` in exchange.h).
IN_CORE = {gpus: Exchange(_native.memory_exchange(number), gpus) for number, gpus in ((1, "nccl"), (2, "host"))}
#: The name of the store of several processes.
MPI = "mpi"
#: The exchanges of several processes that are in use: the others must be told of a failure and of the end.
stores: List[Any] = []


def spans_processes(name: Any) -> bool:
    """Whether a store of this name spans processes. A program may have registered one of its own with MXNet."""
    return isinstance(name, str) and name == MPI and name not in mx.kvstore.KVStoreBase.kv_registry


def is_of_workers(kvstore: Any) -> bool:
    """Whether this is a store of MXNet's that adds over workers, or its name."""
    return (kvstore if isinstance(kvstore, str) else getattr(kvstore, "type", "")) in dist_sync.TYPES


def store(name: Any) -> ProcessStore:
    """Returns the one store of several processes of this name. ImportError: it needs a package that is not there."""
    if not isinstance(name, str) or name != MPI:
        reason = _refusal(str(name))
        if isinstance(name, str) and name in (*TYPES, *IN_CORE, *dist_sync.TYPES):
            missing = name == "nccl" and _native.nccl_problem()
            instead = "no kvstore" if missing else f"gluon_syncbn.configure(kvstore={name!r})"
            reason = f" Layers take {name!r} without one{f', but {missing}' if missing else ''}: write {instead}."
        arguments.refuse("name", name, f"one of {(MPI,)}.{reason}")
    found = next((one for one in stores if one.name == name), None)
    if found is None:
        found = ProcessStore(name, Job())
        stores.append(found)
        try:
            found.meet()
        except BaseException as error:
            found.fail(f"rank {found.rank} left gluon_syncbn.kvstore with {type(error).__name__}: {error}")
            raise
    return found


@functools.lru_cache(maxsize=None)
def _adding(kvstore: Any) -> Exchange:
    """One for each KVStore, so that one lock guards it, and one KVStore for each name. They stay: MXNet may free one
    that is still adding, and the process would end in SIGFPE.
    """
    return DeviceExchange(mx.kvstore.create(kvstore) if isinstance(kvstore, str) else kvstore)


def exchange(kvstore: Any) -> Optional[Exchange]:
    """Returns the exchange for the argument ``kvstore`` (see `configure`). ValueError: there is none."""
    if spans_processes(kvstore):
        return store(kvstore)
    if kvstore is None or isinstance(kvstore, Exchange):
        return kvstore
    is_name = isinstance(kvstore, str)
    if is_name and kvstore in IN_CORE:
        missing = kvstore == "nccl" and _native.nccl_problem()
        if missing:
            raise ValueError(
                f"kvstore: 'nccl' was given, but {missing}; None (the default), 'host', 'device' and 'local' need none"
            )
        return IN_CORE[kvstore]
    if is_of_workers(kvstore):
        found = next((one for one in stores if isinstance(one, dist_sync.DistSyncExchange)), None)
        if found is None:
            found = dist_sync.DistSyncExchange(kvstore)
            stores.append(found)
        if kvstore not in (found.name, found.kvstore):
            arguments.refuse("kvstore", kvstore, f"{found.kvstore!r}, because a process has one store of this kind")
        return found
    kind = kvstore.type if isinstance(kvstore, mx.kvstore.KVStoreBase) else kvstore
    if not isinstance(kind, str) or kind not in TYPES:
        names = (*TYPES, *IN_CORE, MPI, "dist_sync")
        expected = f"one of {names}, an object of one of these types but 'nccl' and 'host', or None."
        arguments.refuse("kvstore", kind, expected + _refusal(str(kind)))
    return _adding(kvstore)


def _refusal(name: str) -> str:
    if name.startswith("dist"):
        return " Other workers' statistics are of other steps."
    if name == "nccl":
        return (
            " A store of NCCL serves only the keys that it had at its first sum, so a Trainer cannot share it; the "
            "name 'nccl' does without one."
        )
    if name == "horovod":
        return " Beside its DistributedTrainer, layers take 'mpi', in a job that mpiexec starts."
    return ""
