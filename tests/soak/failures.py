"""Steps that cannot be finished: each has to end in its error, change nothing and leave the next step right."""

import functools
from contextlib import suppress
from typing import Any, Callable, Dict, List, Sequence

import mxnet as mx
from mxnet import autograd, nd

import gluon_syncbn

from .trial import TIMEOUT, Trial, Wrong

SHORT = 0.4  # seconds that a replica waits for one that does not come
LEFT = "OutOfData left the recorded step"


class OutOfData(Exception):
    pass


def choices(trial: Trial) -> Dict[Callable[[], None], float]:
    """Those that a case can have, and how often, where 100 steps are healthy ones."""
    kinds: Dict[Callable[[Trial], None], float] = {an_exception: 3, a_replica_that_is_never_called: 1}
    if not trial.threads and not trial.case.empty:
        kinds[one_loss] = 1
    if not trial.case.meets:
        kinds = {}
    return {functools.wraps(fail)(functools.partial(fail, trial)): chance for fail, chance in kinds.items()}


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
