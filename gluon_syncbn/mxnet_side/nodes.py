"""Reads and changes graphs in the form that MXNet writes into files. MXNet reads nodes in any order, and drops those
that no output needs.
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from typing import Any, Dict, Iterator, List, Mapping, Optional, Set, Tuple

import mxnet as mx

from ..system import arguments
from ..training.replicas import Replicas
from .op import NAME

Json = Dict[str, Any]
Entry = List[int]  # an output: its node, its number there, and the version of the array that the node overwrites


def walk(graph: Json, numbers: Optional[Iterator[int]] = None) -> Iterator[Tuple[int, Json, Json]]:
    """Yields each node, its number in the walk, and the graph that it is in: the body of a loop or a condition is a
    graph in the node that runs it, and comes before it.
    """
    numbers = itertools.count() if numbers is None else numbers
    for node in graph["nodes"]:
        for body in node.get("subgraphs", ()):
            yield from walk(body, numbers)
        yield next(numbers), graph, node


def json_of(symbol: mx.sym.Symbol) -> Json:
    """Returns the graph of a symbol, with the nodes of this package and those of mixed precision.

    By default, MXNet's ``Symbol.tojson`` removes the latter from a copy of the graph, which it never frees, and which
    `export` makes plain.
    """
    recorded: Json = json.loads(mx.sym.Symbol.tojson(symbol, remove_amp_cast=False))
    for _, _, node in walk(recorded):
        node.setdefault("attrs", {})
        if is_ours(node) and "call" in node["attrs"]:  # see op.py
            raise mx.MXNetError("this graph has eager calls of a SyncBatchNorm: make it by net(mx.sym.var('data'))")
    return recorded


def number_nodes(graph: Json) -> bool:
    """Numbers the nodes of each layer from 0, in the order of the graph, and those that update the same running
    statistics. Says whether this changed a node.

    A node meets the nodes with its number on other contexts and in other processes. So all processes have the same
    numbers, whatever else some of them have recorded.
    """
    count: Counter = Counter()
    updating: Dict[Tuple[int, int], List[Dict[str, str]]] = {}  # by the input
    ours = [(within, node) for _, within, node in walk(graph) if is_ours(node)]
    before = [dict(node["attrs"]) for _, node in ours]
    for within, node in ours:
        attributes = node["attrs"]
        attributes.pop("turn", None)
        attributes["node"] = str(count[attributes["layer"]])
        count[attributes["layer"]] += 1
        frozen = attributes["use_global_stats"] == "1"
        updating.setdefault((id(node if frozen else within), node["inputs"][-1][0]), []).append(attributes)
    for nodes in updating.values():
        for turn, attributes in enumerate(nodes if len(nodes) > 1 else ()):
            attributes["turn"] = str(turn)
    return before != [node["attrs"] for _, node in ours]


def symbol_of(graph: Json) -> mx.sym.Symbol:
    return mx.sym.load_json(json.dumps(graph))


def _entries(graph: Json) -> List[Entry]:
    return [entry for node in graph["nodes"] for entry in node["inputs"]] + graph["heads"]


def uses(graph: Json) -> Counter:
    """Counts the uses of each output, by node and number there."""
    return Counter((number, output) for number, output, *_ in _entries(graph))


def bypass(graph: Json, numbers: Set[int]) -> None:
    """Lets all users of nodes whose outputs are their inputs use the inputs."""
    for entry in _entries(graph):
        while entry[0] in numbers:
            entry[:] = graph["nodes"][entry[0]]["inputs"][entry[1]]


def layers_of(graph: Json) -> List[Tuple[Replicas, Dict[str, str]]]:
    """Returns the layers of this process in a graph, each with the attributes of its node."""
    given = [node["attrs"] for _, _, node in walk(graph) if is_ours(node)]
    found = [(Replicas.of_node(attributes), attributes) for attributes in given]
    return [(layer, attributes) for layer, attributes in found if layer is not None]


# ---- nodes ----------------------------------------------------------------------------------------------------


def operator_of(node: Json) -> str:
    """Returns the operator of a node, for a custom one its ``op_type``."""
    operator: str = node["attrs"]["op_type"] if node["op"] == "Custom" else node["op"]
    return operator


def is_ours(node: Json) -> bool:
    return operator_of(node) == NAME


def is_guard(node: Json) -> bool:
    """Whether the node guards a synchronised node (op.py), and changes nothing."""
    attributes = node["attrs"]
    return node["op"] == "SwapAxis" and attribute(attributes, "dim1", 0) == attribute(attributes, "dim2", 0)


def gives_moments(graph: Json, node: Json) -> bool:
    """Whether the graph uses the mean or the variance that its node of batch normalisation puts out."""
    return any(output in (1, 2) and graph["nodes"][at] is node for at, output in uses(graph))


def attribute(attributes: Mapping[str, str], name: str, default: Any = None) -> Any:
    """Returns the value of an attribute, which may be a text."""
    return arguments.value_of(attributes.get(name, default))
