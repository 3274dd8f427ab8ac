"""Finds the layers of batch normalisation in a recorded graph.

A ``SymbolBlock`` has a graph and parameters, and no layers. `open_graph` makes a layer of each node of batch
normalisation, on the node's own parameters. Changes to these layers enter the graph at its next call. `close_graph`
makes the block a plain graph again unless one of its layers is synchronised.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Type

import mxnet as mx
from mxnet.gluon import Block, Parameter, ParameterDict, SymbolBlock
from mxnet.gluon.nn import BatchNorm, BatchNormReLU  # by name, because a script may put ours into their places in `nn`

from ..activation import Activation, BatchNormAdd
from ..layer import SyncBatchNorm, SyncBatchNormAdd
from ..mxnet_side import blocks
from ..mxnet_side.export import inputs_of_layer, passing
from ..mxnet_side.nodes import Entry, Graph, Json, json_of, symbol_of, uses
from ..mxnet_side.op import NAME
from ..mxnet_side.operators import SYMBOLS
from ..system import kinds
from ..training.replicas import Replicas


class Slot(NamedTuple):
    """The record of a node of batch normalisation that became a layer."""

    layer: BatchNorm
    operator: str  # of the node as recorded
    settings: Optional[Json]  # settings of MXNet's operator that computes the same; None: MXNet has none


class Left(NamedTuple):
    """A node of batch normalisation that no layer stands for."""

    name: str
    operator: str
    reason: str


class Opened(SymbolBlock):
    """A ``SymbolBlock`` whose nodes of batch normalisation are layers."""

    # By number of node in the skeleton, which is the graph with the nodes as they were recorded. Gluon warns of
    # attributes that hold blocks, unless they have such a name.
    __layers__: Dict[int, Slot]
    _skeleton: Json
    _left: List[Left]

    def forward(self, x: Any, *args: Any) -> Any:
        if isinstance(x, mx.sym.Symbol) or self._cached_op is None:
            # A node meets itself on other contexts, so no two graphs may share a node.
            _write(self)
        return super().forward(x, *args)


def open_graph(block: SymbolBlock) -> List[Left]:
    """Makes layers of the nodes. Returns the nodes that stay."""
    if isinstance(block, Opened):
        return block._left
    graph = json_of(block._cached_graph[1])
    parameters = {parameter.name: parameter for parameter in block._reg_params.values()}
    used = uses(graph)
    slots: Dict[int, Slot] = {}
    left: List[Left] = []

    def fold(number: int, node: Json, inputs: List[Entry]) -> Optional[List[Entry]]:
        operator, attributes = blocks.operator_of(node), node.get("attrs", {})
        through = passing(node, inputs)
        if through is not None:
            return through
        if operator not in (*blocks.OPERATORS, NAME):
            return None
        names = [graph["nodes"][at]["name"] for at, *_ in node["inputs"]]
        given = [parameters[name] for name in (*names[1:3], *names[-2:]) if name in parameters]
        slot = None
        if len(given) < len(blocks.PARAMETERS):
            reason = "its gamma, beta or running statistics are not parameters of the graph"
        elif operator != NAME and (used[number, 1] or used[number, 2]):
            reason = "the graph uses its mean or variance"
        else:
            reason = "the layer that recorded it no longer exists"
            slot = _slot(node["name"], operator, attributes, given)
        if slot is None:
            left.append(Left(node["name"], operator, reason))
            return None
        at = skeleton.add(node, inputs_of_layer(node, inputs))
        slots[at] = slot
        return [[at, 0, 0]]

    skeleton = Graph()
    rewritten = skeleton.rewrite(graph, fold)
    if slots:
        block.__class__ = derived(type(block), Opened)  # type: ignore[arg-type]
        block.__layers__, block._skeleton, block._left = slots, rewritten, left
    return left


def close_graph(block: SymbolBlock) -> None:
    """Writes the graph, and undoes `open_graph` unless one of its layers is synchronised."""
    if isinstance(block, Opened):
        _write(block)
        if not any(isinstance(slot.layer, SyncBatchNorm) for slot in block.__layers__.values()):
            block.__class__ = type(block).__bases__[1]
            del block.__layers__, block._skeleton, block._left


@lru_cache(maxsize=None)
def derived(cls: Type[Block], base: Type[Block]) -> Type[Any]:
    """Returns a class with the name of ``cls`` in which the methods of another base come first."""
    return type(cls.__name__, (base, cls), {"__doc__": cls.__doc__, "__module__": cls.__module__})


def settings_of(prefix: str, attributes: Dict[str, str]) -> Json:
    """Arguments of ``nn.BatchNorm`` for what a node of batch normalisation computes, with MXNet's defaults."""
    true = ("1", "True")
    return dict(
        axis=int(attributes.get("axis", 1)),
        momentum=float(attributes.get("momentum", 0.9)),
        epsilon=float(attributes.get("eps", 1e-3)),
        scale=attributes.get("fix_gamma", "True") not in true,
        use_global_stats=attributes.get("use_global_stats") in true,
        prefix=prefix,
        params=ParameterDict(),  # nothing to share: the constructor's own parameters are thrown away
    )


