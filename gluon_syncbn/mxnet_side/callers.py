"""Finds out whether a thread is left that could call a replica that the others wait for."""

from __future__ import annotations

import linecache
import os
import sys
import sysconfig
import threading
import traceback
from types import FrameType
from typing import List, Tuple

import mxnet as mx

from .. import _native
from ..training import steps

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


def what_callers_wait_for() -> Tuple[str, float]:
    """Names the results that all threads wait for which could call a replica, and the seconds of `_WAITS`.

    The text is empty if another thread could call one. That is a thread in code of the user's, or one that has trained
    and works in a library. A thread that joins another one does nothing before that one ends. A worker of a library's
    that waits for work gets none from those who wait.
    """
    waits, training = [], steps.training_threads.objects()
    for thread in threading.enumerate():
        frames = _frames(thread)
        trains = thread in training
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
