"""Folds BatchNorm into the convolutions and dense layers before it, in a copy of a net for prediction."""

from __future__ import annotations

import ast
import inspect
import itertools
import warnings
from typing import Any, Dict, List, Optional, Tuple

import mxnet as mx
import numpy as np
from mxnet import autograd
from mxnet.gluon import HybridBlock, Parameter, SymbolBlock
from mxnet.gluon.block import _flatten, _regroup

from ..layer import SyncBatchNorm
from ..mxnet_side import blocks
from ..mxnet_side.export import gammas_without_effect, has_fixed_gamma, plain, warn_of_ones
from ..mxnet_side.nodes import Entry, Graph, Json, json_of, symbol_of, uses
from ..system import arguments, kinds
from .graphs import Opened

Values = Dict[str, np.ndarray]  # of parameters, by name

#: Operators that absorb a BatchNorm, and the index of their weight. A bias follows the weight.
WEIGHTS = {
    "Convolution": 1,
    "Deconvolution": 1,
    "FullyConnected": 1,
    "_contrib_DeformableConvolution": 2,
    "_contrib_ModulatedDeformableConvolution": 3,
}


def fold(net: HybridBlock) -> SymbolBlock:
    r"""Returns a copy of a network for prediction, with BatchNorm folded into the weights of the layer before it:

    .. math:: w' = \frac{\gamma}{\sqrt{\sigma^2 + \epsilon}} w, \qquad
              b' = \frac{\gamma}{\sqrt{\sigma^2 + \epsilon}} (b - \mu) + \beta

    for each channel, with running mean and variance, computed in float64. It folds plain and synchronised layers after
    dense layers and convolutions of any kind and layout.

    In training too, the copy computes the net's prediction: a BatchNorm that stays uses its running statistics. Its
    parameters are copies on the net's contexts, in the types that they had, without gradient. Statistics that differ
    between contexts are averaged, as in ``save_parameters``. ``export`` of the copy writes only operators of MXNet.

    Parameters
    ----------
    net : gluon.HybridBlock
        A network with values for all its parameters, hybridized or not, or a ``SymbolBlock``. It stays as it is.

    Returns
    -------
    gluon.SymbolBlock
        The copy. It takes and returns what ``net`` does.

    Raises
    ------
    ValueError
        If ``net`` is not a ``HybridBlock``, cannot be traced, or has parameters without values.

    Warns
    -----
    UserWarning
        One warning names each BatchNorm that stays, and the reason: it follows another operator, or the output of the
        convolution is used elsewhere, too. Another one names the gammas that are not 1 in layers with ``scale=False``:
        they are 1 in the copy.
    """
    if not isinstance(net, HybridBlock):
        arguments.refuse("net", net, "a gluon.HybridBlock; in another block, fold the hybrid blocks")
    traced, inputs, in_format, out_format = prediction(net)
    parameters = _parameters(net, [name for name in traced.list_inputs() if name not in inputs])
    values = {name: one._reduce().asnumpy() for name, one in parameters.items()}  # the mean over the contexts
    graph = Graph().rewrite(json_of(traced), lambda _, node, given: given if node["op"].startswith("amp_") else None)
    ones = [name for name in gammas_without_effect(graph) if (values[name] != 1).any()]
    values.update((name, np.ones_like(values[name])) for name in ones)
    warn_of_ones("fold", ones, stacklevel=3)
    folding = _Folding(graph, values)
    symbol = folding.written()
    if folding.left:
        warnings.warn(f"fold left as it was: {arguments.some(folding.left, '; ')}", stacklevel=2)
    names = [name for name in symbol.list_inputs() if name in values]
    arrays = {name: mx.nd.array(values[name], dtype=values[name].dtype) for name in names}
    # SymbolBlock infers the types of parameters from those of the inputs, and raises an error if it cannot
    dtype = next((array.dtype for array in arrays.values()), "float32")
    variables = [kinds.like(mx.sym.var(name, dtype=dtype), traced) for name in inputs]
    copy = SymbolBlock(kinds.like(symbol, traced), variables)
    params = copy.collect_params()
    for name, array in arrays.items():
        params[name].shape = array.shape
    contexts = next((one.list_ctx() for one in parameters.values()), [mx.context.current_context()])
    params.load_dict(arrays, contexts, cast_dtype=True, dtype_source="saved")
    params.setattr("grad_req", "null")
    copy._in_format, copy._out_format = in_format, out_format
    return copy


def _parameters(net: HybridBlock, names: List[str]) -> Dict[str, Parameter]:
    """Returns these parameters of the net by their names. Raises ValueError if some have no values."""
    known = {p.name: p for block in blocks.iterate(net) for p in (*block.params.values(), *block._reg_params.values())}
    known.update(net.collect_params().items())
    without = [name for name in names if name not in known or known[name]._data is None]
    if without:
        raise ValueError(
            f"net: '{net.name}' has no values for {arguments.some(without, ', ')}; expected an "
            "initialised net, which was called once if its shapes depend on the input"
        )
    return {name: known[name] for name in names}


