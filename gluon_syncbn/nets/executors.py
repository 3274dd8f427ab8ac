"""Synchronises batch normalisation in the graphs of `Module`.

Each of its executors runs the graph on one context. They have no parameters of Gluon, from which a layer could find its
replicas: their group lists the contexts. Each group gets its own graph, because equal nodes on several contexts meet.
"""

from __future__ import annotations

import json
import threading
import warnings
import weakref
from contextlib import contextmanager, nullcontext
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.context import Context
from mxnet.executor import Executor
from mxnet.module.executor_group import DataParallelExecutorGroup

from .. import _native
from ..layer import SyncBatchNorm
from ..mxnet_side.export import SYNCHRONISED, unshared, with_layers
from ..mxnet_side.nodes import Json, gives_moments, is_ours, json_of, number_nodes, symbol_of, walk
from ..settings import Settings
from ..system import arguments, kinds
from ..system.environment import read
from ..training import steps
from ..training.replicas import IN_GRAPH, Replicas, executing, setting
from ..training.session import session
from .graphs import layer_of

#: A synchronised node of an executor, which keeps the replicas alive: the names of the running statistics, and the
#: replicas.
_Node = Tuple[List[str], Replicas]


def _grouping(group: Callable, symbol: mx.sym.Symbol, contexts: List[Context], *args: Any, **kwargs: Any) -> Any:
    graph, layers = _synchronised(symbol, contexts)
    if layers and kwargs.get("group2ctxs"):
        arguments.refuse("group2ctxs", kwargs["group2ctxs"], "None for a graph with synchronised layers")
    made = _Group(layers, graph, contexts, *args, **kwargs) if layers else group(graph, contexts, *args, **kwargs)
    if made.for_training:
        steps.training_threads(threading.current_thread())
    if made.for_training and any(replicas.reaches_other_processes() for _, replicas in layers):
        warnings.warn(
            "the gradients of a Module stay in this process, and its layers share their statistics with others: "
            "train with gluon.Trainer(..., kvstore=kv)",
            stacklevel=4,
        )
    if made.for_training and layers:
        _refuse_mirroring(graph)
    for (mean, _), replicas in layers:
        if made.for_training:
            replicas.check()
        replicas.set_contexts(replicas.contexts, made.execs[0].aux_dict[mean].shape[0])
    return made


def _refuse_mirroring(graph: mx.sym.Symbol) -> None:
    """An executor would compute the layers' forwards once more for the backward, as nodes that look like others."""
    for _, _, node in walk(json_of(graph)):
        if is_ours(node) and arguments.value_of(node["attrs"].get("__force_mirroring__", "0")):
            arguments.refuse("force_mirroring", True, f"False for '{node['name']}', which would meet the others twice")
    mirrors = read("MXNET_BACKWARD_DO_MIRROR")
    if mirrors not in ("", "0"):
        arguments.refuse("MXNET_BACKWARD_DO_MIRROR", mirrors, "0 for a Module with layers of SyncBatchNorm")


def _layer(node: Json) -> SyncBatchNorm:
    """Creates a layer for a node, with its own replicas."""
    attributes = node["attrs"]
    if not is_ours(node):
        written = json.loads(attributes.get(SYNCHRONISED, "{}"))
        given = {name: value for name, value in written.items() if name not in ("ndev", "key")}  # of version 0.3
        own = Settings.from_node(attributes).batch_norm()
        return SyncBatchNorm(**unshared(f"{node['name']}_"), **own, **given)
    replicas = Replicas.of_node(attributes)
    if replicas is None:
        raise mx.MXNetError(
            f"the SyncBatchNorm of '{node['name']}' no longer exists, or belongs to another process: keep the net of "
            "this symbol until a Module is bound"
        )
    return layer_of(f"{replicas.name}_", attributes)


