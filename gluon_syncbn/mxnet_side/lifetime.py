"""Ends all operators in flight before the process ends or forks, whether the step is healthy or not."""

from __future__ import annotations

import atexit
import linecache
import os
import sys
import sysconfig
import threading
import time
import traceback
from types import FrameType
from typing import List, Tuple

import mxnet as mx

from .. import _native
from ..system import logs
from ..system.logs import log
from ..training import steps
from ..training.session import session

DAEMONS_END_WITHIN = 1.0  # seconds, for all daemon threads that are in the middle of a step

_pid = os.getpid()
_MXNET, _PACKAGE = os.path.dirname(mx.__file__), os.path.dirname(_native.__file__)
_PACKAGES = (sysconfig.get_path("purelib"), os.path.dirname(_MXNET), _PACKAGE)
_STANDARD = sysconfig.get_path("stdlib")
#: Where MXNet waits for results: the function, what messages call it, and the seconds after which it surely waits for
#: the missing replica. A wait for all is sure to. A read may wait for an operator that no layer feeds. Calls wait for
#: a condition, or a shape that depends on data; the first call of a graph also plans its memory.
_WAITS = {
    **{name: (name, 3.0) for name in ("asnumpy", "wait_to_read", "save", "__getstate__", "_to_shared_mem")},
    "to_dlpack_for_write": ("to_dlpack_for_write", 3.0),
    "waitall": ("waitall", 0.2),
    "__call__": ("the call of a graph", 10.0),
    "_imperative_invoke": ("the call of an operator", 10.0),
}
_JOINS = ("join", "_wait_for_tstate_lock")  # of Python 3.13, and before


# ---- the end of the process ---------------------------------------------------------------------------------


def _at_exit() -> None:
    # At interpreter exit, MXNet drops queued operators and waits for running ones. A running replica would wait for a
    # queued one for ever. This handler runs before MXNet's own. It lets a healthy step finish and ends a stuck one.
    session.ending = True
    # A daemon thread that trains may be anywhere in its step. An operator that it issues during MXNet's exit handler
    # waits for ever, or uses memory that MXNet has freed. Such a thread ends where its next step would begin, because
    # `scope_entered` raises SystemExit there. A thread that waits for something else stays.
    ends = time.monotonic() + DAEMONS_END_WITHIN
    for thread in list(session.training_threads):
        if thread.daemon and thread is not threading.current_thread():
            thread.join(max(0.0, ends - time.monotonic()))
    _native.exiting(True)
    steps.drain()
    _native.close()
    while _pass_on(0.0):
        pass
    if os.getpid() != _pid:
        return  # a child of a fork: the exchanges belong to its parent
    if _native.failure():
        session.tell_others(_native.failure())
    for store in session.stores:
        store.close()


def _what_callers_wait_for() -> Tuple[str, float]:
    """Names the results that all threads wait for which could call a replica, and the seconds of `_WAITS`.

    The text is empty if another thread could call one. That is a thread in code of the user's, or one that has trained
    and works in a library. A thread that joins another one does nothing before that one ends. A worker of a library's
    that waits for work gets none from those who wait.
    """
    waits = []
    for thread in threading.enumerate():
        frames = _frames(thread)
        trains = thread in session.training_threads
        if not frames or thread is threading.current_thread():
            continue
        name = frames[0].f_code.co_name
        if _is_of(frames[0], _MXNET) and name in _WAITS:
            if trains:
                where, patience = _WAITS[name]
                waits.append((f"thread '{thread.name}' waits in {where} ({_line(frames)})", patience))
        elif frames[0].f_code.co_filename == threading.__file__ and name in _JOINS:
            continue
        elif _is_users(frames) or (trains and _is_of(frames[0], *_PACKAGES)):
            return "", 0.0
    return " and ".join(text for text, _ in waits), max((patience for _, patience in waits), default=0.0)


def _is_users(frames: List[FrameType]) -> bool:
    return not all(_is_of(frame, _STANDARD, "<frozen", *_PACKAGES) for frame in frames)


def _line(frames: List[FrameType]) -> str:
    """Describes the innermost line of the user's."""
    frame = next((frame for frame in frames if _is_users([frame])), frames[-1])
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{file}, line {number}: {linecache.getline(file, number).strip()}"


def _frames(thread: threading.Thread) -> List[FrameType]:
    """Returns the frames of a thread. The first is the innermost one, which has called into a library."""
    frame = sys._current_frames().get(thread.ident or 0)
    return [frame for frame, _ in traceback.walk_stack(frame)] if frame else []


def _is_of(frame: FrameType, *folders: str) -> bool:
    return frame.f_code.co_filename.startswith(folders)


# ---- records --------------------------------------------------------------------------------------------------


def _pass_on_records() -> None:
    while True:
        _pass_on(60.0)


def _pass_on(seconds: float) -> bool:
    level, _, text = _native.next_record(seconds).partition(" ")
    with logs.errors_reported(text):
        if level == "0":
            _native.answer_callers(*_what_callers_wait_for())
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
    _native.forking(session.inside() == [threading.current_thread()])  # so no other replica can come
    try:
        for error in dict.fromkeys(steps.drain()):  # a persistent error appears again and again
            log.error("failed before a fork, so reading the result no longer raises this error: %s", error)
    finally:
        _native.forking(False)


def _after_fork_in_child() -> None:
    _native.forking(False)
    _native.exiting(False)
    _native.reset()
    session.forked()
    _start_thread()


def begin() -> None:
    """Starts the core, and installs the handlers of exits and forks for good: Python cannot remove one of forks."""
    logs.start()
    _native.register()
    atexit.register(_at_exit)
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
    _start_thread()
