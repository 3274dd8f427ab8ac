"""Changes MXNet's functions and classes: `install` says which and why, and `remove` restores them."""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
import weakref
from contextlib import nullcontext
from typing import Any, Callable, List, Optional, Tuple

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.executor import Executor
from mxnet.gluon.nn.basic_layers import _BatchNorm
from mxnet.module import Module
from mxnet.module.executor_group import DataParallelExecutorGroup

from .. import _native
from ..exchange.store import ProcessStore
from ..system import arguments
from ..training import devices, steps
from ..training.replicas import IN_GRAPH, Replicas
from ..training.session import session
from . import callers, draws, mixed, processes
from .nodes import Synchronised, json_of
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
    - ``gluon.Trainer`` updates nothing in a step that failed. In MXNet a failed operator and all operators that are
      skipped because of it share one exception. The first reader of any of their results removes the exception. Then
      operators that are still queued run. An update that was issued before the loss was read would then use gradients
      that were never computed. The gate is an exception of its own, between the gradients and their users. In its first
      step, a trainer also copies the first context's running statistics to all contexts; the gate covers this copy too.
    - ``Parameter._reduce``, by which Gluon saves parameters, works after a failed step, and so does ``save_states`` of
      a ``gluon.Trainer``. The error of the step would reach them once for each array that the step was to write, though
      weights are as they were.
    - A new ``gluon.Trainer`` is noted, so that `devices` finds its gradients. Those of contexts that take no part would
      be added again, as the last backward there has left them.
    - ``gluon.Trainer`` gives the gradients of a step to a store of processes together. MXNet gives them one by one, and
      the store could not tell the last one.
    - ``gluon.Trainer`` and the layers use the same store of processes, if one of them has one and the user has chosen
      nothing else.
    - ``gluon.Trainer`` compares its weights with those of the other processes before its first update. MXNet would copy
      rank 0's there, after a forward and a backward with others.
    - ``gluon.Trainer`` sees the whole net before its first update. Nets whose layers compute something else than they
      were asked for get a warning there.
    - ``asnumpy`` and ``wait_to_read`` note that a caller has seen a failure. Then the next step does not report it
      again, and that of a ``Module`` may begin.
    - The ``__call__`` of Gluon's batch normalisation records, once, which blocks call a layer. A layer in an attribute
      of an object that is not a block cannot be found otherwise.
    - ``HybridBlock._build_cache`` records which blocks have a graph, because a block does not know those around it. If
      its layers change, these graphs are out of date.
    - ``mx.nd.CachedOp`` with a layer issues its operators on one context one thread after the other (see
      `Session.issuing`). With ``static_shape`` it also announces its calls. MXNet makes its operators once and executes
      them again, so the layers cannot see which thread calls them.
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
    _replace(gluon.Trainer, "__init__", lambda construct: _registering(_sharing(construct)))
    # a store that updates does so while it adds
    gate_sums = _gated(lambda trainer: trainer._update_on_kvstore, _gradients)
    _replace(gluon.Trainer, "_allreduce_grads", lambda add: _settling(gate_sums(_adding(add))))
    _replace(gluon.Trainer, "_update", _gated(lambda trainer: not trainer._update_on_kvstore, _gradients))
    for owner, name in ((gluon.Parameter, "_reduce"), (gluon.Trainer, "save_states")):
        _replace(owner, name, _saving)
    for name in ("asnumpy", "wait_to_read"):
        _replace(mx.nd.NDArray, name, _reading)
    _replace(_BatchNorm, "__call__", callers.noting)
    _replace(mx.nd, "CachedOp", _issuing)
    _replace(gluon.HybridBlock, "_build_cache", lambda build: _once(callers.noting_graphs(build)))
    _replace(mx.random, "seed", _telling)
    _replace(autograd, "grad", _noting_layers)
    copies = _gated(lambda trainer: trainer._kvstore is not None, _written)
    _replace(gluon.Trainer, "_init_params", lambda initialise: _warning_of_mixed(copies(_comparing(initialise))))


