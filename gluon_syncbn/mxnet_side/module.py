"""Runs in the places of methods of executors and of ``Module``, for steps with synchronised layers."""

from __future__ import annotations

from typing import Any, Callable, Optional

import mxnet as mx
from mxnet.executor import Executor
from mxnet.module import Module
from mxnet.module.executor_group import DataParallelExecutorGroup

from .. import _native
from ..training import steps
from ..training.replicas import IN_GRAPH
from ..training.session import session
from . import patches
from .nodes import Synchronised


def install() -> None:
    """For a ``Module`` with synchronised layers. A program may have one of its own, which makes the group itself."""
    patches.replace(beginning, DataParallelExecutorGroup, "forward")
    patches.replace(within, DataParallelExecutorGroup, "backward")
    patches.replace(updating, Module, "update")
    patches.replace(after_forward, DataParallelExecutorGroup, "get_params")


def calling(forward: Callable, executor: Executor, /, is_train: bool = False, **kwargs: Any) -> Any:
    """MXNet makes the operators of an executor when it is bound, so nobody else sees which replicas will come."""
    if is_train and isinstance(executor._symbol, Synchronised):
        for _, layer in executor._symbol.layers:
            layer._replicas.runs(IN_GRAPH)
            meets = layer._replicas.pooling.mode != "local" and not layer._kwargs["use_global_stats"]
            if meets and executor._ctx in layer._replicas.contexts:  # each layer is one node: see executors.py
                _native.layer_called(layer._replicas.id, 0, str(executor._ctx))
    return forward(executor, is_train, **kwargs)


def beginning(
    forward: Callable, group: DataParallelExecutorGroup, data_batch: Any, is_train: Optional[bool] = None
) -> None:
    """A training forward begins a step: all executors of a ``Module`` begin in it.

    Several modules may be one net, as the two of a GAN. The second one must not forget what the first one has failed
    with: it would train on what is left of that. So a failure that nobody has been told of is raised here, and only
    the forward after that starts afresh.
    """
    if not _is_synchronised(group) or not (group.for_training if is_train is None else is_train):
        forward(group, data_batch, is_train)
        return
    reason = "" if session.depth() else _native.failure()
    if reason and reason != session.raised:
        session.raised = reason
        raise mx.MXNetError(reason)
    steps.scope_entered()
    try:
        forward(group, data_batch, is_train)
    except BaseException as error:
        steps.scope_left(type(error), error)
        session.raised = _native.failure()
        raise
    steps.scope_left(None, None)


def within(backward: Callable, group: DataParallelExecutorGroup, *args: Any, **kwargs: Any) -> None:
    """The backward belongs to the step of the forward. An update after it changes nothing in a step that failed, as
    that of a ``gluon.Trainer``.
    """
    try:
        backward(group, *args, **kwargs)
    except BaseException as error:
        if _is_synchronised(group) and not session.depth():
            steps.break_off(f"{type(error).__name__} left the backward of a Module ({error})")
            session.raised = _native.failure()
        raise
    _gate(group)


def updating(update: Callable, module: Module) -> None:
    """Another module of the step may have failed since its backward."""
    _gate(module._exec_group)
    update(module)


def _gate(group: DataParallelExecutorGroup) -> None:
    if _is_synchronised(group):
        gradients = [g for arrays in group.grad_arrays for g in arrays if g is not None]
        if gradients:
            _native.gate(gradients)


def after_forward(method: Callable, group: DataParallelExecutorGroup, *args: Any) -> None:
    """An executor tells MXNet's engine only what its operators read and put out, and not that they write auxiliary
    states (`GraphExecutor::InitCachedOps` in src/executor/graph_executor.cc). So the engine may copy the running
    statistics before a forward that was issued earlier has written them.
    """
    steps.settle_failed()
    if _is_synchronised(group):
        for executor in group.execs:
            for output in executor.outputs:
                output.wait_to_read()
    method(group, *args)


def _is_synchronised(group: Optional[DataParallelExecutorGroup]) -> bool:
    return isinstance(getattr(group, "symbol", None), Synchronised)
