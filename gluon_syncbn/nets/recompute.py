"""Makes blocks keep no activations for the backward, and compute their forward again instead."""

from __future__ import annotations

import functools
import itertools
import os
import random
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Callable, Dict, Iterator, List, NamedTuple, Optional, Tuple, TypeVar

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.autograd import _RecordingStateScope as _Recording  # MXNet's: that of `steps` begins a step
from mxnet.gluon import Block, Constant, HybridBlock, Parameter, SymbolBlock, nn
from mxnet.ndarray import NDArray

from .. import _native
from ..layer import SyncBatchNorm
from ..mxnet_side import blocks, patches
from ..mxnet_side.nodes import is_ours, json_of, walk
from ..system import arguments, kinds
from ..system.kinds import arrays_of, is_float, map_arrays
from .selection import forget_graphs

BlockT = TypeVar("BlockT", bound=Block)
Arrays = Dict[Parameter, NDArray]

# Names of operators that may draw random numbers. A few matches draw none and only cost time. LeakyReLU draws as RReLU.
_RANDOM = re.compile(
    r"\w*([Dd]ropout|random|sample|multinomial|shuffle)\w*|RNN|LeakyReLU|Custom|"
    r"_npi_(bernoulli|choice|exponential|gamma|normal|pareto|powerd|rayleigh|uniform|weibull)(_n)?"
)


def recompute(block: BlockT, active: bool = True) -> BlockT:
    r"""Makes a block keep no activations from forward to backward: its backward computes them again from its inputs.

    For several such blocks in a row, memory holds their inputs, a copy of their parameters, and the activations of one
    block at a time. The price is a second forward of each block. Output and gradients are unchanged, up to rounding. In
    the second forward, this package's layers normalise with the statistics of the first, so no replica waits there, and
    the running statistics take the batch once. Random operators draw the same numbers both times. Their seed follows
    from ``mx.random.seed``, so the numbers differ from those of a block without `recompute`. The first call draws a
    number, and waits for operators in flight.

    It acts where ``autograd`` records; elsewhere the block is called as it is. The block may hybridize itself. A
    hybridized block around it cannot hold it, because MXNet 1.9 has no operator that forgets a graph's activations.

    ::

        import gluon_syncbn
        from gluoncv.model_zoo import get_model

        net = get_model("resnet50_v1b", classes=10)
        for stage in (net.layer1, net.layer2, net.layer3, net.layer4):
            for unit in stage:
                gluon_syncbn.recompute(unit)

    Parameters
    ----------
    block : gluon.Block
        A part of a network, changed in place. Names of parameters and files stay as they were. Its forward
        takes arrays on one context, also within lists, tuples and dictionaries. A second call must compute the same:
        the forward keeps no state between calls, does not ask whether ``autograd`` records, and uses no arrays but its
        arguments and the ``data()`` of parameters. The block may hold other such blocks.
    active : bool
        False restores the block.

    Returns
    -------
    gluon.Block
        ``block``.

    Raises
    ------
    ValueError
        If an argument is not as described above. In a recorded call, if the second forward could not repeat a
        part of the block. Such parts are plain BatchNorm in training, a graph with ``static_alloc``, and Dropout on a
        GPU, where its seed cannot be set. `convert` plain BatchNorm: mode ``'local'`` computes the same.
    MXNetError
        In a call, if a hybridized block contains this block. Reading a gradient raises it if the second forward failed,
        or differed from the first.

    References
    ----------
    T. Chen, B. Xu, C. Zhang, C. Guestrin, "Training Deep Nets with Sublinear Memory Cost", 2016, arXiv 1604.06174.
    """
    arguments.block("block", block)
    active = arguments.flag("active", active)
    own = vars(block).get("forward")
    if active and not isinstance(own, _Recomputed):
        vars(block)["forward"] = _Recomputed(block, own)
        forget_graphs(block)  # graphs around it hold its operators, and those within keep old rates of Dropout
    elif isinstance(own, _Recomputed) and not active:
        vars(block).pop("_operators", None)
        del block.forward
        if own.replaced:
            vars(block)["forward"] = own.replaced
    return block


class _Recomputed:
    """Stands in the place of a block's forward, and computes that again in the backward."""

    def __init__(self, block: Block, replaced: Optional[Callable[..., Any]]) -> None:
        self._block, self.replaced = block, replaced  # None: that of the class, which `convert` may change
        _forwards.install()

    def __reduce__(self) -> Any:
        return _Recomputed, (self._block, self.replaced)  # another process installs, too

    def __call__(self, *args: Any) -> Any:
        caller = sys._getframe(1).f_locals.get("self")  # a copy of the block has the same forward
        is_its_own = isinstance(caller, Block) and vars(caller).get("forward") is self
        return _forward(caller if is_its_own else self._block, self.replaced, *args)


