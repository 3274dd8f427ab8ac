"""How many copies of temporary space MXNet's operators on CPU contexts take turns on.

Replicas that wait for each other need more than MXNet's 4: an operator behind the wait holds a copy that the replica
which is waited for wants. How many depends on the net. MXNet reads MXNET_CPU_TEMP_COPY once, when the first operator
runs. Most nets are built before that, so the number follows the layers that there are.
"""

from __future__ import annotations

from typing import Callable, Optional

from .environment import at_least, held_at, read, write

VARIABLE = "MXNET_CPU_TEMP_COPY"
#: For each layer and each context but the first. For two contexts FastSCNN (45 layers) takes 64 to 128 copies,
#: ResNet-101 (104) 128 to 256, DenseNet-121 (121) and DeepLabV3 on ResNet-101 (114) 256 to 384, ResNet-152 (155) 384 to
#: 512.
FOR_A_LAYER = 4
#: For each context but the first, where a net may become synchronised when operators have run already: any of these.
FOR_ANY_NET = 1024
#: The same, once there are layers.
FOR_A_NET = 256
#: For nets of few layers, which have more operators for each, without `cpu_devices`.
LEAST = 16

#: What MXNet has by itself.
DEFAULT = 4

_others = 1  # contexts but the first, as far as is known
_least = LEAST
_chosen = False  # by the user
_set = ""  # what was set here, and may be lowered


def of_contexts(contexts: int, copies: Optional[int]) -> bool:
    """There are so many contexts, and the user may have said how many copies. Whether that raised the number."""
    global _others, _least, _chosen, _set
    _others, _chosen = contexts - 1, copies is not None
    if contexts == 1:  # it waits for nobody
        return False
    _least = FOR_A_NET
    raised = at_least(VARIABLE, FOR_ANY_NET * _others if copies is None else copies)
    _set = read(VARIABLE) if raised else ""
    return raised


def of_layers(layers: int) -> None:
    """There are so many layers."""
    global _set
    if _chosen or _others == 0:
        return
    wanted = max(_least, FOR_A_LAYER * layers) * _others
    if _set and read(VARIABLE) == _set:
        write(VARIABLE, wanted)
        _set = str(wanted)
    else:
        at_least(VARIABLE, wanted)


def as_mxnet_has_it(make: Callable[[], None]) -> None:
    """Calls what makes the temporary space of a thread whose operators wait for nobody: with no more copies than MXNet
    has by itself, since each comes to the largest space that any operator asks for.
    """
    with held_at(VARIABLE, DEFAULT):
        make()
