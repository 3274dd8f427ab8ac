"""Finds the layers of batch normalisation in a recorded graph.

A ``SymbolBlock`` has a graph and parameters, and no layers. `open_graph` makes a layer of each node of batch
normalisation, on the node's own parameters. Changes to these layers enter the graph at its next call. `close_graph`
makes the block a plain graph again unless one of its layers is synchronised.
"""

from __future__ import annotations

import warnings
from typing import Any, Dict, List, Sequence

import mxnet as mx
from mxnet.gluon import Block, Parameter, ParameterDict, SymbolBlock
from mxnet.gluon.nn import BatchNorm, BatchNormReLU  # by name, because a script may put ours into their places in `nn`

from ..layer import SyncBatchNorm, SyncBatchNormAdd
from ..mxnet_side import blocks
from ..mxnet_side.blocks import Recorded
from ..mxnet_side.export import settings_of, unshared, with_layers
from ..mxnet_side.nodes import Json, gives_moments, json_of, walk
from ..mxnet_side.op import NAME
from ..settings import Settings
from ..system import arguments, kinds
from ..system.classes import derived
from ..training.session import session


class Opened(SymbolBlock):
    """A ``SymbolBlock`` whose nodes of batch normalisation are layers."""

    # By number in `walk`. Gluon warns of attributes that hold blocks, unless they have such a name.
    __layers__: Dict[int, BatchNorm]
    _settings: Dict[int, Json]  # of the layers with which an operator of MXNet's computes the same
    _recorded: Json
    _left: List[Recorded]

    def forward(self, x: Any, *args: Any) -> Any:
        with session.tracing:
            if isinstance(x, mx.sym.Symbol) or self._cached_op is None:
                _write(self)
        return super().forward(x, *args)


def plain_graphs(block: Block) -> List[SymbolBlock]:
    """Returns the graphs within a block that nobody has opened."""
    return [one for one in blocks.iterate(block) if isinstance(one, SymbolBlock) and not isinstance(one, Opened)]


def open_graph(block: SymbolBlock) -> List[Recorded]:
    """Makes layers of the nodes. Returns the nodes that stay, with the reasons."""
    if isinstance(block, Opened):
        return block._left
    graph = json_of(block._cached_graph[1])
    parameters = {parameter.name: parameter for parameter in block._reg_params.values()}
    places = {number: (within, recorded) for number, within, recorded in walk(graph)}
    layers: Dict[int, BatchNorm] = {}
    left: List[Recorded] = []
    gone: List[str] = []
    for node in blocks.recorded(block, graph):
        given = [parameters[name] for name in (*node.inputs[1:3], *node.inputs[-2:]) if name in parameters]
        within, recorded = places[node.number]
        if len(given) < len(blocks.PARAMETERS):
            left.append(node._replace(reason="its gamma, beta or running statistics are not parameters of the graph"))
        elif node.operator != NAME and gives_moments(within, recorded):
            left.append(node._replace(reason="the graph uses its mean or variance"))
        else:
            layers[node.number] = _layer(node, recorded["attrs"], given)
            if node.reason:
                gone.append(node.name)
    if gone:
        warnings.warn(
            f"the layers that recorded {arguments.some(gone, ', ')} no longer exist, and their mode, groups, KVStore "
            "and timeout are forgotten",
            stacklevel=5,
        )
    if layers:
        block.__class__ = derived(type(block), Opened, type(block))
        block.__layers__, block._recorded, block._left = layers, graph, left
        block._settings = {n: dict(one._kwargs) for n, one in layers.items() if not isinstance(one, SyncBatchNorm)}
    return left


def close_graph(block: SymbolBlock) -> None:
    """Writes the graph, and undoes `open_graph` unless one of its layers is synchronised."""
    if isinstance(block, Opened):
        _write(block)
        if not any(isinstance(layer, SyncBatchNorm) for layer in block.__layers__.values()):
            block.__class__ = type(block)._own_class
            del block.__layers__, block._settings, block._recorded, block._left


def layer_of(prefix: str, attributes: Dict[str, str]) -> SyncBatchNorm:
    """Creates a layer for a synchronised node, with replicas of its own."""
    settings = settings_of(attributes)
    layer = (SyncBatchNormAdd if settings.adds else SyncBatchNorm)(**unshared(prefix), **settings.batch_norm())
    layer._release_parameters()
    layer._adopt_parameters(settings)
    return layer


def _layer(node: Recorded, attributes: Dict[str, str], parameters: Sequence[Parameter]) -> BatchNorm:
    """Creates a layer for a node, on the node's parameters."""
    gamma = parameters[0].name
    prefix = gamma[: -len("gamma")] if gamma.endswith("gamma") else f"{node.name}_"
    if node.operator == NAME:
        layer = layer_of(prefix, attributes)
        layer._release_parameters()
    else:
        plain = BatchNormReLU if node.operator == "_contrib_BatchNormWithReLU" else BatchNorm
        layer = plain(**unshared(prefix), **Settings.from_node(attributes).batch_norm())
    for attribute, parameter in zip(blocks.PARAMETERS, parameters):
        layer.__dict__[attribute] = layer._reg_params[attribute] = parameter  # Gluon refuses to replace one
    layer._params = ParameterDict(layer.prefix)
    layer._params._params.update((parameter.name, parameter) for parameter in parameters)
    if node.operator == NAME:
        layer._adopt_parameters()
    return layer


def _write(block: Opened) -> None:
    """Writes the graph with the present settings of its layers."""
    layers = {
        number: layer
        for number, layer in block.__layers__.items()
        if isinstance(layer, SyncBatchNorm) or layer._kwargs != block._settings.get(number)
    }
    written = with_layers(block._recorded, layers)
    block._clear_cached_op()
    inputs, before = block._cached_graph
    block._cached_graph = inputs, kinds.like(written, before)
