"""Fuses synchronised layers in graphs with the operators behind them: an activation, and an addition before it.

A hybridized block is a graph before it runs, so no list of known blocks is needed. Without a graph, a layer cannot know
the operator that follows.
"""

from __future__ import annotations

from typing import Any, Callable, Dict, List, NamedTuple, Optional, Set, Tuple

import mxnet as mx
from mxnet.gluon import HybridBlock
from mxnet.gluon.block import _flatten

from ..activation import RELU, RELU6, SLOPES, Activation, described, invertible
from ..mxnet_side import patches
from ..mxnet_side.export import ADDED, EPILOGUE, is_guard, is_ours
from ..mxnet_side.nodes import Entry, Graph, Json, json_of, symbol_of, uses
from ..system import kinds
from ..training.replicas import Replicas


def install() -> None:
    """Changes ``HybridBlock._get_graph``: Gluon records each graph through it and has no hook there."""
    patches.replace(_of_fused_graphs, HybridBlock, "_get_graph")


class Chain(NamedTuple):
    """Nodes of a graph that become one, by number: normalisation, guard of its output, addition, activation."""

    layer: int
    guard: Optional[int]
    addition: Optional[int]
    activation: Activation


def fused(symbol: mx.sym.Symbol, inputs: Dict[str, mx.nd.NDArray]) -> Optional[mx.sym.Symbol]:
    """Returns the graph in which layers with ``fuses`` have absorbed the operators behind them; None if unchanged."""
    recorded = json_of(symbol)
    if not any(node.get("attrs", {}).get("fuses") == "1" for node in recorded["nodes"]):
        return None
    casts = _alike(symbol, recorded, inputs, "amp_multicast")
    if casts:
        recorded = Graph().rewrite(recorded, lambda number, _, given: given if number in casts else None)
        symbol = kinds.like(symbol_of(recorded), symbol)
    sums = {number for number, node in enumerate(recorded["nodes"]) if node["op"] == "elemwise_add"}
    sums |= _alike(symbol, recorded, inputs, "_npi_add")  # which may mix shapes or types
    chains = _chains(recorded, sums)
    if not chains:
        return None
    absorbed: Dict[int, List[Entry]] = {}  # input entries, in the new graph
    parts = {number for chain in chains.values() for number in chain[:3] if number is not None}
    graph = Graph()

    def fold(number: int, node: Json, inputs: List[Entry]) -> Optional[List[Entry]]:
        if number in parts:
            absorbed[number] = inputs
            return [[]]
        chain = chains.get(number)
        if chain is None:
            return None
        layer = recorded["nodes"][chain.layer]
        epilogue = {EPILOGUE: node["name"]}
        given = absorbed[chain.layer]
        if chain.addition is not None:
            epilogue[ADDED] = recorded["nodes"][chain.addition]["name"]
            (addend,) = [entry for entry in absorbed[chain.addition] if entry]
            if chain.guard is not None and not is_guard(graph.nodes[addend[0]]):
                guard = {"op": "SwapAxis", "name": f"{layer['name']}_addend", "attrs": {"dim1": "0", "dim2": "0"}}
                addend = [graph.add(guard, [addend]), 0, 0]
            given = [*given[:3], addend, *given[3:]]
        attributes = {**layer["attrs"], **epilogue, **chain.activation.attributes()}
        adds = chain.addition is not None
        inplace = attributes["inplace"] == "1" and invertible(chain.activation, adds)
        attributes.update(adds=str(int(adds)), inplace=str(int(inplace)), fuses="0")  # it absorbs nothing more
        at = graph.add({**layer, "attrs": attributes}, given)
        replicas = Replicas.of_token(attributes["layer"])
        if replicas is not None:
            replicas.taken_in = described(chain.activation, adds, inplace)
        if chain.guard is not None:
            at = graph.add(recorded["nodes"][chain.guard], [[at, 0, 0]])
        return [[at, 0, 0]]

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


def _chains(graph: Json, sums: Set[int]) -> Dict[int, Chain]:
    """Returns the chains by the number of their last node. An output that is used elsewhere too is not absorbed."""
    nodes = graph["nodes"]
    used = uses(graph)

    def only(entry: Entry) -> bool:
        return used[entry[0], entry[1]] == 1

    def layer_of_entry(entry: Entry) -> Optional[Tuple[int, Optional[int]]]:
        """Returns the normalisation with this output, and its guard."""
        if not only(entry):
            return None
        number, guard = entry[0], None
        if is_guard(nodes[number]) and only(nodes[number]["inputs"][0]):
            number, guard = nodes[number]["inputs"][0][0], number
        fuses = is_ours(nodes[number]) and nodes[number]["attrs"].get("fuses") == "1"
        return (number, guard) if fuses else None

    chains: Dict[int, Chain] = {}
    for number, node in enumerate(nodes):
        activation = _activation_of(node)
        if activation is None:
            continue
        entry = node["inputs"][0]
        addition = entry[0] if entry[0] in sums and only(entry) else None
        for summand in [entry] if addition is None else nodes[addition]["inputs"]:
            found = layer_of_entry(summand)
            if found is None:
                continue
            chains[number] = Chain(*found, addition, activation)
            break
    return chains


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


def _of_fused_graphs(get: Callable, block: HybridBlock, *args: Any) -> Any:
    inputs, symbol = get(block, *args)
    arrays = [array for array in _flatten(args, "input")[0] if array is not None]
    new = fused(symbol, dict(zip([one.name for one in inputs], arrays)))
    if new is not None:
        block._cached_graph = inputs, new
    return block._cached_graph
