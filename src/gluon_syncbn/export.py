"""What ``net.export`` writes: plain BatchNorm in the places of the nodes of this package.

A node of this package belongs to its process, which has the layer that it meets in. A file is for others, which predict
with the running statistics, as a BatchNorm does.
"""

from __future__ import annotations

import json
from typing import Any, Callable, List, Optional

import mxnet as mx
import numpy as np
from mxnet.gluon import HybridBlock

from . import patches
from .nodes import Entry, Graph, Json
from .op import NAME, Role


def install() -> None:
    """Changes ``HybridBlock.export``, which has no hook: a layer within a net cannot know that the net is exported.
    Nothing is changed before there is a layer.
    """
    patches.replace_once(HybridBlock, "export", _of_plain_graphs)


def passing(node: Json, inputs: List[Entry]) -> Optional[List[Entry]]:
    """What stands for a node that only serves a synchronised one; None for any other."""
    attributes = node.get("attrs", {})
    if node["op"] == "SwapAxis" and attributes.get("dim1", "0") == attributes.get("dim2", "0"):
        return [inputs[0]]  # what guards a synchronised node (op.py), and changes nothing
    if _is_ours(node) and int(attributes["role"]) == Role.MEET:
        return [inputs[0], []]
    return None


def plain(symbol: mx.sym.Symbol) -> Optional[mx.sym.Symbol]:
    """The graph with ``BatchNorm`` for each synchronised node, under its name and on its inputs; None without any."""
    recorded = json.loads(symbol.tojson())
    if not any(_is_ours(node) for node in recorded["nodes"]):
        return None

    def fold(_: int, node: Json, inputs: List[Entry]) -> Optional[List[Entry]]:
        through = passing(node, inputs)
        if through is not None or not _is_ours(node):
            return through
        given = node["attrs"]
        attributes = {key: value for key, value in given.items() if key.startswith("__")}  # MXNet's for any node
        attributes.update({key: given[key] for key in ("axis", "eps")})
        attributes["momentum"] = str(np.float32(given["momentum"]))  # op.py writes all its digits
        attributes["fix_gamma"] = str(bool(int(given["fix_gamma"])))
        number = graph.add({**node, "op": "BatchNorm", "attrs": attributes}, inputs[:3] + inputs[-2:])
        return [[number, 0, 0]]

    graph = Graph()
    graph.heads = graph.grow(recorded, fold)
    return mx.sym.load_json(json.dumps(graph.json(recorded)))


def _is_ours(node: Json) -> bool:
    return node["op"] == "Custom" and node["attrs"]["op_type"] == NAME


def _of_plain_graphs(export: Callable) -> Callable:
    def exported(block: HybridBlock, *args: Any, **kwargs: Any) -> Any:
        recorded = block._cached_graph  # empty before the first forward, of which MXNet tells
        symbol = plain(recorded[1]) if recorded else None
        if symbol is None:
            return export(block, *args, **kwargs)
        block._cached_graph = recorded[0], symbol
        try:
            return export(block, *args, **kwargs)
        finally:
            block._cached_graph = recorded

    return exported
