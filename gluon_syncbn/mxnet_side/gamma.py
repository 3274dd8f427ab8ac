"""Finds gammas that have no effect: MXNet takes 1 in layers with ``scale=False``, which is ``fix_gamma`` in graphs."""

from __future__ import annotations

import warnings
from typing import Callable, Iterable, List, Set

import numpy as np
from mxnet.gluon import Block, Parameter

from ..system import arguments
from . import blocks
from .nodes import Json


def of_layers(net: Block, chosen: Callable[[Block], bool]) -> List[Parameter]:
    """Returns the gammas without effect of the chosen layers, unless they have an effect in another layer."""
    layers = [block for block in blocks.iterate(net) if blocks.is_batch_norm(block)]
    counted = {id(layer.gamma) for layer in layers if not layer._kwargs["fix_gamma"]}
    ignored = {id(layer.gamma): layer.gamma for layer in layers if layer._kwargs["fix_gamma"] and chosen(layer)}
    return [gamma for number, gamma in ignored.items() if number not in counted]


def names(graph: Json) -> List[str]:
    """Returns the variables of a graph that are a gamma without effect, and nothing else."""
    nodes = graph["nodes"]
    ignored: Set[int] = set()
    counted = {at for at, *_ in graph["heads"]}
    for node in nodes:
        for place, (at, *_) in enumerate(node["inputs"]):
            (ignored if place == 1 and is_fixed(node) else counted).add(at)
    return [nodes[at]["name"] for at in sorted(ignored - counted) if nodes[at]["op"] == "null"]


def is_fixed(node: Json) -> bool:
    """Whether the node is a batch normalisation whose gamma counts as 1, which is also the default."""
    return node["op"] in blocks.OPERATORS and node.get("attrs", {}).get("fix_gamma", "True") in ("1", "True")


def write_ones(verb: str, parameters: Iterable[Parameter], stacklevel: int = 4) -> None:
    """Writes 1 where another value is stored, and warns of it once."""
    written = []
    for gamma in parameters:
        if gamma._data is not None and any((array.asnumpy() != 1).any() for array in gamma.list_data()):
            gamma.set_data(np.ones(gamma.shape, gamma.dtype))
            written.append(gamma.name)
    warn(verb, written, stacklevel)


def warn(verb: str, written: List[str], stacklevel: int = 4) -> None:
    if written:
        warnings.warn(
            f"{verb} wrote 1 into gammas that were not 1: {arguments.some(written, ', ')}. Their layers have "
            "scale=False (fix_gamma): MXNet uses 1 for them, but ONNX and other exporters use the stored values",
            stacklevel=stacklevel,
        )
