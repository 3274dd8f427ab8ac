"""Where a step begins and ends, so that one that broke off harms neither its replicas nor the next step."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import threading
from typing import Any, Callable

import mxnet as mx
from mxnet import autograd

from . import _native
from .exchange.base import beyond

_log = logging.getLogger("gluon_syncbn")
_lock = threading.Lock()
_open_scopes = 0
_raised = ""  # the last failure that went through a scope as an exception
_own = threading.local()
_pid = os.getpid()


def drain() -> None:
    """Waits until MXNet has nothing left to do, whatever comes of it."""
    while True:
        try:
            mx.nd.waitall()
            return
        except mx.MXNetError:
            # Errors of the step that failed; whoever reads its results has them. Each is raised once, and reading
            # them is what makes the arrays usable again.
            continue


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


def _at_exit() -> None:
    # MXNet drops what is queued at interpreter exit and waits for what runs: a replica that waits for a queued partner
    # would wait for ever. This runs before MXNet's own handler, lets a healthy step finish and ends a stuck one.
    if os.getpid() == _pid:
        _native.main_thread_ended()
        drain()
        if _native.failure():
            _tell_others(_native.failure())
        for exchange in list(beyond):
            exchange.close()


def _when_main_thread_ends() -> None:
    threading.main_thread().join()
    _native.main_thread_ended()


_watch_scopes()
_watch_trainers()
atexit.register(_at_exit)
# Exit handlers run only after all other threads: one of those may be what waits for a step that is stuck.
threading.Thread(target=_when_main_thread_ends, name="gluon_syncbn-exit", daemon=True).start()
