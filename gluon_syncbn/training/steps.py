"""Marks where a step begins and ends, so that a failed step harms neither its replicas nor the next step.

Scopes are ``with autograd.record()`` and ``with autograd.train_mode()``; `patches` calls what is here. A ``Module`` has
none: there a training forward begins a step, unless the one before has failed and nobody has been told.
"""

from __future__ import annotations

import logging
import sys
import threading
from typing import Any, Dict, Iterable, List, Optional

import mxnet as mx

from .. import _native
from ..system import logs
from .session import session

MOST_WAITS = 10


def drain() -> List[str]:
    """Waits until MXNet has no work left, with or without errors, and returns the errors.

    An array of a failed step raises its error once, when it is read. It is usable again afterwards.

    MXNet's wait forgets all errors that it finds (`ThreadedEngine::WaitForAll` in src/engine/threaded_engine.cc). So
    after `MOST_WAITS` errors every wait fails, and another one would fail too.
    """
    errors: List[str] = []
    raised = session.raised
    while len(errors) < MOST_WAITS:
        try:
            mx.nd.waitall()
            break
        except mx.MXNetError as error:
            errors.append(str(error))
    session.raised = raised
    return errors


def settle(arrays: Iterable[mx.nd.NDArray]) -> None:
    """Waits for arrays that are to be saved, and takes the error of a failed step from them. MXNetError: another one.

    Temporary space may have that error, too, and passes it on to a sum of replicas that takes it.
    """
    errors = errors_of(arrays)
    if _native.failure():
        drain()
    elif errors:
        raise next(iter(errors.values()))


def errors_of(arrays: Iterable[Any]) -> Dict[int, mx.MXNetError]:
    """Waits for arrays, and takes their errors from them. Returns these, by handle. The program has not seen them."""
    raised, errors = session.raised, {}
    for array in arrays:
        try:
            mx.nd.NDArray.wait_to_read(array)
        except mx.MXNetError as error:
            errors[array.handle.value] = error
    session.raised = raised
    return errors


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
        errors = drain()
        _native.reset()
        session.raised = ""
    if len(errors) == MOST_WAITS:
        raise mx.MXNetError(f"no step can begin, because MXNet fails at every wait: {errors[-1]}")


def follow_level() -> None:
    """Tells the native core whether this logger itself has a level that asks for a record of every meeting. A level of
    the root logger is meant for the user's own messages.
    """
    _native.debug(logs.log.level != logging.NOTSET and logs.log.isEnabledFor(logging.DEBUG))


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
        if not session.inside():
            follow_level()
            if _native.failure():
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
    elif current:  # else another thread has begun a new step since then
        break_off(f"{kind.__name__} left the recorded step ({value})")
        failure_seen(value)


def break_off(what: str) -> None:
    # The step before may be in flight, and its update would be lost. A job of processes ends, and must not wait first.
    if not session.stores:
        errors_of(array for one in session.trained() for array in one._data)
    session.raised = f"{what}, so the replicas that had been called cannot finish it. The next step starts afresh."
    _native.fail(session.raised)
    session.tell_others(session.raised)


def failure_seen(error: BaseException) -> None:
    """An error reaches the program: if it is the step's failure, the next step does not report it."""
    reason = _native.failure()
    if reason and reason in str(error):
        session.raised = reason
