"""Blocks that keep no activations for the backward, and compute their forward again instead."""

from __future__ import annotations

import functools
import itertools
import json
import os
import queue
import re
import threading
from contextlib import ExitStack, contextmanager
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Sequence, Tuple, Type, TypeVar, cast

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import Block, HybridBlock, Parameter, nn
from mxnet.ndarray import NDArray

from .. import _native
from ..layer import SyncBatchNorm
from ..mxnet_side import blocks, draws, patches
from ..mxnet_side.op import NAME
from ..system import arguments, temporary_space

__all__ = ["checkpoint"]

BlockT = TypeVar("BlockT", bound=Block)

# Operators that draw random numbers, by name; a few that match do not, which costs time alone. LeakyReLU does as RReLU.
_RANDOM = re.compile(r"\w*([Dd]ropout|random|sample|multinomial|shuffle)\w*|RNN|LeakyReLU")


def checkpoint(block: BlockT, active: bool = True) -> BlockT:
    r"""Has a block keep no activations from forward to backward: its backward computes them again from its inputs.

    What stays in memory of several blocks in a row is their inputs, a copy of their parameters and, of one block at a
    time, the activations; the price is a second forward of each. Output and gradients are those without it, up to
    rounding. The layers of this package normalise, the second time, with the statistics of the first: these are
    exchanged once, the running statistics take the batch once, and no replica waits for another in what is computed
    again. Random operators draw the same numbers both times, with a seed that follows from ``mx.random.seed``, and so
    other numbers than without it.

    Acts where a graph is recorded; elsewhere the block is called as it is. The block may hybridize itself; a hybridized
    block around it cannot hold it: MXNet 1.9 has no operator that holds a graph and forgets its activations, and its
    option for that (``MXNET_BACKWARD_DO_MIRROR``) does not reach Gluon's graphs.

    ::

        import gluon_syncbn
        from gluoncv.model_zoo import get_model

        net = get_model("resnet50_v1b", classes=10)
        for stage in (net.layer1, net.layer2, net.layer3, net.layer4):
            for unit in stage:
                gluon_syncbn.checkpoint(unit)

    Parameters
    ----------
    block : gluon.Block
        A part of a network, changed in place. Its forward takes arrays, also within lists, tuples and dictionaries, all
        on one context, and computes the same when it is called again: it keeps nothing between calls, and takes no
        arrays but its arguments and parameters. It may hold others that are recomputed.
    active : bool
        False makes the block what it was.

    Returns
    -------
    gluon.Block
        ``block``, the same object. Names of parameters and files stay as they were.

    Raises
    ------
    ValueError
        Where an argument is not what is said above. In a recorded call, where the block holds what cannot be computed
        twice: plain BatchNorm in training (`convert`; mode ``'local'`` is what it computes), a graph with
        ``static_alloc``, or on a GPU Dropout, which MXNet seeds there by a number that nobody can set.
    MXNetError
        In a call, where a hybridized block holds it. When a gradient is read: the second forward failed, or was not
        that of the first.

    References
    ----------
    T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv 1604.06174.
    """
    arguments.block("block", block)
    active = arguments.flag("active", active)
    changed = isinstance(block, _Recomputed)
    if active and not changed:
        patches.replace_once(Parameter, "data", _seen)
        block.__class__ = _recomputed(cast(Any, type(block)))
    elif changed and not active:
        block.__class__ = type(block).__mro__[2]
    return block


class _Recomputed(Block):
    """What a block's class has before it."""

    def forward(self, *args: Any) -> Any:
        forward = super().forward
        arrays = _arrays(args)
        if any(isinstance(array, mx.sym.Symbol) for array in arrays):
            raise mx.MXNetError(
                f"'{self.name}' is recomputed (gluon_syncbn.checkpoint) and cannot be part of a hybridized block: "
                "hybridize the blocks that are recomputed, each by itself, and not what holds them. Or, before a graph "
                "for prediction, a file or shapes is made: gluon_syncbn.checkpoint(block, active=False)"
            )
        recording = autograd.is_recording() and bool(arrays)
        if not recording and not _frames():
            return forward(*args)
        with ExitStack() as scopes:
            seed = None
            if _draws(self, forward, args):
                seed = draws.seed()
                scopes.enter_context(draws.drawn_from(seed, arrays[0].context))
            if not recording:  # within a block that is recomputed
                return forward(*args)
            _check(self, arrays[0].context)
            return _Call(self, forward, seed).first(args)


@functools.lru_cache(maxsize=None)
def _recomputed(cls: Type[Block]) -> Type[Block]:
    return type(cls.__name__, (_Recomputed, cls), {"__module__": cls.__module__, "__doc__": cls.__doc__})


