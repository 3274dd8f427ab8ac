"""Records the blocks that call a layer of batch normalisation, and those that have recorded a graph.

Gluon knows the blocks that a block itself holds. A layer in an attribute of another object is found when it runs. A
block does not know the blocks around it, whose graphs contain its layers.
"""

from __future__ import annotations

import sys
import traceback
import weakref
from typing import Any, Callable, List, Set

from mxnet.gluon import Block, HybridBlock

# Layers by caller. They are keys, in the order of their first calls, because processes have to number them alike.
called: weakref.WeakKeyDictionary[Block, weakref.WeakKeyDictionary[Block, None]] = weakref.WeakKeyDictionary()
_known: weakref.WeakSet[Block] = weakref.WeakSet()  # layers whose callers are recorded
with_graph: weakref.WeakSet[HybridBlock] = weakref.WeakSet()


def noting(call: Callable[..., Any], layer: Block, *args: Any) -> Any:
    """Runs in the place of a layer's ``__call__``: its first call within other blocks records these blocks."""
    if layer not in _known:
        for frame, _ in traceback.walk_stack(sys._getframe()):
            caller = frame.f_locals.get("self")
            # A constructor that calls a net records its graph, as those of GluonCV's SymbolBlocks do.
            if isinstance(caller, Block) and caller is not layer and frame.f_code.co_name != "__init__":
                called.setdefault(caller, weakref.WeakKeyDictionary())[layer] = None
                _known.add(layer)
    return call(layer, *args)


def called_by(block: Block) -> List[Block]:
    """Returns the layers that have run within this block."""
    return list(called.get(block, ()))


def with_graphs_of(parameters: Set[int]) -> List[HybridBlock]:
    """Returns the blocks whose graphs read one of these parameters, given by their ``id``."""
    return [
        block
        for block in list(with_graph)
        if any(not is_input and id(given) in parameters for is_input, given in block._cached_op_args)
    ]
