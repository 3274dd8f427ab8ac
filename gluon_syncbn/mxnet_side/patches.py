"""Changes MXNet's functions and classes. Each function here that runs in the place of one says why."""

from __future__ import annotations

import functools
import threading
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any, Callable, ContextManager, Dict, Iterator, List, Tuple

import mxnet as mx
from mxnet import autograd, gluon
from mxnet.gluon.nn.basic_layers import _BatchNorm

from .. import _native
from ..system import arguments, kinds
from ..training import steps
from ..training.replicas import IN_GRAPH, Replicas, executing
from ..training.session import session
from . import blocks, trainer
from .nodes import layers_of

_originals: Dict[Tuple[Any, str, Callable], Any] = {}  # None if the owner inherits the function


def install() -> None:
    """Changes MXNet for all programs. `replace` changes what only some need, at its first use."""
    replace(_entering, autograd._RecordingStateScope, "__enter__")
    replace(_leaving, autograd._RecordingStateScope, "__exit__")
    replace(_noting_layers, autograd, "grad")
    replace(trainer.constructing, gluon.Trainer, "__init__")
    replace(trainer.connecting, gluon.Trainer, "_init_kvstore")
    replace(trainer.initialising, gluon.Trainer, "_init_params")
    replace(trainer.adding, gluon.Trainer, "_allreduce_grads")
    replace(trainer.updating, gluon.Trainer, "_update")
    replace(trainer.updating_apart, gluon.Trainer, "update")
    replace(_saving, gluon.Parameter, "_reduce")
    replace(_writing, mx.base._LIB, "MXNDArraySave")
    replace(_giving_states, mx.optimizer.Updater, "get_states")
    replace(_raising, mx.base, "get_last_ffi_error")
    replace(blocks.noting, _BatchNorm, "__call__")
    replace(_issuing, mx.nd, "CachedOp")
    replace(_once, gluon.HybridBlock, "_build_cache")
    replace(_numbering, gluon.HybridBlock, "_get_graph")


def replace(around: Callable, owner: Any, *names: str) -> None:
    """Puts functions in the places of some of a module or a class; once is enough.

    A call becomes ``around(original, *arguments)``.
    """
    for name in names:
        if (owner, name, around) not in _originals:
            original = getattr(owner, name)
            _originals[owner, name, around] = vars(owner).get(name)
            setattr(owner, name, functools.wraps(original)(_called_with(original, around)))


def _called_with(original: Callable, around: Callable) -> Callable:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return around(original, *args, **kwargs)

    return wrapper


def remove() -> None:
    """Puts all originals back."""
    while _originals:
        (owner, name, _), original = _originals.popitem()
        if original is None:
            delattr(owner, name)
        else:
            setattr(owner, name, original)


# ---- steps ----------------------------------------------------------------------------------------------------
# MXNet has no hook for the scopes of ``autograd.record()`` and ``train_mode()``: see training/steps.py.


def _trains(scope: Any) -> bool:
    return bool(scope._enter_is_record) or bool(scope._enter_train_mode)


def _entering(enter: Callable, scope: Any) -> Any:
    if _trains(scope):
        steps.scope_entered()
    return enter(scope)


def _leaving(leave: Callable, scope: Any, kind: Any, value: Any, trace: Any) -> Any:
    try:
        return leave(scope, kind, value, trace)
    finally:
        if _trains(scope):
            steps.scope_left(kind, value)


def _raising(make: Callable) -> Exception:
    error = make()
    steps.failure_seen(error)
    return error


def _saving(reduce: Callable, parameter: gluon.Parameter) -> mx.nd.NDArray:
    """A copy of an array with an error has no values. A failed step leaves its error in running statistics."""
    steps.settle(parameter._data or ())
    steps.tell()
    return reduce(parameter)


def _giving_states(get: Callable, updater: Any, *args: Any, **kwargs: Any) -> bytes:
    """A failed step leaves its error in the state of the optimizer, which is as it was. The file is open already."""
    steps.settle(kinds.arrays_of(updater.states))
    return get(updater, *args, **kwargs)


def _writing(write: Callable, file: Any, count: Any, handles: Any, names: Any) -> int:
    """MXNet opens the file before it waits for the arrays (`MXNDArraySave` in src/c_api/c_api.cc), so the error of one
    would cost the file that was there. A parameter with the error of a failed step is as it was.
    """
    errors = steps.errors_of(SimpleNamespace(handle=mx.base.NDArrayHandle(handle)) for handle in handles)
    if errors and _native.failure():
        for parameter in [one for trainer in list(session.trainers) for one in trainer._params]:
            for array in parameter._data or ():
                errors.pop(array.handle.value, None)
    if errors:
        first = next(iter(errors.values()))
        steps.failure_seen(first)
        raise first
    return write(file, count, handles, names)


# ---- replicas -------------------------------------------------------------------------------------------------


_of_thread = threading.local()


