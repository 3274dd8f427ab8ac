"""Changes MXNet's functions and classes: `install` says which and why, and `remove` restores them."""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any, Callable, List, Tuple

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.executor import Executor
from mxnet.gluon.nn.basic_layers import _BatchNorm
from mxnet.module import Module
from mxnet.module.executor_group import DataParallelExecutorGroup

from .. import _native
from ..system import arguments
from ..training import steps
from ..training.replicas import IN_GRAPH, Replicas
from ..training.session import session
from . import callers, draws, module, trainer
from .nodes import json_of
from .op import Role

# Reading the annotations of a class adds them as an attribute.
_ASSIGNED = [name for name in functools.WRAPPER_ASSIGNMENTS if name != "__annotations__"]
_replaced: List[Tuple[Any, str, Any]] = []  # owner, name, original; None if the owner inherits it
_wrapped: List[Tuple[Any, str, Callable]] = []  # owner, name, wrapper, of `replace_once`


def install() -> None:
    """Changes MXNet; once is enough.

    - The scopes of ``autograd.record()`` and ``train_mode()`` mark where a step begins and ends. MXNet has no hook for
      that. After an exception in one replica's part, the other replicas wait for it. The next step would then meet the
      rest of this one. Only the scope sees both.
    - ``autograd.backward`` keeps replicas that share a context apart. MXNet bundles up to 15 operators of a backward
      into one operation, which waits for the inputs of all of them. On a shared context, the last operators of one
      replica share a bundle with the first ones of the next. This layer's operator in the first replica then waits for
      the second replica. The second replica waits for the bundle, and the bundle waits for the first replica. A copy is
      issued by itself and ends the bundle before it. So one copy at the head of each replica keeps replicas apart.
    - ``gluon.Trainer`` takes part in what the methods in `trainer` say.
    - ``Parameter._reduce``, by which Gluon saves parameters, works after a failed step, and so does ``save_states`` of
      a ``gluon.Trainer``. The error of the step would reach them once for each array that the step was to write, though
      weights are as they were.
    - ``asnumpy`` and ``wait_to_read`` note that a caller has seen a failure. Then the next step does not report it
      again, and that of a ``Module`` may begin.
    - The ``__call__`` of Gluon's batch normalisation records, once, which blocks call a layer. A layer in an attribute
      of an object that is not a block cannot be found otherwise.
    - ``HybridBlock._build_cache`` records which blocks have a graph, because a block does not know those around it. If
      its layers change, these graphs are out of date.
    - ``mx.nd.CachedOp`` with a layer issues its operators on one context one thread after the other (see
      `Session.issuing`). With ``static_shape`` it also announces its calls. MXNet makes its operators once and executes
      them again, so the layers cannot see that they are called.
    - ``HybridBlock._build_cache`` records a graph once, in one thread at a time. In MXNet, threads that record one net
      at once take each other's name scopes. Or they make graphs of their own, whose nodes do not meet.
    - ``autograd.grad`` with ``create_graph`` notes the layers whose gradient may be differentiated again. There MXNet's
      error would not say which operator it means.
    - ``mx.random.seed`` announces its calls, because seeds that are drawn here follow from it.
    """
    if _replaced:
        return
    scope = autograd._RecordingStateScope
    _replace(scope, "__enter__", _entering)
    _replace(scope, "__exit__", _leaving)
    _replace(autograd, "backward", lambda backward: _naming_layers(_apart(backward)))
    _replace(gluon.Trainer, "__init__", trainer.constructing)
    _replace(gluon.Trainer, "_init_params", trainer.initialising)
    _replace(gluon.Trainer, "_allreduce_grads", trainer.adding)
    _replace(gluon.Trainer, "_update", trainer.updating)
    for owner, name in ((gluon.Parameter, "_reduce"), (gluon.Trainer, "save_states")):
        _replace(owner, name, _saving)
    for name in ("asnumpy", "wait_to_read"):
        _replace(mx.nd.NDArray, name, _reading)
    _replace(_BatchNorm, "__call__", callers.noting)
    _replace(mx.nd, "CachedOp", _issuing)
    _replace(gluon.HybridBlock, "_build_cache", lambda build: _once(callers.noting_graphs(build)))
    _replace(mx.random, "seed", _telling)
    _replace(autograd, "grad", _noting_layers)