def install_for_executors() -> None:
    """Changes MXNet for executors with synchronised layers, once there is one: ``Executor.forward`` tells that it calls
    them. MXNet makes the operators of an executor when it is bound, so that nobody else sees which replicas will come.
    """
    replace_once(Executor, "forward", _calling)


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
    replace_once(DataParallelExecutorGroup, "forward", _beginning)
    replace_once(DataParallelExecutorGroup, "backward", _within)
    replace_once(Module, "update", _updating)
    replace_once(DataParallelExecutorGroup, "get_params", _after_forward)


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


def _calling(forward: Callable) -> Callable:
    def calling(executor: Executor, is_train: bool = False, **kwargs: Any) -> Any:
        if is_train and isinstance(executor._symbol, Synchronised):
            for _, layer in executor._symbol.layers:
                layer._replicas.runs(IN_GRAPH)
                if executor._ctx in layer._replicas.contexts:
                    _native.layer_called(layer._replicas.id, str(executor._ctx))
        return forward(executor, is_train, **kwargs)

    return calling


def _beginning(forward: Callable) -> Callable:
    def beginning(group: DataParallelExecutorGroup, data_batch: Any, is_train: Optional[bool] = None) -> None:
        trains = group.for_training if is_train is None else is_train
        with steps.executors_run_forward() if trains and _is_synchronised(group) else nullcontext():
            forward(group, data_batch, is_train)

    return beginning


def _within(backward: Callable) -> Callable:
    def within(group: DataParallelExecutorGroup, *args: Any, **kwargs: Any) -> None:
        with steps.executors_run_backward() if _is_synchronised(group) else nullcontext():
            backward(group, *args, **kwargs)
        _gate(group)

    return within


def _updating(update: Callable) -> Callable:
    def updating(module: Module) -> None:
        _gate(module._exec_group)
        update(module)

    return updating


def _gate(group: DataParallelExecutorGroup) -> None:
    if _is_synchronised(group):
        gradients = [g for arrays in group.grad_arrays for g in arrays if g is not None]
        if gradients:
            _native.gate(gradients)


def _reading(read: Callable) -> Callable:
    def reading(array: mx.nd.NDArray) -> Any:
        try:
            return read(array)
        except mx.MXNetError as error:
            steps.failure_seen(error)
            raise

    return reading


def _after_forward(method: Callable) -> Callable:
    def after_forward(group: DataParallelExecutorGroup, *args: Any) -> None:
        steps.settle_failed()
        if _is_synchronised(group):
            for executor in group.execs:
                for output in executor.outputs:
                    output.wait_to_read()
        method(group, *args)

    return after_forward


def _is_synchronised(group: Optional[DataParallelExecutorGroup]) -> bool:
    return isinstance(getattr(group, "symbol", None), Synchronised)


_graphs = itertools.count(2)


def _issuing(cached_op: Any) -> Callable[..., mx.nd.CachedOp]:
    class Issuing(cached_op):
        layers: List[Replicas] = []

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            if autograd.is_training():
                for layer in self.layers:
                    layer.runs(IN_GRAPH)
                self.layers = []
            with session.issuing(args[0].ctx):
                return super().__call__(*args, **kwargs)

    class Announcing(Issuing):
        def __init__(self, sym: mx.sym.Symbol, flags: Any, layers: List[Replicas]) -> None:
            super().__init__(sym, flags)
            self._layers, self._graph = layers, -next(_graphs)

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            _native.graph_begins([layer.id for layer in self._layers], args[0], self._graph)
            try:
                return super().__call__(*args, **kwargs)
            finally:
                _native.graph_ends()

    def make(sym: mx.sym.Symbol, flags: Any = ()) -> mx.nd.CachedOp:
        nodes = [node for node in sym.attr_dict().values() if node.get("role") != str(Role.TRACK)]
        layers = [layer for layer in (Replicas.of_token(node.get("layer", "")) for node in nodes) if layer is not None]
        if not layers:
            return cached_op(sym, flags)
        meeting = [layer for layer in layers if layer.pooling.mode != "local"]
        announces = meeting and dict(flags).get("static_shape")
        graph = Announcing(sym, flags, meeting) if announces else Issuing(sym, flags)
        graph.layers = layers
        return graph

    return make


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


