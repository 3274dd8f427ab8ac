"""How many copies of temporary space MXNet's operators on CPU contexts take turns on.

Replicas that wait for each other need more than MXNet's 4: an operator behind the wait holds a copy that the replica
which is waited for wants. How many depends on the net. MXNet reads MXNET_CPU_TEMP_COPY once, when the first operator
runs. Most nets are built before that, so the number follows the layers that there are.
"""

from __future__ import annotations

from typing import Optional

from .environment import at_least

VARIABLE = "MXNET_CPU_TEMP_COPY"
#: For each layer and each context but the first. For two contexts FastSCNN (45 layers) takes 64 to 128 copies,
#: ResNet-101 (104) 128 to 256, DeepLabV3 on it (114) 256 to 384, ResNet-152 (155) 384 to 512.
FOR_A_LAYER = 4
#: Where a net is made synchronised when operators have run already, for each context but the first.
FOR_A_NET = 256
#: For nets of few layers, which have more operators for each.
LEAST = 16

_others = 1  # contexts but the first, as far as is known
_chosen = False  # by the user


def of_contexts(contexts: int, copies: Optional[int]) -> bool:
    """There are so many contexts, and the user may have said how many copies. Whether that raised the number."""
    global _others, _chosen
    _others, _chosen = max(1, contexts - 1), copies is not None
    # one waits for nobody
    return contexts > 1 and at_least(VARIABLE, FOR_A_NET * _others if copies is None else copies)


def of_layers(layers: int) -> None:
    """There are so many layers."""
    if not _chosen:
        at_least(VARIABLE, max(LEAST, FOR_A_LAYER * layers) * _others)
