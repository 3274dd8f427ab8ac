"""Writes plain BatchNorm in place of the nodes of this package, for ``net.export`` and for ``save`` and ``tojson`` of
a symbol.

A node of this package belongs to its process, which has its layer. A file is for other processes, which predict with
the running statistics, as a BatchNorm does. The file of a symbol also marks the nodes that were synchronised, so that
training may continue from a checkpoint of a ``Module``.
"""

from __future__ import annotations

import json
from typing import Any, Callable, Dict, List, Optional

import mxnet as mx
import numpy as np
from mxnet.gluon import Block, HybridBlock

from ..activation import NONE, Activation
from ..training.replicas import Replicas
from . import blocks, gamma, patches
from .nodes import Entry, Graph, Json, json_of, symbol_of
from .op import NAME

#: Attributes of a node that has absorbed other nodes (`fusion`): the names of these.
ADDED, EPILOGUE = "__added__", "__behind__"
#: Attribute of a ``BatchNorm`` in a file that was a synchronised node: the arguments of the layer, in JSON. In a node
#: of this package, those that only executors need.
SYNCHRONISED = "__gluon_syncbn__"


def install() -> None:
    """Changes the functions that write graphs, or show their layers, which have no hook. A layer within a net cannot
    know that the net is exported. Nothing is changed before there is a layer.

    ``Block.save`` writes a graph by ``tojson``, and ``Block.load`` puts it into the net. There it would take the places
    of the net's layers, and train without them.
    """
    patches.replace(_of_plain_graphs, HybridBlock, "export")
    patches.replace(_as_plain_graph, mx.sym.Symbol, "save", "tojson")
    patches.replace(_without_graphs, Block, "load")
    patches.replace(_of_plain_operators, mx.visualization, "print_summary", "plot_network")


def passing(node: Json, inputs: List[Entry]) -> Optional[List[Entry]]:
    """Returns the inputs of a node that only serves a synchronised one; None for any other node."""
    if is_guard(node):
        return [inputs[0]]
    if blocks.is_meeting(node):
        mask = inputs[-1] if int(node["attrs"]["masks"]) else []
        return [inputs[0], mask, *inputs[3:]]  # the mask in the place of the batch's statistics
    return None


def is_guard(node: Json) -> bool:
    """Whether the node guards a synchronised node (op.py), and changes nothing."""
    attributes = node.get("attrs", {})
    return node["op"] == "SwapAxis" and attributes.get("dim1", "0") == attributes.get("dim2", "0")


def plain(symbol: mx.sym.Symbol, tells: bool = False) -> mx.sym.Symbol:
    """Returns the graph with ``BatchNorm`` for each synchronised node, with its name and inputs.

    ``tells``: each of them has an attribute that says that it was synchronised.
    """
    recorded = json_of(symbol)
    if not any(is_ours(node) for node in recorded["nodes"]):
        return symbol

    names = names_of_outputs(recorded) if tells else {}

    def fold(number: int, node: Json, inputs: List[Entry]) -> Optional[List[Entry]]:
        through = passing(node, inputs)
        if through is not None or not is_ours(node):
            return through
        given = node["attrs"]
        # MXNet's for any node
        of_any = {k: v for k, v in given.items() if k.startswith("__") and k not in (ADDED, EPILOGUE, SYNCHRONISED)}
        attributes = {**of_any, "axis": given["axis"], "eps": given["eps"]}
        if tells:
            attributes[SYNCHRONISED] = json.dumps(_arguments(given))
        attributes["momentum"] = str(np.float32(given["momentum"]))  # op.py writes all its digits
        for flag in ("fix_gamma", "use_global_stats"):
            attributes[flag] = str(bool(int(given[flag])))
        first = last = graph.add({**node, "op": "BatchNorm", "attrs": attributes}, inputs[:3] + inputs[-2:])
        if int(given["adds"]):
            name = given.get(ADDED, f"{node['name']}_add")
            last = graph.add({"op": "elemwise_add", "name": name, "attrs": of_any}, [[first, 0, 0], inputs[3]])
        activation = Activation.of_attributes(given)
        if activation != NONE:
            name, z = given.get(EPILOGUE, f"{node['name']}_activation"), [last, 0, 0]
            behind = json_of(activation.apply(mx.sym, mx.sym.var("z")))
            for place, part in enumerate(behind["nodes"]):
                part["name"] = f"{name}_{place}"
                part.setdefault("attrs", {}).update(of_any)
            graph.append(behind, lambda _, part, __: [z] if part["op"] == "null" else None)
            last = len(graph.nodes) - 1
            graph.nodes[last]["name"] = name
        if tells:  # who goes on with a file finds outputs by name
            name = names.get(number, node["name"])
            graph.nodes[first]["name"], graph.nodes[last]["name"] = f"{name}_norm", name
        return [[last, 0, 0]]

    graph = Graph()
    return symbol_of(graph.rewrite(recorded, fold))


def names_of_outputs(recorded: Json) -> Dict[int, str]:
    """Returns the names of guards by the numbers of the nodes before them. MXNet names the output after the guard."""
    return {node["inputs"][0][0]: node["name"] for node in recorded["nodes"] if is_guard(node)}


def is_ours(node: Json) -> bool:
    return node["op"] == "Custom" and node["attrs"]["op_type"] == NAME


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


def _of_plain_operators(show: Callable[..., Any], symbol: mx.sym.Symbol, *args: Any, **kwargs: Any) -> Any:
    return show(plain(symbol) if isinstance(symbol, mx.sym.Symbol) else symbol, *args, **kwargs)  # else an error


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
    ignored = gamma.names(json_of(symbol))
    parameters = [parameter for is_input, parameter in block._cached_op_args if not is_input]
    gamma.write_ones("export", [parameter for parameter in parameters if parameter.name in ignored], 5)
    block._cached_graph = recorded[0], symbol
    try:
        return export(block, *args, **kwargs)
    finally:
        block._cached_graph = recorded