def for_replica(call: Callable, block: gluon.Block, *args: Any) -> Any:
    """For layers on several CPU contexts: the outermost block that is called in training issues the operators of a
    replica. These take resources of their own (csrc/native/resources.cc).

    A block that cannot be hybridized and has no parameters, such as a loss, may read what no layer feeds. So its
    operators take temporary space that is free: that of the replica may be held by operators that wait for a layer.
    """
    if not isinstance(block, gluon.HybridBlock) and not _has_parameters(block):
        with _spare_space(True):
            return call(block, *args)
    is_outermost = not getattr(_of_thread, "issues", False) and autograd.is_training()
    given = kinds.arrays_of(args) if is_outermost else []
    if not any(isinstance(one, mx.nd.NDArray) and _native.issue_for(one) for one in given):
        return call(block, *args)
    _of_thread.issues = True
    try:
        with _spare_space(False):
            return call(block, *args)
    finally:
        _of_thread.issues = False
        _native.issue_on(-1)


@contextmanager
def _spare_space(uses: bool) -> Iterator[None]:
    before = _native.use_spare_space(uses)
    try:
        yield
    finally:
        _native.use_spare_space(before)


def _has_parameters(block: gluon.Block) -> bool:
    return len(block._params.keys()) > 0 or any(map(_has_parameters, block._children.values()))


# ---- graphs ---------------------------------------------------------------------------------------------------


class _Issuing(mx.nd.CachedOp):
    """A graph with layers, or one whose operators MXNet keeps. Threads issue the operators of layers on one context one
    after the other: see `Session.issuing`.
    """

    layers: List[Replicas]  # until they have run
    lock: Callable[[mx.Context], ContextManager]  # of a context
    keeps: bool  # MXNet makes its operators once, and executes them again
    calls: Tuple[List[int], List[int], List[gluon.Parameter]]  # those layers, their nodes and running statistics

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        training, context = autograd.is_training(), args[0].ctx
        if training:
            for layer in self.layers:
                layer.runs(IN_GRAPH)
            self.layers = []
        with self.lock(context), executing(context, *self.calls if training else ()) if self.keeps else nullcontext():
            return super().__call__(*args, **kwargs)


def _issuing(cached_op: Any, sym: mx.sym.Symbol, flags: Any = ()) -> mx.nd.CachedOp:
    """With ``static_shape``, the layers cannot see that they are called, so the graph announces its calls."""
    found, keeps = layers_of(sym), bool(dict(flags).get("static_shape"))
    if not found and not (keeps and sym.list_inputs()):
        return cached_op(sym, flags)
    graph = _Issuing(sym, flags)
    graph.layers, graph.keeps = [layer for layer, _ in found], keeps
    graph.lock = session.issuing if found else nullcontext
    meeting = [(layer, int(of["node"])) for layer, of in found if _meets(layer, of)]
    # An operator takes the call that was announced first: one call must not overtake another on its context.
    running = [parameter for layer, _ in meeting for parameter in list(layer.running)[:1]]
    graph.calls = [layer.id for layer, _ in meeting], [node for _, node in meeting], running
    return graph


def _meets(layer: Replicas, attributes: Dict[str, str]) -> bool:
    return layer.pooling.mode != "local" and attributes["use_global_stats"] != "1"


def _once(build: Callable, block: gluon.HybridBlock, *args: Any) -> None:
    """Records a graph once, in one thread at a time. In MXNet, threads that record one net at once take each other's
    name scopes. Or they make graphs of their own, whose nodes do not meet.
    """
    with session.tracing:
        if block._cached_op is None:
            build(block, *args)
            blocks.with_graph.add(block)


def _numbering(record: Callable, block: gluon.HybridBlock, *args: Any) -> Any:
    """Numbers the nodes of a layer in each graph from 0. So all processes have the same numbers, whatever else some of
    them have recorded, as where one loads parameters and another one has to infer their shapes.
    """
    with session.tracing:
        session.graphs += not block._cached_graph
        return record(block, *args)


def _noting_layers(grad: Callable, heads: Any, *args: Any, **kwargs: Any) -> Any:
    """Notes the layers whose gradient may be differentiated again: MXNet's error would not name them."""
    if kwargs.get("create_graph") or any(args[3:4]):
        for head in heads if isinstance(heads, (list, tuple)) else [heads]:
            _differentiated.update(layer for layer, _ in layers_of(autograd.get_symbol(head)))
        if _differentiated:
            replace(_naming_layers, mx.nd.NDArray, "backward")
            replace(_naming_layers, autograd, "backward")
    return _naming_layers(grad, heads, *args, **kwargs)


_differentiated: weakref.WeakSet[Replicas] = weakref.WeakSet()


def _naming_layers(backward: Callable, *args: Any, **kwargs: Any) -> Any:
    try:
        return backward(*args, **kwargs)
    except mx.MXNetError as error:
        if _differentiated and "_backward_Custom is non-differentiable" in str(error):
            names = arguments.some(sorted({layer.name for layer in _differentiated}), ", ")
            raise mx.MXNetError(
                f"SyncBatchNorm has no second derivative (layers of the graph: {names}), and neither has MXNet's "
                "BatchNorm. A gradient penalty (autograd.grad with create_graph=True) needs a net without them"
            ) from error
        raise
