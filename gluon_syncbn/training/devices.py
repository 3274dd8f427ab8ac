"""Chooses the contexts that take part, and makes CPU contexts whose operators can wait for each other."""

from __future__ import annotations

import warnings
import weakref
from contextlib import contextmanager
from typing import Dict, Iterable, Iterator, List, Optional, Sequence

import mxnet as mx
from mxnet import gluon
from mxnet.context import Context

from .. import _native
from ..system import arguments, kinds, temporary_space
from ..system.environment import at_least
from .replicas import Replicas
from .steps import drain

trainers: weakref.WeakSet[gluon.Trainer] = weakref.WeakSet()


@contextmanager
def devices(contexts: Sequence[Context]) -> Iterator[None]:
    """Lets only these contexts take part, for example for a short last batch.

    ::

        import mxnet as mx
        import gluon_syncbn
        from mxnet import autograd

        contexts = gluon_syncbn.cpu_devices(3)
        layer = gluon_syncbn.SyncBatchNorm(in_channels=4)
        layer.initialize(ctx=contexts)
        xs = [mx.nd.random.normal(shape=(2, 4), ctx=context) for context in contexts[:2]]  # the last samples
        with gluon_syncbn.devices(contexts[:2]):
            with autograd.record():
                ys = [layer(x) for x in xs]
            autograd.backward(ys)

    The block waits for all work at its beginning and end, so that each step has one set of contexts. It affects the
    whole process. Afterwards, the other contexts have the same running statistics, if the layer has one statistic (mode
    ``'sync'`` without groups). A gradient that the block computes is 0 on the other contexts, for a ``gluon.Trainer``.
    With ``grad_req='add'``, it is there what earlier batches have left. A loop that updates weights without a
    ``gluon.Trainer`` calls ``zero_grad`` before the block.

    Parameters
    ----------
    contexts : list of Context
        At least one context, each once.

    Raises
    ------
    ValueError
        If the list is empty, repeats a context or holds something else.
    """
    if isinstance(contexts, Context):
        contexts = [contexts]
    expected = "a list of different mx.Context objects"
    chosen = arguments.contexts("contexts", contexts, expected)
    names = [str(context) for context in chosen]
    if len(set(names)) < len(names):
        arguments.refuse("contexts", contexts, expected)
    global _active
    if _active is not None:
        raise ValueError("contexts: devices(...) is active already; leave that block first")
    mx.nd.waitall()
    _active = _Gradients(chosen)
    _native.reset()
    _native.devices(names)
    try:
        yield
        mx.nd.waitall()
    except BaseException as error:
        _native.fail(f"{type(error).__name__} left gluon_syncbn.devices(...): {error}")
        drain()
        raise
    finally:
        _native.devices([])
        _native.reset()
        settle_gradients(_trained_parameters())
        _active = None
        for replicas in Replicas.all():
            replicas.spread_running(chosen)


def settle_gradients(parameters: Iterable[gluon.Parameter]) -> None:
    """Within `devices`, makes the gradients of contexts without a batch those of an empty batch."""
    if _active is not None:
        for parameter in parameters:
            _active.settle(parameter)


def _trained_parameters() -> List[gluon.Parameter]:
    parameters = dict.fromkeys(parameter for trainer in list(trainers) for parameter in trainer._params)
    return [parameter for parameter in parameters if parameter._grad is not None]


class _Gradients:
    """Tells which gradients are computed on the contexts that take part.

    MXNet marks a parameter's array on a context when a backward writes its gradient. A ``gluon.Trainer`` that updates
    the weights itself takes the mark away, and one that updates in its KVStore does not. So this class takes all marks
    away and puts them back.
    """

    def __init__(self, contexts: Sequence[Context]) -> None:
        self._contexts = contexts
        self._marks: Dict[gluon.Parameter, List[bool]] = {}
        for parameter in _trained_parameters():
            arrays = self._arrays(parameter)
            self._marks[parameter] = [array._fresh_grad for array in arrays]
            for array in arrays:
                array._fresh_grad = False

    def _arrays(self, parameter: gluon.Parameter) -> List[mx.nd.NDArray]:
        return [array for array in parameter.list_data() if array.ctx in self._contexts]

    def settle(self, parameter: gluon.Parameter) -> None:
        if parameter._grad is None:
            return
        marks, arrays = self._marks.pop(parameter, []), self._arrays(parameter)
        if not any(array._fresh_grad for array in arrays):
            for array, mark in zip(arrays, marks):
                array._fresh_grad = mark
            return
        for array, gradient in zip(parameter.list_data(), parameter.list_grad()):
            if array.ctx not in self._contexts:
                if parameter.grad_req == "write":
                    gradient = kinds.classic(gradient)
                    mx.nd.zeros_like(gradient, out=gradient)
                array._fresh_grad = True


