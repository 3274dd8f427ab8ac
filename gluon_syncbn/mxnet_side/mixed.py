"""Warns, when training begins, of layers that compute something else than they were asked for."""

from __future__ import annotations

import warnings
from typing import Any, Dict, Iterator, List, Sequence

from mxnet.gluon.parameter import Parameter

from ..system.arguments import some
from ..training.replicas import IN_GRAPH, NEVER, UNFUSED, Replicas
from . import blocks, callers
from .nodes import json_of

_MEANS = ("running_mean", "moving_mean")


def warn_of(parameters: Sequence[Parameter]) -> None:
    """Warns once of each of these, as its first step begins:

    - a net that mixes synchronised and plain layers, which is rarely intended;
    - layers that were to be fused, and ran without a graph, where nothing is fused;
    - layers that got gradients, and were never computed: the net computes something else with their parameters.
    """
    for text in (_of_mixed(parameters), _of_eager(parameters), _of_bypassed(parameters)):
        if text:
            warnings.warn(text, stacklevel=5)


def _of_mixed(parameters: Sequence[Parameter]) -> str:
    """Layers whose gamma is not trained are frozen and do not count, nor do nets on one device. Layers that the trainer
    does not know count where they have run within a block of the net, or are operators in its graph.
    """
    by_name = {parameter.name: parameter for parameter in parameters}
    plain, synchronised = [], 0
    for name, parameter in by_name.items():
        suffix = next((mean for mean in _MEANS if name.endswith(mean)), None)
        if suffix is None:
            continue
        gamma = by_name.get(name[: -len(suffix)] + "gamma")
        if _followers(parameter):
            synchronised += 1
        elif gamma is not None and gamma.grad_req != "null":
            plain.append(name[: -len(suffix) - 1])
    if not any(layer.meets() for layer in _layers(parameters)):
        return ""
    plain += _run_within(parameters)
    plain += _called(parameters)
    if not plain:
        return ""
    return (
        f"{synchronised} of {synchronised + len(plain)} layers of batch normalisation are synchronised, and these "
        f"are not: {some(plain, ', ')}. gluon_syncbn.convert(net) reaches layers that norm_layer= does not, and after "
        "a forward those in attributes of other objects; gluon_syncbn.summary(net) lists all"
    )


def _of_eager(parameters: Sequence[Parameter]) -> str:
    layers = list(_layers(parameters))
    eager = [layer.name for layer in layers if layer.ran == UNFUSED]
    if not eager or any(layer.ran == IN_GRAPH for layer in layers):  # some may stay outside of graphs on purpose
        return ""
    return (
        f"{some(eager, ', ')}: fuse=True fuses nothing here, because no graph contains these layers. Call "
        "net.hybridize() before the first step"
    )


def _of_bypassed(parameters: Sequence[Parameter]) -> str:
    """A gradient that is fresh was computed in this step."""
    own = {parameter.name: _followers(parameter) for parameter in parameters}
    bypassed = []
    for parameter in parameters:
        stem, _, kind = parameter.name.rpartition("_")
        layers = [layer for mean in _MEANS for layer in own.get(f"{stem}_{mean}", []) if kind in ("gamma", "beta")]
        fresh = parameter.grad_req != "null" and all(array._fresh_grad for array in parameter._data or ())
        if fresh and any(layer.meets() for layer in layers) and all(layer.ran == NEVER for layer in layers):
            bypassed.append(layers[0].name)
    if not bypassed:
        return ""
    return (
        f"{some(list(dict.fromkeys(bypassed)), ', ')}: the parameters of these synchronised layers got gradients, but "
        "the layers were not computed. Something else normalises in their places: call the layers, and if the graph of "
        "the net was loaded or is out of date, call net.hybridize() again"
    )


def _followers(parameter: Parameter) -> List[Replicas]:
    return getattr(parameter, "_followers", [])


def _layers(parameters: Sequence[Parameter]) -> Iterator[Replicas]:
    for parameter in parameters:
        yield from _followers(parameter)


def _called(parameters: Sequence[Parameter]) -> List[str]:
    """Returns the BatchNorm operators in graphs of the net whose running statistics no name tells."""
    found: Dict[str, None] = {}
    for block in callers.with_graphs_of({id(parameter) for parameter in parameters}):
        given = {parameter.name: parameter for is_input, parameter in block._cached_op_args if not is_input}
        nodes: List[Dict[str, Any]] = json_of(block._cached_graph[1])["nodes"]
        for node in nodes:
            if node["op"] in blocks.OPERATORS and not blocks.is_frozen(node):
                gamma, mean = (given.get(nodes[node["inputs"][place][0]]["name"]) for place in (1, 3))
                trains = gamma is None or gamma.grad_req != "null"
                if trains and (mean is None or not mean.name.endswith(_MEANS)):
                    found[node["name"]] = None
    return list(found)


def _run_within(parameters: Sequence[Parameter]) -> List[str]:
    """Returns the layers that are not synchronised, that the trainer does not know, and that a block with synchronised
    parameters has called.
    """
    known = {id(parameter) for parameter in parameters}
    synchronised = {id(parameter) for parameter in parameters if getattr(parameter, "_followers", [])}
    found: Dict[str, None] = {}
    for block, called in callers.every():
        plain = [
            layer
            for layer in called
            if id(layer.running_mean) not in known
            and not getattr(layer.running_mean, "_followers", [])
            and layer.gamma.grad_req != "null"
        ]
        if plain and any(id(parameter) in synchronised for parameter in block.collect_params().values()):
            found.update((layer.name, None) for layer in plain)
    return list(found)
