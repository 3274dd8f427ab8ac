"""Finds the exchange for a name or a KVStore."""

from __future__ import annotations

import functools
import importlib
from typing import Any, Optional

import mxnet as mx

from .. import _native
from ..system import arguments, distribution
from .base import DeviceExchange, Exchange, Transport
from .store import ProcessStore

#: KVStore types that add within one process.
TYPES = ("local", "device")
#: The native core's own exchanges, for all contexts of a process.
IN_CORE = {gpus: Exchange(_native.memory_exchange(gpus)) for gpus in ("nccl", "host")}
#: The module of each transport, and its class there.
TRANSPORTS = {"mpi": "MPITransport", "horovod": "HorovodTransport", "dist_sync": "DistSyncTransport"}
#: The package that a transport needs, and what installs it.
PACKAGES = {
    "mpi": ("mpi4py", distribution.command("mpi")),
    "horovod": ("horovod", "tools/install_horovod.sh in the checkout compiles it"),
}


def transport(name: Any) -> Transport:
    """Returns the transport of this name. ImportError: a package that it needs is not installed."""
    if not isinstance(name, str) or name not in TRANSPORTS:
        of_one_process = isinstance(name, str) and name in (*TYPES, *IN_CORE)
        reason = _in_one_process(name) if of_one_process else _refusal(str(name))
        arguments.refuse("name", name, f"one of {tuple(TRANSPORTS)}.{reason}")
    return getattr(importlib.import_module(f".{name}", __package__), TRANSPORTS[name])()


# One for each KVStore, so that one lock guards it.
_adding = functools.lru_cache(maxsize=None)(DeviceExchange)


def exchange(kvstore: Any) -> Optional[Exchange]:
    """Returns the exchange for ``None`` (see `configure`), a name or a KVStore object.

    Raises
    ------
    ValueError
        If the argument is not a KVStore, or one that cannot add statistics. The text says why.
    """
    if kvstore is None or isinstance(kvstore, ProcessStore):
        return kvstore
    if isinstance(kvstore, str) and kvstore in IN_CORE:
        problem = _without_nccl(kvstore)
        if problem:
            raise ValueError(
                f"kvstore: 'nccl' was given, but {problem}; None (the default), 'host', 'device' and 'local' need none"
            )
        return IN_CORE[kvstore]
    if isinstance(kvstore, str):
        if kvstore not in TYPES:
            arguments.refuse("kvstore", kvstore, _EXPECTED + "." + _refusal(kvstore))
        kvstore = mx.kv.create(kvstore)
    if not isinstance(kvstore, (mx.kv.KVStore, mx.kvstore.KVStoreBase)):
        arguments.refuse("kvstore", kvstore, _EXPECTED)
    if kvstore.type not in TYPES:
        raise ValueError(
            f"kvstore: an object of type {kvstore.type!r} was given, expected one of {TYPES}." + _refusal(kvstore.type)
        )
    return _adding(kvstore)


_EXPECTED = f"one of {(*TYPES, *IN_CORE)}, a KVStore object or None"


def _in_one_process(name: str) -> str:
    problem = _without_nccl(name)
    instead = f", and {problem}: write no kvstore" if problem else f": write gluon_syncbn.configure(kvstore={name!r})"
    return f" {name!r} adds within one process{instead}."


def _without_nccl(name: str) -> str:
    return _native.nccl_problem() if name == "nccl" else ""


def _refusal(name: str) -> str:
    if name.startswith("dist"):
        return (
            " MXNet's store runs the optimizer on all that is pushed, statistics too. "
            "gluon_syncbn.kvstore('dist_sync') makes one for gradients and statistics, in its place."
        )
    return {
        "horovod": " MXNet 1.9.1 has no store of that name and silently creates a local one; "
        "gluon_syncbn.kvstore('horovod') makes one.",
        "mpi": " gluon_syncbn.kvstore('mpi') makes one between processes.",
        "nccl": " A store of NCCL serves only the keys that it had at its first sum, so a Trainer cannot share it; the "
        "name 'nccl' does without one.",
    }.get(name, "")
