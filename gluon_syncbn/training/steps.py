"""Marks where a step begins and ends, so that a failed step harms neither its replicas nor the next step.

Scopes are ``with autograd.record()`` and ``with autograd.train_mode()``; `patches` calls what is here. A ``Module`` has
none: there a training forward begins a step, unless the one before has failed and nobody has been told.
"""

from __future__ import annotations

import sys
import threading
from typing import Any, Callable, Dict, Iterable, List, Optional, TypeVar

import mxnet as mx

from .. import _native
from ..system import kinds, logs
from .replicas import Replicas
from .session import session

ArraysT = TypeVar("ArraysT")

MOST_WAITS = 10


def drain(before: str = "") -> List[str]:
    """Waits until MXNet has no work left, with or without errors, and returns the errors. With ``before``, those that
    are not the step's are logged.

    An array of a failed step raises its error once, when it is read. It is usable again afterwards.

    MXNet's wait forgets all errors that it finds, and raises the first (`ThreadedEngine::WaitForAll` in
    src/engine/threaded_engine.cc). So after `MOST_WAITS` errors every wait fails, and another one would fail too.
    """
    errors: List[str] = []
    raised = session.raised
    while len(errors) < MOST_WAITS:
        try:
            mx.nd.waitall()
            break
        except mx.MXNetError as error:
            errors.append(str(error))
            if before and not isinstance(error, _native.StepError):
                logs.log.error("failed before %s, so reading the result no longer raises this error: %s", before, error)
    session.raised = raised
    return errors


def settle(arrays: Iterable[Any]) -> bool:
    """Waits for arrays, and takes the error of a failed step from them. Returns whether one had it. The program has not
    seen it. MXNetError: another one, because what is in the array then is no value.
    """
    raised, found = session.raised, False
    for array in arrays:
        try:
            mx.nd.NDArray.wait_to_read(array)
        except _native.StepError:
            if not _native.failure():
                raise
            session.raised, found = raised, True
    return found


def settled(compute: Callable[[], ArraysT]) -> ArraysT:
    """Returns arrays that are computed of settled ones. An operator takes temporary space, which may have the error of
    a failed step, too, once for each copy.
    """
    for _ in range(MOST_WAITS):
        found = compute()
        if not settle(kinds.arrays_of(found)):
            return found
    raise _native.StepError(_native.failure())


def watch() -> None:
    """Fails the step if an operator outside of a layer has failed, for which MXNet has left out calls of a replica.

    These would have written the running statistics, and their backwards gradients.
    """
    running = [one for replicas in list(Replicas.placed.values()) for one in list(replicas.running.values())]
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
    if reason and reason != session.raised and sys.exc_info()[0] is None:
        session.raised = reason
        raise _native.StepError(reason)


def reset() -> None:
    """Forgets a failed step, so that the next one starts afresh.

    ``with autograd.record()``, ``autograd.train_mode()`` and a training forward of a ``Module`` do this by themselves.
    Call it after a failure in a loop that uses none of them. Waits for all issued operators.

    Raises
    ------
    MXNetError
        If MXNet fails at every wait, for example with an unknown engine.
    """
    with session.beginning:  # otherwise half of a step that begins meanwhile would be gone
        reason = _native.failure()
        if reason:
            if reason != session.raised:  # a caller that reads no results has not seen it
                logs.log.warning("starting a new step after a failed one: %s", reason)
            session.tell_others(reason)
        # A healthy step that is in flight ends too: its replicas could not find each other any more.
        errors = drain("a new step")
        _native.reset()
        session.raised = ""
    if len(errors) == MOST_WAITS:
        raise mx.MXNetError(f"no step can begin, because MXNet fails at every wait: {errors[-1]}")


def scope_entered() -> None:
    if session.ending:
        if threading.current_thread().daemon:
            raise SystemExit  # as Python ends it
        raise mx.MXNetError(
            "the process is running its exit handlers, so no step can begin; join training threads before the main "
            "thread ends"
        )
    thread, depth = threading.current_thread(), session.depth()
    if depth:
        session.open[thread] = depth + 1
        return
    with session.beginning:
        if _native.failure() and not session.inside():
            reset()
        session.open[thread] = 1
        session.training_threads.add(thread)
        _native.scope_enter(thread.name)


def scope_left(kind: Optional[type], value: Any) -> None:
    """``kind`` and ``value`` describe the exception that leaves the scope."""
    thread, left = threading.current_thread(), session.depth() - 1
    if left > 0:
        session.open[thread] = left
    else:
        session.open.pop(thread, None)
    if left != 0:  # below 0, a generator has opened the scope in another thread
        return
    current, ended = _native.scope_is_current(), _native.scope_leave()
    # StopIteration and GeneratorExit end loops, not steps.
    if kind is None or issubclass(kind, (StopIteration, GeneratorExit)):
        if ended:  # ended by another thread, whose replicas have met this thread's replicas
            session.raised = ended
            raise _native.StepError(ended)
    elif current and (_native.layers() or session.stores):  # else another thread has begun a new step since then
        try:
            break_off("the recorded step", value)
        finally:
            failure_seen(value)


def break_off(where: str, error: BaseException) -> None:
    """MXNetError: the error of an operator that writes a weight, and that is not the step's."""
    try:
        # The step before may be in flight, and its update would be lost. A job of processes ends, and must not wait.
        if not session.stores:
            settle(array for one in session.trained() for array in one._data)
    finally:
        what = f"{type(error).__name__} left {where}" + (f" ({error})" if str(error) else "")
        session.raised = f"{what}, so the replicas that had been called cannot finish it. The next step starts afresh."
        _native.fail(session.raised)
        session.tell_others(session.raised)


def failure_seen(error: BaseException) -> None:
    """An error reaches the program: if it is the step's failure, the next step does not report it."""
    reason = _native.failure()
    if reason and reason in str(error):
        session.raised = reason
