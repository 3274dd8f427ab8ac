"""Finds the exchange for a name or a KVStore."""

from __future__ import annotations

import functools
from typing import Any, Optional

import mxnet as mx

from .. import _native
from ..system import arguments, distribution
from . import dist_sync, horovod
from .base import DeviceExchange, Exchange
from .mpi import Job

#: KVStore types that add within one process.
TYPES = ("local", "device")
#: The native core's own exchanges, for all contexts of a process.
IN_CORE = {gpus: Exchange(_native.memory_exchange(gpus), gpus) for gpus in ("nccl", "host")}
#: The names of jobs of several processes.
TRANSPORTS = {"mpi": Job}
#: The package that a transport needs, and what installs it.
PACKAGES = {"mpi": ("mpi4py", distribution.command("mpi"))}


def spans_processes(name: Any) -> bool:
    """Whether a store of this name spans processes. A program may have registered one of its own with MXNet."""
    return isinstance(name, str) and name in TRANSPORTS and name not in mx.kvstore.KVStoreBase.kv_registry


def is_of_workers(kvstore: Any) -> bool:
    """Whether this is a store of MXNet's that adds over workers, or its name."""
    return (kvstore if isinstance(kvstore, str) else getattr(kvstore, "type", "")) in dist_sync.TYPES


def transport(name: Any) -> Job:
    """Returns the transport of this name. ImportError: a package that it needs is not installed."""
    if not isinstance(name, str) or name not in TRANSPORTS:
        reason = _refusal(str(name))
        if isinstance(name, str) and name in (*TYPES, *IN_CORE):
            missing = name == "nccl" and _native.nccl_problem()
            instead = "no kvstore" if missing else f"gluon_syncbn.configure(kvstore={name!r})"
            reason = f" {name!r} adds within one process{f', and {missing}' if missing else ''}: write {instead}."
        arguments.refuse("name", name, f"one of {tuple(TRANSPORTS)}.{reason}")
    return TRANSPORTS[name]()


@functools.lru_cache(maxsize=None)
def _adding(kvstore: Any) -> Exchange:
    """One for each KVStore, so that one lock guards it, and one KVStore for each name. They stay: MXNet may free one
    that is still adding, and the process would end in SIGFPE.
    """
    return DeviceExchange(mx.kvstore.create(kvstore) if isinstance(kvstore, str) else kvstore)


def exchange(kvstore: Any) -> Optional[Exchange]:
    """Returns the exchange for ``None`` (see `configure`), a name of one process, or a KVStore. ValueError: it adds no
    statistics.
    """
    if kvstore is None or isinstance(kvstore, Exchange):
        return kvstore
    if isinstance(kvstore, str) and kvstore in IN_CORE:
        missing = kvstore == "nccl" and _native.nccl_problem()
        if missing:
            raise ValueError(
                f"kvstore: 'nccl' was given, but {missing}; None (the default), 'host', 'device' and 'local' need none"
            )
        return IN_CORE[kvstore]
    if is_of_workers(kvstore):
        return dist_sync.exchange(kvstore)
    if isinstance(kvstore, str) and kvstore == "horovod":
        return horovod.exchange()
    if isinstance(kvstore, str):
        if kvstore not in TYPES:
            arguments.refuse("kvstore", kvstore, _EXPECTED + "." + _refusal(kvstore))
        return _adding(kvstore)
    if not isinstance(kvstore, mx.kvstore.KVStoreBase):
        arguments.refuse("kvstore", kvstore, _EXPECTED)
    if kvstore.type not in TYPES:
        raise ValueError(
            f"kvstore: an object of type {kvstore.type!r} was given, expected one of {TYPES}." + _refusal(kvstore.type)
        )
    return _adding(kvstore)


_EXPECTED = f"one of {(*TYPES, *IN_CORE, *TRANSPORTS, 'dist_sync', 'horovod')}, a KVStore object or None"


def _refusal(name: str) -> str:
    if name.startswith("dist"):
        return " Other workers' statistics are of other steps."
    if name == "nccl":
        return (
            " A store of NCCL serves only the keys that it had at its first sum, so a Trainer cannot share it; the "
            "name 'nccl' does without one."
        )
    return ""
