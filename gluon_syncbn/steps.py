"""Where a step begins and ends, so that one that broke off harms neither its replicas nor the next step."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import threading
import time
from typing import Any, Callable, List

import mxnet as mx
from mxnet import autograd

from . import _native
from .exchange.base import beyond

_log = logging.getLogger("gluon_syncbn")
_lock = threading.Lock()
_open_scopes = 0
_raised = ""  # the last failure that went through a scope as an exception
_own = threading.local()
_ending = False
_pid = os.getpid()
_MXNET = os.path.dirname(mx.__file__)


def drain() -> List[str]:
    """Waits until MXNet has nothing left to do, whatever comes of it, and returns what failed.

    Whoever reads the results of a failed step has its errors. Each is raised once, and reading them is what makes the
    arrays usable again.
    """
    errors: List[str] = []
    while True:
        try:
            mx.nd.waitall()
            return errors
        except mx.MXNetError as error:
            errors.append(str(error))


def reset() -> None:
    """Forgets a failed step, so that the next one starts afresh.

    ``with autograd.record()`` and ``autograd.train_mode()`` do this by themselves; call it after a failure in a loop
    that uses neither. Waits until everything that was issued has ended.
    """
    reason = _native.failure()
    if reason:
        if reason != _raised:  # whoever reads no results has not heard of it
            _log.warning("starting afresh after a step that failed: %s", reason)
        _tell_others(reason)
        drain()
    _native.reset()


def _tell_others(reason: str) -> None:
    for exchange in list(beyond):
        exchange.fail(reason)


def _trains(scope: autograd._RecordingStateScope) -> bool:
    return bool(scope._enter_is_record) or bool(scope._enter_train_mode)


def _watch_scopes() -> None:
    # MXNet has no hook for the end of a step. An exception in one replica's part leaves the others waiting for it, and
    # would let the next step meet what is left of this one; only the scope sees both.
    scope = autograd._RecordingStateScope
    enter, leave = scope.__enter__, scope.__exit__

    @functools.wraps(enter)
    def watched_enter(self: Any) -> Any:
        global _open_scopes
        if _trains(self):
            if _ending:
                raise mx.MXNetError(
                    "the process is ending and has come to its exit handlers, so no step begins; join the threads that "
                    "train before the main thread ends"
                )
            with _lock:
                first = _open_scopes == 0
                _open_scopes += 1
            _own.depth = getattr(_own, "depth", 0) + 1
            if first and _native.failure():
                reset()
        return enter(self)

    @functools.wraps(leave)
    def watched_leave(self: Any, kind: Any, value: Any, trace: Any) -> Any:
        global _open_scopes, _raised
        try:
            return leave(self, kind, value, trace)
        finally:
            if _trains(self):
                with _lock:
                    _open_scopes -= 1
                _own.depth -= 1
                # StopIteration and GeneratorExit end loops, not steps.
                if kind is not None and _own.depth == 0 and not issubclass(kind, (StopIteration, GeneratorExit)):
                    _raised = (
                        f"{kind.__name__} left the recorded step ({value}), so the replicas that had been called "
                        "cannot finish it. The next `with autograd.record()` starts afresh."
                    )
                    _native.fail(_raised)
                    _tell_others(_raised)

    scope.__enter__, scope.__exit__ = watched_enter, watched_leave


def _watch_trainers() -> None:
    # In MXNet a failed operator and all that is skipped because of it share one exception. Whoever reads any of their
    # results first takes it away, and what is still queued runs as if nothing had happened: an update that was issued
    # before the loss was read would then use gradients that nobody has computed. The gate is an exception of its own,
    # between the gradients and what uses them, so a failed step changes no parameter.
    def guard(name: str, wanted: Callable[[mx.gluon.Trainer], bool]) -> None:
        original = getattr(mx.gluon.Trainer, name)

        @functools.wraps(original)
        def guarded(trainer: mx.gluon.Trainer, *args: Any, **kwargs: Any) -> Any:
            if wanted(trainer) and _native.layers():
                gradients = [g for p in trainer._params if p._grad is not None for g in p._grad]
                if gradients:
                    _native.gate(gradients)
            return original(trainer, *args, **kwargs)

        setattr(mx.gluon.Trainer, name, guarded)

    guard("_allreduce_grads", lambda trainer: trainer._update_on_kvstore)  # the store updates as it adds
    guard("_update", lambda trainer: not trainer._update_on_kvstore)


def _watch_backward() -> None:
    # MXNet bundles up to 15 operators of a backward into one, which waits for what any of them needs. Where replicas
    # share a context, the last operators of one stand in a bundle with the first ones of the next: this layer's
    # operator in the first replica waits for that in the second, which waits for the bundle, which waits for the first.
    # A copy is pushed by itself and ends the bundle before it: one at the head of each replica keeps them apart.
    original = autograd.backward

    @functools.wraps(original)
    def apart(heads: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(heads, (list, tuple)) and len(heads) > 1 and _native.contexts_are_shared():
            before = autograd.set_recording(True)
            try:
                heads = [head.copyto(head.context) for head in heads]
            finally:
                autograd.set_recording(before)
        original(heads, *args, **kwargs)

    autograd.backward = apart


# ---- the end of the process ---------------------------------------------------------------------------------


def _at_exit() -> None:
    # MXNet drops what is queued at interpreter exit and waits for what runs: a replica that waits for a queued partner
    # would wait for ever. This runs before MXNet's own handler, lets a healthy step finish and ends a stuck one. Daemon
    # threads are still there, and find that no step begins any more.
    global _ending
    _ending = True
    _native.nobody_left(True)
    drain()
    _native.close()
    if os.getpid() != _pid:
        return  # a child of a fork: the exchanges belong to its parent
    if _native.failure():
        _tell_others(_native.failure())
    for exchange in list(beyond):
        exchange.close()


def _watch_main_thread() -> None:
    # Exit handlers run only after all threads that are no daemons: one of those may be what waits for a step that is
    # stuck. Where all of them wait within MXNet, nobody is left to call the replicas that are missing.
    threading.main_thread().join()
    while True:
        _native.nobody_left(all(map(_waits_in_mxnet, filter(_counts, threading.enumerate()))))
        time.sleep(0.1)


def _counts(thread: threading.Thread) -> bool:
    return not thread.daemon and thread is not threading.main_thread()


def _waits_in_mxnet(thread: threading.Thread) -> bool:
    frame = sys._current_frames().get(thread.ident or 0)
    return frame is not None and frame.f_code.co_filename.startswith(_MXNET)


def _start_watching() -> None:
    threading.Thread(target=_watch_main_thread, name="gluon_syncbn-exit", daemon=True).start()


# ---- forks ----------------------------------------------------------------------------------------------------
# Before a fork MXNet stops its threads, those of custom operators before its engine (LibraryInitializer::atfork_prepare
# in src/initialize.cc), so that a custom operator which is still in flight is waited for and never runs; and an error
# that nobody has read ends the process. So all of it has to be over by then.


def _before_fork() -> None:
    if not _native.layers():
        return
    with _lock:
        alone = _open_scopes == getattr(_own, "depth", 0)  # nobody else is in a step, whose replicas could still come
    _native.forking(alone and _open_scopes > 0)
    for error in drain():
        _log.error("failed before a fork, which took the error away from whoever reads the results: %s", error)
    _native.forking(False)


def _after_fork_in_child() -> None:
    global _lock, _open_scopes
    _lock, _open_scopes = threading.Lock(), getattr(_own, "depth", 0)
    _native.forked()
    for exchange in list(beyond):
        exchange.forked()
    _start_watching()


_watch_scopes()
_watch_backward()
_watch_trainers()
atexit.register(_at_exit)
os.register_at_fork(before=_before_fork, after_in_child=_after_fork_in_child)
_start_watching()