def install_for_executors() -> None:
    """Changes MXNet for executors with synchronised layers, once there is one: ``Executor.forward`` tells that it calls
    them. MXNet makes the operators of an executor when it is bound, so that nobody else sees which replicas will come.
    """
    replace_once(Executor, "forward", module.calling)


def install_for_contexts() -> None:
    """Changes MXNet for layers on several CPU contexts, once there is one.

    The outermost block that is called in training issues the operators of a replica. These take resources of their own
    (csrc/native/resources.h).
    """
    replace_once(gluon.Block, "__call__", _for_replica)


def install_for_modules() -> None:
    """Changes MXNet for those who train with ``Module``; once there is one with synchronised layers.

    - ``forward`` and ``backward`` of a group of executors mark where a step begins, and where it fails between two of
      them. A program may have a module of its own, which makes the group itself. So an update after the ``backward``
      changes nothing in a step that failed, as that of a ``gluon.Trainer`` (see `install`).
    - ``update`` of a ``Module`` is another such place: another module of the step may have failed since its backward.
    - ``get_params`` of a group of executors waits for the forward. An executor tells MXNet's engine only what its
      operators read and put out, and not that they write auxiliary states (`GraphExecutor::InitCachedOps` in
      src/executor/graph_executor.cc). So the engine may copy the running statistics before a forward that was issued
      earlier has written them.
    """
    replace_once(DataParallelExecutorGroup, "forward", module.beginning)
    replace_once(DataParallelExecutorGroup, "backward", module.within)
    replace_once(Module, "update", module.updating)
    replace_once(DataParallelExecutorGroup, "get_params", module.after_forward)


def remove() -> None:
    """Undoes `install`."""
    _wrapped.clear()
    while _replaced:
        owner, name, original = _replaced.pop()
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


def replace_once(owner: Any, name: str, wrap: Callable[[Callable], Callable]) -> None:
    """Wraps a function that only some programs need changed, at its first use. Several callers may wrap the same."""
    if (owner, name, wrap) not in _wrapped:
        _wrapped.append((owner, name, wrap))
        _replace(owner, name, wrap)


def _replace(owner: Any, name: str, wrap: Callable[[Callable], Callable]) -> None:
    original = getattr(owner, name)
    _replaced.append((owner, name, vars(owner).get(name)))
    setattr(owner, name, functools.wraps(original, _ASSIGNED)(wrap(original)))


def _trains(scope: Any) -> bool:
    return bool(scope._enter_is_record) or bool(scope._enter_train_mode)


def _entering(enter: Callable) -> Callable:
    def watched(scope: Any) -> Any:
        if _trains(scope):
            steps.scope_entered()
        return enter(scope)

    return watched


def _leaving(leave: Callable) -> Callable:
    def watched(scope: Any, kind: Any, value: Any, trace: Any) -> Any:
        try:
            return leave(scope, kind, value, trace)
        finally:
            if _trains(scope):
                steps.scope_left(kind, value)

    return watched


