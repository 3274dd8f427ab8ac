"""Writes plain BatchNorm in place of the nodes of this package, for ``net.export`` and for ``save`` and ``tojson`` of
a symbol.

A node of this package belongs to its process, which has its layer. A file is for other processes, which predict with
the running statistics, as a BatchNorm does. It marks the nodes that were synchronised, so that training may continue
from a checkpoint of a ``Module``.
"""

from __future__ import annotations

import json
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Mapping, Optional

import mxnet as mx
import numpy as np
from mxnet.gluon import ParameterDict
from mxnet.gluon.nn import BatchNorm  # by name, because a script may put ours into its place in `nn`

from ..activation import NONE, BatchNormActivation, BatchNormAdd, Computation
from ..system import arguments, kinds
from ..training.replicas import Replicas
from . import blocks
from .nodes import Entry, Graph, Json, attribute, changed, is_guard, is_ours, json_of, symbol_of, walk
from .op import SYMBOLS

#: Attribute of a ``BatchNorm`` in a file that was a synchronised node: the arguments of the layer, in JSON. In a node
#: of this package, those that only executors need.
SYNCHRONISED = "__gluon_syncbn__"


def of_plain_graph(remove: Callable[..., int], handle: Any, copy: Any) -> int:
    """All functions that write a graph call this first, by default: `export`, `save` and `tojson`. They have no hook,
    and a layer within a net cannot know of them.
    """
    symbol = plain(SimpleNamespace(handle=handle))
    return remove(symbol.handle, copy)


def plain(symbol: mx.sym.Symbol) -> mx.sym.Symbol:
    """Returns the graph with the nodes of plain layers in the places of synchronised ones, which say so."""
    recorded = json_of(symbol)
    ours = {number: node["attrs"] for number, _, node in walk(recorded) if is_ours(node)}
    if not ours:
        return symbol
    marks = {number: json.dumps(_arguments(attributes)) for number, attributes in ours.items()}
    return with_layers(recorded, {number: _plain_layer(attributes) for number, attributes in ours.items()}, marks)


def _plain_layer(attributes: Dict[str, str]) -> BatchNorm:
    """Creates the layer that `revert` would leave. In a node, a momentum has all its digits (op.py)."""
    momentum, computes = str(np.float32(attributes["momentum"])), Computation.of_attributes(attributes)
    cls = BatchNormAdd if computes.adds else BatchNorm if computes.activation == NONE else BatchNormActivation
    layer = cls(**settings_of("norm_", {**attributes, "momentum": momentum}))
    layer._activation = computes.activation
    return layer


def with_layers(
    recorded: Json, layers: Mapping[int, BatchNorm], marks: Optional[Mapping[int, str]] = None
) -> mx.sym.Symbol:
    """Returns the graph with the nodes of layers in the places of nodes, given by number in `walk`. Their guards are
    gone, and outputs keep the names of these. A plain layer leaves out a mask. ``marks`` has values of `SYNCHRONISED`.
    """

    def change(graph: Json, numbers: List[int]) -> Json:
        here = {at: number for at, number in enumerate(numbers) if number in layers}
        own = {at: layers[number] for at, number in here.items()}
        plain_ones = [graph["nodes"][at] for at, layer in own.items() if not hasattr(layer, "_replicas")]
        masked = [node["name"] for node in plain_ones if node["attrs"].get("masks") == "1"]
        if masked and "attrs" not in graph:
            raise ValueError(
                f"{arguments.some(masked, ', ')}: a mask was given in the body of F.contrib.foreach, while_loop or "
                "cond, expected none there: plain operators take none, and MXNet cannot leave out an input of a body"
            )
        marked = None if marks is None else {at: marks[number] for at, number in here.items()}
        return _with_layers(graph, own, marked) if own else graph

    return symbol_of(changed(recorded, change))


def _with_layers(recorded: Json, layers: Mapping[int, BatchNorm], marks: Optional[Mapping[int, str]]) -> Json:
    """Does so in one graph, with nodes given by number there."""
    nodes = recorded["nodes"]
    behind = {node["inputs"][0][0]: number for number, node in enumerate(nodes) if is_guard(node)}
    serving = {at for number in layers for at, *_ in nodes[number]["inputs"]}
    serving |= {guard for number, guard in behind.items() if number in layers}

    def unfold(number: int, node: Json, inputs: List[Entry]) -> Optional[List[Entry]]:
        if number in serving and is_guard(node):
            return inputs
        if number not in layers:
            return None
        layer = layers[number]
        name = nodes[behind.get(number, number)]["name"]
        attributes = {k: v for k, v in node["attrs"].items() if k.startswith("__") and k != SYNCHRONISED}
        parameters = [layer._reg_params[parameter].name for parameter in blocks.PARAMETERS]
        data = _DATA[: len(inputs) - len(parameters)]
        if not hasattr(layer, "_replicas"):
            data = data[: 1 + isinstance(layer, BatchNormAdd)]
        given = dict(zip([data[0], *parameters[:2], *data[1:]], inputs))
        given.update(zip(parameters[2:], inputs[-2:]))
        variables = {name: parameter.var() for name, parameter in layer._reg_params.items()}
        with layer.name_scope():
            written = json_of(layer.hybrid_forward(SYMBOLS, *map(kinds.variable, data), **variables))
        last = written["heads"][0][0]
        for at, part in enumerate(written["nodes"]):
            if part["op"] != "null":  # an output is called after its node
                part["name"] = name if at == last else f"{name}_{part['name']}"
                part["attrs"].update(attributes)
                if marks and part["op"] == "BatchNorm":
                    part["attrs"][SYNCHRONISED] = marks[number]
        return graph.append(written, lambda _, part, __: [given[part["name"]]] if part["op"] == "null" else None)

    graph = Graph()
    return graph.rewrite(recorded, unfold)


_DATA = [f"input {number} of the layer" for number in range(3)]


def settings_of(prefix: str, attributes: Dict[str, str]) -> Json:
    """Arguments of ``nn.BatchNorm`` for what a node of batch normalisation computes, with MXNet's defaults."""
    return dict(
        axis=attribute(attributes, "axis", 1),
        momentum=attribute(attributes, "momentum", 0.9),
        epsilon=attribute(attributes, "eps", 1e-3),
        scale=not attribute(attributes, "fix_gamma", True),
        use_global_stats=bool(attribute(attributes, "use_global_stats", False)),
        prefix=prefix,
        params=ParameterDict(),  # nothing to share: the constructor's own parameters are thrown away
    )


def _arguments(attributes: Dict[str, str]) -> Json:
    """Returns the arguments that create the layer again, except a KVStore, which a file cannot hold."""
    written: Json = json.loads(attributes.get(SYNCHRONISED, "{}"))
    replicas = Replicas.by_token.get(attributes["layer"])
    if replicas is not None:
        written.update(replicas.pooling._asdict(), num_devices=replicas.num_devices, timeout=replicas.timeout)
    if int(attributes["unbiased"]):
        written["running_variance"] = "unbiased"
    return {key: value for key, value in written.items() if value is not None}
