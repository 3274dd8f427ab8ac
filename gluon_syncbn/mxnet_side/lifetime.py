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
_WAITS = ("asnumpy", "wait_to_read", "waitall", "save", "__getstate__", "_to_shared_mem", "to_dlpack_for_write")
#: Where MXNet waits before an operator is issued: for a condition, or a shape that depends on data.
_ISSUES = {"__call__": "the call of a graph", "_imperative_invoke": "the call of an operator"}
_JOINS = ("join", "_wait_for_tstate_lock")  # of Python 3.13, and before


# ---- the end of the process ---------------------------------------------------------------------------------


def _at_exit() -> None:
    # At interpreter exit, MXNet drops queued operators and waits for running ones. A running replica would wait for a
    # queued one for ever. This handler runs before MXNet's own. It lets a healthy step finish and ends a stuck one.
    session.ending = True
    _native.nobody_left(True)
    _stop_daemons()
    _native.nobody_reads()
    steps.drain()
    _native.close()
    while _pass_on(0.0):
        pass
    slowest = _native.slowest()
    if slowest:
        log.debug(slowest)
    if os.getpid() != _pid:
        return  # a child of a fork: the exchanges belong to its parent
    if _native.failure():
        session.tell_others(_native.failure())
    for store in session.stores:
        store.close()


def _stop_daemons() -> None:
    # A daemon thread that trains may be anywhere in its step. An operator that it issues during MXNet's exit handler
    # waits for ever, or uses memory that MXNet has freed. Such a thread ends where its next step would begin, because
    # `scope_entered` raises SystemExit there. A thread that waits for something else stays.
    ends = time.monotonic() + DAEMONS_END_WITHIN
    for thread in list(session.training_threads):
        if thread.daemon and thread is not threading.current_thread():
            thread.join(max(0.0, ends - time.monotonic()))


def _watch_callers() -> None:
    # Exit handlers run only after all threads that are not daemons, and one of these may wait for a stuck step. If all
    # of them wait within MXNet, no thread is left that could call the missing replicas.
    while True:
        if _native.asked_for_callers(60.0):
            main = threading.main_thread()
            if not main.is_alive():
                others = [_frames(one)[:1] for one in threading.enumerate() if one is not main and not one.daemon]
                _native.nobody_left(all(frames and _is_of(frames[0], _MXNET) for frames in others))
            _native.answer_callers(*_what_callers_wait_for())
            time.sleep(0.05)  # many replicas ask


def _what_callers_wait_for() -> Tuple[str, bool]:
    """Names the results that all threads wait for which could call a replica, and whether these are all results.

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
        if _is_of(frames[0], _MXNET) and name in (*_WAITS, *_ISSUES):
            if trains:
                where = _ISSUES.get(name, name)
                waits.append((f"thread '{thread.name}' waits in {where} ({_line(frames)})", name == "waitall"))
        elif frames[0].f_code.co_filename == threading.__file__ and name in _JOINS:
            continue
        elif _is_users(frames) or (trains and _is_of(frames[0], *_PACKAGES)):
            return "", False
    return " and ".join(text for text, _ in waits), all(for_all for _, for_all in waits)


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
    if level:
        log.log(int(level), text)
    return bool(level)


def _start_threads() -> None:
    threading.Thread(target=_pass_on_records, name="gluon_syncbn-log", daemon=True).start()
    threading.Thread(target=_watch_callers, name="gluon_syncbn-callers", daemon=True).start()


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
    _native.forked()
    session.forked()
    _start_threads()


def begin() -> None:
    """Starts the core, and installs the handlers of exits and forks for good: Python cannot remove one of forks."""
    logs.start()
    steps.follow_level()
    _native.register()
    atexit.register(_at_exit)
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
    _start_threads()