def _apart(backward: Callable) -> Callable:
    def apart(heads: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(heads, (list, tuple)) and len(heads) > 1 and _native.contexts_are_shared():
            recording = autograd.set_recording(True)
            try:
                heads = [head.copyto(head.ctx) for head in heads]
            finally:
                autograd.set_recording(recording)
        backward(heads, *args, **kwargs)

    return apart


_of_thread = threading.local()


def _for_replica(call: Callable) -> Callable:
    def for_replica(block: gluon.Block, *args: Any) -> Any:
        if getattr(_of_thread, "issues", False) or not _begins(args):
            return call(block, *args)
        _of_thread.issues = True
        try:
            return call(block, *args)
        finally:
            _of_thread.issues = False
            _native.issue_on(-1)

    return for_replica


def _begins(args: Any) -> bool:
    for arg in args:
        if isinstance(arg, mx.nd.NDArray):
            return _native.issue_for(arg)
        if isinstance(arg, (list, tuple)) and _begins(arg):
            return True
    return False


def _noting_layers(grad: Callable) -> Callable:
    def noting(heads: Any, variables: Any, head_grads: Any = None, retain_graph: Any = None, create_graph: bool = False,
               **kwargs: Any) -> Any:  # fmt: skip
        if create_graph:
            for head in heads if isinstance(heads, (list, tuple)) else [heads]:
                for node in json_of(autograd.get_symbol(head))["nodes"]:
                    layer = Replicas.of_token(node.get("attrs", {}).get("layer", ""))
                    if layer is not None:
                        _differentiated[layer] = layer.name
            if _differentiated:
                replace_once(mx.nd.NDArray, "backward", _naming_layers)
        return _naming_layers(grad)(heads, variables, head_grads, retain_graph, create_graph, **kwargs)

    return noting


_differentiated: weakref.WeakKeyDictionary[Replicas, str] = weakref.WeakKeyDictionary()


def _naming_layers(backward: Callable) -> Callable:
    def naming(*args: Any, **kwargs: Any) -> Any:
        try:
            return backward(*args, **kwargs)
        except mx.MXNetError as error:
            if _differentiated and "_backward_Custom is non-differentiable" in str(error):
                names = arguments.some(sorted(set(_differentiated.values())), ", ")
                raise mx.MXNetError(
                    f"SyncBatchNorm has no second derivative (layers of the graph: {names}), and neither has MXNet's "
                    "BatchNorm. A gradient penalty (autograd.grad with create_graph=True) needs a net without them"
                ) from error
            raise

    return naming


def _reading(read: Callable) -> Callable:
    def reading(array: mx.nd.NDArray) -> Any:
        try:
            return read(array)
        except mx.MXNetError as error:
            steps.failure_seen(error)
            raise

    return reading


def _issuing(cached_op: Any) -> Callable[..., mx.nd.CachedOp]:
    class Issuing(cached_op):
        layers: List[Replicas] = []
        calls: List[Tuple[int, int]] = []  # layers and nodes, with static_shape

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            training, context = autograd.is_training(), args[0].ctx
            if training:
                for layer in self.layers:
                    layer.runs(IN_GRAPH)
                self.layers = []
            with session.issuing(context):
                if not (training and self.calls):
                    return super().__call__(*args, **kwargs)
                for number, node in self.calls:
                    _native.layer_called(number, node, str(context))
                _native.within_graph(True)
                try:
                    return super().__call__(*args, **kwargs)
                finally:
                    _native.within_graph(False)

    def make(sym: mx.sym.Symbol, flags: Any = ()) -> mx.nd.CachedOp:
        found = [Replicas.of_token(node.get("layer", "")) for node in sym.attr_dict().values()]
        if not any(found):
            return cached_op(sym, flags)
        graph = Issuing(sym, flags)
        graph.layers = [layer for layer in found if layer is not None]
        if dict(flags).get("static_shape"):
            graph.calls = _calls(sym)
        return graph

    return make


def _calls(sym: mx.sym.Symbol) -> List[Tuple[int, int]]:
    """Returns the layers and nodes of a graph that meet in training."""
    found = []
    for node in json_of(sym)["nodes"]:
        attributes = node.get("attrs", {})
        layer = Replicas.of_token(attributes.get("layer", ""))
        frozen = attributes.get("use_global_stats") == "1" or attributes.get("role") == str(Role.TRACK)
        if layer is not None and layer.pooling.mode != "local" and not frozen:
            found.append((layer.id, int(attributes["node"])))
    return found


def _once(build: Callable) -> Callable:
    def once(block: gluon.HybridBlock, *args: Any) -> None:
        with session.tracing:
            if block._cached_op is None:
                build(block, *args)

    return once


def _telling(seed: Callable) -> Callable:
    def telling(seed_state: Any, *args: Any, **kwargs: Any) -> None:
        seed(seed_state, *args, **kwargs)
        draws.seeded(seed_state)

    return telling


def _saving(save: Callable) -> Callable:
    def saving(owner: Any, *args: Any) -> Any:
        steps.settle_failed()
        return save(owner, *args)

    return saving