def _forward(block: Block, replaced: Optional[Callable[..., Any]], *args: Any) -> Any:
    forward = replaced or functools.partial(type(block).forward, block)
    arrays = arrays_of(args)
    if any(isinstance(array, mx.sym.Symbol) for array in arrays):
        raise mx.MXNetError(
            f"'{block.name}' is recomputed (gluon_syncbn.recompute) and cannot be part of a hybridized block: "
            "hybridize each recomputed block, but not the blocks that contain it. To predict with a graph, to "
            "write a file or to infer shapes, first call gluon_syncbn.recompute(block, active=False)"
        )
    recording = autograd.is_recording()
    if not arrays or not (recording or _forwards.frames):
        return forward(*args)
    context, within = arrays[0].ctx, list(blocks.iterate(block))
    operators = _operators(block, within, forward, args)
    seed = _forwards.seeds(context).getrandbits(31) if operators.draw else None
    if not recording:  # within the first forward of another block
        with _frame(context, seed, {}):
            return forward(*args)
    _check(block, within, operators, context)
    call = _Call(forward, context, seed)
    outputs, inputs = call.compute(args)
    known = {id(one) for layer in filter(blocks.is_batch_norm, within) for one in layer._reg_params.values()}
    for one in call.arrays if autograd.is_training() else ():  # of what an operator writes, the next call has to wait
        if not (one._differentiable or isinstance(one, Constant) or id(one) in known):
            raise ValueError(
                f"block: '{block.name}' was given, whose forward hands '{one.name}' to an operator, expected {_LAYER}"
            )
    # An output may be one of the inputs, or be returned twice.
    outputs = map_arrays(lambda array: array.detach() if is_float(array) else array, outputs)
    if not _floats(outputs):
        return outputs

    thread = _forwards.thread(context)

    def differentiate(*given: Any) -> None:
        # It returns when all is issued, because what it writes is freed then. This waits for no replica.
        thread.submit(call.differentiate, *given).result()

    what = f"'{block.name}' was computed again (gluon_syncbn.recompute)"
    _native.record_function(what, inputs, _floats(outputs), differentiate)
    # A gradient in oneDNN's layout would reach the backward as a copy that is freed too early; see op.py.
    if context.device_type == "gpu":
        return outputs
    guarded = functools.partial(mx.nd.SwapAxis, dim1=0, dim2=0)
    return map_arrays(lambda a: kinds.like(guarded(kinds.classic(a)), a) if is_float(a) else a, outputs)


class _Call:
    """A call of a block: its first forward, and what the second one needs."""

    def __init__(self, forward: Callable[..., Any], context: mx.Context, seed: Optional[int]) -> None:
        self.context = context
        self._forward, self._seed, self._tape = forward, seed, _native.Tape()
        # Settings of this thread.
        self._training, self._current = autograd.is_training(), mx.Context(mx.current_context())
        self._np_shape, self._np_array = mx.util.is_np_shape(), mx.util.is_np_array()
        self._args: Any = ()
        self.arrays: Arrays = {}
        self._trained: List[Parameter] = []  # which gradients are asked for is known at the first forward

    def compute(self, args: Any) -> Tuple[Any, List[NDArray]]:
        """Runs the first forward, and records nothing. Returns its outputs, and the arrays that get gradients."""
        used: Arrays = {}
        with _Recording(False, self._training):
            # These are copies, because the engine runs the second forward after all operators that were issued since
            # then and write the same arrays. Parameters are written by their update, which waits for the gradient.
            self._args = map_arrays(lambda array: array.copy(), args)
            with _frame(self.context, self._seed, used), self._tape.running(again=False):
                outputs = self._forward(*args)
            self.arrays = {parameter: array.copy() for parameter, array in used.items()}
        self._trained = [parameter for parameter in used if parameter.grad_req != "null"]
        return outputs, _floats(args) + [used[parameter] for parameter in self._trained]

    def differentiate(self, heads: List[NDArray], gradients: List[NDArray], requests: List[int]) -> None:
        """Runs the second forward and its backward. Issues operators and waits for none."""
        args = map_arrays(lambda array: array.detach(), self._args)
        arrays = {parameter: array.detach() for parameter, array in self.arrays.items()}
        inputs = _floats(args) + [arrays[parameter] for parameter in self._trained]
        asked = [one for one in zip(inputs, gradients, requests) if one[2] != _native.NULL]
        if not asked:
            return
        # The gradients are returned, and not left in the arrays of the parameters.
        wanted = [array for array, _, _ in asked]
        autograd.mark_variables(wanted, [array.detach() for array in wanted])
        with self._current, mx.util.np_shape(self._np_shape):
            with _frame(self.context, self._seed, arrays, again=True), self._tape.running(again=True):
                with mx.util.np_array(self._np_array), _Recording(True, self._training):
                    outputs = _floats(self._forward(*args))
            if len(outputs) != len(heads):
                raise _native.differs(f"had {len(outputs)} outputs, the first {len(heads)}")
            for (_, gradient, request), found in zip(
                asked, autograd.grad(outputs, wanted, heads, train_mode=self._training)
            ):
                value = kinds.classic(found)
                gradient[:] = gradient + value if request == _native.ADD else value


