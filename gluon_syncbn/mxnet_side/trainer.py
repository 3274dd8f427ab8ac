"""Runs in the places of methods of ``gluon.Trainer`` that begin a training, add gradients and update weights."""

from __future__ import annotations

import warnings
from contextlib import contextmanager, nullcontext
from typing import Any, Callable, Iterator, Optional

from mxnet import gluon

from .. import _native
from ..exchange import named
from ..exchange.base import Exchange
from ..exchange.dist_sync import DistSyncExchange
from ..exchange.store import ProcessStore
from ..system import arguments, kinds
from ..system.logs import log
from ..training import devices, steps
from ..training.replicas import followers_of, stores_of
from ..training.session import session
from . import advice, comparison, optimizers


def constructing(construct: Callable, trainer: gluon.Trainer, *args: Any, **kwargs: Any) -> None:
    """A new Trainer and the layers use the same store of processes, if one of them has one and the user has chosen
    nothing else. `only_on` finds the Trainer's gradients: those of contexts that take no part would be added again.
    """
    construct(trainer, *args, **kwargs)
    # Behind the parameters, the optimizer and its settings. The note is the Trainer's own, so that a copy has it too.
    if "kvstore" not in kwargs and len(args) <= 3:
        vars(trainer)["_has_chosen_store"] = False
    _share_store(trainer)
    session.trainers(trainer)
    for change in session.hooks["constructing"]:
        change(trainer)


def beginning(begin: Callable, trainer: gluon.Trainer) -> None:
    """Before the first step: the layers may have got their store since the Trainer was made. The Trainer sees the whole
    net now, and warns of layers that compute something else than they were asked for.

    MXNet would copy the first context's running statistics to all. ``save_states`` and ``load_states`` come here, too,
    maybe in one process alone. So a store of processes compares weights in the first sum.
    """
    _share_store(trainer)
    if _watches(trainer):
        steps.watch_gradients(trainer._params)
    begin(trainer)
    state = session.trainers(trainer)
    if trainer._kvstore is not None and _watches(trainer):
        of_each = [p._data if p.grad_req == "null" else p._grad for p in trainer._params]
        _native.gate([array for arrays in of_each for array in arrays or ()])
    if isinstance(trainer._kvstore, ProcessStore):
        trainer._params_to_init = []  # what MXNet would copy
        state.summed_for = None
    of_workers = _of_workers(trainer)
    if of_workers is not None:
        of_workers.begin_trainer(trainer)
    if not state.has_begun:
        state.has_begun = True
        for text in advice.surprises(trainer):
            warnings.warn(text, stacklevel=4)
        advice.tell_who_meets(trainer)


def adding(add: Callable, trainer: gluon.Trainer) -> None:
    """A store of processes gets the gradients of a step together. MXNet gives them one by one, without an end."""
    store, state = trainer._kvstore, session.trainers(trainer)  # which a copy does not have before
    state.begin_part("allreduce_grads")
    devices.settle_gradients(trainer._params)
    if _watches(trainer):
        steps.watch_gradients(trainer._params)
    if isinstance(store, ProcessStore):
        if state.summed_for is None:
            comparison.compare_weights(trainer, store)
        gradients = {p.name: p.list_grad() for p in state.in_order(trainer) if p.grad_req != "null"}
        store.add_gradients(trainer, gradients, comparison.update_of(trainer))
        state.summed_for = trainer._optimizer.rescale_grad
    else:
        of_workers = _of_workers(trainer)
        adds = nullcontext() if of_workers is None else of_workers.summing(trainer)
        with adds, _gated(trainer) if trainer._update_on_kvstore else nullcontext():  # the store updates while it adds
            add(trainer)


def updating(update: Callable, trainer: gluon.Trainer, *args: Any, **kwargs: Any) -> None:
    """``update`` comes after ``allreduce_grads``, whose sums are there before anybody knows what they will be divided
    by. It sets the divisor, as `step` does before the sums.
    """
    store, state, divisor = trainer._kvstore, session.trainers(trainer), trainer._optimizer.rescale_grad
    state.begin_part("update")
    if isinstance(store, ProcessStore) and divisor is not state.summed_for:
        comparison.compare_divisor(trainer, store, round(trainer._scale / divisor, 6))
    try:
        with nullcontext() if trainer._update_on_kvstore else _gated(trainer):
            with optimizers.alike(trainer) if isinstance(store, ProcessStore) else nullcontext():
                update(trainer, *args, **kwargs)
    except UserWarning:  # a stale gradient: replicas that wait for one without a batch know why
        for gradient in [one for p in trainer._params if p.grad_req != "null" for one in p.list_grad()]:
            gradient.wait_to_read()
        raise


