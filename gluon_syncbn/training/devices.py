"""Chooses the contexts that take part."""

from __future__ import annotations

from contextlib import contextmanager
from typing import Dict, Iterable, Iterator, List, Sequence

import mxnet as mx
from mxnet import gluon
from mxnet.context import Context

from .. import _native
from ..system import arguments, kinds
from .replicas import Replicas
from .session import session
from .steps import drain


@contextmanager
def only_on(contexts: Sequence[Context]) -> Iterator[None]:
    """Lets only these contexts take part, for example for a short last batch.

    Its ``record()`` and ``backward()`` stand in a block ``with gluon_syncbn.only_on(contexts[:2]):``, which waits
    for all work at its beginning and end, so that each step has one set of contexts. It affects the whole process.
    Afterwards, the other contexts have the same running statistics, if the layer has one statistic (mode ``'sync'``
    without groups). A gradient that the block computes is 0 on the other contexts, for a ``gluon.Trainer``. With
    ``grad_req='add'``, it is there what earlier batches have left. A loop that updates weights without a
    ``gluon.Trainer`` calls ``zero_grad`` before the block.

    ::

        import gluon_syncbn
        import mxnet as mx
        from mxnet import autograd

        contexts = gluon_syncbn.cpu_devices(2)
        layer = gluon_syncbn.SyncBatchNorm(in_channels=3)
        layer.initialize(ctx=contexts)
        with gluon_syncbn.only_on(contexts[:1]):
            with autograd.record():
                y = layer(mx.nd.random.normal(shape=(2, 3), ctx=contexts[0]))
            y.backward()

    Parameters
    ----------
    contexts : list of Context
        At least one context, each once.

    Raises
    ------
    ValueError
        If the list is empty, repeats a context or holds something else.
    """
    expected = "a list of different mx.Context objects"
    chosen = arguments.contexts("contexts", contexts, expected)
    if len(set(chosen)) < len(chosen):
        arguments.refuse("contexts", contexts, expected)
    if session.devices:
        raise ValueError("contexts: only_on(...) is active already; leave that block first")
    mx.nd.waitall()
    marks: Dict[Context, Dict[int, bool]] = {context: {} for context in chosen}
    for parameter in session.trained():
        for array in parameter.list_data():
            if array.ctx in marks:
                marks[array.ctx][id(array)], array._fresh_grad = array._fresh_grad, False
    _native.reset()
    session.set(devices=marks)
    try:
        yield
        mx.nd.waitall()
    except BaseException as error:
        _native.fail(f"{type(error).__name__} left gluon_syncbn.only_on(...): {error}")
        drain("the end of only_on")
        raise
    finally:
        try:
            settle_gradients(session.trained())
        finally:  # also where a second Ctrl-C ends that
            session.set(devices={})
            _native.reset()
        for replicas in Replicas.all():
            replicas.spread_running(chosen)


def settle_gradients(parameters: Iterable[gluon.Parameter]) -> None:
    """Within `only_on`, makes the gradients of contexts without a batch those of an empty batch.

    MXNet marks a parameter's array on a context when a backward writes its gradient. A ``gluon.Trainer`` that updates
    the weights itself takes the mark away, and one that updates in its KVStore does not. So `only_on` takes all marks
    away, and those of parameters without a gradient of the block come back here.
    """
    for parameter in parameters if session.devices else ():
        if parameter._grad is None:
            continue
        arrays = [array for array in parameter.list_data() if array.ctx in session.devices]
        marks = [session.devices[array.ctx].pop(id(array), False) for array in arrays]
        if not any(array._fresh_grad for array in arrays):
            for array, mark in zip(arrays, marks):
                array._fresh_grad = mark
            continue
        for array, gradient in zip(parameter.list_data(), parameter.list_grad()):
            if array.ctx not in session.devices:
                if parameter.grad_req == "write":
                    gradient = kinds.classic(gradient)
                    mx.nd.zeros_like(gradient, out=gradient)
                array._fresh_grad = True


def cpu_devices(n: int) -> List[Context]:
    """Returns ``n`` CPU contexts, ``[mx.cpu(0), ..., mx.cpu(n - 1)]``. Contexts made by hand serve as well.

    MXNet's operators on all CPU contexts share four copies of temporary space and one random state. Replicas that wait
    for each other could then wait for ever. So, as soon as a layer is on several contexts, temporary space belongs to
    the threads that run operators, and random states to contexts.

    A replica is a block that is called in training, with its arrays on a context. Its Dropout draws from random states
    of this context, in each thread that issues it. So do operators outside of any block on ``mx.cpu(1)`` and later ones
    in training. ``mx.random.seed(seed)`` seeds these states, with another seed for each context.
    ``mx.random.seed(seed, ctx=context)`` gives one of them the numbers of a process with one context. All else, such as
    initial weights, draws the numbers that a seed gives without this package.

    Parameters
    ----------
    n : int
        Number of contexts, from 1 to 1024.

    Raises
    ------
    ValueError
        If ``n`` is not an integer, or out of range.
    """
    return [mx.cpu(i) for i in range(arguments.whole("n", n, 1, 1024))]
