"""Warns, when training begins, of layers that compute something else than they were asked for."""

from __future__ import annotations

import warnings
from typing import Any, Dict, List, Sequence

from mxnet.gluon.parameter import Parameter

from ..system.arguments import some
from ..training.replicas import IN_GRAPH, NEVER, UNFUSED, followers_of
from . import blocks

_MEANS = ("running_mean", "moving_mean")


def warn_of(parameters: Sequence[Parameter]) -> None:
    """Warns as the first step of a net begins."""
    for text in (_of_mixed(parameters), _of_eager(parameters), _of_bypassed(parameters)):
        if text:
            warnings.warn(text, stacklevel=5)


def _of_mixed(parameters: Sequence[Parameter]) -> str:
    """A net that mixes synchronised and plain layers, which is rarely intended. Layers whose gamma is not trained
    are frozen and do not count, nor do nets on one device. Layers that the trainer does not know count where they
    have run within a block of the net, or are operators in its graph.
    """
    if not any(layer.meets() for layer in followers_of(parameters)):
        return ""
    layers = _layers(parameters)
    synchronised = [mean for mean, *_ in layers.values() if followers_of([mean])]
    trained = [stem for stem, (_, gamma, _) in layers.items() if gamma is not None and gamma.grad_req != "null"]
    plain = [stem for stem in trained if not followers_of([layers[stem][0]])]
    plain += _run_within(parameters) + _called(parameters)
    if not plain:
        return ""
    return (
        f"{len(synchronised)} of {len(synchronised) + len(plain)} layers of batch normalisation are synchronised, and "
        f"these are not: {some(plain, ', ')}. gluon_syncbn.convert(net) reaches layers that norm_layer= does not, and "
        "after a forward those in attributes of other objects; gluon_syncbn.summary(net) lists all"
    )


def _of_eager(parameters: Sequence[Parameter]) -> str:
    """Layers that were to be fused, and ran without a graph, where nothing is fused."""
    layers = followers_of(parameters)
    eager = [layer.name for layer in layers if layer.ran == UNFUSED]
    if not eager or any(layer.ran == IN_GRAPH for layer in layers):  # some may stay outside of graphs on purpose
        return ""
    return (
        f"{some(eager, ', ')}: fuse=True fuses nothing here, because no graph contains these layers. Call "
        "net.hybridize() before the first step"
    )


def _of_bypassed(parameters: Sequence[Parameter]) -> str:
    """Layers that got gradients, which are fresh in this step, and were never computed: something else was."""
    bypassed = []
    for mean, *trained in _layers(parameters).values():
        layers = followers_of([mean])
        fresh = [
            p for p in trained if p is not None and p.grad_req != "null" and all(d._fresh_grad for d in p._data or ())
        ]
        if fresh and any(layer.meets() for layer in layers) and all(layer.ran == NEVER for layer in layers):
            bypassed.append(layers[0].name)
    if not bypassed:
        return ""
    return (
        f"{some(bypassed, ', ')}: the parameters of these synchronised layers got gradients, but the layers were not "
        "computed. Something else normalises in their places: call the layers, and if the graph of the net was loaded "
        "or is out of date, call net.hybridize() again"
    )


def _layers(parameters: Sequence[Parameter]) -> Dict[str, List[Any]]:
    """Returns the running mean, gamma and beta of each layer, as their names tell; None for one that is not there."""
    by_name = {parameter.name: parameter for parameter in parameters}
    means = {name[: -len(mean)]: by_name[name] for name in by_name for mean in _MEANS if name.endswith(mean)}
    return {stem[:-1]: [mean, by_name.get(f"{stem}gamma"), by_name.get(f"{stem}beta")] for stem, mean in means.items()}


def _called(parameters: Sequence[Parameter]) -> List[str]:
    """Returns the BatchNorm operators in graphs of the net whose running statistics no name tells."""
    found: Dict[str, None] = {}
    for block in blocks.with_graphs_of({id(parameter) for parameter in parameters}):
        given = {parameter.name: parameter for is_input, parameter in block._cached_op_args if not is_input}
        for node in blocks.recorded(block):
            if node.operator in blocks.OPERATORS and not node.frozen:
                gamma, mean = given.get(node.inputs[1]), given.get(node.inputs[3])
                trains = gamma is None or gamma.grad_req != "null"
                if trains and (mean is None or not mean.name.endswith(_MEANS)):
                    found[node.name] = None
    return list(found)


def _run_within(parameters: Sequence[Parameter]) -> List[str]:
    """Returns the layers that are not synchronised, that the trainer does not know, and that a block with synchronised
    parameters has called.
    """
    known = {id(parameter) for parameter in parameters}
    found: Dict[str, None] = {}
    for block, layers in list(blocks.called.items()):
        plain = [
            layer.name
            for layer in list(layers)
            if id(layer.running_mean) not in known
            and not followers_of([layer.running_mean])
            and layer.gamma.grad_req != "null"
        ]
        if plain and followers_of(one for one in block.collect_params().values() if id(one) in known):
            found.update(dict.fromkeys(plain))
    return list(found)
