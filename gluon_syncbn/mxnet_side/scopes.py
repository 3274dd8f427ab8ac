"""Runs where a step begins and ends, and where a failed one shows.

MXNet has no hook for the scopes of ``autograd.record()`` and ``train_mode()``: see training/steps.py.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Callable

import mxnet as mx
from mxnet import autograd, gluon

from .. import _native
from ..training import steps
from ..training.replicas import counts_as_1
from ..training.session import session


class Scope(autograd._RecordingStateScope):
    def __enter__(self) -> Any:
        if self._trains():
            steps.scope_entered()
        return super().__enter__()

    def __exit__(self, kind: Any, value: Any, trace: Any) -> Any:
        try:
            return super().__exit__(kind, value, trace)
        finally:
            if self._trains():
                steps.scope_left(kind, value)

    def _trains(self) -> bool:
        return bool(self._enter_is_record) or bool(self._enter_train_mode)


def _failed(text: str) -> Exception:
    """A caller sees a failure once: the next step does not report it again."""
    error = _native.StepError(text.replace("gluon_syncbn.StepError: ", "", 1))
    steps.failure_seen(error)
    return error


def _saving(reduce: Callable, parameter: gluon.Parameter) -> mx.nd.NDArray:
    """A copy of an array with an error has no values. A failed step leaves its error in running statistics. Within a
    step, ``reset_ctx`` must not wait for replicas that are still to be called.

    A gamma that does not count is 1, because others read the files too. A Trainer's KVStore copies back what it was.
    """
    if steps.current():
        array = reduce(parameter)
    else:
        array = steps.settled(parameter._data or (), lambda: reduce(parameter))
    if counts_as_1(parameter):
        array[:] = 1
    return array


def _writing(write: Callable, file: Any, count: Any, handles: Any, names: Any) -> int:
    """MXNet opens the file before it waits for the arrays (`MXNDArraySave` in src/c_api/c_api.cc), so the error of one
    would cost the file that was there. A parameter with the error of a failed step is as it was.
    """
    parameters = [one for trainer in session.trainers.objects() for one in trainer._params]
    kept = {array.handle.value for parameter in parameters for array in parameter._data or ()}
    for handle in handles:
        array = SimpleNamespace(handle=mx.base.NDArrayHandle(handle))
        if handle in kept:
            steps.settle([array])
        else:
            mx.nd.NDArray.wait_to_read(array)
    return write(file, count, handles, names)


WRAPPED = {
    (autograd, "_RecordingStateScope"): Scope,
    (gluon.Parameter, "_reduce"): _saving,
    (mx.base._LIB, "MXNDArraySave"): _writing,
}
mx.base.register_error("gluon_syncbn.StepError", _failed)  # as the core begins the text of one
