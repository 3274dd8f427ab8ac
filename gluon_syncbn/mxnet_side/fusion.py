"""Fuses synchronised layers in graphs with the operators behind them: an activation, and an addition before it.

A hybridized block is a graph before it runs, so no list of known blocks is needed. Without a graph, a layer cannot know
the operator that follows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Dict, List, Optional, Set

import mxnet as mx

from ..activation import RELU, RELU6, SLOPES, Activation
from ..settings import Settings
from ..system import kinds
from ..training.replicas import Replicas
from .nodes import Entry, Json, attribute, bypass, is_guard, is_ours, json_of, symbol_of, uses


def fuse(symbol: mx.sym.Symbol, graph: Json, inputs: Dict[str, mx.nd.NDArray]) -> bool:
    """Lets layers with ``fuses`` absorb the operators behind them, and says whether there are such layers. In the body
    of a loop or a condition they absorb nothing. ``symbol`` is the same graph.
    """
    if not any(is_ours(node) and node["attrs"]["fuses"] == "1" for node in graph["nodes"]):
        return False
    casts = _alike(symbol, graph, inputs, "amp_multicast")
    if casts:
        bypass(graph, casts)
        symbol = symbol_of(graph)
        graph.update(json_of(symbol))
    nodes, used = graph["nodes"], uses(graph)
    sums = {number for number, node in enumerate(nodes) if node["op"] == "elemwise_add"}
    sums |= _alike(symbol, graph, inputs, "_npi_add")  # which may mix shapes or types

    def only(entry: Entry) -> bool:  # an output that is used elsewhere too is not absorbed
        return used[entry[0], entry[1]] == 1

    def added(node: Json, inputs: List[Entry]) -> Entry:
        nodes.append({**node, "inputs": inputs})
        return [len(nodes) - 1, 0, 0]

    for number, node in enumerate(list(nodes)):
        activation = _activation_of(node)
        if activation is None:
            continue
        entry = node["inputs"][0]
        addition = entry[0] if entry[0] in sums and only(entry) else None
        for place, summand in enumerate([entry] if addition is None else nodes[addition]["inputs"]):
            guard = nodes[summand[0]] if is_guard(nodes[summand[0]]) else None
            before = summand if guard is None else guard["inputs"][0]
            layer = nodes[before[0]]
            if not (only(summand) and only(before) and is_ours(layer) and layer["attrs"].get("fuses") == "1"):
                continue
            entries = layer["inputs"]
            if addition is not None:
                addend = nodes[addition]["inputs"][1 - place]
                if guard is not None and not is_guard(nodes[addend[0]]):
                    addend = added({**guard, "name": f"{layer['name']}_addend"}, [addend])
                entries = [*entries[:3], addend, *entries[3:]]
            adds = addition is not None
            settings = replace(Settings.from_node(layer["attrs"]), **activation._asdict(), adds=adds, fuses=False)
            attributes = {**layer["attrs"], **settings.to_node()}
            whole = {**layer, "attrs": attributes, "inputs": entries}
            nodes[number] = whole if guard is None else {**guard, "inputs": [added(whole, entries)]}
            replicas = Replicas.of_node(attributes)
            if replicas is not None:
                replicas.taken_in = settings.behind
            break
    return True


def _alike(symbol: mx.sym.Symbol, graph: Json, inputs: Dict[str, mx.nd.NDArray], *operators: str) -> Set[int]:
    """Returns the nodes of these operators whose inputs have one shape and type."""
    nodes = graph["nodes"]
    unsure = {number for number, node in enumerate(nodes) if node["op"] in operators}
    if not unsure:
        return unsure
    internals = kinds.classic(symbol).get_internals()
    _, shapes, _ = internals.infer_shape_partial(**{name: array.shape for name, array in inputs.items()})
    _, types, _ = internals.infer_type_partial(**{name: array.dtype for name, array in inputs.items()})
    places = [tuple(entry[:2]) for entry in json_of(internals)["heads"]]
    known = dict(zip(places, zip(shapes, types)))

    def alike(one: Any, *others: Any) -> bool:
        return all(one == other for other in others) and None not in one and min(one[0], default=0) > 0

    return {at for at in unsure if alike(*(known[tuple(entry[:2])] for entry in nodes[at]["inputs"]))}


def _activation_of(node: Json) -> Optional[Activation]:
    """Returns the activation of a node, if layers support it."""
    attributes = node["attrs"]
    if node["op"] in ("relu", "_npx_relu") or (node["op"] == "Activation" and attributes.get("act_type") == "relu"):
        return RELU
    if node["op"] == "clip" and (attribute(attributes, "a_min"), attribute(attributes, "a_max")) == (0, RELU6.ceiling):
        return RELU6
    if node["op"] == "LeakyReLU" and attributes.get("act_type", "leaky") == "leaky":
        slope = float(attribute(attributes, "slope", 0.25))
        return Activation(slope) if SLOPES[0] <= slope <= SLOPES[1] else None
    return None
