"""Records the graphs of nets, and calls those with layers."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, Callable, ContextManager, Dict, List, Tuple

import mxnet as mx
from mxnet import autograd, gluon

from .. import _native
from ..system import arguments, kinds
from ..training import steps
from ..training.replicas import IN_GRAPH, executing, followers_of, records, setting
from ..training.session import session
from . import blocks
from .fusion import fuse
from .nodes import Json, is_ours, json_of, layers_of, number_nodes, symbol_of


class _Issuing(mx.nd.CachedOp):
    """A graph with layers, or one whose operators MXNet keeps. Threads issue the operators of layers on one context one
    after the other: see `Session.issuing`. With ``static_shape``, the layers cannot see that they are called, so the
    graph announces its calls.
    """

    def __init__(self, symbol: mx.sym.Symbol, flags: List[Tuple[str, Any]], graph: Json) -> None:
        super().__init__(symbol, flags)
        found = layers_of(graph)
        self.symbol, self.flags = symbol, flags
        self.layers = [layer for layer, _ in found]
        names = symbol.list_inputs()
        data = {graph["nodes"][node["inputs"][0][0]]["name"] for node in graph["nodes"] if is_ours(node)}
        self.may_be_sparse = [place for place in dict(flags)["data_indices"] if names[place] in data]
        self.ran_with: Any = None  # the default exchange, and the contexts of the layers
        self.called: Dict[Any, Any] = {}  # outside of all scopes
        self.lock: Callable[[mx.Context], ContextManager] = session.issuing if found else nullcontext
        self.keeps = bool(dict(flags).get("static_shape"))  # MXNet makes its operators once, and executes them again
        loops = [node for node in graph["nodes"] if node["op"] in ("_foreach", "_while_loop", "_cond")]
        bodies = [body for node in loops for body in node["subgraphs"]]
        self.in_bodies = [layer.name for body in bodies for layer, _ in layers_of(body)]
        # An operator takes the call that was announced first: one call must not overtake another on its context.
        moving = [(layer, of) for layer, of in found if of["use_global_stats"] != "1"]
        running = [parameter for layer in dict(moving) for parameter in layer.running.objects()]
        meeting = [(layer.id, int(of["node"])) for layer, of in moving if layer.settings.mode != "local"]
        self.calls = [layer for layer, _ in meeting], [node for _, node in meeting], running

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.in_bodies and autograd.is_recording():
            # The check of CachedOp::Backward in src/imperative/cached_op.cc forgets auxiliary states.
            raise mx.MXNetError(
                f"{arguments.some(self.in_bodies, ', ')}: MXNet cannot compute the gradient of batch normalisation "
                "in the body of F.contrib.foreach, while_loop or cond of a hybridized block, nor of nn.BatchNorm: "
                "call hybridize(False) on the block that has the loop, or use autograd.train_mode() without gradients"
            )
        for place in self.may_be_sparse:
            args = (*args[:place], kinds.dense(args[place]), *args[place + 1 :])
        training, context = autograd.is_training(), args[0].ctx
        if training and self.ran_with != (now := (session.exchange, [layer.contexts for layer in self.layers])):
            for layer in self.layers:
                layer.runs(IN_GRAPH)
            self.ran_with = now
        if self.keeps and autograd.is_recording() and any(len(one.contexts) > 1 for one in self.layers):
            self._note_call(context)
        with self.lock(context), executing(context, *self.calls if training else ()) if self.keeps else nullcontext():
            outputs = super().__call__(*args, **kwargs)
        if training and self.keeps and self.layers:  # others of these layers' arrays tell nothing: see `steps.watch`
            _native.watch(str(context), kinds.arrays_of(outputs))
        return outputs

    def _note_call(self, context: mx.Context) -> None:
        """From the second call in a step on, operators are made anew at each call. MXNet makes those of their
        backwards anew anyway, because the gradients of the weights are other arrays at each step. But it drops the old
        ones only when all operators before them that read the weights have run (`ThreadedEngine::DeleteOperator` in
        src/engine/threaded_engine.cc). If a loss joins devices, these may issue their backwards in different orders,
        and would wait for each other.
        """
        scope = steps.current()
        called = self.called if scope is None else scope.called
        if (id(self), context) in called:
            again = mx.nd.CachedOp(self.symbol, [flag for flag in self.flags if flag[0] != "static_shape"])
            self.handle, again.handle = again.handle, self.handle
            self.keeps = False
            called["dropped"] = again  # until the step ends, because another thread may be calling it
        called[id(self), context] = None

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a hybridized net that was called holds operators of MXNet's, which cannot be copied or pickled: call "
            "net.hybridize() before, which drops them"
        )


def _building(build: Callable, block: gluon.HybridBlock, *args: Any) -> None:
    """Records a graph once, in one thread at a time, numbers its nodes, and fuses. MXNet makes its operator of the
    result. The block keeps the graph that was recorded, which files are written from.

    In MXNet, threads that record one net at once take each other's name scopes. Or they make graphs of their own, whose
    nodes do not meet.
    """
    before = block._cached_op  # that of an earlier ``optimize_for``
    with session.tracing:
        if block._cached_op is not before:
            return
        for prepare in session.hooks["recording"]:
            prepare(block)
        kept: List[Any] = []  # until MXNet's operator keeps them
        with setting(records, kept):
            inputs, symbol, graph = running_graph(block, *args)
        # In the place of the block, because other threads call MXNet's operator as soon as they see it there. It is of
        # MXNet's class, because one of a program's may end what it has, and of the block it asks what that may define.
        draft = object.__new__(gluon.HybridBlock)
        vars(draft).update(vars(block), _get_graph=lambda *args: (inputs, symbol))
        vars(draft).update(infer_shape=block.infer_shape, collect_params=block.collect_params)
        build(draft, *args)
        if draft._cached_graph is not block._cached_graph:  # the parts that a backend has made of it
            block._cached_graph = draft._cached_graph
            symbol = draft._cached_graph[1]
            graph = json_of(symbol)
        flags = [("data_indices", []), ("param_indices", []), *block._flags]
        for place, (is_input, _) in enumerate(draft._cached_op_args):
            flags[0 if is_input else 1][1].append(place)
        if layers_of(graph) or (dict(flags).get("static_shape") and symbol.list_inputs()):
            draft._cached_op = _Issuing(symbol, flags, graph)
        block._cached_op_args = draft._cached_op_args
        block._cached_op = draft._cached_op  # last, because other threads look for it
        session.graphs(block)


def running_graph(block: gluon.HybridBlock, *args: Any) -> Tuple[List[mx.sym.Symbol], mx.sym.Symbol, Json]:
    """Returns the inputs of the graph that a block records, and the graph that it runs for these arguments, in the form
    of files too.
    """
    if block._cached_graph and not isinstance(block, gluon.SymbolBlock):
        parameters = block.collect_params()
        means = [node.inputs[3] for node in blocks.recorded(block) if node.operator in blocks.OPERATORS]
        if followers_of(parameters[mean] for mean in means if mean in parameters):
            _forget_loaded(block)
    inputs, symbol = block._get_graph(*args)
    graph = json_of(symbol)
    is_other = number_nodes(graph)
    if fuse(symbol, graph, dict(zip([one.name for one in inputs], kinds.arrays_of(args)))) or is_other:
        symbol = kinds.like(symbol_of(graph), symbol)
        graph = json_of(symbol)  # without the nodes that were absorbed
    return inputs, symbol, graph


def _forget_loaded(net: gluon.Block) -> None:
    """Lets a net record its own graph again, in place of that of ``Block.load``, which has plain operators for its
    synchronised layers. It has renamed the net's entries, and not its parameters.
    """
    for one in blocks.iterate(net):
        entries = one.params._params
        parameters = {parameter.name: parameter for parameter in entries.values()}
        entries.clear()
        entries.update(parameters)
        if isinstance(one, gluon.HybridBlock):
            one._clear_cached_op()


WRAPPED = {(gluon.HybridBlock, "_build_cache"): _building}
