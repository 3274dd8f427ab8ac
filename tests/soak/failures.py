"""Steps that cannot be finished: each has to end in its error, change nothing and leave the next step right."""

import functools
import os
from contextlib import suppress
from typing import Any, Callable, Dict, List, Sequence

import mxnet as mx
from mxnet import autograd, nd

import gluon_syncbn
from gluon_syncbn import SyncBatchNorm
from gluon_syncbn.mxnet_side import blocks
from gluon_syncbn.training.session import session

from .trial import TIMEOUT, Trial, Wrong, wait_for

SHORT = 0.4  # seconds that a replica waits for one that does not come


LEFT = "OutOfData left the recorded step"


class OutOfData(Exception):
    pass


def choices(trial: Trial) -> Dict[Callable[[], None], float]:
    """Those that a case can have, and how often, where 100 steps are healthy ones."""
    return {functools.wraps(fail)(functools.partial(fail, trial)): chance for fail, chance in _choices(trial).items()}


def _choices(trial: Trial) -> Dict[Callable[[Trial], None], float]:
    case = trial.case
    if not case.meets:
        return {}
    kinds: Dict[Callable[[Trial], None], float] = {an_exception: 3, a_replica_that_is_never_called: 1}
    if trial.threads or case.empty:
        return kinds
    kinds[a_fork_between_replicas] = 0.3
    kinds[one_loss] = 1
    kinds[reading_between_replicas] = 1
    if case.net == "layer" and case.way == "eager" and case.dtype != "float64":
        kinds[another_type] = 2
    if case.mode == "sync" and "group_size" not in case.pooling:
        kinds[a_store_that_raises] = 2
    return kinds


def an_exception(trial: Trial) -> None:
    """Between two replicas, or in the thread of one."""
    case, (call,) = trial.case, trial.calls(trial.case.contexts)
    failing = trial.rng.randint(1, len(case.contexts))
    ys: List[Any] = []

    def replica(i: int) -> None:
        with autograd.record(), mx.util.np_shape(case.empty):  # which is each thread's own
            if i == failing:
                raise OutOfData
            try:
                ys.append(trial.net(call.xs[i]))
            except mx.MXNetError as error:  # a thread may come after the exception of another
                explains(error, LEFT)
                raise OutOfData from None

    with suppress(OutOfData), autograd.record():
        if trial.threads:
            trial.crew.run([functools.partial(replica, i) for i in range(len(case.contexts))])
        else:
            for i in range(failing + 1):
                replica(i)
    if trial.rng.rand() < 0.5:  # otherwise the next step finds what nobody has read
        for y in filled(ys):
            fails(y, LEFT)
    recover(trial)


def a_replica_that_is_never_called(trial: Trial) -> None:
    (call,) = trial.calls(trial.case.contexts)
    some = sorted(trial.rng.permutation(len(call.xs))[: trial.rng.randint(1, len(call.xs))])
    part = call._replace(xs=[call.xs[i] for i in some], dys=[call.dys[i] for i in some])
    if not filled(part.xs):
        return  # no result would show the failure, and the parameters would wait for the missing replicas
    gluon_syncbn.configure(timeout=SHORT)
    (ys,) = trial.issue([part], fails=True)
    if trial.rng.rand() < 0.5:
        train_on(trial, [part], [ys])
    for y in filled(ys):
        fails(y, "replicas arrived")
    recover(trial)


def one_loss(trial: Trial) -> None:
    (call,) = trial.calls(trial.case.contexts)
    gluon_syncbn.configure(timeout=10)  # which the backward has from its forward, whose replicas come in time
    (ys,) = trial.issue([call])
    for y in ys:
        y.wait_to_read()
    trial.specification.forward(call.shards, trial.case.contexts)
    i = trial.rng.randint(len(ys))
    train_on(trial, [call._replace(dys=[call.dys[i]])], [[ys[i]]])
    fails(call.xs[i].grad, "replicas arrived")
    recover(trial)


def reading_between_replicas(trial: Trial) -> None:
    (call,) = trial.calls(trial.case.contexts)
    gluon_syncbn.configure(timeout=SHORT)
    with suppress(OutOfData), autograd.record():
        fails(trial.net(call.xs[0]), "replicas arrived")
        raise OutOfData
    recover(trial)


def another_type(trial: Trial) -> None:
    (call,) = trial.calls(trial.case.contexts)
    i = trial.rng.randint(len(call.xs))
    call.xs[i] = call.xs[i].astype("float16" if trial.case.dtype == "float32" else "float32")
    (ys,) = trial.issue([call], fails=True)
    for y in ys:
        fails(y, "on data of the same type")
    recover(trial)


def a_store_that_raises(trial: Trial) -> None:
    (call,) = trial.calls(trial.case.contexts)
    if trial.case.kvstore is None:
        gluon_syncbn.configure(kvstore="device")
    layers = [block for block in blocks.iterate(trial.net) if isinstance(block, SyncBatchNorm)]
    exchanges = {layer._replicas.exchange or session.exchange for layer in layers}

    def link_down(*arguments: Any) -> None:
        raise ConnectionError("the link is down")

    for exchange in exchanges:
        exchange.add = link_down
    text = "the KVStore could not add the statistics: ConnectionError: the link is down"
    try:
        (ys,) = trial.issue([call], fails=True)
        if trial.rng.rand() < 0.5:
            train_on(trial, [call], [ys])
        for y in ys:
            fails(y, text)
    finally:
        for exchange in exchanges:
            del exchange.add
    recover(trial)


def a_fork_between_replicas(trial: Trial) -> None:
    (call,) = trial.calls(trial.case.contexts)
    with autograd.record():
        trial.net(call.xs[0])
        child = os.fork()
        if child == 0:
            os._exit(7)
        wait_for(child, 7)
        fails(trial.net(call.xs[1]), "the process was forked")
    trial.counted["forks"] += 1
    recover(trial)


def filled(arrays: Sequence[nd.NDArray]) -> List[nd.NDArray]:
    """MXNet does not wait for an array that has nothing to read."""
    return [array for array in arrays if array.size]


def fails(array: nd.NDArray, text: str) -> None:
    try:
        array.asnumpy()
    except mx.MXNetError as error:
        explains(error, text)
    else:
        raise Wrong(f"a step that cannot be finished gave a result, expected an error with {text!r}")


def explains(error: mx.MXNetError, text: str) -> None:
    if text not in str(error):
        raise Wrong(f"expected an error with {text!r}") from error


def train_on(trial: Trial, calls: Sequence[Any], ys: Sequence[Sequence[nd.NDArray]]) -> None:
    """As a loop does that has not looked at the loss."""
    trial.backward(calls, ys)
    if trial.trainer is not None:
        trial.trainer.step(1, ignore_stale_grad=True)


def recover(trial: Trial) -> None:
    """The next step starts afresh; nothing has changed but gradients."""
    again = [gluon_syncbn.reset, autograd.record, autograd.train_mode][trial.rng.randint(3)]
    if again is gluon_syncbn.reset:
        again()
    else:
        with again():
            pass
    gluon_syncbn.configure(timeout=TIMEOUT)
    trial.unchanged()
    trial.counted["failed as expected"] += 1
    for p in trial.parameters:
        p.zero_grad()
    trial.specification.forget_gradients(trial.case.contexts)
    trial.start_over(trial.case.seed)  # a call that failed may have taken a permutation, or not