def _floats(value: Any) -> List[NDArray]:
    """Returns the arrays in a value that may have gradients."""
    return [array for array in arrays_of(value) if is_float(array)]


# ---- forwards --------------------------------------------------------------------------------------------------


class _Frame(NamedTuple):
    """A forward of a recomputed block that a thread is within."""

    seeds: random.Random  # of the recomputed forwards within
    arrays: Arrays  # The first forward notes the parameters that it uses. The second one gets the copies that it left.
    again: bool  # A second forward has a thread of its own, and is the outermost frame there.


@contextmanager
def _frame(context: mx.Context, seed: Optional[int], arrays: Arrays, again: bool = False) -> Iterator[None]:
    """Seeds the random operators of a forward, if there are any, and lets the thread be within it."""
    seeds = _forwards.seeds(context) if seed is None else random.Random(seed)
    for place in () if seed is None else {context, mx.current_context()}:  # on the latter, those without an input draw
        _seed(seed, place)
    _forwards.frames.append(_Frame(seeds, arrays, again))
    try:
        yield
    finally:
        _forwards.frames.pop()


# One reason for the copies is the engine. The other: an array also belongs to the graph of the thread that records
# with it. Two threads that do so at the same time damage each other's graph.
def _array_of(data: Callable[..., NDArray], parameter: Parameter, ctx: Optional[mx.Context] = None) -> NDArray:
    frames = _forwards.frames
    if frames and frames[0].again:
        if parameter not in frames[0].arrays:
            raise _native.differs(f"used the parameter '{parameter.name}', the first did not")
        array = frames[0].arrays[parameter]
    else:
        array = data(parameter, ctx)
    for frame in frames:
        if not frame.again:
            frame.arrays[parameter] = array
    return array


# ---- random numbers, threads -----------------------------------------------------------------------------------
# MXNet keeps a generator for each thread and does not expose its state. Drawing a number from it would wait for the
# operators in flight. So a forward that will be recomputed takes its seed from a generator of its context here, in any
# thread. That starts with the seed of ``mx.random.seed``. Scripts seed before they have a block: until they seed
# again, with a number of MXNet's.


class _Forwards:
    """The forwards of recomputed blocks."""

    def __init__(self) -> None:
        self._of_thread = threading.local()
        self._first: Optional[int] = None  # seed of all contexts
        self._seeds: Dict[mx.Context, random.Random] = {}  # outside of all forwards
        self._threads: Dict[Tuple[int, mx.Context, int], ThreadPoolExecutor] = {}

    @property
    def frames(self) -> List[_Frame]:
        """Those that this thread is within, the outermost first."""
        frames: List[_Frame] = vars(self._of_thread).setdefault("frames", [])
        return frames

    def install(self) -> None:
        patches.replace(_array_of, Parameter, "data")
        patches.replace(self.follow, mx.random, "seed")
        if self._first is None:
            self._first = int(mx.nd.random.randint(1, 2**31 - 1).asscalar())

    def seeds(self, context: mx.Context) -> random.Random:
        """Returns the generator from which the next forward of this thread takes its seed."""
        if self.frames:
            return self.frames[-1].seeds
        return self._seeds.setdefault(context, random.Random(f"{self._first} {context}"))

    def follow(self, seed: Callable[..., None], seed_state: Any, ctx: Any = "all") -> None:
        """Stands in for ``mx.random.seed``."""
        seed(seed_state, ctx)
        if ctx == "all":
            self._first = int(seed_state)
            self._seeds.clear()
        else:  # the numbers of a process that has this context alone
            self._seeds[mx.Context(ctx)] = random.Random(int(seed_state))

    def thread(self, context: mx.Context) -> ThreadPoolExecutor:
        """Returns the thread that issues second forwards on a context, within so many blocks that are recomputed.

        It is one for good, because MXNet gives each thread that runs an operator its own temporary space, and never
        frees it. Operators behind an inner block hold temporary space while they wait for its gradient, so that its own
        need other space. The child of a fork has no threads.
        """
        key = os.getpid(), context, len(self.frames)
        if key not in self._threads:
            place = context.device_id if context.device_type == "cpu" else -1
            self._threads[key] = ThreadPoolExecutor(1, thread_name_prefix=f"gluon_syncbn-again-{context}")
            self._threads[key].submit(_native.issue_on, place)  # and its thread is made here, not by one of MXNet's
        return self._threads[key]