class _Folding:
    """Writes a graph anew: at a BatchNorm that is folded stands the convolution before it, with other weights. MXNet
    drops the old convolution, which no output needs.
    """

    def __init__(self, graph: Json, values: Values) -> None:
        self.left: List[str] = []
        self._graph, self._nodes, self._values = graph, graph["nodes"], values
        self._uses = uses(graph)
        self._written = Graph()
        self._inputs: List[List[Entry]] = []  # of each node, in the new graph
        # by number of a BatchNorm: the convolution that has absorbed it, and all that this has absorbed so far
        self._into: Dict[int, Tuple[int, List[Json]]] = {}
        # by the parameters of convolutions and BatchNorms, which several may share: weight and bias
        self._made: Dict[Tuple[str, ...], List[Entry]] = {}
        self._names = {node["name"]: node["name"] for node in self._nodes}  # each name, and the one that it stands for

    def written(self) -> mx.sym.Symbol:
        """Returns the new graph, and adds the new weights and biases to the values."""
        written = self._written.rewrite(self._graph, self._fold)
        used = set(symbol_of(written).list_inputs())
        for node in self._written.nodes:
            name = self._names[node["name"]]
            if node["name"] in used and name not in used:  # nobody needs the old value
                self._values[name] = self._values[node["name"]]
                node["name"] = name
                used.add(name)
        return symbol_of(written)

    def _fold(self, number: int, node: Json, inputs: List[Entry]) -> Optional[List[Entry]]:
        self._inputs.append(inputs)
        if node["op"] == "null" and node["name"] in self._values:
            return [self._variable(node["name"], self._values[node["name"]])]
        if node["op"] not in blocks.OPERATORS:
            return None
        problem = self._take(number, node)
        if problem:
            self.left.append(f"{node['name']} ({node['op']}: {problem})")
            node["attrs"] = {**node.get("attrs", {}), "use_global_stats": "True"}
            return None
        target, norms = self._into[number]
        layer = self._nodes[target]
        place = WEIGHTS[layer["op"]]
        weight, *bias = self._names_of(layer)[place:]
        parts = (text for norm in norms for text in (*self._names_of(norm)[1:], str(norm.get("attrs"))))
        key = (layer["op"], weight, *bias, *parts)
        if key not in self._made:
            stem = weight[: -len("weight")] if weight.endswith("weight") else f"{weight}_"
            new = [self._renamed(name) for name in (weight, *(bias or [f"{stem}bias"]))]
            arrays = dict(zip(new, self._folded(layer, norms)))
            self._values.update(arrays)
            self._made[key] = [self._variable(*one) for one in arrays.items()]
        layer = {**layer, "attrs": {**layer["attrs"], "no_bias": "False"}}
        at = self._written.add(layer, [*self._inputs[target][:place], *self._made[key]])
        if node["op"] == _WITH_RELU:
            relu = {"op": "Activation", "name": node["name"], "attrs": {"act_type": "relu"}}
            at = self._written.add(relu, [[at, 0, 0]])
        return [[at, 0, 0]]

    def _names_of(self, node: Json) -> List[str]:
        return [self._nodes[at]["name"] for at, *_ in node["inputs"]]

    def _renamed(self, name: str) -> str:
        candidates = (f"{name}_folded{count}" if count else name for count in itertools.count())
        free = next(candidate for candidate in candidates if candidate not in self._names)
        self._names[free] = name
        return free

    def _variable(self, name: str, value: np.ndarray) -> Entry:
        (node,) = json_of(mx.sym.var(name, shape=value.shape, dtype=value.dtype))["nodes"]
        return [self._written.add(node, []), 0, 0]

    def _take(self, number: int, node: Json) -> str:
        """Returns the reason if the node stays."""
        if self._uses[number, 1] or self._uses[number, 2]:
            return "the graph uses its mean or variance"
        if not all(name in self._values for name in self._names_of(node)[1:]):
            return "its gamma, beta or running statistics are not parameters of the graph"
        at, output, *_ = node["inputs"][0]
        before = self._nodes[at]
        if before["op"] == "null":
            return f"it stands behind the variable {before['name']}"
        # a BatchNorm that has gone into a convolution is that convolution, unless a ReLU is behind it
        if before["op"] not in WEIGHTS and (at not in self._into or before["op"] == _WITH_RELU):
            return f"it stands behind {before['name']} ({before['op']})"
        target, norms = self._into.get(at, (at, []))
        if self._uses[at, output] > 1:
            return f"the output of {before['name']} is used elsewhere, too"
        layer = self._nodes[target]
        if not all(name in self._values for name in self._names_of(layer)[WEIGHTS[layer["op"]] :]):
            return f"weight or bias of {layer['name']} are not parameters of the graph"
        if not _is_channel_axis(int(node.get("attrs", {}).get("axis", 1)), layer):
            return f"its axis is not, or may not be, the channel axis of {layer['name']}"
        if not all(np.isfinite(value).all() for value in self._folded(layer, [*norms, node])):
            return f"with it, the weight or bias of {layer['name']} would not be finite"
        self._into[number] = target, [*norms, node]
        return ""

    def _folded(self, layer: Json, norms: List[Json]) -> Tuple[np.ndarray, np.ndarray]:
        """Returns weight and bias of a node that has absorbed these, in the weight's type."""
        given = [self._values[name] for name in self._names_of(layer)[WEIGHTS[layer["op"]] :]]
        weight, bias = (one.astype("float64") for one in [*given, np.zeros(1)][:2])
        with np.errstate(all="ignore"):  # a value that is not finite is refused
            for norm in norms:
                factor, beta, mean, variance = (
                    self._values[name].astype("float64") for name in self._names_of(norm)[1:]
                )
                factor = np.ones_like(factor) if has_fixed_gamma(norm) else factor
                scale = factor / np.sqrt(variance + float(norm.get("attrs", {}).get("eps", 1e-3)))
                weight, bias = _scaled(weight, scale, layer), scale * (bias - mean) + beta
            return weight.astype(given[0].dtype), bias.astype(given[0].dtype)


