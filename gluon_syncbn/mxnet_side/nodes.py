"""Reads and builds graphs in the form that MXNet writes into files."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, Callable, Dict, List, Optional, Tuple

import mxnet as mx

from ..training.replicas import Replicas

Json = Dict[str, Any]
Entry = List[int]  # an output: its node, its number there, and the version of the array that the node overwrites
#: Replaces a node, given its number, the node and its inputs: an entry for each output; None copies the node.
Rule = Callable[[int, Json, List[Entry]], Optional[List[Entry]]]

_tojson = mx.sym.Symbol.tojson  # `export` replaces it by a function that writes plain operators


class Graph:
    """A graph that is being built, in the form of MXNet's files."""

    def __init__(self) -> None:
        self.nodes: List[Json] = []

    def add(self, node: Json, inputs: List[Entry]) -> int:
        self.nodes.append({**node, "inputs": inputs})
        return len(self.nodes) - 1

    def append(self, graph: Json, rule: Rule) -> List[Entry]:
        """Adds the nodes of another graph, or their replacements. Returns the entries of its outputs here."""
        found: List[Optional[List[Entry]]] = []
        copies: Dict[int, int] = {}

        def here(entry: Entry) -> Entry:
            number, output, version = entry
            entries = found[number]
            return [copies[number], output, version] if entries is None else entries[output]

        for number, node in enumerate(graph["nodes"]):
            inputs = [here(entry) for entry in node["inputs"]]
            found.append(rule(number, node, inputs))
            if found[number] is None:
                copies[number] = self.add(node, inputs)
        return [here(entry) for entry in graph["heads"]]

    def rewrite(self, graph: Json, rule: Rule) -> Json:
        """Returns another graph with the replacements."""
        heads = self.append(graph, rule)
        variables = [number for number, node in enumerate(self.nodes) if node["op"] == "null"]
        return {"nodes": self.nodes, "arg_nodes": variables, "heads": heads, "attrs": graph["attrs"]}


def json_of(symbol: mx.sym.Symbol) -> Json:
    """Returns the graph of a symbol, with the nodes of this package and those of mixed precision.

    By default, MXNet's ``Symbol.tojson`` removes the latter from a copy of the graph, which it never frees.
    """
    recorded: Json = json.loads(_tojson(symbol, remove_amp_cast=False))
    for node in recorded["nodes"]:
        if node["op"] == "Custom" and "call" in node["attrs"]:  # an eager call; see op.py
            number = node["attrs"].pop("call")
            layer = Replicas.by_call.get(number)
            if layer is None:
                gone = "a SyncBatchNorm that this graph has recorded is gone. Keep the layer as long as the graph."
                raise mx.MXNetError(gone)
            node["attrs"].update(layer.attributes[number])
    return recorded


def symbol_of(graph: Json) -> mx.sym.Symbol:
    return mx.sym.load_json(json.dumps(graph))


def uses(graph: Json) -> Counter:
    """Counts the uses of each output, by node and number there."""
    entries = [entry for node in graph["nodes"] for entry in node["inputs"]] + graph["heads"]
    return Counter((number, output) for number, output, *_ in entries)


def layers_of(symbol: mx.sym.Symbol) -> List[Tuple[Replicas, Dict[str, str]]]:
    """Returns the layers of this process in a graph, each with the attributes of its node."""
    given = [node.get("attrs", {}) for node in json_of(symbol)["nodes"]]
    found = [(Replicas.by_token.get(attributes.get("layer", "")), attributes) for attributes in given]
    return [(layer, attributes) for layer, attributes in found if layer is not None]


class Synchronised(mx.sym.Symbol):
    """A graph for executors, which keeps its layers alive, each with the name of its running mean. An executor has a
    copy.
    """

    __slots__ = ["layers"]
    layers: List[Tuple[str, Any]]

    @classmethod
    def from_symbol(cls, symbol: mx.sym.Symbol, layers: List[Tuple[str, Any]]) -> Synchronised:
        """Instead of the symbol, which nobody may use any more."""
        synchronised = cls(symbol.handle)
        symbol.handle = None  # which has another owner now
        synchronised.layers = layers
        return synchronised

    def __deepcopy__(self, memo: Any) -> Synchronised:
        return self.from_symbol(super().__deepcopy__(memo), self.layers)
