"""Marks where a step begins and ends, so that a failed step harms neither its replicas nor the next step.

Scopes are ``with autograd.record()`` and ``with autograd.train_mode()``. A ``Module`` has none: there a training
forward begins a step, unless the one before has failed and nobody has been told.
"""

from __future__ import annotations

import sys
import threading
from types import SimpleNamespace
from typing import Any, Callable, Dict, Iterable, List, Optional, TypeVar

import mxnet as mx
from mxnet import autograd, gluon

from .. import _native
from ..system import kinds, locks, logs
from ..system.identity import OfEach
from .replicas import Replicas
from .session import session

ArraysT = TypeVar("ArraysT")


class Steps:
    """The steps of this process."""

    def __init__(self) -> None:
        self.open: Dict[threading.Thread, Scope] = {}
        self.beginning: Any  # held by a thread that enters its first scope, or forgets a failed step
        locks.give(self, beginning=threading.RLock)
        self.raised = ""  # the text of the last failure that went through a scope or a reader as an exception
        self.ending = False  # exit handlers have begun


_steps = Steps()
#: The threads that have been in a step, or have made a ``Module`` for some.
training_threads: OfEach[None] = OfEach(lambda: None)

MOST_WAITS = 10
_LOST = "failed before %s, so reading the result no longer raises this error: %s"


def drain(before: str = "") -> List[str]:
    """Waits until MXNet has no work left, with or without errors, and returns the errors. With ``before``, those that
    are not the step's are logged.

    An array of a failed step raises its error once, when it is read. It is usable again afterwards.

    MXNet's wait forgets all errors that it finds, and raises the first (`ThreadedEngine::WaitForAll` in
    src/engine/threaded_engine.cc). So after `MOST_WAITS` errors every wait fails, and another one would fail too.
    """
    errors: List[str] = []
    raised = _steps.raised
    while len(errors) < MOST_WAITS:
        try:
            mx.nd.waitall()
            break
        except mx.MXNetError as error:
            errors.append(str(error))
            if before and not isinstance(error, _native.StepError):
                logs.log.error(_LOST, before, error)
    _steps.raised = raised
    return errors


def settle(arrays: Iterable[Any]) -> bool:
    """Waits for arrays, and takes the error of a failed step from them. Returns whether one had it. The program has not
    seen it. MXNetError: another one, because what is in the array then is no value.
    """
    raised, found = _steps.raised, False
    for array in arrays:
        try:
            mx.nd.NDArray.wait_to_read(array)
        except _native.StepError:
            if not _native.failure():
                raise
            _steps.raised, found = raised, True
    return found


def settled(arrays: Iterable[Any], compute: Callable[[], ArraysT]) -> ArraysT:
    """Settles arrays, and returns what is computed of them. An operator takes temporary space, which may have the error
    of a failed step, too, once for each copy. StepError: the step has failed, and the caller may not know of it.
    """
    settle(arrays)
    tell()
    for _ in range(MOST_WAITS):
        found = compute()
        if not settle(kinds.arrays_of(found)):
            return found
    raise _native.StepError(_native.failure())


def watch() -> None:
    """Fails the step if an operator outside of a layer has failed, for which MXNet has left out calls of a replica.

    These would have written the running statistics, and their backwards gradients.
    """
    running = [one for replicas in Replicas.placed() for one in replicas.running.objects()]
    arrays = [array for one in running for array in one._data or ()]
    for array in [*arrays, *(array for one in session.trained() for array in one._grad)]:
        _native.watch(str(array.ctx), [array])


def watch_gradients(parameters: Iterable[Any]) -> None:
    """The same, of all gradients of a step, before a sum or an update writes to them."""
    of: Dict[str, List[Any]] = {}
    for array in [array for one in parameters for array in one._grad or ()]:
        of.setdefault(str(array.ctx), []).append(array)
    for context, arrays in of.items():
        _native.watch(context, arrays)


def tell() -> None:
    """StepError: the step has failed, and the caller may not know of it, because no exception is being handled, and
    none went through a scope or a reader. It comes once.
    """
    reason = _native.failure()
    if reason and reason not in _steps.raised and sys.exc_info()[0] is None:
        raise _failed(reason)


def reset() -> None:
    """Forgets a failed step, so that the next one starts afresh.

    ``with autograd.record()``, ``autograd.train_mode()`` and a training forward of a ``Module`` do this by themselves.
    Call it after a failure in a loop that uses none of them. Waits for all issued operators.

    Raises
    ------
    MXNetError
        If MXNet fails at every wait, for example with an unknown engine.
    """
    with _steps.beginning:  # otherwise half of a step that begins meanwhile would be gone
        reason = _native.failure()
        if reason:
            if reason not in _steps.raised:  # a caller that reads no results has not seen it
                logs.log.warning("starting a new step after a failed one: %s", reason)
            session.tell_others(reason)
        # A healthy step that is in flight ends too: its replicas could not find each other any more.
        errors = drain("a new step")
        _native.reset()
        _steps.raised = ""
    if len(errors) == MOST_WAITS:
        raise mx.MXNetError(f"no step can begin, because MXNet fails at every wait: {errors[-1]}")


