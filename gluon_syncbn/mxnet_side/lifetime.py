"""Ends all operators in flight before the process ends or forks, whether the step is healthy or not."""

from __future__ import annotations

import atexit
import os
import threading
import time

from .. import _native
from ..system import logs
from ..system.logs import log
from ..training import steps
from ..training.session import session
from .callers import what_callers_wait_for

DAEMONS_END_WITHIN = 1.0  # seconds, for all daemon threads that are in the middle of a step

_PID = os.getpid()


# ---- the end of the process ---------------------------------------------------------------------------------


def _at_exit() -> None:
    # At interpreter exit, MXNet drops queued operators and waits for running ones. A running replica would wait for a
    # queued one for ever. This handler runs before MXNet's own. It lets a healthy step finish and ends a stuck one.
    steps.end()
    # A daemon thread that trains may be anywhere in its step. An operator that it issues during MXNet's exit handler
    # waits for ever, or uses memory that MXNet has freed. Such a thread ends where its next step would begin, because
    # `scope_entered` raises SystemExit there. A thread that waits for something else stays.
    ends = time.monotonic() + DAEMONS_END_WITHIN
    for thread in steps.training_threads.objects():
        if thread.daemon and thread is not threading.current_thread():
            thread.join(max(0.0, ends - time.monotonic()))
    _native.exiting(True)
    steps.drain()
    _native.close()
    while _pass_on(0.0):
        pass
    if os.getpid() != _PID:
        return  # a child of a fork: the exchanges belong to its parent
    if _native.failure():
        session.tell_others(_native.failure())
    for store in session.stores:
        store.close()


# ---- records --------------------------------------------------------------------------------------------------


def _pass_on_records() -> None:
    while True:
        _pass_on(60.0)


def _pass_on(seconds: float) -> bool:
    level, _, text = _native.next_record(seconds).partition(" ")
    with logs.errors_reported(text):
        if level == "0":
            _native.answer_callers(*what_callers_wait_for())
        elif level == "1":
            steps.watch()
        elif level:
            log.log(int(level), text)
    return bool(level)


def _start_thread() -> None:
    threading.Thread(target=_pass_on_records, name="gluon_syncbn-log", daemon=True).start()


# ---- forks ----------------------------------------------------------------------------------------------------
# Before a fork MXNet stops its threads, those of custom operators before its engine (LibraryInitializer::atfork_prepare
# in src/initialize.cc). Then the engine waits for a custom operator in flight, which never runs. An error that was not
# read ends the process. So all operators have to end before the fork.


def _before_fork() -> None:
    if not _native.layers():
        return
    _native.forking(steps.inside() == [threading.current_thread()])  # so no other replica can come
    try:
        for error in dict.fromkeys(steps.drain()):  # a persistent error appears again and again
            log.error("failed before a fork, so reading the result no longer raises this error: %s", error)
    finally:
        _native.forking(False)


def _after_fork_in_child() -> None:
    _native.forking(False)
    _native.exiting(False)
    _native.reset()
    _start_thread()


def begin() -> None:
    """Installs the handlers of exits and forks for good: Python cannot remove one of forks."""
    logs.start()
    atexit.register(_at_exit)
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
    _start_thread()
