"""Traces the graph of a prediction: the net with running statistics, in MXNet's own operators."""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from typing import Any, Dict, Iterator, List, NamedTuple

import mxnet as mx
from mxnet import autograd
from mxnet.gluon import HybridBlock, SymbolBlock
from mxnet.gluon.block import _flatten, _regroup

from ..layer import SyncBatchNorm
from ..mxnet_side import blocks
from ..mxnet_side.export import plain
from ..system import kinds
from .graphs import Opened


class Prediction(NamedTuple):
    symbol: mx.sym.Symbol
    inputs: List[str]
    input_format: Any  # how Gluon describes the nesting of the inputs
    output_format: Any

    def block(self, symbol: mx.sym.Symbol, values: Dict[str, mx.nd.NDArray], contexts: Any) -> SymbolBlock:
        """Returns a block with the net's inputs and outputs for this graph. All parameters have values, no gradient."""
        # SymbolBlock infers the types of parameters from those of the inputs, and raises an error if it cannot
        dtype = next((value.dtype for value in values.values()), "float32")
        inputs = [mx.sym.var(name, dtype=dtype) for name in self.inputs]
        block = SymbolBlock(kinds.like(symbol, self.symbol), [kinds.like(one, self.symbol) for one in inputs])
        params = block.collect_params()
        for name, parameter in params.items():
            parameter.shape = values[name].shape
        params.load_dict(values, contexts, cast_dtype=True, dtype_source="saved")
        params.setattr("grad_req", "null")
        block._in_format, block._out_format = self.input_format, self.output_format
        return block


def prediction(net: HybridBlock) -> Prediction:
    """Records the graph anew, because a net may record another graph in training. The net stays as it is.
    A ``ValueError`` gives the reason if the net cannot be traced."""
    if net._cached_graph:
        names, form = [one.name for one in net._cached_graph[0]], net._in_format
    else:
        count = _inputs(net)
        names, form = ["data"] if count == 1 else [f"data{i}" for i in range(count)], [0] * count
    if form[0] != 0:
        raise ValueError(f"net: the first input of '{net.name}' is not an array, but a SymbolBlock needs one")
    variables = iter([kinds.variable(name) for name in names])
    given = _regroup([next(variables) if place >= 0 else None for place in _places(form)], form)
    try:
        with _undisturbed(net), autograd.pause(train_mode=False):
            traced = net.forward(*given)
    except Exception as error:  # the user's code
        raise ValueError(
            f"net: {type(net).__name__} '{net.name}' cannot be traced ({type(error).__name__}: {error}); expected a "
            "net that can be hybridized. If it has inputs other than arrays, call the net once, hybridized, before"
        ) from error
    outputs, output_form = _flatten(traced, "output")
    return Prediction(kinds.like(plain(mx.sym.Group(outputs)), outputs[0]), names, form, output_form)


def _inputs(net: HybridBlock) -> int:
    """Returns the number of arrays that the forward needs."""
    taken = list(inspect.signature(net.hybrid_forward).parameters.values())[1:]  # the arguments after F
    needed = (one for one in taken if one.kind is one.POSITIONAL_OR_KEYWORD and one.default is one.empty)
    return max(1, sum(one.name not in net._reg_params for one in needed))


def _places(form: Any) -> List[int]:
    """Returns a number for each input in Gluon's description; -1 for None."""
    if isinstance(form, int):
        return [form] if form <= 0 else [0] * form
    return [place for part in form for place in _places(part)]


@contextmanager
def _undisturbed(net: HybridBlock) -> Iterator[None]:
    """Restores recorded graphs, and the numbers of nodes, which synchronised layers count alike in all processes of a
    job. Replicas never meet in this graph, and one process may trace it alone. So it must not count.
    """
    before = [(one, dict(vars(one))) for one in blocks.iterate(net) if isinstance(one, (SyncBatchNorm, Opened))]
    try:
        yield
    finally:
        for block, state in before:
            block.__dict__.update(state)