def saving_states(save: Callable, trainer: gluon.Trainer, fname: str) -> None:
    """A failed step leaves its error in the state of the optimizer, which is as it was. MXNet would open the file, and
    then raise the error. The states in a KVStore of the program's own are its own.
    """
    updater = getattr(trainer._kvstore, "_updater", None) if trainer._update_on_kvstore else trainer._updaters[0]
    steps.settle(kinds.arrays_of(getattr(updater, "states", {})))
    save(trainer, fname)


#: What runs in the places of its methods. A subclass of a program's calls them as MXNet's.
WRAPPED = {
    (gluon.Trainer, "__init__"): constructing,
    (gluon.Trainer, "_init_kvstore"): beginning,
    (gluon.Trainer, "_allreduce_grads"): adding,
    (gluon.Trainer, "_update"): updating,
    (gluon.Trainer, "save_states"): saving_states,
}


def _share_store(trainer: gluon.Trainer) -> None:
    settings = trainer._kvstore_params
    chosen = vars(trainer).get("_has_chosen_store", True) or settings["update_on_kvstore"]
    stores = [] if chosen else [one for one in stores_of(trainer._params) if one.of_trainer]
    if len(stores) == 1 and settings["kvstore"] is not stores[0].of_trainer["kvstore"]:
        settings.update(stores[0].of_trainer)
        if followers_of(trainer._params):
            log.info("the Trainer uses the KVStore of the layers: %r", stores[0])
        elif stores[0].num_workers > 1:
            log.warning(
                "a Trainer whose net has no layer of gluon_syncbn adds its gradients over all processes: it has no "
                "kvstore=, and %r is that of gluon_syncbn.configure. kvstore=None makes a Trainer of one process, "
                "kvstore='device' one of several devices of it",
                stores[0],
            )
    shared: Optional[Exchange] = None
    # MXNet makes a local one of either name without a word.
    if named.spans_processes(settings["kvstore"]) or settings["kvstore"] == "horovod":
        settings["kvstore"] = named.store(settings["kvstore"])
    if isinstance(settings["kvstore"], ProcessStore):
        shared = store = settings["kvstore"]
        optimizers.check(trainer, store.num_workers)
        if trainer._compression_params:
            arguments.refuse("compression_params", trainer._compression_params, f"None with {store!r}")
        store.expect(trainer)
    elif named.is_of_workers(settings["kvstore"]):
        takes_part = any(isinstance(one, DistSyncExchange) for one in stores_of(trainer._params))
        if takes_part and settings["update_on_kvstore"] is not False:
            expected = "False, because the servers' optimizer would run on the statistics of the layers, too"
            arguments.refuse("update_on_kvstore", settings["update_on_kvstore"], expected)
        if settings["update_on_kvstore"] is False and followers_of(trainer._params):
            shared = named.exchange(settings["kvstore"])
            settings.update(shared.of_trainer if shared else {})
    if shared is not None and session.exchange is None and not session.chosen:  # `configure` has not chosen
        session.set(exchange=shared)
        log.info("layers without a KVStore of their own use that of the Trainer: %r", shared)


def _of_workers(trainer: gluon.Trainer) -> Optional[DistSyncExchange]:
    """Returns the exchange of layers by this Trainer's store of MXNet's, if there is one."""
    of_workers = [one for one in session.stores if isinstance(one, DistSyncExchange)]
    return next((one for one in of_workers if one.kvstore is trainer._kvstore), None)


@contextmanager
def _gated(trainer: gluon.Trainer) -> Iterator[None]:
    """Within the block, an update is issued. If the step fails, it changes nothing. The first reader of a weight gets
    the error, and the next one the values, which are as they were.

    In MXNet a failed operator and all operators that are skipped because of it share one exception. The first reader of
    any of their results removes the exception. Then operators that are still queued run. An update that was issued
    before the loss was read would then use gradients that were never computed. The gate is an exception of its own,
    between the gradients and their users, which would also stay in the weights.

    A store of processes needs it too: MXNet leaves out the sum of an array that was not computed. That array keeps the
    exception that it shares with the loss, and weights changed where a program read the loss before the update ran.
    """
    if not _watches(trainer):
        yield
        return
    trained = [p for p in trainer._params if p._grad is not None]
    _native.gate([gradient for p in trained for gradient in p._grad])
    try:
        yield
    finally:
        _native.share_failure([weight for p in trained for weight in p._data])


def _watches(trainer: gluon.Trainer) -> bool:
    return _native.layers() > 0 or isinstance(trainer._kvstore, ProcessStore)
