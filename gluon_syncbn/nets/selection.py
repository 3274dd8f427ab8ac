"""Selects the layers of batch normalisation that a change of a network is about."""

from __future__ import annotations

import re
import warnings
from contextlib import contextmanager
from typing import Any, Iterator, List, Optional, Tuple

from mxnet.gluon import Block, HybridBlock, SymbolBlock
from mxnet.gluon.nn import BatchNorm  # by name, because a script may put ours into its place in `nn`

from ..mxnet_side import blocks
from ..mxnet_side.op import NAME
from ..system import arguments
from .graphs import close_graph, open_graph


@contextmanager
def selected(verb: str, net: Block, select: Optional[str]) -> Iterator[Tuple[List[BatchNorm], List[Any]]]:
    """Yields the selected layers, with those that it makes of the nodes in recorded graphs, and a list for pairs of one
    that stays and the reason, of which it warns.

    Afterwards, graphs without synchronised layers are plain again, and those that were recorded with the old layers are
    forgotten.
    """
    if select is not None and not isinstance(select, str):
        arguments.refuse("select", select, "None or a regular expression")
    try:
        matches = re.compile(select or "").match
    except re.error as error:
        arguments.refuse("select", select, f"a regular expression ({error})")
    recorded = [block for block in blocks.iterate(net) if isinstance(block, SymbolBlock)]
    stay: List[Any] = []
    try:
        nodes = [node for block in recorded for node in open_graph(block)]
        layers = [block for block in blocks.iterate(net) if blocks.is_batch_norm(block)]
        chosen = [one for one in layers if any(matches(of.name) for of in (one, *one._reg_params.values()))]
        yield chosen, stay
    finally:
        for block in recorded:
            close_graph(block)
        forget_graphs(net)
    if not chosen and not nodes and (verb == "convert" or select is not None):
        why = (
            f"{type(net).__name__} '{net.name}' has no layer of batch normalisation. If a hybrid_forward calls "
            "F.BatchNorm, convert a SymbolBlock of the net"
        )
        if layers:
            why = (
                f"select={select!r} matches no layer of batch normalisation from the beginning of its name. Some names "
                f"are {arguments.some([one.name for one in layers], ', ')}"
            )
        warnings.warn(f"{verb} changed nothing: {why}", stacklevel=4)
    texts = [f"{block.name} ({type(block).__name__}: {reason})" for block, reason in stay if reason]
    left = [node for node in nodes if matches(node.name) and (node.operator == NAME or verb != "revert")]
    texts += [f"{node.name} ({node.operator}: {node.reason})" for node in left]
    if texts:
        warnings.warn(f"{verb} left as it was: {arguments.some(texts, '; ')}", stacklevel=4)


def forget_graphs(net: Block) -> None:
    """Drops the graphs that blocks in the net and around it recorded with the old layers. The flags stay."""
    within = list(blocks.iterate(net))
    parameters = {id(parameter) for block in within for parameter in block._reg_params.values()}
    for block in within + blocks.with_graphs_of(parameters):
        if isinstance(block, HybridBlock):
            block._clear_cached_op()