_active: Optional[_Gradients] = None


def cpu_devices(n: int, temp_copies: Optional[int] = None, random_copies: Optional[int] = None) -> List[Context]:
    """Returns ``n`` CPU contexts whose operators can wait for each other. Call it before the first operator runs.

    MXNet's operators on all CPU contexts share one pool of temporary space and one of random states (for Dropout and
    other random operators). They take copies in the order in which they were issued. The default is 4 and 1 copies.
    Then a later operator of the first replica can hold the copy that an operator of the second replica needs. If the
    first replica waits for the second, this is a deadlock. With k such operators in a step of one replica, ``(n - 1)
    * k`` copies are enough. This function sets ``MXNET_CPU_TEMP_COPY`` and ``MXNET_CPU_PARALLEL_RAND_COPY``. Larger
    values stay. With one context, ``MXNET_CPU_TEMP_COPY`` stays, and the other is set only if ``random_copies`` is
    given.

    The number of random states decides which numbers a seed gives: each random operator draws from the next state. With
    equal ``random_copies``, the processes of a job draw the same numbers as one process with all contexts.

    A copy of temporary space takes no memory until its first use. Then it keeps the largest space that it ever served.
    Operators take the copies in turn, so a job grows until each copy has served the largest one. (FastSCNN on two
    contexts with images of 64 pixels takes 0.56 GB with 256 copies, after 50 steps. It takes 0.78 GB with 512, after
    100, and 1.27 GB with 1024, after 200.) A copy of the random states takes 5 MB at once and is never freed. Each copy
    exists **in every thread** that runs an operator which needs temporary space or random numbers. The defaults take
    20 MB a thread for two contexts, 60 MB for four. A program that starts new threads at each step, such as GluonCV's
    ``DataParallelModel(sync=True)``, grows by as much for each. `gluon_syncbn.parallel` starts none.

    Parameters
    ----------
    n : int
        Number of contexts, from 1 to 1024.
    temp_copies : int, optional
        Copies of temporary space. The default is 1024 for each context but the first. If the net's layers are made
        before the first operator runs, it is 4 for each `SyncBatchNorm`, and at least 256. For two contexts DeepLabV3
        on ResNet-101 (114 layers) needs 256 to 384, on ResNet-152 (155 layers) 384 to 512. If there are too few, an
        error says so.
    random_copies : int, optional
        Copies of the random states. For more than one context the default is ``4 * (n - 1)``, enough for four random
        operators in a forward of a replica. A net with more Dropouts needs more. If there are too few, an error says
        so.

    Returns
    -------
    list of Context
        ``[cpu(0), ..., cpu(n - 1)]``

    Raises
    ------
    ValueError
        If an argument is not an integer, or out of range.

    Warns
    -----
    UserWarning
        If MXNet has already read lower settings in this thread.
    """
    n = arguments.whole("n", n, 1, 1024)
    if temp_copies is not None:
        temp_copies = arguments.whole("temp_copies", temp_copies, 1, 2**20)
    if random_copies is not None:
        random_copies = arguments.whole("random_copies", random_copies, 1, 2**20)
    elif n > 1:
        random_copies = 4 * (n - 1)
    raised = temporary_space.of_contexts(n, temp_copies)
    if random_copies:  # MXNet reads it when it first needs such a copy: after its import and before the first operator
        raised |= at_least("MXNET_CPU_PARALLEL_RAND_COPY", random_copies)
    if raised and _native.copies_are_made():
        follows = (
            "A training step on these contexts may fail, because its replicas cannot wait for each other"
            if n > 1
            else "Random operators draw other numbers than with this many copies"
        )
        warnings.warn(
            f"cpu_devices({n}) comes too late: an operator has run, and MXNet has already read MXNET_CPU_TEMP_COPY "
            f"and MXNET_CPU_PARALLEL_RAND_COPY. {follows}. Call cpu_devices before the first operator runs",
            stacklevel=2,
        )
    return [mx.cpu(i) for i in range(n)]
