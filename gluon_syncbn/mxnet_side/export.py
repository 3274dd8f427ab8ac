"""Writes plain BatchNorm in place of the nodes of this package, for ``net.export`` and for ``save`` and ``tojson`` of
a symbol.

A node of this package belongs to its process, which has its layer. A file is for other processes, which predict with
the running statistics, as a BatchNorm does. It marks the nodes that were synchronised, so that training may continue
from a checkpoint of a ``Module``.
"""

from __future__ import annotations

import json
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Callable, Dict, List, Mapping, Set

import mxnet as mx
from mxnet.gluon import ParameterDict
from mxnet.gluon.nn import BatchNorm  # by name, because a script may put ours into its place in `nn`

from ..activation import NONE, BatchNormActivation, BatchNormAdd
from ..settings import Settings
from ..system import arguments, kinds
from ..training.replicas import Replicas
from . import blocks
from .nodes import Json, bypass, is_guard, is_ours, json_of, symbol_of, walk
from .op import SYMBOLS

#: Attribute of a ``BatchNorm`` in a file that was a synchronised node: the arguments of the layer, in JSON.
SYNCHRONISED = "__gluon_syncbn__"


def of_plain_graph(remove: Callable[..., int], handle: Any, copy: Any) -> int:
    """All functions that write a graph call this first, by default: `export`, `save` and `tojson`. They have no hook,
    and a layer within a net cannot know of them.
    """
    symbol: Any = SimpleNamespace(handle=handle)
    recorded = json_of(symbol)
    ours = {number: Settings.from_node(node["attrs"]) for number, _, node in walk(recorded) if is_ours(node)}
    if ours:
        symbol = with_layers(recorded, {number: _plain_layer(one) for number, one in ours.items()}, marks=True)
    return remove(symbol.handle, copy)


def _plain_layer(settings: Settings) -> BatchNorm:
    """Creates the layer that `revert` would leave."""
    activation = settings.activation
    cls = BatchNormAdd if settings.adds else BatchNorm if activation == NONE else BatchNormActivation
    layer = cls(**unshared("norm_"), **settings.batch_norm())
    layer._activation = activation
    return layer


def with_layers(recorded: Json, layers: Mapping[int, BatchNorm], marks: bool = False) -> mx.sym.Symbol:
    """Returns the graph with the nodes of layers in the places of nodes, given by number in `walk`. Their guards are
    gone, and outputs keep the names of these. A plain layer leaves out a mask. ``marks``: with `SYNCHRONISED`.
    """
    graph: Json = json.loads(json.dumps(recorded))
    found = [(within, node, layers[number]) for number, within, node in walk(graph) if number in layers]
    misfits = [
        node["name"]
        for within, node, layer in found
        if within is not graph and not hasattr(layer, "_replicas")
        if "1" in (node["attrs"].get("masks"), node["attrs"].get("adds"))
    ]
    if misfits:
        raise ValueError(
            f"{arguments.some(misfits, ', ')}: a mask or an addend was given in the body of F.contrib.foreach, "
            "while_loop or cond, expected none there: plain operators take no mask, and add after they normalise, and "
            "MXNet cannot leave out or move an input of a body"
        )
    for within in {id(within): within for within, *_ in found}.values():
        _drop_guards(within, {id(node) for _, node, *_ in found if is_ours(node)})
    for within, node, layer in found:
        _write(within["nodes"], node, layer, json.dumps(_arguments(node["attrs"])) if marks else "")
    return symbol_of(graph)


def _drop_guards(graph: Json, ours: Set[int]) -> None:
    nodes = graph["nodes"]
    guards = {at for node in nodes if id(node) in ours for at, *_ in node["inputs"] if is_guard(nodes[at])}
    for number, guard in enumerate(nodes):
        guarded = nodes[guard["inputs"][0][0]] if is_guard(guard) else {}
        if id(guarded) in ours:
            guards.add(number)
            guarded["name"] = guard["name"]
    bypass(graph, guards)


def _write(nodes: List[Json], node: Json, layer: BatchNorm, mark: str) -> None:
    """Writes a layer in the place of a node, in one graph. What the layer computes before is added to the nodes."""
    attributes = {k: v for k, v in node["attrs"].items() if k.startswith("__") and k != SYNCHRONISED}
    parameters = [layer._reg_params[parameter].name for parameter in blocks.PARAMETERS]
    data = _DATA[: len(node["inputs"]) - len(parameters)]
    if not hasattr(layer, "_replicas"):
        data = data[: 1 + isinstance(layer, BatchNormAdd)]
    given = dict(zip([data[0], *parameters[:2], *data[1:]], node["inputs"]))
    given.update(zip(parameters[2:], node["inputs"][-2:]))
    variables = {name: parameter.var() for name, parameter in layer._reg_params.items()}
    with layer.name_scope():
        written = json_of(layer.hybrid_forward(SYMBOLS, *map(kinds.variable, data), **variables))["nodes"]
    for part in written:
        part["inputs"] = [given.get(written[at]["name"], [len(nodes) + at, *rest]) for at, *rest in part["inputs"]]
        if part["op"] != "null":
            part["name"] = f"{node['name']}_{part['name']}"
            part["attrs"].update(attributes)
            if mark and part["op"] == "BatchNorm":
                part["attrs"][SYNCHRONISED] = mark
    nodes += written
    node.update(written[-1], name=node["name"])  # an output is called after its node


_DATA = [f"input {number} of the layer" for number in range(3)]


def unshared(prefix: str) -> Json:
    """Arguments of a layer whose own parameters are thrown away."""
    return {"prefix": prefix, "params": ParameterDict()}


def _arguments(attributes: Dict[str, str]) -> Json:
    """Returns the arguments that create the layer again, except a KVStore, which a file cannot hold. What stands behind
    the normalisation is in nodes of its own.
    """
    return replace(settings_of(attributes), **NONE._asdict(), exchange=None).arguments()


def settings_of(attributes: Dict[str, str]) -> Settings:
    """Returns the settings of a node of this package. What it does not say is its layer's, if that still exists."""
    replicas = Replicas.of_node(attributes)
    return Settings.from_node(attributes, replicas.settings if replicas else None)
