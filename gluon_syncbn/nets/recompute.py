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
from typing import Any, Callable, Dict, Iterator, List, Optional, Tuple, TypeVar

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.autograd import _RecordingStateScope as _Recording  # MXNet's: that of `patches` begins a step
from mxnet.gluon import Block, HybridBlock, Parameter, SymbolBlock, nn
from mxnet.ndarray import NDArray

from .. import _native
from ..layer import SyncBatchNorm
from ..mxnet_side import blocks, patches
from ..mxnet_side.nodes import is_ours, json_of, walk
from ..system import arguments, kinds
from ..system.kinds import arrays_of, is_float, map_arrays
from .convert import forget_graphs

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
        A part of a network, changed in place and returned. Names of parameters and files stay as they were. Its forward
        takes arrays on one context, also within lists, tuples and dictionaries. A second call must compute the same:
        the forward keeps no state between calls, and uses no arrays but its arguments and parameters. The block may
        hold other such blocks.
    active : bool
        False restores the block.

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
        vars(block).pop("_draws_random", None)
        del block.forward
        if own.replaced:
            vars(block)["forward"] = own.replaced
    return block


class _Recomputed:
    """Stands in the place of a block's forward, and computes that again in the backward."""

    def __init__(self, block: Block, replaced: Optional[Callable[..., Any]]) -> None:
        self._block, self.replaced = block, replaced  # None: that of the class, which `convert` may change
        _install()

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
    recording = autograd.is_recording() and bool(arrays)
    if not recording and not _of_thread.frames:
        return forward(*args)
    within, context = list(blocks.iterate(block)), arrays[0].ctx
    seed = _generator(context).getrandbits(31) if _may_be_random(block, within, forward, args) else None
    if recording:
        _install()  # after an `uninstall`
        _check(block, within, context)
        return _recorded(block, forward, seed, args)
    with _frame(seed, context, {}):  # within a block that is being recomputed
        return forward(*args)


def _recorded(block: Block, forward: Callable[..., Any], seed: Optional[int], args: Any) -> Any:
    """Calls a block, and records how to compute it again."""
    context, training, tape = arrays_of(args)[0].ctx, autograd.is_training(), _native.Tape()
    np_shape, np_array = mx.util.is_np_shape(), mx.util.is_np_array()  # of this thread
    thread = _thread(os.getpid(), context, len(_of_thread.frames))
    used: Arrays = {}
    with _Recording(False, training):
        # These are copies, because the engine runs the second forward after all operators that were issued since
        # then and write the same arrays. Parameters are written by their update, which waits for the gradient.
        copies = map_arrays(lambda array: array.copy(), args)
        with _frame(seed, context, used), tape.running(again=False):
            outputs = forward(*args)
        parameters = {parameter: array.copy() for parameter, array in used.items()}

    def again(heads: List[NDArray], gradients: List[NDArray], requests: List[int]) -> None:
        """Runs the backward. Issues operators and waits for none."""
        args = map_arrays(lambda array: array.detach(), copies)
        wanted = [array for array in arrays_of(args) if is_float(array)]
        given = {parameter: array.detach() for parameter, array in parameters.items()}
        wanted += [array for parameter, array in given.items() if parameter.grad_req != "null"]
        asked = [(a, g, r) for a, g, r in zip(wanted, gradients, requests) if r != _native.NULL]
        if not asked:
            return
        # The gradients are returned, and not left in the arrays of the parameters.
        autograd.mark_variables([a for a, _, _ in asked], [a.detach() for a, _, _ in asked])
        with context, mx.util.np_shape(np_shape), mx.util.np_array(np_array), _Recording(True, training):
            with _frame(seed, context, given, again=True), tape.running(again=True):
                outputs = forward(*args)
        computed = [array for array in arrays_of(outputs) if is_float(array)]
        if len(computed) != len(heads):
            raise mx.MXNetError(
                f"the second forward had {len(computed)} outputs, the first {len(heads)}. A block of "
                "gluon_syncbn.recompute must compute the same each time."
            )
        found = autograd.grad(computed, [a for a, _, _ in asked], heads, train_mode=training)
        for (_, gradient, request), array in zip(asked, found):
            value = kinds.classic(array)
            gradient[:] = gradient + value if request == _native.ADD else value

    inputs = [array for array in arrays_of(args) if is_float(array)]
    inputs += [array for parameter, array in used.items() if parameter.grad_req != "null"]
    # An output may be one of the inputs, or be returned twice.
    outputs = map_arrays(lambda array: array.detach() if is_float(array) else array, outputs)
    floats = [array for array in arrays_of(outputs) if is_float(array)]
    if not floats:
        return outputs

    what = f"'{block.name}' was computed again (gluon_syncbn.recompute)"
    # It returns when all is issued, because what `again` writes is freed then. This waits for no replica.
    _native.record_function(what, inputs, floats, lambda *given: thread.submit(again, *given).result())
    # A gradient in oneDNN's layout would reach the backward as a copy that is freed too early; see op.py.
    if context.device_type == "gpu":
        return outputs
    guarded = functools.partial(mx.nd.SwapAxis, dim1=0, dim2=0)
    return map_arrays(lambda a: kinds.like(guarded(kinds.classic(a)), a) if is_float(a) else a, outputs)


# ---- forwards --------------------------------------------------------------------------------------------------
# MXNet keeps a generator for each thread and does not expose its state. Drawing a number from it would wait for the
# operators in flight. So a forward that will be recomputed takes its seed from a generator of its context here, in any
# thread. That starts with the seed of ``mx.random.seed``. Scripts seed before they have a block: until they seed
# again, with a number of MXNet's.

