"""Runs in the places of methods of ``gluon.Trainer`` that begin a training, add gradients and update weights."""

from __future__ import annotations

import inspect
import weakref
from typing import Any, Callable, List

import mxnet as mx
from mxnet import gluon

from .. import _native
from ..exchange.store import ProcessStore
from ..training import devices
from . import mixed, processes


def constructing(construct: Callable, *args: Any, **kwargs: Any) -> None:
    """A new Trainer and the layers use the same store of processes, if one of them has one and the user has chosen
    nothing else. `devices` finds the Trainer's gradients: those of contexts that take no part would be added again.
    """
    given = inspect.signature(construct).bind(*args, **kwargs).arguments
    store = given.get("kvstore")
    if "kvstore" not in given and not given.get("update_on_kvstore"):
        store = processes.store_of_layers(given["params"])
        if store is not None:
            kwargs["kvstore"] = store
    construct(*args, **kwargs)
    if isinstance(store, ProcessStore):
        store.expect(given["self"])
        processes.give_to_layers(store)
    devices.trainers.add(given["self"])


def initialising(initialise: Callable, trainer: gluon.Trainer) -> None:
    """Before its first update, a Trainer sees the whole net, and warns of layers that compute something else than they
    were asked for. It compares its weights with those of the other processes. MXNet would copy rank 0's, after a
    forward and a backward with others. It copies the first context's running statistics to all.
    """
    if trainer not in _initialised:
        _initialised.add(trainer)
        mixed.warn_of(trainer._params)
        processes.tell(trainer._params)
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
