"""Fuses synchronised layers in graphs with the operators behind them: an activation, and an addition before it.

A hybridized block is a graph before it runs, so no list of known blocks is needed. Without a graph, a layer cannot know
the operator that follows.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, Optional, Set, Tuple

import mxnet as mx
from mxnet.gluon import HybridBlock

from ..activation import RELU, RELU6, SLOPES, Activation, described, invertible
from ..mxnet_side import patches
from ..mxnet_side.export import is_guard, is_ours
from ..mxnet_side.nodes import Entry, Graph, Json, json_of, symbol_of, uses
from ..system import kinds
from ..training.replicas import Replicas


def install() -> None:
    """Changes ``HybridBlock._get_graph``, from which Gluon takes a graph that it runs, and has no hook there."""
    patches.replace(_as_fused, HybridBlock, "_get_graph")


def fused(symbol: mx.sym.Symbol, inputs: Dict[str, mx.nd.NDArray]) -> mx.sym.Symbol:
    """Returns the graph in which layers with ``fuses`` have absorbed the operators behind them."""
    recorded = json_of(symbol)
    if not any(node.get("attrs", {}).get("fuses") == "1" for node in recorded["nodes"]):
        return symbol
    casts = _alike(symbol, recorded, inputs, "amp_multicast")
    if casts:
        recorded = Graph().rewrite(recorded, lambda number, _, given: given if number in casts else None)
        symbol = kinds.like(symbol_of(recorded), symbol)
    sums = {number for number, node in enumerate(recorded["nodes"]) if node["op"] == "elemwise_add"}
    sums |= _alike(symbol, recorded, inputs, "_npi_add")  # which may mix shapes or types
    nodes, used = recorded["nodes"], uses(recorded)
    given: List[List[Entry]] = []  # the inputs of each node, in the new graph
    graph = Graph()

    def only(entry: Entry) -> bool:  # an output that is used elsewhere too is not absorbed
        return used[entry[0], entry[1]] == 1

    def fold(number: int, node: Json, inputs: List[Entry]) -> Optional[List[Entry]]:
        given.append(inputs)
        activation = _activation_of(node)
        if activation is None:  # MXNet drops the copies of absorbed nodes, which no output needs
            return None
        entry = node["inputs"][0]
        addition = entry[0] if entry[0] in sums and only(entry) else None
        for place, summand in enumerate([entry] if addition is None else nodes[addition]["inputs"]):
            guard = summand[0] if is_guard(nodes[summand[0]]) else None
            before = summand if guard is None else nodes[guard]["inputs"][0]
            layer, entries = nodes[before[0]], given[before[0]]
            if not (only(summand) and only(before) and is_ours(layer) and layer["attrs"].get("fuses") == "1"):
                continue
            if addition is not None:
                addend = given[addition][1 - place]
                if guard is not None and not is_guard(graph.nodes[addend[0]]):
                    addend = [graph.add({**nodes[guard], "name": f"{layer['name']}_addend"}, [addend]), 0, 0]
                entries = [*entries[:3], addend, *entries[3:]]
            adds = addition is not None
            attributes = {**layer["attrs"], **activation.attributes()}
            inplace = attributes["inplace"] == "1" and invertible(activation, adds)
            attributes.update(adds=str(int(adds)), inplace=str(int(inplace)), fuses="0")  # it absorbs nothing more
            at = graph.add({**layer, "attrs": attributes}, entries)
            replicas = Replicas.by_token.get(attributes["layer"])
            if replicas is not None:
                replicas.taken_in = described(activation, adds, inplace)
            return [[at if guard is None else graph.add(nodes[guard], [[at, 0, 0]]), 0, 0]]
        return None

    return kinds.like(symbol_of(graph.rewrite(recorded, fold)), symbol)


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
    attributes = node.get("attrs", {})
    if node["op"] in ("relu", "_npx_relu") or (node["op"] == "Activation" and attributes.get("act_type") == "relu"):
        return RELU
    if node["op"] == "clip" and (float(attributes["a_min"]), float(attributes["a_max"])) == (0, RELU6.ceiling):
        return RELU6
    if node["op"] == "LeakyReLU" and attributes.get("act_type", "leaky") == "leaky":
        slope = float(attributes.get("slope", 0.25))
        return Activation(slope) if SLOPES[0] <= slope <= SLOPES[1] else None
    return None


def _as_fused(get: Callable, block: HybridBlock, *args: Any) -> Tuple[List[mx.sym.Symbol], mx.sym.Symbol]:
    """The block keeps the other graph, which files are written from."""
    inputs, symbol = get(block, *args)
    return inputs, fused(symbol, dict(zip([one.name for one in inputs], kinds.arrays_of(args))))