class Scope(autograd._RecordingStateScope):
    """Stands in for MXNet's, which has no hook. The outermost one of a thread is the step that it is in."""

    called: Dict[Any, Any]  # graphs whose operators MXNet keeps; see mxnet_side/recording.py

    def __enter__(self) -> Any:
        if self._enter_is_record or self._enter_train_mode:
            self._begin()
        return super().__enter__()

    def __exit__(self, kind: Any, value: Any, trace: Any) -> Any:
        try:
            return super().__exit__(kind, value, trace)
        finally:
            if current() is self:  # a generator may have opened it in another thread
                self._end(kind, value)

    def _begin(self) -> None:
        thread = threading.current_thread()
        if _steps.ending:
            if thread.daemon:
                raise SystemExit  # as Python ends it
            raise mx.MXNetError(
                "the process is running its exit handlers, so no step can begin; join training threads before the main "
                "thread ends"
            )
        if current() is not None:
            return
        with _steps.beginning:
            if _native.failure() and not inside():
                reset()
            _steps.open[thread], self.called = self, {}
            training_threads(thread)
            _native.scope_enter(thread.name)

    def _end(self, kind: Optional[type], value: Any) -> None:
        """``kind`` and ``value`` describe the exception that leaves the scope."""
        del _steps.open[threading.current_thread()]
        is_current, ended = _native.scope_is_current(), _native.scope_leave()
        # StopIteration and GeneratorExit end loops, not steps.
        if kind is None or issubclass(kind, (StopIteration, GeneratorExit)):
            if ended:  # ended by another thread, whose replicas have met this thread's replicas
                raise _failed(ended)
        elif is_current and (_native.layers() or session.stores):  # else another thread has begun a new step since then
            break_off("the recorded step", value)


def break_off(where: str, error: BaseException) -> None:
    """MXNetError: the error of an operator that writes a weight, and that is not the step's. Ctrl-C and the end of the
    program come before it.
    """
    try:
        # The step before may be in flight, and its update would be lost. A job of processes ends, and must not wait.
        if not session.stores:
            settle(array for one in session.trained() for array in one._data)
    except mx.MXNetError as other:
        if isinstance(error, Exception):
            raise
        logs.log.error(_LOST, type(error).__name__, other)
    finally:
        what = f"{type(error).__name__} left {where}" + (f" ({error})" if str(error) else "")
        _steps.raised = f"{what}, so the replicas that had been called cannot finish it. The next step starts afresh."
        _native.fail(_steps.raised)
        session.tell_others(_steps.raised)


# ---- what others ask --------------------------------------------------------------------------------------------


def current() -> Optional[Scope]:
    """Returns the scope of this thread, if it has one open."""
    return _steps.open.get(threading.current_thread())


def inside() -> List[threading.Thread]:
    """Returns the threads that are in a step."""
    return [thread for thread in list(_steps.open) if thread.is_alive()]


def end() -> None:
    """Lets no further step begin."""
    _steps.ending = True


# ---- where a failed step shows -----------------------------------------------------------------------------------


def _failed(text: str) -> Exception:
    """A caller sees a failure once: the next step does not report it again."""
    reason = _native.failure()
    if reason and reason in text:
        _steps.raised = reason
    return _native.StepError(text.replace("gluon_syncbn.StepError: ", "", 1))


def _saving(reduce: Callable, parameter: gluon.Parameter) -> mx.nd.NDArray:
    """A copy of an array with an error has no values. A failed step leaves its error in running statistics. Within a
    step, ``reset_ctx`` must not wait for replicas that are still to be called.
    """
    return reduce(parameter) if current() else settled(parameter._data or (), lambda: reduce(parameter))


def _writing(write: Callable, file: Any, count: Any, handles: Any, names: Any) -> int:
    """MXNet opens the file before it waits for the arrays (`MXNDArraySave` in src/c_api/c_api.cc), so the error of one
    would cost the file that was there. A parameter with the error of a failed step is as it was.
    """
    parameters = [one for trainer in session.trainers.objects() for one in trainer._params]
    kept = {array.handle.value for parameter in parameters for array in parameter._data or ()}
    for handle in handles:
        array = SimpleNamespace(handle=mx.base.NDArrayHandle(handle))
        if handle in kept:
            settle([array])
        else:
            mx.nd.NDArray.wait_to_read(array)
    return write(file, count, handles, names)


WRAPPED = {
    (autograd, "_RecordingStateScope"): Scope,
    (gluon.Parameter, "_reduce"): _saving,
    (mx.base._LIB, "MXNDArraySave"): _writing,
}
mx.base.register_error("gluon_syncbn.StepError", _failed)  # as the core begins the text of one