class _Call:
    """A recorded call of a block: what its second forward needs."""

    def __init__(self, block: Block, forward: Callable[..., Any], seed: Optional[int]) -> None:
        self._block, self._forward, self._seed = block, forward, seed
        self._training = autograd.is_training()
        self._tape = _native.Tape()

    def first(self, args: Any) -> Any:
        context = _arrays(args)[0].context
        frame = _Frame(None, {})
        with _recording(False):
            # The second forward is issued when the engine comes to this backward: behind whatever was issued since then
            # and writes the same arrays. Of parameters that is their update, which waits for the gradient.
            self._args = _map(NDArray.copy, args)
            with frame.open(), self._tape.running(again=False):
                outputs = self._forward(*args)
            self._parameters = [(parameter, array.copy()) for parameter, array in frame.used.values()]
        inputs = [array for array in _arrays(args) if _is_float(array)]
        inputs += [array for parameter, array in frame.used.values() if parameter.grad_req != "null"]
        # An output may be one of the inputs, or stand there twice.
        outputs = _map(lambda array: array.detach() if _is_float(array) else array, outputs)
        recorded = [array for array in _arrays(outputs) if _is_float(array)]
        if not recorded:
            return outputs
        worker = _worker(self._block, context)
        what = f"'{self._block.name}' was computed again (gluon_syncbn.checkpoint)"
        _native.record_function(what, inputs, recorded, lambda *given: worker.do(lambda: self._again(context, *given)))
        # A gradient in oneDNN's layout would reach the backward as a copy that is freed too early; see op.py.
        if context.device_type == "gpu":
            return outputs
        return _map(lambda a: mx.nd.SwapAxis(a, dim1=0, dim2=0) if _is_float(a) else a, outputs)

    def _again(self, context: mx.Context, heads: List[NDArray], gradients: List[NDArray], requests: List[int]) -> None:
        """The backward. Issues operators and waits for none."""
        args = _map(NDArray.detach, self._args)
        wanted = [array for array in _arrays(args) if _is_float(array)]
        given = {id(parameter): array.detach() for parameter, array in self._parameters}
        wanted += [given[id(parameter)] for parameter, _ in self._parameters if parameter.grad_req != "null"]
        asked = [(a, g, r) for a, g, r in zip(wanted, gradients, requests) if r != _native.NULL]
        if not asked:
            return
        # Their gradients are returned, and not left where a mark says.
        autograd.mark_variables([a for a, _, _ in asked], [a.detach() for a, _, _ in asked])
        with ExitStack() as scopes:
            scopes.enter_context(context)
            scopes.enter_context(_recording(True))
            if self._seed is not None:
                scopes.enter_context(draws.drawn_from(self._seed, context))
            training = autograd.set_training(self._training)
            scopes.callback(autograd.set_training, training)
            with _Frame(given, {}).open(), self._tape.running(again=True):
                outputs = self._forward(*args)
        computed = [array for array in _arrays(outputs) if _is_float(array)]
        if len(computed) != len(heads):
            raise mx.MXNetError(f"the second forward had {len(computed)} outputs, the first {len(heads)}")
        found = autograd.grad(computed, [a for a, _, _ in asked], heads, train_mode=self._training)
        for (_, gradient, request), value in zip(asked, found):
            gradient[:] = gradient + value if request == _native.ADD else value


# ---- parameters ------------------------------------------------------------------------------------------------
# The second forward has copies in their place. Not for the engine alone: an array also belongs to the graph of the
# thread that records with it, and two threads that do so at the same time damage each other's.


class _Frame(NamedTuple):
    """A forward that is recomputed, on this thread: what its parameters are, the second time, or which it used."""

    given: Optional[Dict[int, NDArray]]
    used: Dict[int, Tuple[Parameter, NDArray]]

    @contextmanager
    def open(self) -> Iterator[None]:
        _frames().append(self)
        try:
            yield
        finally:
            _frames().pop()


_of_thread = threading.local()


def _frames() -> List[_Frame]:
    """Those that this thread is within, the outermost first."""
    if not hasattr(_of_thread, "frames"):
        _of_thread.frames = []
    return _of_thread.frames


def _seen(data: Callable[..., NDArray]) -> Callable[..., NDArray]:
    def seen(parameter: Parameter, ctx: Optional[mx.Context] = None) -> NDArray:
        frames = _frames()
        if not frames:
            return data(parameter, ctx)
        array = None
        for frame in frames:
            if frame.given is not None:
                array = frame.given.get(id(parameter))
                if array is None:
                    raise mx.MXNetError(f"the second forward used the parameter '{parameter.name}', the first did not")
        if array is None:
            array = data(parameter, ctx)
        for frame in frames:
            if frame.given is None:
                frame.used[id(parameter)] = (parameter, array)
        return array

    return seen


