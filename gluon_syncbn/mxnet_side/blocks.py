"""The blocks of a network, wherever it holds them, and which of them are batch normalisation."""

from __future__ import annotations

import json
import re
from typing import Any, Dict, Iterator, List, Optional, Set, Tuple

import mxnet as mx
from mxnet.gluon import Block, SymbolBlock
from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm
from mxnet.gluon.nn.basic_layers import _BatchNorm

from ..activation import BatchNormActivation, BatchNormAdd
from ..system import arguments
from . import callers

PARAMETERS = ("gamma", "beta", "running_mean", "running_var")
#: Operators of BatchNorm in a recorded graph; `op_type` where they are custom ones.
OPERATORS = ("BatchNorm", "_contrib_SyncBatchNorm", "_contrib_BatchNormWithReLU")
# What says how an operator computes, not what.
_HOW = {"cudnn_off"}
# What a forward in a class of these computes depends on its layer's settings, and these are known.
_LIBRARIES = {"mxnet", "gluoncv"}


def of(net: Block, seen: Optional[Set[int]] = None) -> Iterator[Block]:
    """Every block once, ``net`` first: children; those that an attribute holds in a list, tuple, set or dictionary,
    which Gluon does not register; and layers of batch normalisation that have run within it, whatever holds them.
    """
    seen = set() if seen is None else seen
    if id(net) in seen:
        return
    seen.add(id(net))
    yield net
    for child in list(net._children.values()):
        yield from of(child, seen)
    for value in _attributes(net):
        for block in _within(value, set()):
            yield from of(block, seen)
    for layer in callers.called_by(net):
        yield from of(layer, seen)


def _attributes(net: Block) -> Iterator[Any]:
    yield from [value for name, value in vars(net).items() if name != "_children"]
    for cls in type(net).__mro__:
        slots = vars(cls).get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            yield getattr(net, name, None)


def _within(value: Any, seen: Set[int]) -> Iterator[Block]:
    if isinstance(value, Block):
        yield value
    elif isinstance(value, (list, tuple, set, frozenset, dict)) and id(value) not in seen:
        seen.add(id(value))
        for entry in list(value.values()) if isinstance(value, dict) else list(value):
            yield from _within(entry, seen)


def is_batch_norm(block: Block) -> bool:
    return isinstance(block, _BatchNorm)


def difference(block: Block) -> str:
    """What this BatchNorm does beyond ``nn.BatchNorm``, ``nn.BatchNormReLU`` and contrib's layer; empty if nothing.

    Found by whose forward it has, and by what that computes: the graph of its ``hybrid_forward`` is one operator on its
    four parameters. A forward of the user's own may compute something else tomorrow, where it looks at a flag.
    """
    cls = type(block)
    if cls in (BatchNormActivation, BatchNormAdd):
        return ""
    if isinstance(block, ContribSyncBatchNorm):  # not traced: `replacements` may have its operator
        return "" if cls is ContribSyncBatchNorm else "it is a subclass of contrib's SyncBatchNorm"
    for name in ("forward", "__call__"):
        if getattr(cls, name) is not getattr(_BatchNorm, name):
            return f"it has a {name} of its own"
    owner = next(one for one in cls.__mro__ if "hybrid_forward" in vars(one))
    if owner.__module__.partition(".")[0] not in _LIBRARIES:
        return "it has a hybrid_forward of its own"
    if set(block._reg_params) != set(PARAMETERS) or block._children:
        return "it has other parameters or blocks than a BatchNorm"
    names = ("data", *PARAMETERS)
    inputs = {name: mx.sym.var(name) for name in names}
    try:
        output = block.hybrid_forward(mx.sym, inputs.pop("data"), **inputs)
        graph = json.loads(output.tojson())
    except Exception as error:  # the user's code, on which nothing depends here but the reason
        return f"its hybrid_forward cannot be traced ({type(error).__name__}: {error})"
    nodes = [node for node in graph["nodes"] if node["op"] != "null"]
    if len(nodes) != 1 or nodes[0]["op"] not in OPERATORS or len(output) != 1:
        return "its hybrid_forward is more than a BatchNorm"
    given = [graph["nodes"][entry[0]]["name"] for entry in nodes[0]["inputs"]]
    attributes = {key: value for key, value in nodes[0]["attrs"].items() if key not in _HOW}
    if tuple(given) != names or attributes != {key: str(value) for key, value in block._kwargs.items()}:
        return "its hybrid_forward does not hand on its parameters and settings as they are"
    return ""


def recorded(block: SymbolBlock) -> List[Tuple[str, str]]:
    """The nodes of the graph, by name and by what they run, which for a custom operator is its type."""
    return [(node["name"], operator_of(node)) for node in json.loads(block._cached_graph[1].tojson())["nodes"]]


def operator_of(node: Dict[str, Any]) -> str:
    return node["attrs"]["op_type"] if node["op"] == "Custom" else node["op"]


class Selection:
    """Layers by name, as ``collect_params`` selects: those for which a regular expression matches, from the beginning,
    the name of the layer or of one of its parameters. None selects all.
    """

    def __init__(self, select: Any) -> None:
        if select is not None and not isinstance(select, str):
            arguments.refuse("select", select, "None or a regular expression")
        try:
            self._pattern = None if select is None else re.compile(select)
        except re.error as error:
            arguments.refuse("select", select, f"a regular expression ({error})")

    def __contains__(self, block: Block) -> bool:
        return self.matches(block.name, *(parameter.name for parameter in block._reg_params.values()))

    def matches(self, *names: str) -> bool:
        return self._pattern is None or any(self._pattern.match(name) for name in names)
