"""Finds the blocks of a network, and decides which of them are batch normalisation."""

from __future__ import annotations

from typing import Any, Iterator, List, NamedTuple, Optional, Set

from mxnet.gluon import Block, HybridBlock
from mxnet.gluon.contrib.nn import SyncBatchNorm as ContribSyncBatchNorm
from mxnet.gluon.nn.basic_layers import BatchNorm, BatchNormReLU, _BatchNorm

from ..activation import BatchNormActivation, BatchNormAdd
from ..training.replicas import Replicas
from ..training.session import session
from .nodes import Json, attribute, json_of, operator_of, walk
from .op import NAME

PARAMETERS = ("gamma", "beta", "running_mean", "running_var")
#: Operators of BatchNorm in a recorded graph; for custom ones their `op_type`.
OPERATORS = ("BatchNorm", "_contrib_SyncBatchNorm", "_contrib_BatchNormWithReLU")
_KNOWN = (BatchNorm, BatchNormReLU, BatchNormActivation, BatchNormAdd, ContribSyncBatchNorm)
_CUDNN_OFF = ("gluoncv.nn.block", "BatchNormCudnnOff")  # which changes no result


def iterate(value: Any, seen: Optional[Set[int]] = None) -> Iterator[Block]:
    """Yields every block of a net once, the net first, also those in lists, tuples, sets or dictionaries of an
    attribute, which Gluon does not register.
    """
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    if isinstance(value, Block):
        yield value
        entries = [*value._children.values(), *vars(value).values()]
    else:
        entries = list(value.values()) if isinstance(value, dict) else list(value)
    seen.add(id(value))
    for entry in entries:
        if isinstance(entry, (Block, list, tuple, set, frozenset, dict)):
            yield from iterate(entry, seen)


def is_batch_norm(block: Block) -> bool:
    return isinstance(block, _BatchNorm)


def difference(block: Block) -> str:
    """Says how this BatchNorm differs from ``nn.BatchNorm``, ``nn.BatchNormReLU``, contrib's layer and GluonCV's
    ``BatchNormCudnnOff``; empty if it does not. A user's own forward may read a flag, and compute something else
    tomorrow.
    """
    cls = type(block)
    if isinstance(block, ContribSyncBatchNorm) and cls is not ContribSyncBatchNorm:
        return "it is a subclass of contrib's SyncBatchNorm"
    for name in ("forward", "__call__", "hybrid_forward"):
        owner = next(one for one in cls.__mro__ if name in vars(one))
        known = owner in _BatchNorm.__mro__ or has_nothing_of_its_own(owner)
        own = vars(block).get(name)
        if not known or getattr(own, "replaced", own):  # `recompute` calls what it has replaced
            return f"it has a {name} of its own"
    return ""


def has_nothing_of_its_own(cls: Any) -> bool:
    """Whether a class of batch normalisation is one of MXNet's, of this package's or of GluonCV's."""
    return cls in _KNOWN or (cls.__module__, cls.__qualname__) == _CUDNN_OFF


class Recorded(NamedTuple):
    """A node of batch normalisation in a graph."""

    number: int  # in `walk`
    name: str
    operator: str  # for a custom one its type
    frozen: bool
    inputs: List[str]  # names
    reason: str = ""  # why no layer stands for it: it is gone, or `open_graph` has left the node


def recorded(block: HybridBlock, graph: Optional[Json] = None) -> List[Recorded]:
    """Returns the nodes of batch normalisation in a block's graph, one for each call of a layer."""
    found = []
    for number, within, node in walk(graph or json_of(block._cached_graph[1])):
        operator = operator_of(node)
        if operator in (*OPERATORS, NAME):
            inputs = [within["nodes"][at]["name"] for at, *_ in node["inputs"]]
            frozen = bool(attribute(node["attrs"], "use_global_stats", False))
            gone = operator == NAME and Replicas.of_node(node["attrs"]) is None
            reason = "its layer no longer exists" if gone else ""
            found.append(Recorded(number, node["name"], operator, frozen, inputs, reason))
    return found


def with_graphs_of(parameters: Set[int]) -> List[HybridBlock]:
    """Returns the blocks whose graphs read one of these parameters, given by their ``id``."""
    return [
        block
        for block in session.graphs.objects()
        if any(not is_input and id(given) in parameters for is_input, given in block._cached_op_args)
    ]