_seed = mx.random.seed  # without what follows
_first: Optional[int] = None  # the seed of all contexts
_generators: Dict[mx.Context, random.Random] = {}  # of seeds, outside of all forwards


def _install() -> None:
    global _first
    patches.replace(_record_use, Parameter, "data")
    patches.replace(_seeding, mx.random, "seed")
    if _first is None:
        _first = int(mx.nd.random.randint(1, 2**31 - 1).asscalar())


def _seeding(seed: Callable[..., None], seed_state: Any, ctx: Any = "all") -> None:
    global _first
    seed(seed_state, ctx)
    if ctx == "all":
        _first = int(seed_state)
        _generators.clear()
    else:  # the numbers of a process that has this context alone
        _generators[mx.Context(ctx)] = random.Random(int(seed_state))


# The second forward uses copies of the parameters. One reason is the engine. The other: an array also belongs to the
# graph of the thread that records with it. Two threads that do so at the same time damage each other's graph.


class _OfThread(threading.local):
    def __init__(self) -> None:
        #: The recomputed forwards that the thread is within, the outermost first: the generator of the seeds within,
        #: and the parameters that it uses, or that it is given the second time.
        self.frames: List[Tuple[random.Random, Arrays, bool]] = []


_of_thread = _OfThread()


def _generator(context: mx.Context) -> random.Random:
    if _of_thread.frames:
        return _of_thread.frames[-1][0]
    return _generators.setdefault(context, random.Random(f"{_first} {context}"))


@contextmanager
def _frame(seed: Optional[int], context: mx.Context, parameters: Arrays, again: bool = False) -> Iterator[None]:
    """Makes random operators on this context, and recomputed forwards within, draw from the seed if there is one."""
    generator = _generator(context) if seed is None else random.Random(seed)
    if seed is not None:
        _seed(seed, context)
    _of_thread.frames.append((generator, parameters, again))
    try:
        yield
    finally:
        _of_thread.frames.pop()


def _record_use(data: Callable[..., NDArray], parameter: Parameter, ctx: Optional[mx.Context] = None) -> NDArray:
    array = None
    for _, parameters, again in _of_thread.frames:
        if again:
            array = parameters.get(parameter)
            if array is None:
                raise mx.MXNetError(
                    f"the second forward used the parameter '{parameter.name}', the first did not. A block of "
                    "gluon_syncbn.recompute must compute the same each time."
                )
    if array is None:
        array = data(parameter, ctx)
    for _, parameters, again in _of_thread.frames:
        if not again:
            parameters[parameter] = array
    return array


# ---- threads ---------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=None)
def _thread(process: int, context: mx.Context, depth: int) -> ThreadPoolExecutor:
    """Returns the thread that issues the second forwards on a context, within so many other blocks that are recomputed.

    It is one for good, because MXNet gives each thread that runs an operator its own temporary space, and never frees
    it. Operators behind an inner block hold temporary space while they wait for its gradient, so that its own need
    other space. The child of a fork has no threads.
    """

    def begin() -> None:
        threading.current_thread().name = f"gluon_syncbn-again-{context}"
        if context.device_type == "cpu":
            _native.issue_on(context.device_id)

    thread = ThreadPoolExecutor(1)
    thread.submit(begin).result()
    return thread


# ---- what a block is -------------------------------------------------------------------------------------------


def _check(block: Block, within: List[Block], context: mx.Context) -> None:
    for one in within:
        expected = ""
        if blocks.is_batch_norm(one) and not isinstance(one, SyncBatchNorm) and not one._kwargs["use_global_stats"]:
            expected = "SyncBatchNorm, which alone can repeat a forward (gluon_syncbn.convert; mode='local' is plain)"
        elif isinstance(one, HybridBlock) and one._active and dict(one._flags).get("static_alloc"):
            expected = "no static_alloc, whose arrays belong to the next forward when the second one is issued"
        elif isinstance(one, nn.Dropout) and one._rate > 0 and context.device_type == "gpu":
            expected = "no Dropout on a GPU, whose mask MXNet cannot draw again"
        if expected:
            raise ValueError(f"block: '{block.name}' was given, which holds '{one.name}', expected {expected}")


def _may_be_random(block: Block, within: List[Block], forward: Callable[..., Any], args: Any) -> bool:
    """Whether the block may draw random numbers, as a forward with symbols shows. Seeding costs some milliseconds.

    A schedule may raise a rate from 0, so the answer "no" holds until a setting changes. "Yes" holds for good, because
    a graph that was recorded keeps its rate.
    """
    now = _settings(within)
    before, known = vars(block).get("_draws_random", (None, not isinstance(block, HybridBlock)))
    if not known and now != before:
        count = itertools.count()
        try:
            traced = arrays_of(forward(*map_arrays(lambda a: kinds.like(mx.sym.var(f"data{next(count)}"), a), args)))
            nodes = [node for _, _, node in walk(json_of(mx.sym.Group(traced))) if not is_ours(node)]
            known = any(_RANDOM.fullmatch(node["op"]) for node in nodes)
        except Exception:  # the user's code fails; the only consequence here is that it cannot be traced
            known = True
        block._draws_random = now, known
    return bool(known)


def _settings(within: List[Block]) -> List[Any]:
    """Returns what may decide which operators these blocks call: the mode, and the numbers and texts that they hold."""
    fixed = SyncBatchNorm, SymbolBlock  # always call the same
    found: List[Any] = [autograd.is_training()]
    for value in (value for one in within if not isinstance(one, fixed) for value in vars(one).values()):
        parts = list(value.values()) if isinstance(value, dict) else value
        parts = parts if isinstance(parts, (list, tuple)) else [parts]
        found += [part for part in parts if isinstance(part, (int, float, str, np.number))]
    return found
