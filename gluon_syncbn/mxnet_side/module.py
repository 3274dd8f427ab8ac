"""Runs in the places of methods of executors and of ``Module``, for steps with synchronised layers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Callable, Optional

from mxnet.executor import Executor
from mxnet.module import Module
from mxnet.module.executor_group import DataParallelExecutorGroup

from .. import _native
from ..training import steps
from ..training.replicas import IN_GRAPH
from .nodes import Synchronised


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
    trains = group.for_training if is_train is None else is_train
    with steps.executors_run_forward() if trains and _is_synchronised(group) else nullcontext():
        forward(group, data_batch, is_train)


def within(backward: Callable, group: DataParallelExecutorGroup, *args: Any, **kwargs: Any) -> None:
    """An update after the backward changes nothing in a step that failed, as that of a ``gluon.Trainer``."""
    with steps.executors_run_backward() if _is_synchronised(group) else nullcontext():
        backward(group, *args, **kwargs)
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