def _synchronised(symbol: mx.sym.Symbol, contexts: List[Context]) -> Tuple[mx.sym.Symbol, List[_Node]]:
    """Returns the graph with a layer for each node, or the same object without such a node; and those nodes."""
    recorded = json_of(symbol)
    names = {node["name"] for node in recorded["nodes"]}
    chosen: Dict[int, SyncBatchNorm] = {}
    layers: List[_Node] = []
    stay: List[str] = []
    operators = session.hooks["operators"]
    for number, within, node in walk(recorded):
        takes = node["op"] in operators or (node["op"] == "BatchNorm" and SYNCHRONISED in node["attrs"])
        if not takes and not is_ours(node):
            continue
        running = [within["nodes"][at]["name"] for at, *_ in node["inputs"][-2:]]
        if not names.issuperset(running):
            continue  # a backend, such as that of oneDNN, made it a part of its own operator, and renamed its inputs
        if takes and gives_moments(within, node):
            stay.append(f"{node['name']} ({node['op']})")
            continue
        chosen[number] = layer = _layer(node)
        layer._replicas.set_contexts(contexts, 0)
        layers.append((running, layer._replicas))
    if stay:
        warnings.warn(
            f"{arguments.some(stay, ', ')}: MXNet's own operator stays, because the graph uses its mean or variance",
            stacklevel=5,
        )
    if chosen:
        recorded = json_of(with_layers(recorded, chosen))
    is_other = number_nodes(recorded)
    return kinds.like(symbol_of(recorded), symbol) if chosen or is_other else symbol, layers


@contextmanager
def _making(context: Context) -> Iterator[None]:
    """Makes operators of an executor, within the block. A step may be open, but none of them is a call of it."""
    with setting(_native.issue_on, context.device_id if context.device_type == "cpu" else -1), autograd.predict_mode():
        yield


# ---- steps ----------------------------------------------------------------------------------------------------


def _trains(executor: Executor, layers: List[_Node]) -> Executor:
    """Lets an executor announce its calls of layers. MXNet makes its operators when it is bound, so nobody else sees
    which replicas will come.
    """
    own = weakref.proxy(executor)  # MXNet frees an executor as soon as nobody has it

    def forward(is_train: bool = False, **kwargs: Any) -> Any:
        calls, running = [], []
        for names, replicas in layers if is_train else ():
            replicas.runs(IN_GRAPH)
            if not replicas.settings.use_global_stats:
                calls.append(replicas.id)
                running += [own.aux_dict[name] for name in names]
        with executing(own._ctx, calls, [0] * len(calls), running) if is_train else nullcontext():
            outputs = Executor.forward(own, is_train, **kwargs)
        if is_train:
            _native.watch(str(own._ctx), outputs)
        return outputs

    def reshape(*args: Any, **kwargs: Any) -> Executor:
        with _making(own._ctx):
            return _trains(Executor.reshape(own, *args, **kwargs), layers)

    executor.forward, executor.reshape = forward, reshape
    return executor


class _Group(DataParallelExecutorGroup):
    """The executors of a ``Module`` with synchronised layers."""

    def __init__(self, layers: List[_Node], *args: Any, **kwargs: Any) -> None:
        self.layers = layers
        super().__init__(*args, **kwargs)

    def _bind_ith_exec(self, i: int, *args: Any) -> Executor:
        with _making(self.contexts[i]):
            return _trains(super()._bind_ith_exec(i, *args), self.layers)

    def forward(self, data_batch: Any, is_train: Optional[bool] = None) -> None:
        """A training forward begins a step: all executors of a ``Module`` begin in it.

        Several modules may be one net, as the two of a GAN. The second one must not forget what the first one has
        failed with: it would train on what is left of that. So a failure that nobody has been told of is raised here,
        and only the forward after that starts afresh.
        """
        if not (self.for_training if is_train is None else is_train):
            super().forward(data_batch, is_train)
            return
        steps.tell()
        with autograd.train_mode():  # whose scope is a step
            super().forward(data_batch, is_train)

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """The backward belongs to the step of the forward. An update after it changes nothing in a step that failed, as
        that of a ``gluon.Trainer``.
        """
        try:
            super().backward(*args, **kwargs)
        except BaseException as error:
            if steps.current() is None:
                steps.break_off("the backward of a Module", error)
            raise
        for executor in self.execs:
            _native.watch(str(executor._ctx), [array for array in executor.grad_arrays if array is not None])
        _native.gate(kinds.arrays_of(self.grad_arrays))

    def get_params(self, arg_params: Dict[str, mx.nd.NDArray], aux_params: Dict[str, mx.nd.NDArray]) -> None:
        """As `steps.settled` says of files."""
        arrays, get_params = kinds.arrays_of([self.param_arrays, self.aux_arrays]), super().get_params
        steps.settled(arrays, lambda: [get_params(arg_params, aux_params), arg_params, aux_params])


# `Module` has the class by this name. MXNet does not tell an operator which executors train together.
WRAPPED = {(mx.module.module, "DataParallelExecutorGroup"): _grouping}