_seed = mx.random.seed  # without `follow`
_forwards = _Forwards()


# ---- what a block is -------------------------------------------------------------------------------------------


_LAYER = "SyncBatchNorm, which alone can repeat a forward (gluon_syncbn.convert; mode='local' is plain)"


def _check(block: Block, within: List[Block], operators: _Operators, context: mx.Context) -> None:
    trains = autograd.is_training()
    expected = dict.fromkeys(operators.plain if trains else (), _LAYER)
    for one in within:
        if isinstance(one, HybridBlock) and one._active and dict(one._flags).get("static_alloc"):
            expected[one.name] = "no static_alloc, whose arrays are the next forward's when the second one is issued"
        elif isinstance(one, nn.Dropout) and trains and one._rate > 0 and context.device_type == "gpu":
            expected[one.name] = "no Dropout on a GPU, whose mask MXNet cannot draw again"
        elif blocks.is_batch_norm(one) and trains and not isinstance(one, SyncBatchNorm):
            expected.update({} if one._kwargs["use_global_stats"] else {one.name: _LAYER})
    for name, text in expected.items():
        raise ValueError(f"block: '{block.name}' was given, which holds '{name}', expected {text}")


class _Operators(NamedTuple):
    """What is known of the operators that a block calls."""

    deciding: List[Any]  # what decided which ones
    draw: bool  # whether some may draw random numbers
    plain: List[str]  # the names of those that normalise with the batch, and belong to no layer


def _operators(block: Block, within: List[Block], forward: Callable[..., Any], args: Any) -> _Operators:
    """Returns what a forward with symbols shows, or what recorded graphs within show. Seeding costs some milliseconds.

    A schedule may raise a rate from 0, so that none draws holds until a setting changes. That some may draw holds for
    good, whatever the rates of these blocks: a graph that was recorded keeps its rate, and a trace takes milliseconds.
    """
    before: Optional[_Operators] = vars(block).get("_operators")
    deciding = _deciding(within)
    if before is not None and (before.deciding == deciding or (before.draw and before.deciding[0] == deciding[0])):
        return before
    draw, graphs = True, [json_of(one._cached_graph[1]) for one in within if isinstance(one, SymbolBlock)]
    if isinstance(block, HybridBlock):
        count = itertools.count()
        try:
            traced = arrays_of(forward(*map_arrays(lambda a: kinds.like(mx.sym.var(f"data{next(count)}"), a), args)))
            graphs = [json_of(mx.sym.Group(traced))]
            draw = any(_RANDOM.fullmatch(node["op"]) for _, _, node in walk(graphs[0]) if not is_ours(node))
        except Exception:  # the user's code fails; the only consequence here is that it cannot be traced
            pass
    nodes = [node for graph in graphs for node in blocks.recorded(block, graph) if node.operator in blocks.OPERATORS]
    means = {one.running_mean.name for one in within if blocks.is_batch_norm(one)}
    plain = [node.name for node in nodes if not node.frozen and node.inputs[3] not in means]
    block._operators = _Operators(deciding, draw or (before is not None and before.draw), plain)
    return block._operators


def _deciding(within: List[Block]) -> List[Any]:
    """Returns what may decide which operators these blocks call: which they are, the mode, and the numbers and texts
    that they hold.
    """
    fixed = SyncBatchNorm, SymbolBlock  # always call the same
    found: List[Any] = [[(type(one), one.name) for one in within], autograd.is_training()]
    for value in (value for one in within if not isinstance(one, fixed) for value in vars(one).values()):
        parts = list(value.values()) if isinstance(value, dict) else value
        parts = parts if isinstance(parts, (list, tuple)) else [parts]
        found += [part for part in parts if isinstance(part, (int, float, str, np.number))]
    return found