# ---- threads ---------------------------------------------------------------------------------------------------


class _Worker:
    """Issues the second forwards of a context. One thread for good: MXNet gives each thread that runs an operator
    temporary space of its own, and never frees it.
    """

    def __init__(self, context: mx.Context, alone: bool) -> None:
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._work, name=f"gluon_syncbn-again-{context}", daemon=True).start()
        if alone:
            self.do(lambda: temporary_space.as_mxnet_has_it(lambda: draws.make_generators(context)))

    def do(self, job: Callable[[], None]) -> None:
        """Returns when it is done. A job issues and waits for no replica, so neither does this; and it could not go
        earlier: the arrays that the job writes are gone then.
        """
        done, problems = threading.Event(), []  # type: Tuple[threading.Event, List[BaseException]]
        self._jobs.put((job, done, problems))
        done.wait()
        if problems:
            raise problems[0]

    def _work(self) -> None:
        while True:
            job, done, problems = self._jobs.get()
            try:
                job()
            except BaseException as problem:  # it is raised by whoever waits
                problems.append(problem)
            del job  # with its arrays
            done.set()
            del done, problems


_workers: Dict[Tuple[int, mx.Context, bool], _Worker] = {}
_lock = threading.Lock()


def _worker(block: Block, context: mx.Context) -> _Worker:
    # What waits for nobody needs no more copies of temporary space than MXNet has by itself.
    layers = [one._replicas for one in blocks.of(block) if isinstance(one, SyncBatchNorm)]
    alone = not any(replicas.count() > 1 or replicas.reaches_other_processes() for replicas in layers)
    with _lock:
        key = os.getpid(), context, alone  # a child of a fork has no threads
        if key not in _workers:
            _workers[key] = _Worker(context, alone)
        return _workers[key]


# ---- what a block is -------------------------------------------------------------------------------------------


def _check(block: Block, context: mx.Context) -> None:
    for one in blocks.of(block):
        expected = ""
        if blocks.is_batch_norm(one) and not isinstance(one, SyncBatchNorm) and not one._kwargs["use_global_stats"]:
            expected = "SyncBatchNorm, which alone can repeat a forward (gluon_syncbn.convert; mode='local' is plain)"
        elif isinstance(one, HybridBlock) and one._active and dict(one._flags).get("static_alloc"):
            expected = "no static_alloc, whose arrays belong to the next forward when the second one is issued"
        elif isinstance(one, nn.Dropout) and one._rate > 0 and context.device_type == "gpu":
            expected = "no Dropout on a GPU, whose mask MXNet cannot draw again"
        if expected:
            raise ValueError(f"block: '{block.name}' was given, which holds '{one.name}', expected {expected}")


def _draws(block: Block, forward: Callable[..., Any], args: Any) -> bool:
    """Whether it may draw random numbers. To seed costs some milliseconds."""
    known = vars(block).get("_draws_random", None if isinstance(block, HybridBlock) else True)
    if known is None:
        numbers = itertools.count()
        try:
            traced = _arrays(forward(*_map(lambda _: mx.sym.var(f"data{next(numbers)}"), args)))
            known = any(map(_is_random, _nodes(json.loads(mx.sym.Group(traced).tojson()))))
        except Exception:  # the user's code, of which nothing but this depends on whether it can be traced
            known = True
        block._draws_random = known
    return known


def _nodes(graph: Dict[str, Any]) -> Iterator[Dict[str, Any]]:
    for node in graph["nodes"]:
        yield node
        for within in node.get("subgraphs", []):
            yield from _nodes(within)


def _is_random(node: Dict[str, Any]) -> bool:
    operator = node["op"]
    return blocks.operator_of(node) != NAME if operator == "Custom" else _RANDOM.fullmatch(operator) is not None


def _is_float(array: NDArray) -> bool:
    return np.dtype(array.dtype).kind == "f"


def _arrays(value: Any) -> List[Any]:
    found: List[Any] = []
    _map(found.append, value)
    return found


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """With each array changed."""
    if isinstance(value, (NDArray, mx.sym.Symbol)):
        return change(value)
    if isinstance(value, (list, tuple)):
        entries: Sequence[Any] = [_map(change, entry) for entry in value]
        return type(value)(*entries) if hasattr(value, "_fields") else type(value)(entries)
    if isinstance(value, dict):
        return {key: _map(change, entry) for key, entry in value.items()}
    return value


@contextmanager
def _recording(so: bool) -> Iterator[None]:
    before = autograd.set_recording(so)  # not a scope, which is where a step begins
    try:
        yield
    finally:
        autograd.set_recording(before)
