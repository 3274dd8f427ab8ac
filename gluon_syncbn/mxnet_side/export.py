"""Makes ``net.export`` write plain BatchNorm in place of the nodes of this package.

A node of this package belongs to its process, which has the node's layer. A file is for other processes, which predict
with the running statistics, as a BatchNorm does.
"""

from __future__ import annotations

import json
from typing import Any, Callable, List, Optional

import mxnet as mx
import numpy as np
from mxnet.gluon import HybridBlock

from ..activation import NONE, Activation
from . import gamma, patches
from .nodes import Entry, Graph, Json
from .op import NAME, Role

#: Attributes of a node that has absorbed other nodes (`fusion`): the names of these.
ADDED, BEHIND = "__added__", "__behind__"


def install() -> None:
    """Changes ``HybridBlock.export``, which has no hook: a layer within a net cannot know that the net is exported.
    The first layer of the process triggers the change.
    """
    patches.replace_once(HybridBlock, "export", _of_plain_graphs)


def passing(node: Json, inputs: List[Entry]) -> Optional[List[Entry]]:
    """Returns the inputs of a node that only serves a synchronised one; None for any other node."""
    if is_guard(node):
        return [inputs[0]]
    if is_ours(node) and int(node["attrs"]["role"]) == Role.MEET:
        return [inputs[0], [], *inputs[3:]]
    return None


def is_guard(node: Json) -> bool:
    """Whether the node guards a synchronised node (op.py), and changes nothing."""
    attributes = node.get("attrs", {})
    return node["op"] == "SwapAxis" and attributes.get("dim1", "0") == attributes.get("dim2", "0")


def plain(symbol: mx.sym.Symbol) -> Optional[mx.sym.Symbol]:
    """Returns the graph with ``BatchNorm`` for each synchronised node, with its name and inputs; None without any."""
    recorded = json.loads(symbol.tojson())
    if not any(is_ours(node) for node in recorded["nodes"]):
        return None

    def fold(_: int, node: Json, inputs: List[Entry]) -> Optional[List[Entry]]:
        through = passing(node, inputs)
        if through is not None or not is_ours(node):
            return through
        given = node["attrs"]
        # attributes that MXNet allows for any node
        of_any = {k: v for k, v in given.items() if k.startswith("__") and k not in (ADDED, BEHIND)}
        attributes = {**of_any, "axis": given["axis"], "eps": given["eps"]}
        attributes["momentum"] = str(np.float32(given["momentum"]))  # op.py writes all its digits
        attributes["fix_gamma"] = str(bool(int(given["fix_gamma"])))
        number = graph.add({**node, "op": "BatchNorm", "attrs": attributes}, inputs[:3] + inputs[-2:])
        if int(given["adds"]):
            name = given.get(ADDED, f"{node['name']}_add")
            number = graph.add({"op": "elemwise_add", "name": name, "attrs": of_any}, [[number, 0, 0], inputs[3]])
        activation = Activation.of_attributes(given)
        if activation != NONE:
            behind = json.loads(activation.of(mx.sym, mx.sym.var("z")).tojson())["nodes"][-1]
            behind["name"] = given.get(BEHIND, f"{node['name']}_activation")
            behind["attrs"].update(of_any)
            number = graph.add(behind, [[number, 0, 0]])
        return [[number, 0, 0]]

    graph = Graph()
    graph.heads = graph.grow(recorded, fold)
    return mx.sym.load_json(json.dumps(graph.json(recorded)))


def is_ours(node: Json) -> bool:
    return node["op"] == "Custom" and node["attrs"]["op_type"] == NAME


def _of_plain_graphs(export: Callable) -> Callable:
    def exported(block: HybridBlock, *args: Any, **kwargs: Any) -> Any:
        recorded = block._cached_graph  # empty before the first forward; MXNet raises an error then
        symbol = plain(recorded[1]) if recorded else None
        if recorded:
            ignored = gamma.names(json.loads((recorded[1] if symbol is None else symbol).tojson()))
            parameters = [parameter for is_input, parameter in block._cached_op_args if not is_input]
            gamma.write_ones("export", [parameter for parameter in parameters if parameter.name in ignored])
        if symbol is None:
            return export(block, *args, **kwargs)
        block._cached_graph = recorded[0], symbol
        try:
            return export(block, *args, **kwargs)
        finally:
            block._cached_graph = recorded

    return exported