_WITH_RELU = "_contrib_BatchNormWithReLU"


def _layout(node: Json) -> str:
    given = node["attrs"].get("layout", "None")
    dimensions = len(ast.literal_eval(node["attrs"]["kernel"]))
    return "NC" + "DHW"[-dimensions:] if given == "None" else given


def _is_channel_axis(axis: int, node: Json) -> bool:
    if node["op"] != "FullyConnected":
        layout = _layout(node)
        return axis % len(layout) == layout.index("C")
    # without `flatten` the number of axes is unknown
    return axis == -1 or (axis == 1 and node["attrs"].get("flatten", "True") in ("1", "True"))


def _scaled(weight: np.ndarray, scale: np.ndarray, node: Json) -> np.ndarray:
    """Multiplies each output channel of the weight by its factor."""
    if node["op"] != "Deconvolution":
        return weight * scale.reshape(-1, *[1] * (weight.ndim - 1))
    # input channels come first; each group of them has output channels of its own
    groups = int(node["attrs"].get("num_group", 1))
    by_input = np.repeat(scale.reshape(groups, -1), len(weight) // groups, axis=0)
    shape = [1] * weight.ndim
    shape[0], shape[_layout(node).index("C")] = by_input.shape
    return weight * by_input.reshape(shape)


# ---- the graph of a prediction -----------------------------------------------------------------------------


def prediction(net: HybridBlock) -> Tuple[mx.sym.Symbol, List[str], Any, Any]:
    """Returns the graph of a prediction, the net with running statistics in MXNet's own operators; the names of its
    inputs; and how Gluon describes the nesting of inputs and outputs. ValueError: the net cannot be traced.

    Records the graph anew, because a net may record another graph in training. The net stays as it is.
    """
    if net._cached_graph:
        names, form = [one.name for one in net._cached_graph[0]], net._in_format
    else:
        count = _inputs(net)
        names, form = ["data"] if count == 1 else [f"data{i}" for i in range(count)], [0] * count
    if form[0] != 0:
        raise ValueError(f"net: the first input of '{net.name}' is not an array, but a SymbolBlock needs one")
    variables = iter([kinds.variable(name) for name in names])
    given = _regroup([next(variables) if place >= 0 else None for place in _places(form)], form)
    # Replicas never meet in this graph, and one process of a job may trace it alone. So its nodes must not count, which
    # synchronised layers number alike in all processes.
    before = [(one, dict(vars(one))) for one in blocks.iterate(net) if isinstance(one, (SyncBatchNorm, Opened))]
    try:
        with autograd.pause(train_mode=False):
            traced = net.forward(*given)
    except Exception as error:  # the user's code
        raise ValueError(
            f"net: {type(net).__name__} '{net.name}' cannot be traced ({type(error).__name__}: {error}); expected a "
            "net that can be hybridized. If it has inputs other than arrays, call the net once, hybridized, before"
        ) from error
    finally:
        for block, state in before:
            block.__dict__.update(state)
    outputs, output_form = _flatten(traced, "output")
    return kinds.like(plain(mx.sym.Group(outputs)), outputs[0]), names, form, output_form


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