def _warning_of_mixed(initialise: Callable) -> Callable:
    seen: weakref.WeakSet[gluon.Trainer] = weakref.WeakSet()

    def warning(trainer: gluon.Trainer) -> Any:
        if trainer not in seen:
            seen.add(trainer)
            mixed.warn_of(trainer._params)
            processes.tell(trainer._params)
        return initialise(trainer)

    return warning


def _saving(save: Callable) -> Callable:
    def saving(owner: Any, *args: Any) -> Any:
        steps.settle_failed()
        return save(owner, *args)

    return saving


def _registering(construct: Callable) -> Callable:
    def registering(trainer: gluon.Trainer, *args: Any, **kwargs: Any) -> None:
        construct(trainer, *args, **kwargs)
        devices.trainers.add(trainer)

    return registering


def _settling(adds: Callable) -> Callable:
    def settling(trainer: gluon.Trainer) -> None:
        devices.settle_gradients(trainer._params)
        adds(trainer)

    return settling


def _sharing(initialise: Callable) -> Callable:
    parameters = inspect.signature(initialise)

    def sharing(*args: Any, **kwargs: Any) -> None:
        given = parameters.bind(*args, **kwargs).arguments
        store = given.get("kvstore")
        if "kvstore" not in given and not given.get("update_on_kvstore"):
            store = processes.store_of_layers(given["params"])
            if store is not None:
                kwargs["kvstore"] = store
        initialise(*args, **kwargs)
        if isinstance(store, ProcessStore):
            store.expect(given["self"])
            processes.give_to_layers(store)

    return sharing


def _adding(add: Callable) -> Callable:
    def adding(trainer: gluon.Trainer) -> None:
        store = trainer._kvstore
        if isinstance(store, ProcessStore):
            store.add_gradients(trainer, {p.name: p.list_grad() for p in trainer._params if p.grad_req != "null"})
        else:
            add(trainer)

    return adding


def _comparing(initialise: Callable) -> Callable:
    def comparing(trainer: gluon.Trainer) -> None:
        if not isinstance(trainer._kvstore, ProcessStore):
            initialise(trainer)
            return
        known = [p for p in trainer._params_to_init if not p._deferred_init]
        trainer._params_to_init = [p for p in trainer._params_to_init if p._deferred_init]
        if known:
            trainer._kvstore.compare_weights(trainer, {p.name: (p.list_data(), p.grad_req != "null") for p in known})

    return comparing


def _gradients(trainer: gluon.Trainer) -> List[mx.nd.NDArray]:
    return [g for p in trainer._params if p._grad is not None for g in p._grad]


def _written(trainer: gluon.Trainer) -> List[mx.nd.NDArray]:
    """Returns the arrays that forward and backward write: gradients, and parameters without a gradient."""
    return _gradients(trainer) + [d for p in trainer._params if p.grad_req == "null" for d in p._data or ()]


def _gated(
    wanted: Callable[[gluon.Trainer], bool], arrays: Callable[[gluon.Trainer], List[mx.nd.NDArray]]
) -> Callable[[Callable], Callable]:
    def wrap(method: Callable) -> Callable:
        def gated(trainer: gluon.Trainer, *args: Any, **kwargs: Any) -> Any:
            if wanted(trainer) and (_native.layers() or isinstance(trainer._kvstore, ProcessStore)):
                written = arrays(trainer)
                if written:
                    _native.gate(written)
            return method(trainer, *args, **kwargs)

        return gated

    return wrap
