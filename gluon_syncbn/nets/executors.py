"""Synchronises batch normalisation in the graphs of `Module`, ``simple_bind`` and ``bind``.

An executor runs a graph on one context. It has no parameters of Gluon, from which a layer could find its replicas. In a
``Module``, the group of its executors lists the contexts. Elsewhere, ``ndev=`` says how many executors train together.
Each group gets its own graph, because equal nodes on several contexts meet.
"""

from __future__ import annotations

import functools
import inspect
import json
import warnings
from contextlib import nullcontext
from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import mxnet as mx
from mxnet import autograd
from mxnet.context import Context
from mxnet.executor import Executor
from mxnet.module import executor_group
from mxnet.module.executor_group import DataParallelExecutorGroup

from .. import _native
from ..layer import SyncBatchNorm
from ..mxnet_side import patches
from ..mxnet_side.export import SYNCHRONISED, settings_of, with_layers
from ..mxnet_side.nodes import Json, gives_moments, is_ours, json_of, number_nodes, symbol_of, walk
from ..system import arguments, kinds
from ..system.classes import derived
from ..training import steps
from ..training.replicas import IN_GRAPH, Replicas, executing, setting
from ..training.session import session
from .graphs import layer_of

#: Operators of MXNet whose nodes are also synchronised.
operators: Set[str] = set()
#: A synchronised node of an executor, which keeps the replicas alive: the names of the running statistics, the
#: replicas, and the number among the layer's nodes.
_Node = Tuple[List[str], Replicas, int]
#: Marks a node in the graph of a ``Module`` of which a warning was given: its executors bind that graph.
_STAYS = "null"
#: What executors were bound for training by; empty if none was.
trained: Set[str] = set()


def install() -> None:
    """Wraps the functions that create executors. MXNet does not tell an operator which executors train together."""
    patches.replace(_grouping, DataParallelExecutorGroup, "__init__")
    for name in ("bind", "simple_bind"):
        patches.replace(_binding, mx.sym.Symbol, name)


def _grouping(
    construct: Callable, group: Any, symbol: mx.sym.Symbol, contexts: List[Context], *args: Any, **kwargs: Any
) -> None:
    places = executor_group._prepare_group2ctxs(kwargs.get("group2ctxs"), len(contexts))

    def choose(node: Json) -> SyncBatchNorm:
        layer, part = _layer(node), node["attrs"].get("__ctx_group__")
        own = [(place or {}).get(part, context) for place, context in zip(places, contexts)]
        layer._replicas.set_contexts(own, 0)
        return layer

    graph, layers = _synchronised(symbol, choose)
    if layers:
        # The group itself, because a program may have a class in the place of ``Module``, which makes it.
        group.__class__ = derived(type(group), _Group, type(group))
    construct(group, graph, contexts, *args, **kwargs)
    trained.update(["a Module"] if group.for_training else [])
    if group.for_training and any(replicas.reaches_other_processes() for _, replicas, _ in layers):
        warnings.warn(
            "the gradients of a Module stay in this process, and its layers share their statistics with others: "
            "train with gluon.Trainer(..., kvstore=kv)",
            stacklevel=5,
        )
    for (mean, _), replicas, _ in layers:
        if group.for_training:
            replicas.check(replicas.contexts)
        replicas.set_contexts(replicas.contexts, group.execs[0].aux_dict[mean].shape[0])


def _binding(bind: Callable, symbol: mx.sym.Symbol, /, ctx: Context, *args: Any, **kwargs: Any) -> Executor:
    request = inspect.signature(bind).bind_partial(symbol, ctx, *args, **kwargs).arguments.get("grad_req")
    requests = request.values() if isinstance(request, dict) else request if isinstance(request, list) else [request]
    trains = any(one != "null" for one in requests)
    choose = functools.partial(_beside_others, ctx, trains)
    graph, layers = _synchronised(symbol, choose)
    # A step may be open, but no operator that is made here is a call of it.
    on = ctx.device_id if ctx.device_type == "cpu" else -1
    with setting(_native.issue_on, on) if layers else nullcontext(), executing(ctx), autograd.predict_mode():
        executor = bind(graph, ctx, *args, **kwargs)
    if layers:
        executor.__class__, executor.layers = _Executor, layers
        for (mean, _), replicas, _ in layers if trains else ():
            replicas.channels = executor.aux_dict[mean].shape[0]
    return executor


#: Executors that train together and are bound one by one, by the key of a node and their number: the layer, and the
#: contexts of those that are bound.
_unfinished: Dict[Tuple[str, int], Tuple[SyncBatchNorm, List[Context]]] = {}


def _beside_others(context: Context, trains: bool, node: Json) -> Optional[SyncBatchNorm]:
    """Returns the layer of an executor outside a ``Module``. It is that of earlier executors whose group is incomplete.

    The layer of an incomplete group has no contexts, and its first step raises an error. An executor that never trains
    does not wait for others.
    """
    attributes = node["attrs"]
    if is_ours(node) and _replicas(node).contexts:
        return None  # the node of a Gluon net, whose parameters have values
    written = attributes if node["op"] in operators else json.loads(attributes.get(SYNCHRONISED, "{}"))
    wanted = int(written.get("ndev", 1 if node["op"] in operators else 0))
    if not wanted or (wanted > 1 and not trains):
        return None if is_ours(node) else _layer(node)
    key = str(written.get("key") or attributes.get("layer", node["name"])), wanted
    if key not in _unfinished or context in _unfinished[key][1]:
        _unfinished[key] = _layer(node), []
    layer, contexts = _unfinished[key]
    contexts.append(context)
    if len(contexts) == wanted:
        del _unfinished[key]
        layer._replicas.set_contexts(contexts, 0)
        layer._replicas.check(layer._replicas.contexts)
    return layer