def layer_of(prefix: str, attributes: Dict[str, str], replicas: Replicas) -> SyncBatchNorm:
    """Creates a layer for a synchronised node, with replicas of its own that have the settings of these."""
    settings = settings_of(prefix, attributes)
    settings.update(Activation.of_attributes(attributes).arguments())
    settings["inplace"] = attributes["inplace"] == "1"
    settings["running_variance"] = "unbiased" if attributes["unbiased"] == "1" else "biased"
    layer = (SyncBatchNormAdd if int(attributes["adds"]) else SyncBatchNorm)(**settings)
    layer._fuses = attributes["fuses"] == "1"
    layer._release_parameters()
    layer._adopt_parameters(*replicas.settings())
    return layer


def _slot(name: str, operator: str, attributes: Dict[str, str], parameters: Sequence[Parameter]) -> Optional[Slot]:
    gamma = parameters[0].name
    prefix = gamma[: -len("gamma")] if gamma.endswith("gamma") else f"{name}_"
    if operator == NAME:
        replicas = Replicas.of_token(attributes["layer"])
        if replicas is None:
            return None
        layer = layer_of(prefix, attributes, replicas)
        layer._release_parameters()
    else:
        plain = BatchNormReLU if operator == "_contrib_BatchNormWithReLU" else BatchNorm
        layer = plain(**settings_of(prefix, attributes))
    for attribute, parameter in zip(blocks.PARAMETERS, parameters):
        layer.__dict__[attribute] = layer._reg_params[attribute] = parameter  # Gluon refuses to replace one
    layer._params = ParameterDict(layer.prefix)
    layer._params._params.update((parameter.name, parameter) for parameter in parameters)
    if operator == NAME:
        layer._adopt_parameters()
    return Slot(layer, operator, None if operator == NAME else dict(layer._kwargs))


def write_layer(graph: Graph, layer: BatchNorm, name: str, inputs: List[Entry], **attributes: str) -> List[Entry]:
    """Adds the nodes of a layer, of which the last has this name, to a graph. Returns the output. A plain layer leaves
    out a mask, which is the last but the running statistics.
    """
    names = [layer._reg_params[parameter].name for parameter in blocks.PARAMETERS]
    data = _DATA[: len(inputs) - len(names)]
    if not isinstance(layer, SyncBatchNorm):
        data = data[: 1 + isinstance(layer, BatchNormAdd)]
    given = dict(zip([data[0], *names[:2], *data[1:]], inputs))
    given.update(zip(names[2:], inputs[-2:]))
    parameters = {name: parameter.var() for name, parameter in layer._reg_params.items()}
    with layer.name_scope():
        recorded = json_of(layer.hybrid_forward(SYMBOLS, *map(kinds.variable, data), **parameters))
    last = recorded["heads"][0][0]
    for at, part in enumerate(recorded["nodes"]):
        if part["op"] != "null":  # an output is called after its node
            part["name"] = name if at == last else f"{name}_{part['name']}"
            part.setdefault("attrs", {}).update(attributes)
    return graph.grow(recorded, lambda _, part, __: [given[part["name"]]] if part["op"] == "null" else None)


def _write(block: Opened) -> None:
    """Writes the graph with the present settings of its layers."""

    def unfold(number: int, node: Json, inputs: List[Entry]) -> Optional[List[Entry]]:
        slot = block.__layers__.get(number)
        if slot is None or (not isinstance(slot.layer, SyncBatchNorm) and slot.layer._kwargs == slot.settings):
            return None
        return write_layer(graph, slot.layer, node["name"], inputs)

    graph = Graph()
    written = symbol_of(graph.rewrite(block._skeleton, unfold))
    block._clear_cached_op()
    inputs, before = block._cached_graph
    block._cached_graph = inputs, kinds.like(written, before)


_DATA = [f"input {number} of the layer" for number in range(3)]
