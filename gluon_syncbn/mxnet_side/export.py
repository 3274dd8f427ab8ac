"""Writes plain BatchNorm in place of the nodes of this package, for ``net.export`` and for ``save`` and ``tojson`` of
a symbol.

A node of this package belongs to its process, which has its layer. A file is for other processes, which predict with
the running statistics, as a BatchNorm does. The file of a symbol also marks the nodes that were synchronised, so that
training may continue from a checkpoint of a ``Module``.
"""

from __future__ import annotations

import json
import warnings
from typing import Any, Callable, Dict, List, Mapping, Optional, Set

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, HybridBlock, ParameterDict
from mxnet.gluon.nn import BatchNorm  # by name, because a script may put ours into its place in `nn`

from ..activation import NONE, Activation, BatchNormActivation, BatchNormAdd
from ..system import arguments, kinds
from ..training.replicas import Replicas
from . import blocks, patches
from .nodes import Entry, Graph, Json, attribute, changed, is_guard, is_ours, json_of, symbol_of, walk
from .op import SYMBOLS

#: Attribute of a ``BatchNorm`` in a file that was a synchronised node: the arguments of the layer, in JSON. In a node
#: of this package, those that only executors need.
SYNCHRONISED = "__gluon_syncbn__"


def install() -> None:
    """Changes the functions that write graphs, which have no hook. A layer within a net cannot know that the net is
    exported. Nothing is changed before there is a layer.

    ``Block.save`` writes a graph by ``tojson``, and ``Block.load`` puts it into the net. There it would take the places
    of the net's layers, and train without them.
    """
    patches.replace(_of_plain_graphs, HybridBlock, "export")
    patches.replace(_as_plain_graph, mx.sym.Symbol, "save", "tojson")
    patches.replace(_without_graphs, Block, "load")


def plain(symbol: mx.sym.Symbol, tells: bool = False) -> mx.sym.Symbol:
    """Returns the graph with the nodes of plain layers in the places of synchronised ones. ``tells``: they say so."""
    recorded = json_of(symbol)
    ours = {number: node["attrs"] for number, _, node in walk(recorded) if is_ours(node)}
    if not ours:
        return symbol
    marks = {number: json.dumps(_arguments(attributes)) for number, attributes in ours.items()} if tells else None
    layers = {number: _plain_layer(attributes) for number, attributes in ours.items()}
    return with_layers(recorded, layers, marks, named=tells)


def _plain_layer(attributes: Dict[str, str]) -> BatchNorm:
    """Creates the layer that `revert` would leave. In a node, a momentum has all its digits (op.py)."""
    momentum, activation = str(np.float32(attributes["momentum"])), Activation.of_attributes(attributes)
    cls = BatchNormAdd if int(attributes["adds"]) else BatchNorm if activation == NONE else BatchNormActivation
    layer = cls(**settings_of("norm_", {**attributes, "momentum": momentum}))
    layer._activation = activation
    return layer


def with_layers(
    recorded: Json, layers: Mapping[int, BatchNorm], marks: Optional[Mapping[int, str]] = None, named: bool = True
) -> mx.sym.Symbol:
    """Returns the graph with the nodes of layers in the places of nodes, given by number in `walk`. Their guards are
    gone. A plain layer leaves out a mask. ``marks`` has values of `SYNCHRONISED`. ``named``: outputs keep their names,
    which are those of guards.
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
        return _with_layers(graph, own, marked, named) if own else graph

    return symbol_of(changed(recorded, change))


def _with_layers(
    recorded: Json, layers: Mapping[int, BatchNorm], marks: Optional[Mapping[int, str]], named: bool
) -> Json:
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
        name = nodes[behind.get(number, number) if named else number]["name"]
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
        pooling, num_devices, _, timeout = replicas.settings
        written.update(pooling._asdict(), num_devices=num_devices, timeout=timeout)
    if int(attributes["unbiased"]):
        written["running_variance"] = "unbiased"
    return {key: value for key, value in written.items() if value is not None}


def _as_plain_graph(save: Callable[..., Any], symbol: mx.sym.Symbol, *args: Any, **kwargs: Any) -> Any:
    return save(plain(symbol, tells=True), *args, **kwargs)


def _without_graphs(load: Callable[..., None], block: Block, *args: Any, **kwargs: Any) -> None:
    load(block, *args, **kwargs)
    within = list(blocks.iterate(block))
    if not any(hasattr(one, "_replicas") for one in within):
        return
    for one in within:
        for name, parameter in one.params._params.items():  # MXNet has renamed only the entries
            if parameter.name != name:
                parameter.name, parameter._var = name, None
        if isinstance(one, HybridBlock):
            one._clear_cached_op()


def _of_plain_graphs(export: Callable, block: HybridBlock, *args: Any, **kwargs: Any) -> Any:
    recorded = block._cached_graph
    if not recorded:  # before the first forward; MXNet raises an error
        return export(block, *args, **kwargs)
    symbol = plain(recorded[1])
    ignored = gammas_without_effect(json_of(symbol))
    given = [parameter for is_input, parameter in block._cached_op_args if not is_input and parameter.name in ignored]
    written = [one for one in given if any((array.asnumpy() != 1).any() for array in one.list_data())]
    for parameter in written:
        parameter.set_data(np.ones(parameter.shape, parameter.dtype))
    if written:
        names = arguments.some([one.name for one in written], ", ")
        warnings.warn(
            f"export wrote 1 into gammas that were not 1: {names}. Their layers have scale=False (fix_gamma): MXNet "
            "uses 1 for them, but ONNX and other exporters use the stored values",
            stacklevel=3,
        )
    block._cached_graph = recorded[0], symbol
    try:
        return export(block, *args, **kwargs)
    finally:
        block._cached_graph = recorded


# ---- gammas that do not count ----------------------------------------------------------------------------------
# MXNet takes 1 in layers with ``scale=False``, which is ``fix_gamma`` in graphs. Exporters read the stored values.


def gammas_without_effect(graph: Json) -> List[str]:
    """Returns the variables of a graph that are a gamma without effect, and nothing else."""
    ignored: Dict[str, None] = {}
    counted: Set[str] = set()
    for _, within, node in walk(graph):
        nodes = within["nodes"]
        passed_on = {one["name"] for body in node.get("subgraphs", ()) for one in body["nodes"]}
        counted.update(nodes[at]["name"] for at, *_ in within["heads"])
        for place, (at, *_) in enumerate(node["inputs"]):
            name = nodes[at]["name"]
            if nodes[at]["op"] != "null" or name in passed_on:  # a body has variables of the same names
                continue
            if place == 1 and has_fixed_gamma(node):
                ignored[name] = None
            else:
                counted.add(name)
    return [name for name in ignored if name not in counted]


def has_fixed_gamma(node: Json) -> bool:
    """Whether the node is a batch normalisation whose gamma counts as 1, which is also the default."""
    return node["op"] in blocks.OPERATORS and bool(attribute(node["attrs"], "fix_gamma", True))
