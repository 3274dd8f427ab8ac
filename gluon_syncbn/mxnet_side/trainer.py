"""Runs in the places of methods of ``gluon.Trainer`` that begin a training, add gradients and update weights. A Trainer
and the layers use the same store of processes, and the first step tells who takes part.
"""

from __future__ import annotations

import inspect
import weakref
from typing import Any, Callable, Iterable, List

import mxnet as mx
from mxnet import gluon

from .. import _native
from ..exchange.store import ProcessStore
from ..system import environment
from ..system.logs import log
from ..training import devices
from ..training.replicas import followers_of, stores_of
from ..training.session import session
from . import mixed

#: Of each launcher: the variable with the number of its processes, another one that must be set, and our store.
_LAUNCHERS = (
    ("PMI_SIZE", "", "mpi"),
    ("OMPI_COMM_WORLD_SIZE", "", "mpi"),
    ("HOROVOD_SIZE", "", "horovod"),
    ("SLURM_NTASKS", "SLURM_STEP_ID", "mpi"),
    ("DMLC_NUM_WORKER", "DMLC_ROLE", "dist_sync"),
)


def constructing(construct: Callable, *args: Any, **kwargs: Any) -> None:
    """A new Trainer and the layers use the same store of processes, if one of them has one and the user has chosen
    nothing else. `devices` finds the Trainer's gradients: those of contexts that take no part would be added again.
    """
    given = inspect.signature(construct).bind(*args, **kwargs).arguments
    store = given.get("kvstore")
    if "kvstore" not in given and not given.get("update_on_kvstore"):
        params = given["params"]
        listed = list(params.values()) if hasattr(params, "values") else params
        known = [p for p in listed if isinstance(p, gluon.Parameter)] if isinstance(listed, (list, tuple)) else []
        stores = stores_of(known)
        if len(stores) == 1:
            store = kwargs["kvstore"] = stores[0]
            log.info("the Trainer uses the KVStore of the layers: %r", store)
    construct(*args, **kwargs)
    if isinstance(store, ProcessStore):
        store.expect(given["self"])
        if session.exchange is None and not session.chosen:  # `configure` has not chosen
            session.set_exchange(store)
            log.info("layers without a KVStore of their own use that of the Trainer: %r", store)
    devices.trainers.add(given["self"])


def initialising(initialise: Callable, trainer: gluon.Trainer) -> None:
    """Before its first update, a Trainer sees the whole net, and warns of layers that compute something else than they
    were asked for. It compares its weights with those of the other processes. MXNet would copy rank 0's, after a
    forward and a backward with others. It copies the first context's running statistics to all.
    """
    if trainer not in _initialised:
        _initialised.add(trainer)
        mixed.warn_of(trainer._params)
        _tell_who_meets(trainer._params)
    if trainer._kvstore is not None:
        _gate(trainer, with_running=True)
    if not isinstance(trainer._kvstore, ProcessStore):
        initialise(trainer)
        return
    known = [p for p in trainer._params_to_init if not p._deferred_init]
    trainer._params_to_init = [p for p in trainer._params_to_init if p._deferred_init]
    if known:
        trainer._kvstore.compare_weights(trainer, {p.name: (p.list_data(), p.grad_req != "null") for p in known})


_initialised: weakref.WeakSet[gluon.Trainer] = weakref.WeakSet()


def adding(add: Callable, trainer: gluon.Trainer) -> None:
    """A store of processes gets the gradients of a step together. MXNet gives them one by one, without an end."""
    devices.settle_gradients(trainer._params)
    if trainer._update_on_kvstore:  # the store updates while it adds
        _gate(trainer)
    store = trainer._kvstore
    if isinstance(store, ProcessStore):
        store.add_gradients(trainer, {p.name: p.list_grad() for p in trainer._params if p.grad_req != "null"})
    else:
        add(trainer)


def updating(update: Callable, trainer: gluon.Trainer, *args: Any, **kwargs: Any) -> None:
    if not trainer._update_on_kvstore:
        _gate(trainer)
    update(trainer, *args, **kwargs)


def _gate(trainer: gluon.Trainer, with_running: bool = False) -> None:
    """Lets nothing use the gradients of a step that failed, nor, if asked, running statistics and the like.

    In MXNet a failed operator and all operators that are skipped because of it share one exception. The first reader of
    any of their results removes the exception. Then operators that are still queued run. An update that was issued
    before the loss was read would then use gradients that were never computed. The gate is an exception of its own,
    between the gradients and their users.
    """
    if not (_native.layers() or isinstance(trainer._kvstore, ProcessStore)):
        return
    written: List[mx.nd.NDArray] = [g for p in trainer._params if p._grad is not None for g in p._grad]
    if with_running:
        written += [d for p in trainer._params if p.grad_req == "null" for d in p._data or ()]
    if written:
        _native.gate(written)


def _tell_who_meets(parameters: Iterable[gluon.Parameter]) -> None:
    """Says with whom the layers of a Trainer meet; warns if a launcher has started processes that do not meet."""
    meeting = [replicas for replicas in followers_of(parameters) if replicas.pooling.mode != "local"]
    exchanges = [replicas.exchange or session.exchange for replicas in meeting]
    if not meeting or any(isinstance(one, ProcessStore) and one.num_workers > 1 for one in exchanges):
        return  # the store tells what the processes have agreed on
    log.info("the statistics of %d layers meet within this process: %d replicas", len(meeting), meeting[0].count())
    for variable, other, store in _LAUNCHERS:
        size = environment.read(variable)
        if size.isdigit() and int(size) > 1 and (not other or environment.read(other)) and not session.warned:
            session.warned = True
            log.warning(
                f"This is one of {size} processes ({variable}), but its layers meet no replica of the others. For "
                f"statistics and gradients of all processes, write kv = gluon_syncbn.kvstore({store!r}) and "
                "gluon.Trainer(..., kvstore=kv). mode='local' is for statistics of each device."
            )
