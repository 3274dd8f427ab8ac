"""Where a step begins and ends, so that one that broke off harms neither its replicas nor the next step.

Scopes are ``with autograd.record()`` and ``with autograd.train_mode()``; `patches` calls what is here.
"""

from __future__ import annotations

import threading
from typing import Any, List, Optional

import mxnet as mx

from .. import _native
from ..system import logs
from .session import session

MOST_WAITS = 10


def drain() -> List[str]:
    """Waits until MXNet has nothing left to do, whatever comes of it, and returns what failed.

    Whoever reads the results of a failed step has its errors. Each is raised once, and reading them is what makes the
    arrays usable again.

    A wait of MXNet's forgets all errors that it finds (`ThreadedEngine::WaitForAll` in src/engine/threaded_engine.cc).
    So `MOST_WAITS` errors mean that every wait fails, and then another one would, too.
    """
    errors: List[str] = []
    while len(errors) < MOST_WAITS:
        try:
            mx.nd.waitall()
            break
        except mx.MXNetError as error:
            errors.append(str(error))
    return errors


def reset() -> None:
    """Forgets a failed step, so that the next one starts afresh.

    ``with autograd.record()`` and ``autograd.train_mode()`` do this by themselves; call it after a failure in a loop
    that uses neither. Waits until everything that was issued has ended.

    Raises
    ------
    MXNetError
        Where MXNet fails at every wait, as with an engine that does not exist.
    """
    with session.beginning:  # a step that began meanwhile would be half gone
        reason = _native.failure()
        if reason:
            if reason != session.raised:  # whoever reads no results has not heard of it
                logs.log.warning("starting afresh after a step that failed: %s", reason)
            session.tell_others(reason)
        # A healthy step that is in flight ends as well: its replicas would not find each other any more.
        errors = drain()
        _native.reset()
    if len(errors) == MOST_WAITS:
        raise mx.MXNetError(f"no step can begin, because MXNet fails at every wait: {errors[-1]}")


def scope_entered() -> None:
    if session.ending:
        raise mx.MXNetError(
            "the process is ending and has come to its exit handlers, so no step begins; join the threads that train "
            "before the main thread ends"
        )
    if session.depth():
        session.enter_scope()
        return
    with session.beginning:
        if session.enter_scope():
            logs.follow_level()
            if _native.failure():
                try:
                    reset()
                except BaseException:  # Python leaves no scope that it could not enter
                    session.leave_scope()
                    raise
        _native.scope_enter(threading.current_thread().name)


def scope_left(kind: Optional[type], value: Any) -> None:
    """``kind`` and ``value`` are those of the exception that leaves it."""
    if not session.leave_scope():
        return
    ended, current = _native.scope_leave()
    # StopIteration and GeneratorExit end loops, not steps.
    if kind is None or issubclass(kind, (StopIteration, GeneratorExit)):
        if ended:  # by another thread, whose replicas have met those of this one
            session.raised = ended
            raise mx.MXNetError(ended)
    elif current:  # else another thread has begun a new step since then
        session.raised = (
            f"{kind.__name__} left the recorded step ({value}), so the replicas that had been called cannot finish it. "
            "The next `with autograd.record()` starts afresh."
        )
        _native.fail(session.raised)
        session.tell_others(session.raised)