def _layer(node: Json) -> SyncBatchNorm:
    """Creates a layer for a node, with its own replicas."""
    attributes = node["attrs"]
    if is_ours(node):
        replicas = _replicas(node)
        return layer_of(f"{replicas.name}_", attributes, replicas)
    written = json.loads(attributes.get(SYNCHRONISED, "{}"))
    given = {name: value for name, value in written.items() if name not in ("ndev", "key")}
    return SyncBatchNorm(**settings_of(f"{node['name']}_", attributes), **given)


def _replicas(node: Json) -> Replicas:
    replicas = Replicas.by_token.get(node["attrs"]["layer"])
    if replicas is None:
        raise mx.MXNetError(
            f"the SyncBatchNorm of '{node['name']}' no longer exists, or belongs to another process: keep the net of "
            "this symbol until a Module or an executor is bound"
        )
    return replicas


def _synchronised(
    symbol: mx.sym.Symbol, choose: Callable[[Json], Optional[SyncBatchNorm]]
) -> Tuple[mx.sym.Symbol, List[_Node]]:
    """Returns the graph with the layer that is chosen for each node, or the same object if there is no such node; and
    its synchronised nodes.
    """
    recorded = json_of(symbol)
    is_other = number_nodes(recorded)
    names = {node["name"] for node in recorded["nodes"]}
    chosen: Dict[int, SyncBatchNorm] = {}
    layers: List[_Node] = []
    stay: List[str] = []
    for number, within, node in walk(recorded):
        mark = node["attrs"].get(SYNCHRONISED)
        takes = mark != _STAYS and (node["op"] in operators or (node["op"] == "BatchNorm" and mark is not None))
        if not takes and not is_ours(node):
            continue
        running = [within["nodes"][at]["name"] for at, *_ in node["inputs"][-2:]]
        if not names.issuperset(running):
            continue  # a backend, such as that of oneDNN, made it a part of its own operator, and renamed its inputs
        if takes and gives_moments(within, node):
            stay.append(f"{node['name']} ({node['op']})")
            node["attrs"][SYNCHRONISED], is_other = _STAYS, True
        else:
            layer = choose(node)
            if layer is not None:
                chosen[number] = layer
            replicas = _replicas(node) if layer is None else layer._replicas
            layers.append((running, replicas, 0 if layer is not None else int(node["attrs"]["node"])))
    if stay:
        warnings.warn(
            f"{arguments.some(stay, ', ')}: MXNet's own operator stays, because the graph uses its mean or variance",
            stacklevel=5,
        )
    if chosen:
        recorded = json_of(with_layers(recorded, chosen))
        number_nodes(recorded)
    return kinds.like(symbol_of(recorded), symbol) if chosen or is_other else symbol, layers


# ---- steps ----------------------------------------------------------------------------------------------------


class _Executor(Executor):
    """An executor with synchronised layers. MXNet makes its operators when it is bound, so nobody else sees which
    replicas will come.
    """

    layers: List[_Node]

    def forward(self, is_train: bool = False, **kwargs: Any) -> Any:
        calls, numbers, running = [], [], []
        for names, replicas, number in self.layers if is_train else []:
            replicas.runs(IN_GRAPH)
            if not replicas.kwargs["use_global_stats"] and self._ctx in replicas.contexts:
                calls.append(replicas.id)
                numbers.append(number)
                running += [self.aux_dict[name] for name in names]
        with executing(self._ctx, calls, numbers, running, repeats=True):
            outputs = super().forward(is_train, **kwargs)
        if calls:
            _native.watch(str(self._ctx), outputs)
        return outputs

    def reshape(self, *args: Any, **kwargs: Any) -> Executor:
        executor = super().reshape(*args, **kwargs)
        executor.__class__, executor.layers = _Executor, self.layers
        return executor


class _Group(DataParallelExecutorGroup):
    """The executors of a ``Module`` with synchronised layers."""

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
        try:
            with autograd.train_mode():  # whose scope is a step
                super().forward(data_batch, is_train)
        except BaseException:
            session.raised = _native.failure()
            raise

    def backward(self, *args: Any, **kwargs: Any) -> None:
        """The backward belongs to the step of the forward. An update after it changes nothing in a step that failed, as
        that of a ``gluon.Trainer``.
        """
        try:
            super().backward(*args, **kwargs)
        except BaseException as error:
            if not session.depth():
                steps.break_off("the backward of a Module", error)
                session.raised = _native.failure()
            raise
        for executor in self.execs:
            _native.watch(str(executor._ctx), [array for array in executor.grad_arrays if array is not None])
        _native.gate(kinds.arrays_of(self.grad_arrays))

    def get_params(self, arg_params: Dict[str, mx.nd.NDArray], aux_params: Dict[str, mx.nd.NDArray]) -> None:
        """A gamma that does not count is 1 for a Module that trains, as with plain BatchNorm on one context. On
        several, each update copies the gamma of the KVStore back, which nobody sets.
        """
        steps.settle(kinds.arrays_of([self.param_arrays, self.aux_arrays]))
        steps.tell()
        get_params = super().get_params
        steps.settled(lambda: [get_params(arg_params, aux_params), arg_params, aux_params])
        for _, within, node in walk(json_of(self.symbol)) if self.for_training else ():
            if is_ours(node) and node["attrs"]["fix_gamma"] == "1":
                gamma = within["nodes"][node["inputs"][1][0]]["name"]
                if gamma in arg_params:
                    arg_params[gamma][:] = 1
