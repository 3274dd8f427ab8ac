"""Warns of nets in which some batch normalisation is synchronised and some is not, which is rarely intended."""

from __future__ import annotations

import warnings
from typing import Dict, List, Sequence

from mxnet.gluon.parameter import Parameter

from ..system.arguments import NAMED
from . import callers

_MEANS = ("running_mean", "moving_mean")


def warn_of(parameters: Sequence[Parameter]) -> None:
    """Warns once, when training begins, if the net mixes synchronised and plain layers.

    Layers whose gamma is not trained are frozen and do not count, nor do nets on one device. Layers that the trainer
    does not know count where they have run within a block of the net.
    """
    by_name = {parameter.name: parameter for parameter in parameters}
    plain, synchronised, replicas = [], 0, 1
    for name, parameter in by_name.items():
        suffix = next((mean for mean in _MEANS if name.endswith(mean)), None)
        if suffix is None:
            continue
        followers = getattr(parameter, "_followers", [])  # a parameter of a layer of this package
        gamma = by_name.get(name[: -len(suffix)] + "gamma")
        if followers:
            synchronised += 1
            replicas = max(replicas, *(2 if one.reaches_other_processes() else one.count() for one in followers))
        elif gamma is not None and gamma.grad_req != "null":
            plain.append(name[: -len(suffix) - 1])
    if synchronised:
        plain += _run_within(parameters)
    if plain and synchronised and replicas > 1:
        some = ", ".join(plain[:NAMED]) + (f" and {len(plain) - NAMED} more" if len(plain) > NAMED else "")
        warnings.warn(
            f"{synchronised} of {synchronised + len(plain)} layers of batch normalisation are synchronised, and these "
            f"are not: {some}. gluon_syncbn.convert(net) reaches layers that norm_layer= does not, and after a forward "
            "those in attributes of other objects; gluon_syncbn.summary(net) lists all",
            stacklevel=4,
        )


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
